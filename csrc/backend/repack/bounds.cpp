#include "bounds.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "balance.h"

namespace tide::repack {
namespace {

// Sums over ranges of the lengths, longest first.
struct Prefix {
  std::vector<double> length{0.0};
  std::vector<double> square{0.0};

  explicit Prefix(const Lengths& lengths) {
    for (int64_t l : lengths) {
      const auto value = static_cast<double>(l);
      length.push_back(length.back() + value);
      square.push_back(square.back() + value * value);
    }
  }
};

// Cheapest way to hold rows: `packed` rows on the fullest rank if repacked, `mean` rows on every rank if not.
double rows_us(const ParentCosts& costs, double packed, double mean) {
  return std::min(costs.row * packed, costs.even_row * mean);
}

}  // namespace

ParentCosts parent_costs(const Shape& shape, const Costs& costs, bool may_stay_wide) {
  return {costs.attention / shape.width, costs.full + costs.sparse[width_index(shape.unit)],
          may_stay_wide ? costs.full + costs.spread : std::numeric_limits<double>::infinity()};
}

double step_bound(const Lengths& lengths, const Shape& shape, const ParentCosts& costs) {
  if (lengths.empty()) return 0;
  const Prefix sum(lengths);
  const size_t m = static_cast<size_t>(shape.count);
  auto even = [&](double tokens) { return std::min(costs.row, costs.even_row) * tokens / shape.width; };
  double bound = (costs.square * sum.square.back() + even(sum.length.back())) / shape.count;
  const auto longest = static_cast<double>(lengths[0]);
  bound = std::max(
      bound, costs.square * longest * longest + rows_us(costs, longest / shape.unit, longest / shape.width));
  for (size_t k = 1; k * m < lengths.size(); ++k) {
    const size_t first = k * m - k, last = k * m + 1;  // some parent holds k+1 of these or longer ones
    const double tokens = sum.length[last] - sum.length[first];
    const double stacked =
        static_cast<double>(lengths[k * m]) * static_cast<double>((k + shape.units) / shape.units);
    const double packed = std::max(tokens / shape.width, stacked / shape.unit);
    bound = std::max(bound, costs.square * (sum.square[last] - sum.square[first]) +
                                rows_us(costs, packed, tokens / shape.width));
  }
  return bound;
}

LayerBound layer_bound(const Lengths& lengths, const Shape& shape, const ParentCosts& costs) {
  LayerBound bound;
  if (lengths.empty()) return bound;
  std::vector<int64_t> squares(lengths.size());
  std::transform(lengths.begin(), lengths.end(), squares.begin(), [](int64_t l) { return l * l; });
  bound.attention = costs.square * static_cast<double>(split_bound(squares, shape.count));
  if (std::isinf(costs.even_row)) {
    const auto rows = static_cast<double>(split_bound(lengths, shape.count * shape.units)) / shape.unit;
    bound.rows = costs.row * rows;
  } else {
    // Each parent may choose, so only bounds that hold for a single parent, whatever it chooses, remain.
    bound.rows = step_bound(lengths, shape, {0, costs.row, costs.even_row});
  }
  return bound;
}

}  // namespace tide::repack
