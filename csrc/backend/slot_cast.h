// Shards into their places in a slot.
#pragma once

#include <ATen/core/Tensor.h>

namespace tide {

// Copies from[i] to to[i] on the current stream, casting fp32 to bf16. False, and nothing done, when tide has no
// kernel for all of them: then the caller copies with torch. Sizes must be equal.
bool cast_into_slot(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from, int64_t ctas);

}  // namespace tide
