// Choosing, for every parent, among the ways to hold its samples.
#pragma once

#include "problem.h"

namespace tide::repack {

// One way to hold a parent's samples, as costs. us of one period.
struct Way {
  double full_us = 0;    // full layers without attention
  double sparse_us = 0;  // sparse layers
  double rows_us = 0;    // slowest rank over both
};

// What all parents cost together. `attention_us[g]` does not depend on the way.
//   step:  max over parents of (attention + rows)
//   layer: max attention + max full + max sparse; the slowest parent of each phase holds up all others
double total_us(const std::vector<double>& attention_us, const std::vector<Way>& chosen, Sync sync);

// Index of the way each parent takes so that the total is smallest (exactly); among equals the parent's own
// cheapest, then the first. Every parent must have at least one way.
std::vector<std::size_t> choose(const std::vector<std::vector<Way>>& ways, Sync sync);

}  // namespace tide::repack
