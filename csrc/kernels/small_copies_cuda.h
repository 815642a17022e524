// Many small copies in few launches, to this GPU or to peers: a copy engine spends about 1 us on each, however small.
// Present only in builds with CUDA.
#pragma once

#include "place_cuda.h"

namespace tide {

// Device addresses of any alignment, in this GPU's memory or a peer's as it is mapped here; single rows, which do not
// overlap each other. `ctas` blocks at most. Throws Error(driver) when the launch fails.
// Null in a build without CUDA.
PlaceLaunch small_copies_launch();

}  // namespace tide
