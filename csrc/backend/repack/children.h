// The children of one parent with given samples: which aligned blocks there are and which samples each holds.
#pragma once

#include "problem.h"

namespace tide::repack {

// Lower bound, in rows, on the fullest rank of a parent whose samples all stay inside units: the mean, the
// longest sample over a whole unit, and the pigeonhole bound of split_bound. `lengths`: longest first.
int64_t child_bound_rows(const Lengths& lengths, const Shape& shape);

// Everything that is asked about one parent. `samples` index `all` and are sorted, longest first.
struct ParentProblem {
  const Lengths& all;
  const std::vector<int>& samples;
  const Shape& shape;
  const Costs& costs;
  const Limits& limits;
  double slack;  // rows above the lower bound that a cut may add, as a fraction

  int64_t tokens() const;
};

// No repacking: one child of the parent's width.
Layout baseline_layout(const ParentProblem& problem);

// Node-local children. Samples are balanced over the units first; then each unit is cut into the children
// that cost least, among cuts whose fullest rank holds no more than the fullest uncut unit, or (1 + slack)
// times the bound.
Layout partition_layout(const ParentProblem& problem);

// The longest samples stay parent-wide, the others are partitioned; the cheapest number of them. Not feasible
// for a parent of one unit, or when no such layout fits the limits.
Layout spill_layout(const ParentProblem& problem);

}  // namespace tide::repack
