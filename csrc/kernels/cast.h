// Casts and places: fp32 shards into the bf16 slot, the one kernel of FSDP2's all-gather. Present only in builds with
// CUDA.
#pragma once

#include <cstdint>
#include <vector>

namespace tide {

struct Cast {
  void* to = nullptr;          // bf16
  const void* from = nullptr;  // fp32
  int64_t numel = 0;
};

// Device addresses; the pieces do not overlap. Rounds to nearest even. `ctas` blocks at most. Throws Error(driver) when
// the launch fails.
using CastLaunch = void (*)(const std::vector<Cast>& casts, int ctas, void* stream);

// Null in a build without CUDA.
CastLaunch cast_launch();

}  // namespace tide
