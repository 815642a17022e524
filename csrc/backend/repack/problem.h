// The problem of layerwise repacking as plain numbers: samples, costs, limits, and what a solution consists
// of.
//
// A parent of W ranks runs full attention over its samples; in the sparse layers each sample lies in a child,
// an aligned block of ranks inside one node. A child's packed row is cut evenly over its ranks, so a rank of
// a child of width w with tokens T holds ceil(T / w) rows. Balance is decided on *units*: blocks of min(8,
// ranks per node, W) ranks, the widest child there is.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace tide::repack {

constexpr int kMaxChildWidth = 8;
constexpr int kChildWidths = 4;  // 1, 2, 4, 8

// Index of a child width in tables: log2(width).
inline int width_index(int width) {
  int index = 0;
  while (width > 1) {
    width /= 2;
    ++index;
  }
  return index;
}

inline int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// Microseconds of one period (the full and the sparse layers that repeat), forward and backward.
struct Costs {
  double attention = 0;                       // per squared token, divided by W in a parent
  double full = 0;                            // per row: full layers, linear work and exchange over the parent
  std::array<double, kChildWidths> sparse{};  // per row: sparse layers in a child of width 1, 2, 4, 8
  double spread = 0;                          // per row: sparse layers at the parent's width
};

struct Limits {
  int64_t rows_per_rank = std::numeric_limits<int64_t>::max() / 4096;
  int64_t tokens_per_parent = std::numeric_limits<int64_t>::max() / 4096;
};

// `count` parents of equal width; unit * units == width.
struct Shape {
  int count = 1;
  int width = 1;
  int unit = 1;
  int units = 1;
};

struct Child {
  int first_rank = 0;  // within the parent
  int width = 1;
  std::vector<int> samples;
};

enum class Form { baseline, partition, spill };

// The children of one parent and what they cost.
struct Layout {
  Form form = Form::baseline;
  bool feasible = false;
  std::vector<Child> children;
  int64_t max_rows = 0;       // rows of the fullest rank
  double full_us = 0;         // full layers without attention: full * max_rows
  double sparse_us = 0;       // sparse layers of the slowest rank
  double rows_us = 0;         // slowest rank, full and sparse layers together
  double exchange_rows = 0;   // rows that leave their rank in one exchange of the sparse layers, whole parent
  int64_t balanced_rows = 0;  // fullest rank if every unit were one child (partition and spill)
};

// When parents wait for each other: at the optimizer step, or (expert parallelism, FSDP) at every layer.
enum class Sync { step, layer };

using Lengths = std::vector<int64_t>;
using Members = std::vector<std::vector<int>>;  // samples of each parent or unit

}  // namespace tide::repack
