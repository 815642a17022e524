#include "solver.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "balance.h"
#include "bounds.h"
#include "children.h"
#include "parents.h"

namespace tide::repack {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNear = 2e-4;  // relative distance to the bound at which no other membership is tried

std::vector<int> longest_first(const Lengths& lengths, std::vector<int> samples) {
  auto before = [&](int a, int b) { return lengths[a] != lengths[b] ? lengths[a] > lengths[b] : a < b; };
  if (!std::is_sorted(samples.begin(), samples.end(), before)) std::sort(samples.begin(), samples.end(), before);
  return samples;
}

Lengths pick(const Lengths& lengths, const std::vector<int>& samples) {
  Lengths picked(samples.size());
  for (size_t i = 0; i < samples.size(); ++i) picked[i] = lengths[samples[i]];
  return picked;
}

Way way_of(const Layout& layout) { return {layout.full_us, layout.sparse_us, layout.rows_us}; }

// One class of parents with its samples in order, as the spread functions want it.
struct ClassWork {
  const ParentClass& spec;
  std::vector<int> order;
};

class Solver {
 public:
  Solver(const Lengths& lengths, const std::vector<ParentClass>& classes, const Options& options)
      : lengths_(lengths), options_(options) {
    for (const ParentClass& spec : classes) {
      std::vector<int> samples = spec.samples;
      for (const auto& members : spec.fixed) samples.insert(samples.end(), members.begin(), members.end());
      work_.push_back({spec, longest_first(lengths, std::move(samples))});
    }
  }

  Solution run() {
    const double bound = bound_us();
    Solution best = with_members(members_by(first_rule()));
    best.rule = first_rule();
    if (options_.membership == Membership::solve) {
      const std::vector<Members> by_work = members_by(Rule::work);
      best.work_us = unrepacked_us(by_work);
      // The guarantee never to lose against no repacking rests on trying the spread by work as well.
      consider(Rule::work, by_work, bound, best);
      if (options_.sync == Sync::layer && !near(best, bound)) {
        consider(Rule::step, members_by(Rule::step), bound, best);
      }
    } else {
      best.work_us = best.baseline_us;
    }
    best.bound_us = bound;
    return best;
  }

 private:
  Rule first_rule() const {
    switch (options_.membership) {
      case Membership::solve:
        return options_.sync == Sync::step ? Rule::step : Rule::layer;
      case Membership::work:
        return Rule::work;
      case Membership::fixed:
        return Rule::fixed;
    }
    throw std::logic_error("unknown membership");
  }

  static bool near(const Solution& solution, double bound) { return solution.balance_us <= bound * (1 + kNear); }

  // Keeps another membership if it is better; packs it only if it could be and fits the limits.
  void consider(Rule rule, const std::vector<Members>& all, double bound, Solution& best) const {
    for (size_t c = 0; c < work_.size(); ++c) {
      if (!holds(work_[c].spec.shape, all[c])) return;
    }
    const bool guard_needs_it = options_.guard && best.cost_us > best.work_us;
    if (!guard_needs_it && (near(best, bound) || at_least_us(all) >= best.cost_us)) return;
    Solution other = with_members(all);
    if (other.cost_us >= best.cost_us) return;
    other.rule = rule;
    other.work_us = best.work_us;
    best = std::move(other);
  }

  // No packing of these parents can cost less: rows even over all ranks, at the cheapest price per row.
  double at_least_us(const std::vector<Members>& all) const {
    std::vector<double> attention;
    std::vector<Way> ways;
    for (size_t c = 0; c < work_.size(); ++c) {
      const Costs& costs = work_[c].spec.costs;
      const double cheapest = std::min(costs.spread, *std::min_element(costs.sparse.begin(), costs.sparse.end()));
      for (const auto& samples : all[c]) {
        const double rows = static_cast<double>(tokens(samples)) / work_[c].spec.shape.width;
        attention.push_back(attention_us(work_[c], samples));
        ways.push_back({costs.full * rows, cheapest * rows, (costs.full + cheapest) * rows});
      }
    }
    return total_us(attention, ways, options_.sync);
  }

  SpreadProblem spread_problem(const ClassWork& work, bool may_stay_wide) const {
    const Shape& shape = work.spec.shape;
    const Limits& limits = options_.limits;
    return {lengths_,
            work.order,
            shape,
            parent_costs(shape, work.spec.costs, may_stay_wide),
            std::min(limits.tokens_per_parent, limits.rows_per_rank * shape.width),
            limits.rows_per_rank * shape.unit};
  }

  std::vector<Members> members_by(Rule rule) const {
    std::vector<Members> all;
    for (const ClassWork& work : work_) {
      all.push_back(spread(rule, work));
      for (auto& members : all.back()) members = longest_first(lengths_, std::move(members));
      if (rule != Rule::fixed && !holds(work.spec.shape, all.back())) {
        all.back() = spread_by_tokens(spread_problem(work, true));
      }
    }
    return all;
  }

  Members spread(Rule rule, const ClassWork& work) const {
    switch (rule) {
      case Rule::step:
        return spread_for_step(spread_problem(work, options_.guard));
      case Rule::layer:
        return spread_for_layer(spread_problem(work, options_.guard));
      case Rule::work:
        return spread_by_work(spread_problem(work, true));
      case Rule::fixed:
        return work.spec.fixed;
    }
    throw std::logic_error("unknown rule");
  }

  int64_t parent_room(const Shape& shape) const {
    return std::min(options_.limits.tokens_per_parent, options_.limits.rows_per_rank * shape.width);
  }

  bool holds(const Shape& shape, const Members& members) const {
    return std::all_of(members.begin(), members.end(),
                       [&](const std::vector<int>& m) { return tokens(m) <= parent_room(shape); });
  }

  int64_t tokens(const std::vector<int>& samples) const {
    int64_t total = 0;
    for (int s : samples) total += lengths_[s];
    return total;
  }

  double attention_us(const ClassWork& work, const std::vector<int>& samples) const {
    double squares = 0;
    for (int s : samples) squares += static_cast<double>(lengths_[s]) * static_cast<double>(lengths_[s]);
    return work.spec.costs.attention * squares / work.spec.shape.width;
  }

  // The job with these parents and nothing repacked; infinite where a parent cannot hold its samples.
  double unrepacked_us(const std::vector<Members>& all) const {
    std::vector<double> attention;
    std::vector<Way> ways;
    for (size_t c = 0; c < work_.size(); ++c) {
      const ClassWork& work = work_[c];
      for (const auto& samples : all[c]) {
        const Layout layout =
            baseline_layout({lengths_, samples, work.spec.shape, work.spec.costs, options_.limits, 0});
        if (!layout.feasible) return kInfinity;
        attention.push_back(attention_us(work, samples));
        ways.push_back(way_of(layout));
      }
    }
    return total_us(attention, ways, options_.sync);
  }

  // The ways one parent may go, cheapest choice left to the guard. Throws when there is none.
  std::vector<Layout> layouts(const ParentProblem& problem, size_t index, ParentResult& result) const {
    Layout baseline = baseline_layout(problem);
    Layout partition = partition_layout(problem);
    result.baseline_us = baseline.feasible ? baseline.rows_us : kInfinity;
    result.partition_us = partition.feasible ? partition.rows_us : kInfinity;
    result.balanced_rows = partition.balanced_rows;
    std::vector<Layout> ways;
    if (options_.guard && baseline.feasible) ways.push_back(std::move(baseline));
    if (partition.feasible) ways.push_back(std::move(partition));
    if (options_.spill && (options_.guard || ways.empty())) {
      Layout spill = spill_layout(problem);
      if (spill.feasible) ways.push_back(std::move(spill));
    }
    if (ways.empty() && baseline.feasible) ways.push_back(std::move(baseline));
    if (ways.empty()) throw std::invalid_argument(too_much(problem, index));
    return ways;
  }

  std::string too_much(const ParentProblem& problem, size_t index) const {
    const int64_t room = parent_room(problem.shape);
    const int64_t longest = problem.samples.empty() ? 0 : lengths_[problem.samples[0]];
    const std::string holds = "a parent of " + std::to_string(problem.shape.width) + " ranks holds at most " +
                              std::to_string(room) + " tokens";
    if (longest > room) {
      return "sample " + std::to_string(problem.samples[0]) + " has " + std::to_string(longest) + " tokens, but " +
             holds + "; use wider parents, raise max_rows or max_parent_tokens, or drop the sample";
    }
    return "parent " + std::to_string(index) + " got " + std::to_string(problem.tokens()) + " tokens, but " + holds +
           "; use fewer samples or more parents, or raise max_rows or max_parent_tokens";
  }

  Solution with_members(const std::vector<Members>& all) const {
    Solution solution;
    std::vector<std::vector<Layout>> layouts_of;
    std::vector<std::vector<Way>> ways, uncut_ways;
    std::vector<double> attention;
    for (size_t c = 0; c < work_.size(); ++c) {
      const ClassWork& work = work_[c];
      const Shape& shape = work.spec.shape;
      for (const auto& samples : all[c]) {
        const ParentProblem problem{lengths_, samples, shape, work.spec.costs, options_.limits, options_.slack};
        ParentResult result;
        result.tokens = problem.tokens();
        result.attention_us = attention_us(work, samples);
        result.bound_rows = child_bound_rows(pick(lengths_, samples), shape);
        layouts_of.push_back(layouts(problem, layouts_of.size(), result));
        attention.push_back(result.attention_us);
        std::vector<Way> cut, uncut;
        for (const Layout& layout : layouts_of.back()) {
          cut.push_back(way_of(layout));
          uncut.push_back(layout.form == Form::partition ? uncut_way(work, result.balanced_rows) : cut.back());
        }
        ways.push_back(std::move(cut));
        uncut_ways.push_back(std::move(uncut));
        solution.parents.push_back(std::move(result));
      }
    }
    const std::vector<size_t> chosen = choose(ways, options_.sync);
    std::vector<Way> taken;
    for (size_t g = 0; g < chosen.size(); ++g) {
      taken.push_back(ways[g][chosen[g]]);
      solution.parents[g].layout = std::move(layouts_of[g][chosen[g]]);
    }
    solution.cost_us = total_us(attention, taken, options_.sync);
    const std::vector<size_t> uncut_chosen = choose(uncut_ways, options_.sync);
    for (size_t g = 0; g < chosen.size(); ++g) taken[g] = uncut_ways[g][uncut_chosen[g]];
    solution.balance_us = total_us(attention, taken, options_.sync);
    solution.baseline_us = unrepacked_us(all);
    return solution;
  }

  static Way uncut_way(const ClassWork& work, int64_t rows) {
    const double full = work.spec.costs.full * static_cast<double>(rows);
    const double sparse = work.spec.costs.sparse[width_index(work.spec.shape.unit)] * static_cast<double>(rows);
    return {full, sparse, full + sparse};
  }

  // With fixed or by-work membership the bound is still over all memberships of a class.
  double bound_us() const {
    double step = 0;
    LayerBound layer;
    for (const ClassWork& work : work_) {
      const ParentCosts costs = parent_costs(work.spec.shape, work.spec.costs, options_.guard);
      const Lengths sorted = pick(lengths_, work.order);
      if (options_.sync == Sync::step) {
        step = std::max(step, step_bound(sorted, work.spec.shape, costs));
      } else {
        const LayerBound bound = layer_bound(sorted, work.spec.shape, costs);
        layer.attention = std::max(layer.attention, bound.attention);
        layer.rows = std::max(layer.rows, bound.rows);
        layer.total = std::max(layer.total, bound.total);
      }
    }
    return options_.sync == Sync::step ? step : std::max(layer.total, layer.attention + layer.rows);
  }

  const Lengths& lengths_;
  const Options& options_;
  std::vector<ClassWork> work_;
};

}  // namespace

Solution solve(const Lengths& lengths, const std::vector<ParentClass>& classes, const Options& options) {
  return Solver(lengths, classes, options).run();
}

}  // namespace tide::repack
