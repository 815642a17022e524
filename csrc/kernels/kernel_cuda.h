// What the files of the kernels share: how a thread finds its work, and what they do with the runtime: check a launch,
// and load a kernel before it is needed.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "../backend/error.h"

namespace tide {

// This thread among all threads of a grid of blocks of kThreads, and how many there are.
template <int kThreads>
__device__ long long thread_index() {
  return static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
}
template <int kThreads>
__device__ long long thread_count() {
  return static_cast<long long>(gridDim.x) * kThreads;
}

// Throws Error(driver) "tide: WHAT of the NAME kernel failed: ..." unless `status` is success.
inline void check_kernel(cudaError_t status, const char* what, const char* name) {
  if (status == cudaSuccess) return;
  throw Error(ErrorKind::driver,
              std::string("tide: ") + what + " of the " + name + " kernel failed: " + cudaGetErrorString(status));
}

inline void check_launch(const char* name) { check_kernel(cudaGetLastError(), "launch", name); }

template <typename Kernel>
void load_kernel(Kernel* kernel, const char* name) {
  cudaFuncAttributes attributes;
  check_kernel(cudaFuncGetAttributes(&attributes, kernel), "load", name);
}

}  // namespace tide
