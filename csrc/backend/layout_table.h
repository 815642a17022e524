// Layouts that callers registered for their next collective, keyed by the tensor object they will pass.
//
// Weak, one-shot and checked: an entry is taken by the first call that gets the very same tensor, and an entry
// whose tensor died, or whose address or size changed since, is never applied to another tensor that happens to
// live at a reused address.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "layout.h"

namespace tide {

struct AppliedLayout {
  std::shared_ptr<const ParameterLayout> layout;
  std::vector<at::Tensor> tensors;  // reduce-scatter from a list; empty otherwise
  bool separate = false;            // `tensors` was given (it may be a list of none)
  bool placed = false;
  std::string label;
};

class LayoutTable {
 public:
  static LayoutTable& global();
  void put(const at::Tensor& tensor, AppliedLayout layout);
  std::optional<AppliedLayout> take(const at::Tensor& tensor);

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
    const void* data;
    int64_t numel;
    AppliedLayout layout;
  };
  std::mutex mutex_;
  std::unordered_map<c10::TensorImpl*, Entry> entries_;
};

// Makes `tensor`'s storage point `offset` bytes into `base`'s storage, `bytes` long. The storage object stays the
// same, so views, saved tensors and autograd follow. `base`'s storage lives until `tensor`'s is freed, resized or
// re-pointed. Throws Error(usage) when the range does not fit or devices differ.
void repoint(const at::Tensor& tensor, const at::Tensor& base, int64_t offset, int64_t bytes);

}  // namespace tide
