// Splitting weights over equal bins so that the fullest bin is as light as possible (P||Cmax).
//
// Best of three constructions (longest first, largest differencing, first fit into a searched capacity), then
// moves and swaps out of the fullest bin. Everything is deterministic: ties go to the lower index.
#pragma once

#include "problem.h"

namespace tide::repack {

// Weights must be sorted, heaviest first. bin_of[i] is the bin of weight i, loads[b] the sum in bin b.
struct Split {
  std::vector<int> bin_of;
  std::vector<int64_t> loads;

  int64_t heaviest() const;
};

Split split_longest_first(const std::vector<int64_t>& weights, int bins);
Split split_differencing(const std::vector<int64_t>& weights, int bins);
Split split_first_fit(const std::vector<int64_t>& weights, int bins, int64_t low, int64_t high);

// Moves or swaps items out of the fullest bin while that helps, at most `rounds` times.
void improve(const std::vector<int64_t>& weights, int64_t bound, int rounds, Split& split);

// Stops as soon as the result is within 1e-4 of the lower bound.
Split balance(const std::vector<int64_t>& weights, int bins);

// Lower bound on the fullest bin: the mean, the heaviest item, and for every k the k+1 lightest of the
// k*bins+1 heaviest items (two of them must share a bin, three of them, ...).
int64_t split_bound(const std::vector<int64_t>& weights, int bins);

}  // namespace tide::repack
