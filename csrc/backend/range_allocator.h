// Ranges of a growing span of bytes: best fit, neighbours coalesced. Pure bookkeeping, not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace tide {

struct Range {
  int64_t offset = 0;
  int64_t bytes = 0;
};

class RangeAllocator {
 public:
  // The smallest free range that holds `bytes`, cut to size; the lowest offset among equals.
  std::optional<int64_t> take(int64_t bytes);
  // The free ranges of `least` to `most` bytes, the smallest first.
  std::vector<Range> free_ranges(int64_t least, int64_t most) const;
  // Cuts `wanted` from the free range that it lies in.
  void take(const Range& free, const Range& wanted);
  // Returns the range that take() gave at `offset`; nothing when there is none.
  std::optional<int64_t> give_back(int64_t offset);

  // By how much the span must grow so that take(bytes) succeeds at its end (a free tail counts).
  int64_t missing(int64_t bytes) const;
  void grow(int64_t bytes);

  int64_t span() const { return span_; }
  int64_t in_use() const { return in_use_; }
  // Whether [offset, offset + bytes) lies inside one taken range.
  bool taken(int64_t offset, int64_t bytes) const;

 private:
  void add_free(int64_t offset, int64_t bytes);
  void drop_free(std::map<int64_t, int64_t>::iterator range);

  std::map<int64_t, int64_t> free_;                   // offset -> bytes
  std::set<std::pair<int64_t, int64_t>> free_sizes_;  // (bytes, offset)
  std::map<int64_t, int64_t> taken_;                  // offset -> bytes
  int64_t span_ = 0;
  int64_t in_use_ = 0;
};

}  // namespace tide
