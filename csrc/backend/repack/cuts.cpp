#include "cuts.h"

#include <algorithm>
#include <tuple>

namespace tide::repack {
namespace {

void extend(int rest, int widest, std::vector<int>& current, std::vector<std::vector<int>>& all) {
  if (rest == 0) {
    all.push_back(current);
    return;
  }
  for (int width = std::min(rest, widest); width >= 1; width /= 2) {
    if (width > rest) continue;
    current.push_back(width);
    extend(rest - width, width, current, all);
    current.pop_back();
  }
}

std::vector<std::vector<int>> enumerate(int unit) {
  std::vector<std::vector<int>> all;
  std::vector<int> current;
  for (int widest = unit; widest >= 1; widest /= 2) {
    current.assign(1, widest);
    extend(unit - widest, widest, current, all);
  }
  std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.size() < b.size(); });
  return all;
}

// Longest first to the child that is cheapest with the sample; false as soon as a child exceeds `max_rows`.
bool fill(const Lengths& lengths, const Costs& costs, int64_t max_rows, bool must_hold, Cut& cut) {
  const size_t children = cut.widths.size();
  double rate[kMaxChildWidth], load[kMaxChildWidth] = {};
  for (size_t c = 0; c < children; ++c) {
    rate[c] = (costs.full + costs.sparse[width_index(cut.widths[c])]) / cut.widths[c];
  }
  cut.child_of.resize(lengths.size());
  cut.tokens.assign(children, 0);
  for (size_t i = 0; i < lengths.size(); ++i) {
    const double length = static_cast<double>(lengths[i]);
    size_t best = 0;
    double best_load = load[0] + rate[0] * length;
    for (size_t c = 1; c < children; ++c) {
      const double with = load[c] + rate[c] * length;
      if (with < best_load) {
        best = c;
        best_load = with;
      }
    }
    load[best] = best_load;
    cut.tokens[best] += lengths[i];
    cut.child_of[i] = static_cast<int>(best);
    if (must_hold && cut.tokens[best] > max_rows * cut.widths[best]) return false;
  }
  for (size_t c = 0; c < children; ++c) {
    const int64_t rows = ceil_div(cut.tokens[c], cut.widths[c]);
    const double per_row = costs.full + costs.sparse[width_index(cut.widths[c])];
    cut.rows = std::max(cut.rows, rows);
    cut.cost_us = std::max(cut.cost_us, per_row * static_cast<double>(rows));
    cut.exchange_rows += static_cast<double>(cut.tokens[c]) * (1.0 - 1.0 / cut.widths[c]);
  }
  return true;
}

}  // namespace

const std::vector<std::vector<int>>& unit_widths(int unit) {
  static const std::vector<std::vector<int>> all[kChildWidths] = {enumerate(1), enumerate(2), enumerate(4),
                                                                  enumerate(8)};
  return all[width_index(unit)];
}

std::vector<Cut> unit_cuts(const Lengths& lengths, int unit, const Costs& costs, int64_t max_rows) {
  std::vector<Cut> cuts;
  for (const auto& widths : unit_widths(unit)) {
    Cut cut;
    cut.widths = widths;
    if (fill(lengths, costs, max_rows, !cuts.empty(), cut)) cuts.push_back(std::move(cut));
  }
  return cuts;
}

double cheapest(const std::vector<Cut>& cuts) {
  auto cheaper = [](const Cut& a, const Cut& b) { return a.cost_us < b.cost_us; };
  return std::min_element(cuts.begin(), cuts.end(), cheaper)->cost_us;
}

const Cut& pick_cut(const std::vector<Cut>& cuts, double max_cost_us) {
  auto better = [&](const Cut& a, const Cut& b) {
    auto key = [&](const Cut& c) {
      const bool meets = c.cost_us <= max_cost_us;
      return std::make_tuple(!meets, meets ? c.exchange_rows : c.cost_us, c.cost_us, c.widths.size());
    };
    return key(a) < key(b);
  };
  return *std::min_element(cuts.begin(), cuts.end(), better);
}

}  // namespace tide::repack
