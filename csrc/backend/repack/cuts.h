// Cutting a unit of ranks into children.
#pragma once

#include "problem.h"

namespace tide::repack {

// One way to use a unit: widths of its children (falling, so that every child is aligned) and who is in
// which.
struct Cut {
  std::vector<int> widths;
  std::vector<int> child_of;    // per sample of the unit
  std::vector<int64_t> tokens;  // per child
  int64_t rows = 0;             // fullest rank
  double cost_us = 0;           // slowest rank
  double exchange_rows = 0;     // rows that leave their rank in one exchange of the sparse layers
};

// All multisets of powers of two that sum to `unit` (1, 2, 4 or 8), fewest children first.
const std::vector<std::vector<int>>& unit_widths(int unit);

// Every cut of a unit whose fullest rank holds at most `max_rows`; samples go, longest first, to the child
// that is cheapest with them. The uncut unit is always the first element, whatever it holds. `lengths`:
// longest first.
std::vector<Cut> unit_cuts(const Lengths& lengths, int unit, const Costs& costs, int64_t max_rows);

double cheapest(const std::vector<Cut>& cuts);

// Among cuts that cost at most `max_cost_us`: the fewest exchanged rows, then the cheapest, then the fewest
// children.
const Cut& pick_cut(const std::vector<Cut>& cuts, double max_cost_us);

}  // namespace tide::repack
