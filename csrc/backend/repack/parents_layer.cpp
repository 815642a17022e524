// Parents that meet at every layer: attention (squares) and rows (tokens) must balance at the same time.
//
// Long samples carry the squares, short ones are sand that levels tokens and hardly moves squares. So samples
// of at least a threshold go by squares and the others fill up by tokens, under a budget of squares per
// parent: a parent that still needs T tokens and may still take Q squares accepts a sample only if it is no
// longer than Q / T, since filling T tokens with samples of length L costs L * T squares. A parent with a
// very long sample so waits for sand. The best threshold and budget depend on the data and are searched along
// one axis at a time.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "parents.h"

namespace tide::repack {
namespace {

constexpr double kBudgets[] = {1.002, 1.005, 1.01, 1.02, 1.04, 1.08, 1.16};  // times the bound on squares
constexpr double kNoBudget = std::numeric_limits<double>::infinity();
constexpr double kGoodEnough = 2e-4;  // relative distance to the bound at which the search stops

class LayerSpread {
 public:
  explicit LayerSpread(const SpreadProblem& problem)
      : problem_(problem),
        parents_(problem.shape.count),
        units_(problem.shape.units),
        slots_(parents_ * units_),
        lengths_(problem.order.size()) {
    for (size_t i = 0; i < lengths_.size(); ++i) lengths_[i] = problem.lengths[problem.order[i]];
    const LayerBound bound = layer_bound(lengths_, problem.shape, problem.costs);
    bound_us_ = bound.total;
    least_squares_ = problem.costs.square > 0 ? bound.attention / problem.costs.square : kNoBudget;
    mean_tokens_ = std::accumulate(lengths_.begin(), lengths_.end(), 0.0) / parents_;
  }

  Members run() {
    place_by_squares();
    for (size_t k = 0; k < starts_.size(); ++k) try_out(k, kNoBudget);
    const size_t best_start = start_;
    for (double factor : kBudgets) try_out(best_start, factor * least_squares_);
    if (budget_ < kNoBudget) {
      const double best_budget = budget_;
      for (size_t k = 0; k < starts_.size(); ++k) {
        if (k != best_start) try_out(k, best_budget);
      }
    }
    std::vector<int> parent_of = by_squares_;
    fill(starts_[start_], budget_, &parent_of);
    Members members(parents_);
    for (size_t i = 0; i < parent_of.size(); ++i) members[parent_of[i]].push_back(problem_.order[i]);
    return members;
  }

 private:
  using Slot = std::pair<int64_t, int>;  // tokens, parent * units + unit

  struct State {
    std::vector<double> squares;  // per parent
    std::vector<double> tokens;   // per parent
    std::vector<int64_t> loads;   // tokens per slot
  };

  // The first `prefix` samples placed by squares.
  struct Start {
    size_t prefix;
    State state;
  };

  static double square(int64_t length) { return static_cast<double>(length) * static_cast<double>(length); }

  // Places all samples by squares and keeps the state at every threshold: thresholds a factor 2 apart, and
  // the end.
  void place_by_squares() {
    const auto m = static_cast<size_t>(parents_);
    State state{std::vector<double>(m, 0), std::vector<double>(m, 0), std::vector<int64_t>(slots_, 0)};
    by_squares_.resize(lengths_.size());
    double threshold = kNoBudget;
    for (size_t i = 0; i < lengths_.size(); ++i) {
      if (static_cast<double>(lengths_[i]) < threshold) {
        starts_.push_back({i, state});
        threshold = static_cast<double>(lengths_[i]) / 2;
      }
      const int parent = fewest_squares(state, lengths_[i]);
      state.loads[lightest_unit(state, parent)] += lengths_[i];
      add(state, parent, i, &by_squares_);
    }
    starts_.push_back({lengths_.size(), std::move(state)});
  }

  void try_out(size_t start, double budget) {
    if (best_us_ <= bound_us_ * (1 + kGoodEnough)) return;
    const double us = cost(fill(starts_[start], budget, nullptr));
    if (us < best_us_) {
      best_us_ = us;
      start_ = start;
      budget_ = budget;
    }
  }

  void add(State& state, int parent, size_t i, std::vector<int>* parent_of) const {
    state.squares[parent] += square(lengths_[i]);
    state.tokens[parent] += static_cast<double>(lengths_[i]);
    if (parent_of != nullptr) (*parent_of)[i] = parent;
  }

  size_t lightest_unit(const State& state, int parent) const {
    const auto first = state.loads.begin() + static_cast<std::ptrdiff_t>(parent) * units_;
    return static_cast<size_t>(std::min_element(first, first + units_) - state.loads.begin());
  }

  bool fits(const State& state, int parent, int64_t length) const {
    return static_cast<int64_t>(state.tokens[parent]) + length <= problem_.parent_tokens &&
           state.loads[lightest_unit(state, parent)] + length <= problem_.unit_tokens;
  }

  // The parent with the fewest squares among those that have room, or among all if none has.
  int fewest_squares(const State& state, int64_t length) const {
    const auto least = std::min_element(state.squares.begin(), state.squares.end());
    int best = static_cast<int>(least - state.squares.begin());
    if (fits(state, best, length)) return best;
    int roomy = -1;
    for (int g = 0; g < parents_; ++g) {
      if (fits(state, g, length) && (roomy < 0 || state.squares[g] < state.squares[roomy])) roomy = g;
    }
    return roomy < 0 ? best : roomy;
  }

  // Longest sample a parent accepts under the budget; it never falls while samples get shorter.
  double longest_accepted(const State& state, int parent, double budget) const {
    return (budget - state.squares[parent]) / std::max(mean_tokens_ - state.tokens[parent], 1.0);
  }

  // Every sample after the start goes to the lightest unit whose parent accepts it, or to the lightest one
  // that is left. Samples only get shorter, so a unit once refused waits until they are short enough.
  State fill(const Start& start, double budget, std::vector<int>* parent_of) const {
    State state = start.state;
    const auto heavier = std::greater<Slot>();
    std::vector<Slot> heap(slots_);
    for (int s = 0; s < slots_; ++s) heap[s] = {state.loads[s], s};
    std::make_heap(heap.begin(), heap.end(), heavier);
    std::vector<std::pair<double, Slot>> waiting;  // heap, by the length accepted
    for (size_t i = start.prefix; i < lengths_.size(); ++i) {
      const auto length = static_cast<double>(lengths_[i]);
      while (!waiting.empty() && waiting.front().first >= length) {
        heap.push_back(waiting.front().second);
        std::push_heap(heap.begin(), heap.end(), heavier);
        std::pop_heap(waiting.begin(), waiting.end());
        waiting.pop_back();
      }
      while (budget < kNoBudget && heap.size() > 1) {
        const double accepted = longest_accepted(state, heap.front().second / units_, budget);
        if (accepted >= length) break;
        waiting.emplace_back(accepted, heap.front());
        std::push_heap(waiting.begin(), waiting.end());
        std::pop_heap(heap.begin(), heap.end(), heavier);
        heap.pop_back();
      }
      add(state, heap.front().second / units_, i, parent_of);
      sink(heap, heap.front().first + lengths_[i]);
    }
    for (const auto& [load, slot] : heap) state.loads[slot] = load;
    for (const auto& [accepted, entry] : waiting) state.loads[entry.second] = entry.first;
    return state;
  }

  // Gives the top of a heap (lightest first) a new load and restores the order.
  static void sink(std::vector<Slot>& heap, int64_t load) {
    const Slot item{load, heap.front().second};
    size_t hole = 0;
    for (size_t child = 1; child < heap.size(); child = 2 * hole + 1) {
      if (child + 1 < heap.size() && heap[child + 1] < heap[child]) ++child;
      if (item <= heap[child]) break;
      heap[hole] = heap[child];
      hole = child;
    }
    heap[hole] = item;
  }

  double cost(const State& state) const {
    double rows = 0;
    for (int g = 0; g < parents_; ++g) {
      const auto first = state.loads.begin() + static_cast<std::ptrdiff_t>(g) * units_;
      const auto fullest = static_cast<double>(*std::max_element(first, first + units_));
      const double packed = problem_.costs.row * fullest / problem_.shape.unit;
      rows = std::max(rows, std::min(packed, problem_.costs.even_row * state.tokens[g] / problem_.shape.width));
    }
    return problem_.costs.square * *std::max_element(state.squares.begin(), state.squares.end()) + rows;
  }

  const SpreadProblem& problem_;
  int parents_;
  int units_;
  int slots_;
  Lengths lengths_;
  double bound_us_ = 0;
  double least_squares_ = 0;
  double mean_tokens_ = 0;
  double best_us_ = std::numeric_limits<double>::infinity();
  size_t start_ = 0;
  double budget_ = kNoBudget;
  std::vector<int> by_squares_;  // parent of every sample if all went by squares
  std::vector<Start> starts_;
};

}  // namespace

Members spread_for_layer(const SpreadProblem& problem) { return LayerSpread(problem).run(); }

}  // namespace tide::repack
