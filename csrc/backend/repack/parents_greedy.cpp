// Longest first, each sample to the parent that is best for it: the rule is a price per parent.
#include <algorithm>
#include <limits>

#include "parents.h"

namespace tide::repack {
namespace {

// Index of the first smallest value. Four independent minima, since one chain of comparisons waits for
// itself.
size_t first_smallest(const std::vector<double>& values) {
  double lane[4];
  std::fill(lane, lane + 4, std::numeric_limits<double>::infinity());
  size_t i = 0;
  for (; i + 4 <= values.size(); i += 4) {
    for (size_t l = 0; l < 4; ++l) lane[l] = values[i + l] < lane[l] ? values[i + l] : lane[l];
  }
  for (; i < values.size(); ++i) lane[0] = std::min(lane[0], values[i]);
  const double least = std::min(std::min(lane[0], lane[1]), std::min(lane[2], lane[3]));
  return static_cast<size_t>(std::find(values.begin(), values.end(), least) - values.begin());
}

// Parents filling up, one array per quantity so that pricing all of them is one tight loop.
class Filling {
 public:
  explicit Filling(const SpreadProblem& problem)
      : problem_(problem),
        m_(static_cast<size_t>(problem.shape.count)),
        units_(static_cast<size_t>(problem.shape.units)),
        attention_us(m_, 0),
        tokens(m_, 0),
        lightest(m_, 0),
        heaviest(m_, 0),
        price(m_, 0),
        slot_(m_, 0),
        loads_(m_ * units_, 0),
        members_(m_) {
    int64_t total = 0;
    for (int s : problem.order) total += problem.lengths[s];
    capped_ = total > std::min(problem.parent_tokens, problem.unit_tokens);
  }

  // `reprice(length)` sets price[g] for every parent; the cheapest one with room takes the sample.
  template <typename Reprice>
  Members run(Reprice reprice) {
    for (int s : problem_.order) {
      const auto length = static_cast<double>(problem_.lengths[s]);
      reprice(length);
      const size_t g = cheapest(length);
      members_[g].push_back(s);
      place(g, length);
    }
    return std::move(members_);
  }

 private:
  const SpreadProblem& problem_;
  size_t m_;
  size_t units_;

 public:
  // Per parent: us of attention, tokens, tokens of the lightest and the heaviest unit, price.
  std::vector<double> attention_us, tokens, lightest, heaviest, price;

 private:
  size_t cheapest(double length) const {
    const size_t first = first_smallest(price);
    if (!capped_ || fits(first, length)) return first;
    size_t roomy = m_;
    for (size_t g = 0; g < m_; ++g) {
      if (fits(g, length) && (roomy == m_ || price[g] < price[roomy])) roomy = g;
    }
    return roomy == m_ ? first : roomy;
  }

  bool fits(size_t g, double length) const {
    return tokens[g] + length <= static_cast<double>(problem_.parent_tokens) &&
           lightest[g] + length <= static_cast<double>(problem_.unit_tokens);
  }

  void place(size_t g, double length) {
    attention_us[g] += problem_.costs.square * length * length;
    tokens[g] += length;
    const auto first = loads_.begin() + static_cast<std::ptrdiff_t>(g * units_);
    const auto last = first + static_cast<std::ptrdiff_t>(units_);
    first[static_cast<std::ptrdiff_t>(slot_[g])] += length;
    const auto low = std::min_element(first, last);
    slot_[g] = static_cast<size_t>(low - first);
    lightest[g] = *low;
    heaviest[g] = *std::max_element(first, last);
  }

  std::vector<size_t> slot_;  // lightest unit of each parent
  std::vector<double> loads_;
  Members members_;
  bool capped_ = false;
};

}  // namespace

Members spread_by_work(const SpreadProblem& problem) {
  Filling filling(problem);
  const double per_token = problem.costs.even_row / problem.shape.width;
  return filling.run([&](double) {
    for (size_t g = 0; g < filling.price.size(); ++g) {
      filling.price[g] = filling.attention_us[g] + per_token * filling.tokens[g];
    }
  });
}

Members spread_by_tokens(const SpreadProblem& problem) {
  Filling filling(problem);
  return filling.run([&](double) { filling.price = filling.lightest; });
}

Members spread_by_cost(const SpreadProblem& problem) {
  Filling filling(problem);
  const double packed = problem.costs.row / problem.shape.unit;
  const double even = problem.costs.even_row / problem.shape.width;
  const double* attention = filling.attention_us.data();
  const double* heaviest = filling.heaviest.data();
  const double* lightest = filling.lightest.data();
  const double* tokens = filling.tokens.data();
  double* price = filling.price.data();
  const size_t m = filling.price.size();
  return filling.run([=](double length) {
    for (size_t g = 0; g < m; ++g) {
      const double fullest = std::max(heaviest[g], lightest[g] + length);
      price[g] = attention[g] + std::min(packed * fullest, even * (tokens[g] + length));
    }
  });
}

}  // namespace tide::repack
