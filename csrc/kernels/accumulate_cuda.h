// The reduction of accumulate.h on a GPU. Present only in builds with CUDA.
#pragma once

#include <vector>

#include "accumulate.h"

namespace tide {

// Several reductions in few launches. Pointers are device addresses; the ranks and the scale are the same in all.
// `ctas` blocks at most, so that a concurrent GEMM keeps its SMs. Same values, bit for bit, as accumulate(). Throws
// Error(driver) when a launch fails, Error(usage) for a pair of types it has not.
using AccumulateLaunch = void (*)(ElementType in, ElementType out, const std::vector<AccumulateArgs>& pieces, int ctas,
                                  void* stream);

// Null in a build without CUDA.
AccumulateLaunch accumulate_launch();

}  // namespace tide
