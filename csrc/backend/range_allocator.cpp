#include "range_allocator.h"

#include <algorithm>
#include <iterator>

namespace tide {

std::optional<int64_t> RangeAllocator::take(int64_t bytes) {
  const auto fit = free_sizes_.lower_bound({bytes, 0});
  if (fit == free_sizes_.end()) return std::nullopt;
  const auto [size, offset] = *fit;
  take({offset, size}, {offset, bytes});
  return offset;
}

std::vector<Range> RangeAllocator::free_ranges(int64_t least, int64_t most) const {
  std::vector<Range> found;
  for (auto it = free_sizes_.lower_bound({least, 0}); it != free_sizes_.end() && it->first <= most; ++it) {
    found.push_back({it->second, it->first});
  }
  return found;
}

void RangeAllocator::take(const Range& free, const Range& wanted) {
  const int64_t end = wanted.offset + wanted.bytes, behind = free.offset + free.bytes - end;
  drop_free(free_.find(free.offset));
  if (wanted.offset > free.offset) add_free(free.offset, wanted.offset - free.offset);
  if (behind > 0) add_free(end, behind);
  taken_.emplace(wanted.offset, wanted.bytes);
  in_use_ += wanted.bytes;
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
