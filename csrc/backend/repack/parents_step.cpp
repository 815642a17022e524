// Parents that meet at the optimizer step: minimise the slowest parent. The greedy spread is nearly always at
// the bound already; where samples are coarse, moves and swaps out of the slowest parent close most of the
// rest.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "balance.h"
#include "parents.h"

namespace tide::repack {
namespace {

constexpr double kGoodEnough = 1e-4;  // relative distance to the bound at which the repair stops
constexpr size_t kPartners = 6;       // parents tried as the other side of one change
constexpr int kRoundsPerParent = 3;

class Repair {
 public:
  Repair(const SpreadProblem& problem, Members members) : problem_(problem), members_(std::move(members)) {
    for (const auto& samples : members_) cost_.push_back(cost(samples));
  }

  Members run(double bound) {
    const int rounds = kRoundsPerParent * static_cast<int>(members_.size());
    for (int round = 0; round < rounds; ++round) {
      const size_t worst = static_cast<size_t>(std::max_element(cost_.begin(), cost_.end()) - cost_.begin());
      if (cost_[worst] <= bound * (1 + kGoodEnough) || !relieve(worst)) break;
    }
    return std::move(members_);
  }

 private:
  struct Change {
    double result;  // estimated slower one of the two parents, us
    size_t partner;
    size_t give;          // index in the slowest parent
    std::ptrdiff_t take;  // index in the partner, -1: nothing
  };

  // What a sample costs wherever it goes, if rows balance.
  double weight(int sample) const {
    const auto length = static_cast<double>(problem_.lengths[sample]);
    const double row = std::min(problem_.costs.row, problem_.costs.even_row) / problem_.shape.width;
    return (problem_.costs.square * length + row) * length;
  }

  double cost(const std::vector<int>& samples) const {
    std::vector<int64_t> lengths(samples.size());
    double squares = 0, tokens = 0;
    for (size_t i = 0; i < samples.size(); ++i) {
      lengths[i] = problem_.lengths[samples[i]];
      const auto length = static_cast<double>(lengths[i]);
      squares += length * length;
      tokens += length;
    }
    const auto fullest = static_cast<double>(balance(lengths, problem_.shape.units).heaviest());
    const double packed = problem_.costs.row * fullest / problem_.shape.unit;
    return problem_.costs.square * squares + std::min(packed, problem_.costs.even_row * tokens / problem_.shape.width);
  }

  bool fits(const std::vector<int>& samples) const {
    int64_t tokens = 0;
    for (int s : samples) tokens += problem_.lengths[s];
    return tokens <= problem_.parent_tokens;
  }

  // The change with this partner whose weight is closest to half the difference of the two parents.
  Change best_change(size_t worst, size_t partner) const {
    const auto& mine = members_[worst];
    const auto& theirs = members_[partner];
    Change best{cost_[worst], partner, 0, -1};
    bool found = false;
    const double half = (cost_[worst] - cost_[partner]) / 2;
    std::vector<double> weights(theirs.size());
    for (size_t j = 0; j < theirs.size(); ++j) weights[j] = weight(theirs[j]);
    auto consider = [&](size_t give, double given, std::ptrdiff_t take) {
      const double moved = given - (take < 0 ? 0.0 : weights[static_cast<size_t>(take)]);
      const double result = std::max(cost_[worst] - moved, cost_[partner] + moved);
      if (moved > 0 && (!found || result < best.result)) {
        best = {result, partner, give, take};
        found = true;
      }
    };
    size_t j = 0;
    for (size_t i = 0; i < mine.size(); ++i) {
      const double given = weight(mine[i]);
      consider(i, given, -1);
      while (j < theirs.size() && given - weights[j] < half) ++j;
      if (j < theirs.size()) consider(i, given, static_cast<std::ptrdiff_t>(j));
      if (j > 0) consider(i, given, static_cast<std::ptrdiff_t>(j) - 1);
    }
    return best;
  }

  // Tries the most promising change with each of the fastest parents; keeps the first that really helps.
  bool relieve(size_t worst) {
    std::vector<size_t> order(members_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return cost_[a] < cost_[b]; });
    if (order.size() > kPartners) order.resize(kPartners);
    std::vector<Change> changes;
    for (size_t partner : order) {
      if (partner == worst) continue;
      const Change change = best_change(worst, partner);
      if (change.result < cost_[worst]) changes.push_back(change);
    }
    std::stable_sort(changes.begin(), changes.end(),
                     [](const Change& a, const Change& b) { return a.result < b.result; });
    return std::any_of(changes.begin(), changes.end(), [&](const Change& c) { return apply(worst, c); });
  }

  bool apply(size_t worst, const Change& change) {
    std::vector<int> mine = members_[worst];
    std::vector<int> theirs = members_[change.partner];
    const int given = mine[change.give];
    mine.erase(mine.begin() + static_cast<std::ptrdiff_t>(change.give));
    if (change.take >= 0) {
      const int taken = theirs[static_cast<size_t>(change.take)];
      theirs.erase(theirs.begin() + change.take);
      insert(mine, taken);
    }
    insert(theirs, given);
    const double my_cost = cost(mine);
    const double their_cost = cost(theirs);
    if (std::max(my_cost, their_cost) >= cost_[worst] * (1 - 1e-9) || !fits(theirs) || !fits(mine)) return false;
    members_[worst] = std::move(mine);
    members_[change.partner] = std::move(theirs);
    cost_[worst] = my_cost;
    cost_[change.partner] = their_cost;
    return true;
  }

  // Keeps samples in the order of the problem: longest first, then by index.
  void insert(std::vector<int>& samples, int sample) const {
    const auto& lengths = problem_.lengths;
    auto before = [&](int a, int b) { return lengths[a] != lengths[b] ? lengths[a] > lengths[b] : a < b; };
    samples.insert(std::lower_bound(samples.begin(), samples.end(), sample, before), sample);
  }

  const SpreadProblem& problem_;
  Members members_;
  std::vector<double> cost_;
};

}  // namespace

Members spread_for_step(const SpreadProblem& problem) {
  Lengths sorted(problem.order.size());
  for (size_t i = 0; i < sorted.size(); ++i) sorted[i] = problem.lengths[problem.order[i]];
  return Repair(problem, spread_by_cost(problem)).run(step_bound(sorted, problem.shape, problem.costs));
}

}  // namespace tide::repack
