// Tensors with gaps, for the backend.
#pragma once

#include <ATen/core/Tensor.h>

namespace tide {

// From a tensor's first byte to behind its last.
int64_t reach_bytes(const at::Tensor& t);

}  // namespace tide
