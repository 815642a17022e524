#include "children.h"

#include <algorithm>

#include "balance.h"
#include "cuts.h"

namespace tide::repack {
namespace {

// Past this many parent-wide samples a spill layout is close to the baseline, which is tried anyway.
constexpr size_t kMaxSpilled = 16;

Lengths pick(const Lengths& all, const std::vector<int>& samples) {
  Lengths lengths(samples.size());
  for (size_t i = 0; i < samples.size(); ++i) lengths[i] = all[samples[i]];
  return lengths;
}

// Adds the rows of a parent-wide child to every rank of a layout and prices the whole.
void price(const ParentProblem& problem, int64_t spilled_tokens, Layout& layout) {
  const Costs& costs = problem.costs;
  const int64_t wide = ceil_div(spilled_tokens, problem.shape.width);
  const double wide_sparse = costs.spread * static_cast<double>(wide);
  layout.max_rows = wide;
  layout.sparse_us = wide_sparse;
  layout.rows_us = costs.full * static_cast<double>(wide) + wide_sparse;
  for (const Child& child : layout.children) {
    if (layout.form != Form::partition && &child == &layout.children.front()) continue;
    int64_t tokens = 0;
    for (int s : child.samples) tokens += problem.all[s];
    const int64_t rows = ceil_div(tokens, child.width);
    const double sparse = costs.sparse[width_index(child.width)] * static_cast<double>(rows) + wide_sparse;
    layout.max_rows = std::max(layout.max_rows, wide + rows);
    layout.sparse_us = std::max(layout.sparse_us, sparse);
    layout.rows_us = std::max(layout.rows_us, costs.full * static_cast<double>(wide + rows) + sparse);
    layout.exchange_rows += static_cast<double>(tokens) * (1.0 - 1.0 / child.width);
  }
  layout.exchange_rows += static_cast<double>(spilled_tokens) * (1.0 - 1.0 / problem.shape.width);
  layout.full_us = costs.full * static_cast<double>(layout.max_rows);
  layout.feasible =
      layout.max_rows <= problem.limits.rows_per_rank && problem.tokens() <= problem.limits.tokens_per_parent;
}

void append_partition(const ParentProblem& problem, const std::vector<int>& samples, int64_t row_limit,
                      Layout& layout) {
  const Shape& shape = problem.shape;
  const Lengths lengths = pick(problem.all, samples);
  const Split split = balance(lengths, shape.units);
  const int64_t balanced = ceil_div(split.heaviest(), shape.unit);
  const auto relaxed =
      static_cast<int64_t>(static_cast<double>(child_bound_rows(lengths, shape)) * (1 + problem.slack));
  const int64_t max_rows = std::max(balanced, std::min(relaxed, row_limit));
  layout.balanced_rows = balanced;

  Members in_unit(shape.units);
  for (size_t i = 0; i < samples.size(); ++i) in_unit[split.bin_of[i]].push_back(samples[i]);
  std::vector<std::vector<Cut>> cuts;
  double target = 0;
  for (const auto& members : in_unit) {
    cuts.push_back(unit_cuts(pick(problem.all, members), shape.unit, problem.costs, max_rows));
    target = std::max(target, cheapest(cuts.back()));
  }
  for (int u = 0; u < shape.units; ++u) {
    const Cut& cut = pick_cut(cuts[u], target);
    int first_rank = u * shape.unit;
    const size_t first_child = layout.children.size();
    for (int width : cut.widths) {
      layout.children.push_back({first_rank, width, {}});
      first_rank += width;
    }
    for (size_t i = 0; i < in_unit[u].size(); ++i) {
      layout.children[first_child + cut.child_of[i]].samples.push_back(in_unit[u][i]);
    }
  }
}

}  // namespace

int64_t ParentProblem::tokens() const {
  int64_t total = 0;
  for (int s : samples) total += all[s];
  return total;
}

int64_t child_bound_rows(const Lengths& lengths, const Shape& shape) {
  return ceil_div(split_bound(lengths, shape.units), shape.unit);
}

Layout baseline_layout(const ParentProblem& problem) {
  Layout layout;
  layout.form = Form::baseline;
  layout.children.push_back({0, problem.shape.width, problem.samples});
  price(problem, problem.tokens(), layout);
  return layout;
}

Layout partition_layout(const ParentProblem& problem) {
  Layout layout;
  layout.form = Form::partition;
  append_partition(problem, problem.samples, problem.limits.rows_per_rank, layout);
  price(problem, 0, layout);
  return layout;
}

Layout spill_layout(const ParentProblem& problem) {
  Layout best;
  best.form = Form::spill;
  if (problem.shape.units == 1) return best;
  const size_t most = std::min(problem.samples.size(), kMaxSpilled);
  const int64_t mean_unit = problem.tokens() / problem.shape.units;
  int64_t spilled = 0;
  for (size_t count = 1; count <= most; ++count) {
    const int64_t length = problem.all[problem.samples[count - 1]];
    if (count > 1 && 4 * length < mean_unit) break;  // a sample of this size disturbs no balance
    spilled += length;
    const auto cut = problem.samples.begin() + static_cast<std::ptrdiff_t>(count);
    Layout layout;
    layout.form = Form::spill;
    layout.children.push_back({0, problem.shape.width, {problem.samples.begin(), cut}});
    const int64_t room = problem.limits.rows_per_rank - ceil_div(spilled, problem.shape.width);
    append_partition(problem, {cut, problem.samples.end()}, std::max<int64_t>(room, 0), layout);
    price(problem, spilled, layout);
    if (layout.feasible && (!best.feasible || layout.rows_us < best.rows_us)) best = std::move(layout);
  }
  return best;
}

}  // namespace tide::repack
