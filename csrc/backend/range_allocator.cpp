#include "range_allocator.h"

#include <algorithm>
#include <iterator>

namespace tide {

std::optional<int64_t> RangeAllocator::take(int64_t bytes) {
  const auto fit = free_sizes_.lower_bound({bytes, 0});
  if (fit == free_sizes_.end()) return std::nullopt;
  const auto [size, offset] = *fit;
  drop_free(free_.find(offset));
  if (size > bytes) add_free(offset + bytes, size - bytes);
  taken_.emplace(offset, bytes);
  in_use_ += bytes;
  return offset;
}

std::optional<int64_t> RangeAllocator::give_back(int64_t offset) {
  const auto found = taken_.find(offset);
  if (found == taken_.end()) return std::nullopt;
  const int64_t bytes = found->second;
  taken_.erase(found);
  in_use_ -= bytes;
  add_free(offset, bytes);
  return bytes;
}

int64_t RangeAllocator::missing(int64_t bytes) const {
  int64_t tail = 0;
  if (!free_.empty()) {
    const auto [offset, size] = *free_.rbegin();
    if (offset + size == span_) tail = size;
  }
  return std::max<int64_t>(0, bytes - tail);
}

void RangeAllocator::grow(int64_t bytes) {
  const int64_t offset = span_;
  span_ += bytes;
  add_free(offset, bytes);
}

bool RangeAllocator::taken(int64_t offset, int64_t bytes) const {
  auto after = taken_.upper_bound(offset);
  if (after == taken_.begin()) return false;
  const auto [start, size] = *std::prev(after);
  return bytes >= 0 && bytes <= size && offset - start <= size - bytes;
}

void RangeAllocator::add_free(int64_t offset, int64_t bytes) {
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    drop_free(next);
  }
  next = free_.lower_bound(offset);
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      bytes += previous->second;
      drop_free(previous);
    }
  }
  free_.emplace(offset, bytes);
  free_sizes_.emplace(bytes, offset);
}

void RangeAllocator::drop_free(std::map<int64_t, int64_t>::iterator range) {
  free_sizes_.erase({range->second, range->first});
  free_.erase(range);
}

}  // namespace tide
