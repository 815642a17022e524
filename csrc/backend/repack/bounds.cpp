#include "bounds.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

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

// The parent of the longest sample holds `t` more tokens. Their squares are at least those of the shortest
// samples that make up t tokens (the last one in part), and the other parents hold the rest: convex in t, so
// the least sum is at a whole number of samples or where the rest falls to `rows`.
double crowded_bound(const Lengths& lengths, const Shape& shape, const ParentCosts& costs, double rows) {
  const double total = std::accumulate(lengths.begin(), lengths.end(), 0.0);
  const auto longest = static_cast<double>(lengths[0]);
  const double others = static_cast<double>(shape.count - 1) * shape.width;
  const double row = std::min(costs.row, costs.even_row);
  const double level = total - longest - rows / row * others;  // t at which the others are down to `rows`
  auto sum = [&](double t, double squares) {
    const double rest = others > 0 ? row * (total - longest - t) / others : 0.0;
    return costs.square * (longest * longest + squares) + std::max(rows, rest);
  };
  double t = 0, squares = 0, least = sum(0, 0);
  for (size_t i = lengths.size(); i-- > 1 && t < level;) {
    const auto length = static_cast<double>(lengths[i]);
    if (t + length > level) return std::min(least, sum(level, squares + (level - t) * length));
    t += length;
    squares += length * length;
    least = std::min(least, sum(t, squares));
  }
  return least;
}

// The same for parents that meet at the step: while its rows are those of the longest sample alone, the
// parent with few other tokens wastes ranks, which all parents pay for; with many it is slow itself. Between
// two numbers of shortest samples the first side is taken at the lower, the second side where it is least.
double wasted_bound(const Lengths& lengths, const Shape& shape, const ParentCosts& costs, const Prefix& sum) {
  const auto longest = static_cast<double>(lengths[0]);
  const double cheapest = std::min(costs.row, costs.even_row);
  const double shared = costs.square * sum.square.back() + cheapest * sum.length.back() / shape.width;
  auto packed_us = [&](double tokens) { return costs.row * std::max(longest / shape.unit, tokens / shape.width); };
  auto even_us = [&](double tokens) { return costs.even_row * tokens / shape.width; };
  double least = std::numeric_limits<double>::infinity();
  double tokens = longest, squares = longest * longest;
  for (size_t i = lengths.size(); i-- > 0;) {
    const double next = i > 0 ? tokens + static_cast<double>(lengths[i]) : tokens;
    const double own = costs.square * squares + std::min(packed_us(tokens), even_us(tokens));
    const double excess =
        std::min(packed_us(next) - cheapest * next / shape.width, even_us(tokens) - cheapest * tokens / shape.width);
    least = std::min(least, std::max(own, (shared + excess) / shape.count));
    if (own >= least) break;  // it only grows
    squares += (next - tokens) * (next - tokens);
    tokens = next;
  }
  return least;
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
  bound =
      std::max(bound, costs.square * longest * longest + rows_us(costs, longest / shape.unit, longest / shape.width));
  bound = std::max(bound, wasted_bound(lengths, shape, costs, sum));
  for (size_t k = 1; k * m < lengths.size(); ++k) {
    const size_t first = k * m - k, last = k * m + 1;  // some parent holds k+1 of these or longer ones
    const double tokens = sum.length[last] - sum.length[first];
    const double stacked = static_cast<double>(lengths[k * m]) * static_cast<double>((k + shape.units) / shape.units);
    const double packed = std::max(tokens / shape.width, stacked / shape.unit);
    bound = std::max(
        bound, costs.square * (sum.square[last] - sum.square[first]) + rows_us(costs, packed, tokens / shape.width));
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
  bound.total = bound.attention + bound.rows;
  if (std::min(costs.row, costs.even_row) > 0)
    bound.total = std::max(bound.total, crowded_bound(lengths, shape, costs, bound.rows));
  return bound;
}

}  // namespace tide::repack
