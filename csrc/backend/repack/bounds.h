// Lower bounds on the cost of any assignment of samples to parents, all children as wide as a unit.
#pragma once

#include "problem.h"

namespace tide::repack {

// Costs seen by the parent solver: us = square * L^2 and us = row * (rows of the fullest rank), per parent.
// `even_row` prices rows when the parent is not repacked; it is infinite where that is no option.
struct ParentCosts {
  double square;    // attention / W
  double row;       // full layers and sparse layers in a unit-wide child
  double even_row;  // the same with the sparse layers parent-wide
};

ParentCosts parent_costs(const Shape& shape, const Costs& costs, bool may_stay_wide);

// Parents meet at the optimizer step: a bound on max over parents of (square * sum L^2 + row * rows). us.
// With `even_row` finite, a bound on the cheaper of both ways. `lengths`: longest first.
double step_bound(const Lengths& lengths, const Shape& shape, const ParentCosts& costs);

// Parents meet at every layer: bounds on max square * sum L^2, on max row * rows, and on the sum of the two.
// us. The sum may exceed its parts: the parent of the longest sample either takes squares with its share of
// the tokens, or leaves tokens to the others.
struct LayerBound {
  double attention = 0;
  double rows = 0;
  double total = 0;
};
LayerBound layer_bound(const Lengths& lengths, const Shape& shape, const ParentCosts& costs);

}  // namespace tide::repack
