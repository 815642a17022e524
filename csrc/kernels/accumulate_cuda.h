// The reduction of accumulate.h on a GPU. Present only in builds with CUDA.
#pragma once

#include "accumulate.h"

namespace tide {

// Pointers are device addresses; `ctas` blocks at most, so that a concurrent GEMM keeps its SMs. Same values, bit for
// bit, as accumulate(). Throws Error(driver) when the launch fails, Error(usage) for a pair of types it has not.
using AccumulateLaunch = void (*)(ElementType in, ElementType out, const AccumulateArgs& args, int ctas, void* stream);

// Null in a build without CUDA.
AccumulateLaunch accumulate_launch();

}  // namespace tide
