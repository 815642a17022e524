// What a build without CUDA has instead of the kernels.
#ifndef TIDE_WITH_CUDA

#include "accumulate_cuda.h"
#include "cast.h"
#include "load_cuda.h"
#include "place_cuda.h"
#include "small_copies_cuda.h"

namespace tide {

AccumulateLaunch accumulate_launch() { return nullptr; }
CastLaunch cast_launch() { return nullptr; }
PlaceLaunch place_launch() { return nullptr; }
PlaceLaunch small_copies_launch() { return nullptr; }
void load_kernels() {}

}  // namespace tide

#endif
