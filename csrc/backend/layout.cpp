#include "layout.h"

#include <algorithm>

#include "error.h"

namespace tide {

namespace {
[[noreturn]] void bad(const std::string& what) { throw Error(ErrorKind::usage, "ParameterLayout: " + what); }
}  // namespace

uint64_t hash_words(const std::vector<int64_t>& words, uint64_t seed) {
  uint64_t h = seed;
  for (int64_t word : words) {
    for (int byte = 0; byte < 8; ++byte) {
      h ^= static_cast<uint64_t>(word) >> (8 * byte) & 0xff;
      h *= 0x100000001b3ull;
    }
  }
  return h;
}

ParameterLayout::ParameterLayout(int world, std::vector<int64_t> shard_numels, std::vector<int64_t> numels,
                                 int64_t align)
    : world_(world), align_(align), shard_(std::move(shard_numels)), numel_(std::move(numels)) {
  if (world_ < 1) bad("world_size must be at least 1; got " + std::to_string(world_));
  if (align_ < 1) bad("align must be at least 1 element; got " + std::to_string(align_));
  if (numel_.empty()) {
    for (int64_t shard : shard_) numel_.push_back(shard * world_);
  }
  if (numel_.size() != shard_.size()) {
    bad("got " + std::to_string(shard_.size()) + " shard sizes and " + std::to_string(numel_.size()) +
        " parameter sizes; give one of each per parameter");
  }
  int64_t shard_offset = 0, gathered_offset = 0;
  std::vector<int64_t> words{world_, align_};
  for (size_t i = 0; i < shard_.size(); ++i) {
    if (shard_[i] < 0 || numel_[i] < 0 || numel_[i] > shard_[i] * world_) {
      bad("parameter " + std::to_string(i) + " has " + std::to_string(numel_[i]) + " elements and shards of " +
          std::to_string(shard_[i]) + " on " + std::to_string(world_) +
          " ranks; expected 0 <= numel <= world_size * shard_numel");
    }
    shard_offset_.push_back(shard_offset);
    gathered_offset_.push_back(gathered_offset);
    shard_offset += shard_[i];
    gathered_offset += (shard_[i] * world_ + align_ - 1) / align_ * align_;
    words.push_back(shard_[i]);
    words.push_back(numel_[i]);
  }
  shard_offset_.push_back(shard_offset);
  gathered_offset_.push_back(gathered_offset);
  hash_ = hash_words(words);
}

int64_t ParameterLayout::valid_numel(size_t i, int rank) const {
  return std::clamp<int64_t>(numel_[i] - rank * shard_[i], 0, shard_[i]);
}

std::vector<ParameterLayout::Piece> ParameterLayout::pieces(int64_t begin, int64_t end) const {
  std::vector<Piece> result;
  // First parameter that ends behind `begin`.
  auto first = std::upper_bound(shard_offset_.begin() + 1, shard_offset_.end(), begin) - shard_offset_.begin() - 1;
  for (size_t i = static_cast<size_t>(first); i < shard_.size() && shard_offset_[i] < end; ++i) {
    const int64_t from = std::max(begin, shard_offset_[i]), to = std::min(end, shard_offset_[i + 1]);
    if (from < to) result.push_back({i, from, from - shard_offset_[i], to - from});
  }
  return result;
}

std::string ParameterLayout::describe() const {
  std::string text = "world " + std::to_string(world_) + ", align " + std::to_string(align_) + ", shards [";
  const size_t shown = std::min<size_t>(shard_.size(), 8);
  for (size_t i = 0; i < shown; ++i) text += (i ? ", " : "") + std::to_string(shard_[i]);
  if (shown < shard_.size()) text += ", ... " + std::to_string(shard_.size()) + " in all";
  return text + "]";
}

}  // namespace tide
