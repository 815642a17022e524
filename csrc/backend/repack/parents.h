// Which samples each parent of one width gets, before there are children.
#pragma once

#include "bounds.h"
#include "problem.h"

namespace tide::repack {

// Samples `order` (indices into `lengths`, longest first) are to be spread over `shape.count` parents. A
// parent takes at most `parent_tokens` and a unit at most `unit_tokens` tokens, as far as the heuristics can
// arrange it.
struct SpreadProblem {
  const Lengths& lengths;
  const std::vector<int>& order;
  const Shape& shape;
  ParentCosts costs;
  int64_t parent_tokens;
  int64_t unit_tokens;
};

// What jobs without repacking do: longest first, each to the parent with the least work so far, tokens split
// evenly over a parent's ranks.
Members spread_by_work(const SpreadProblem& problem);

// Longest first, each to the parent that is cheapest with it when units of tokens are tracked along the way.
Members spread_by_cost(const SpreadProblem& problem);

// For parents that meet at the optimizer step: by cost, then moves and swaps out of the slowest parent.
Members spread_for_step(const SpreadProblem& problem);

// For parents that meet at every layer, where squares and tokens must balance separately: samples of at least
// some threshold go by squares, the others fill up by tokens; the best of a grid of thresholds.
Members spread_for_layer(const SpreadProblem& problem);

// Tokens only: the densest packing, for problems that barely fit the memory caps.
Members spread_by_tokens(const SpreadProblem& problem);

}  // namespace tide::repack
