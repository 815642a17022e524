// Copies within one GPU by a kernel: copy engines are several times slower at them. Present only in builds with CUDA.
#pragma once

#include <cstdint>
#include <vector>

namespace tide {

struct Placement {
  void* to = nullptr;
  const void* from = nullptr;
  int64_t bytes = 0;  // of one row
  int64_t rows = 1;
  int64_t to_pitch = 0, from_pitch = 0;  // bytes from row to row, where there are several; at least `bytes`
};

// Device addresses, lengths and pitches of any alignment; the placements do not overlap each other. `ctas` blocks at
// most, so that a concurrent GEMM keeps its SMs. Throws Error(driver) when the launch fails.
using PlaceLaunch = void (*)(const std::vector<Placement>& placements, int ctas, void* stream);

// Null in a build without CUDA.
PlaceLaunch place_launch();

}  // namespace tide
