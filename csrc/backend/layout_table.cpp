#include "layout_table.h"

#include "error.h"

namespace tide {

LayoutTable& LayoutTable::global() {
  static LayoutTable table;
  return table;
}

void LayoutTable::put(const at::Tensor& tensor, AppliedLayout layout) {
  auto* key = tensor.unsafeGetTensorImpl();
  std::vector<Entry> dead;  // their tensors are dropped after the lock: a destructor may run Python
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = entries_.begin(); it != entries_.end();) {
    if (it->second.tensor.expired()) {
      dead.push_back(std::move(it->second));
      it = entries_.erase(it);
    } else {
      ++it;
    }
  }
  auto found = entries_.find(key);
  if (found != entries_.end()) {
    dead.push_back(std::move(found->second));
    entries_.erase(found);
  }
  entries_.emplace(key, Entry{c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()),
                              tensor.const_data_ptr(), tensor.numel(), std::move(layout)});
}

std::optional<AppliedLayout> LayoutTable::take(const at::Tensor& tensor) {
  std::optional<Entry> entry;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (entries_.empty()) return std::nullopt;
    auto found = entries_.find(tensor.unsafeGetTensorImpl());
    if (found == entries_.end()) return std::nullopt;
    entry = std::move(found->second);
    entries_.erase(found);
  }
  if (entry->tensor.expired() || entry->data != tensor.const_data_ptr() || entry->numel != tensor.numel()) {
    return std::nullopt;
  }
  return std::move(entry->layout);
}

void repoint(const at::Tensor& tensor, const at::Tensor& base, int64_t offset, int64_t bytes) {
  const int64_t available = static_cast<int64_t>(base.storage().nbytes());
  if (offset < 0 || bytes < 0 || offset + bytes > available) {
    throw Error(ErrorKind::usage, "tide: repoint: bytes " + std::to_string(offset) + " to " +
                                      std::to_string(offset + bytes) + " do not lie in the base storage of " +
                                      std::to_string(available) + " bytes");
  }
  if (tensor.device() != base.device()) {
    throw Error(ErrorKind::usage, "tide: repoint: the tensor is on " + tensor.device().str() + " and the base on " +
                                      base.device().str() + "; expected the same device");
  }
  auto* keep = new c10::Storage(base.storage());
  c10::DataPtr pointer(
      static_cast<std::byte*>(base.storage().mutable_data()) + offset, keep,
      [](void* context) { delete static_cast<c10::Storage*>(context); }, base.device());
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(std::move(pointer));
  storage->set_nbytes(static_cast<size_t>(bytes));
}

}  // namespace tide
