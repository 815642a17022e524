// The whole solve: membership of parents, children of each parent, and the guard that leaves a parent alone
// where repacking would not pay.
#pragma once

#include "guard.h"
#include "problem.h"

namespace tide::repack {

// How samples come to parents: decided here for the given kind of synchronisation, as jobs without repacking
// do it (longest first by work), or fixed by the caller.
enum class Membership { solve, work, fixed };

// The rule that the samples of a solution were spread by.
enum class Rule { step, layer, work, fixed };

// Parents of one width and the samples that may live in them.
struct ParentClass {
  Shape shape;
  Costs costs;
  std::vector<int> samples;
  Members fixed;  // Membership::fixed: samples of each parent
};

struct Options {
  Sync sync = Sync::step;
  Membership membership = Membership::solve;
  bool guard = true;
  bool spill = false;
  double slack = 0.005;
  Limits limits;
};

struct ParentResult {
  Layout layout;
  int64_t tokens = 0;
  int64_t bound_rows = 0;     // on the fullest rank while all samples stay inside units
  int64_t balanced_rows = 0;  // fullest rank of the partition with every unit one child
  double attention_us = 0;
  // Without attention; infinite where the limits forbid it.
  double baseline_us = 0;
  double partition_us = 0;
};

struct Solution {
  std::vector<ParentResult> parents;  // class by class
  Rule rule = Rule::step;
  double cost_us = 0;      // one period as chosen
  double baseline_us = 0;  // the same samples in the same parents, none repacked
  double work_us = 0;      // none repacked, samples spread by work: the job without this solver
  double balance_us = 0;   // as chosen, but units uncut: what the bound speaks about
  double bound_us = 0;     // no membership and no balance can make balance_us smaller
};

// Throws std::invalid_argument, naming the parent and the numbers, when a parent cannot hold its samples.
Solution solve(const Lengths& lengths, const std::vector<ParentClass>& classes, const Options& options);

}  // namespace tide::repack
