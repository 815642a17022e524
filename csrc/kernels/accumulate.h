// The reduction: out[x] = (sum over ranks r, in rank order, of contribution r)[x] * scale.
//
// bf16 and fp32 add in fp32, fp64 in fp64, integers in their own type with wrap-around and no scale. The order and
// the single rounding make the result bit-identical from run to run and between CPU and GPU.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../backend/types.h"

namespace tide {

struct AccumulateArgs {
  const std::byte* own = nullptr;     // this rank's contribution
  const std::byte* staged = nullptr;  // the others', `stride` bytes apart, in rank order without own_rank
  int64_t stride = 0;
  int own_rank = 0;
  int ranks = 1;
  std::byte* out = nullptr;
  int64_t numel = 0;
  double scale = 1.0;
};

// in == out, or bf16 -> f32; other pairs throw Error(usage). Pointers need no alignment.
void accumulate(ElementType in, ElementType out, const AccumulateArgs& args);

}  // namespace tide
