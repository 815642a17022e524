// Where each parameter's shards lie in a gathered buffer.
//
// W ranks; parameter i has W padded shards of s_i elements. Two layouts of one gathered buffer, in elements:
//   rank-major            out[r*S + o_i : + s_i]      S = sum of s_i, o_i = s_0 + ... + s_(i-1)
//   parameter-contiguous  out[p_i + r*s_i : + s_i]    p_i = start of parameter i
// A ParameterLayout describes the second: p_(i+1) = p_i + W*s_i rounded up to the alignment (1 element for plain
// callers, so that p_i = W*o_i; 512 bytes in slots, so that a 3-element shard does not misalign the next
// parameter).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tide {

class ParameterLayout {
 public:
  // shard_numels[i]: padded shard of parameter i, in elements. numels[i]: elements of parameter i that exist
  // (at most world * shard_numels[i]; the rest is padding behind the last one). align: in elements.
  // Throws Error(usage) for negative sizes, a numel that does not fit, or align < 1.
  ParameterLayout(int world, std::vector<int64_t> shard_numels, std::vector<int64_t> numels, int64_t align);

  int world() const { return world_; }
  size_t parameters() const { return shard_.size(); }
  int64_t align() const { return align_; }
  int64_t shard_numel(size_t i) const { return shard_[i]; }
  int64_t numel(size_t i) const { return numel_[i]; }
  // Start of parameter i in the concatenated shard of one rank (o_i) and in the gathered buffer (p_i).
  int64_t shard_offset(size_t i) const { return shard_offset_[i]; }
  int64_t gathered_offset(size_t i) const { return gathered_offset_[i]; }
  int64_t total_shard_numel() const { return shard_offset_.back(); }
  int64_t total_gathered_numel() const { return gathered_offset_.back(); }
  // Elements of parameter i that rank r holds, without padding: 0 ... shard_numel(i).
  int64_t valid_numel(size_t i, int rank) const;

  uint64_t hash() const { return hash_; }
  std::string describe() const;

  // One part of [begin, end) of a rank's concatenated shard that lies in one parameter.
  struct Piece {
    size_t parameter;
    int64_t shard_offset;  // in the concatenated shard
    int64_t within;        // in the parameter's shard
    int64_t numel;
  };
  std::vector<Piece> pieces(int64_t begin, int64_t end) const;

 private:
  int world_;
  int64_t align_;
  std::vector<int64_t> shard_, numel_, shard_offset_, gathered_offset_;
  uint64_t hash_;
};

// FNV-1a over 64-bit words: the same on every rank, platform and build.
uint64_t hash_words(const std::vector<int64_t>& words, uint64_t seed = 0xcbf29ce484222325ull);

}  // namespace tide
