#include "balance.h"

#include <algorithm>
#include <numeric>

namespace tide::repack {
namespace {

size_t index_of_min(const std::vector<int64_t>& values) {
  return std::min_element(values.begin(), values.end()) - values.begin();
}

size_t index_of_max(const std::vector<int64_t>& values) {
  return std::max_element(values.begin(), values.end()) - values.begin();
}

bool near(int64_t value, int64_t bound) { return value - bound <= bound / 10000; }

// First fit, heaviest first; false when some item fits nowhere.
bool first_fit(const std::vector<int64_t>& weights, int bins, int64_t capacity, Split& split) {
  split.loads.assign(bins, 0);
  split.bin_of.resize(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    int bin = 0;
    while (bin < bins && split.loads[bin] + weights[i] > capacity) ++bin;
    if (bin == bins) return false;
    split.loads[bin] += weights[i];
    split.bin_of[i] = bin;
  }
  return true;
}

// One change that lowers the fuller of two bins: move `give` to the other bin, take `take` back (-1:
// nothing).
struct Change {
  int64_t result;
  int give = -1;
  int take = -1;
  int bin = -1;
};

// `full` and `other` list items of the two bins, heaviest first. The ideal transfer is half the difference of
// loads.
void best_change(const std::vector<int64_t>& weights, const std::vector<int>& full, const std::vector<int>& other,
                 int64_t full_load, int64_t other_load, int bin, Change& best) {
  auto consider = [&](int give, int take) {
    const int64_t moved = weights[give] - (take < 0 ? 0 : weights[take]);
    const int64_t result = std::max(full_load - moved, other_load + moved);
    if (moved > 0 && result < best.result) best = {result, give, take, bin};
  };
  const int64_t half = (full_load - other_load) / 2;
  size_t j = 0;
  for (int give : full) {
    consider(give, -1);
    // Items come in falling weight, so the partner with weights[give] - weights[take] ~ half only moves
    // forward.
    while (j < other.size() && weights[give] - weights[other[j]] < half) ++j;
    if (j < other.size()) consider(give, other[j]);
    if (j > 0) consider(give, other[j - 1]);
  }
}

}  // namespace

int64_t Split::heaviest() const { return loads.empty() ? 0 : *std::max_element(loads.begin(), loads.end()); }

Split split_longest_first(const std::vector<int64_t>& weights, int bins) {
  Split split{std::vector<int>(weights.size()), std::vector<int64_t>(bins, 0)};
  for (size_t i = 0; i < weights.size(); ++i) {
    const size_t bin = index_of_min(split.loads);
    split.bin_of[i] = static_cast<int>(bin);
    split.loads[bin] += weights[i];
  }
  return split;
}

// Karmarkar-Karp: repeatedly joins the two partial solutions of largest spread, the heavy bins of one with
// the light bins of the other. Bins hold linked lists of items, so that a join costs O(bins).
Split split_differencing(const std::vector<int64_t>& weights, int bins) {
  const int n = static_cast<int>(weights.size());
  Split split{std::vector<int>(n), std::vector<int64_t>(bins, 0)};
  if (n == 0) return split;
  struct Bin {
    int64_t load = 0;
    int head = -1;
    int tail = -1;
  };
  std::vector<int> next(n, -1);
  std::vector<Bin> all(static_cast<size_t>(n) * bins);  // `bins` per partial solution, heaviest first
  auto spread = [&](int p) { return all[size_t(p) * bins].load - all[size_t(p) * bins + bins - 1].load; };
  auto less = [&](int x, int y) {
    const int64_t sx = spread(x), sy = spread(y);
    return sx != sy ? sx < sy : x > y;
  };
  std::vector<int> heap(n);
  std::iota(heap.begin(), heap.end(), 0);
  for (int i = 0; i < n; ++i) all[size_t(i) * bins] = {weights[i], i, i};
  std::make_heap(heap.begin(), heap.end(), less);
  auto pop = [&] {
    std::pop_heap(heap.begin(), heap.end(), less);
    const int top = heap.back();
    heap.pop_back();
    return top;
  };
  while (heap.size() > 1) {
    const int first = pop();
    const int second = pop();
    Bin* a = &all[size_t(first) * bins];
    const Bin* b = &all[size_t(second) * bins];
    for (int i = 0; i < bins; ++i) {
      const Bin& light = b[bins - 1 - i];
      if (light.head < 0) continue;
      if (a[i].head < 0) {
        a[i] = light;
        continue;
      }
      a[i].load += light.load;
      next[a[i].tail] = light.head;
      a[i].tail = light.tail;
    }
    std::stable_sort(a, a + bins, [](const Bin& x, const Bin& y) { return x.load > y.load; });
    heap.push_back(first);
    std::push_heap(heap.begin(), heap.end(), less);
  }
  const Bin* result = &all[size_t(heap.front()) * bins];
  for (int bin = 0; bin < bins; ++bin) {
    split.loads[bin] = result[bin].load;
    for (int i = result[bin].head; i >= 0; i = next[i]) split.bin_of[i] = bin;
  }
  return split;
}

// MultiFit: bisects the smallest capacity into which first fit packs everything; `high` must be packable
// otherwise (a known solution), and is what comes back when first fit never beats it.
Split split_first_fit(const std::vector<int64_t>& weights, int bins, int64_t low, int64_t high) {
  Split best, trial;
  for (int round = 0; round < 12 && low < high; ++round) {
    const int64_t capacity = low + (high - low) / 2;
    if (first_fit(weights, bins, capacity, trial)) {
      std::swap(best, trial);
      high = best.heaviest();
    } else {
      low = capacity + 1;
    }
  }
  return best;
}

void improve(const std::vector<int64_t>& weights, int64_t bound, int rounds, Split& split) {
  const int bins = static_cast<int>(split.loads.size());
  std::vector<std::vector<int>> items(bins);
  for (size_t i = 0; i < weights.size(); ++i) items[split.bin_of[i]].push_back(static_cast<int>(i));
  auto transfer = [&](int item, int from, int to) {
    auto& source = items[from];
    source.erase(std::find(source.begin(), source.end(), item));
    auto& target = items[to];
    target.insert(std::lower_bound(target.begin(), target.end(), item), item);
    split.loads[from] -= weights[item];
    split.loads[to] += weights[item];
    split.bin_of[item] = to;
  };
  for (int round = 0; round < rounds; ++round) {
    const int full = static_cast<int>(index_of_max(split.loads));
    const int64_t load = split.loads[full];
    if (near(load, bound)) return;
    Change best{load};
    for (int bin = 0; bin < bins; ++bin) {
      if (bin == full || split.loads[bin] >= load) continue;
      best_change(weights, items[full], items[bin], load, split.loads[bin], bin, best);
    }
    if (best.bin < 0) return;
    transfer(best.give, full, best.bin);
    if (best.take >= 0) transfer(best.take, best.bin, full);
  }
}

Split balance(const std::vector<int64_t>& weights, int bins) {
  const int64_t bound = split_bound(weights, bins);
  Split best = split_longest_first(weights, bins);
  if (bins == 1 || near(best.heaviest(), bound)) return best;
  auto keep_better = [&](Split other) {
    if (other.loads.empty()) return;
    improve(weights, bound, 64, other);
    if (other.heaviest() < best.heaviest()) best = std::move(other);
  };
  const int64_t high = best.heaviest();
  improve(weights, bound, 64, best);
  if (!near(best.heaviest(), bound)) keep_better(split_differencing(weights, bins));
  if (!near(best.heaviest(), bound)) keep_better(split_first_fit(weights, bins, bound, high));
  return best;
}

int64_t split_bound(const std::vector<int64_t>& weights, int bins) {
  if (weights.empty()) return 0;
  std::vector<int64_t> before(weights.size() + 1, 0);
  std::partial_sum(weights.begin(), weights.end(), before.begin() + 1);
  int64_t bound = std::max(ceil_div(before.back(), bins), weights[0]);
  for (size_t k = 1; k * bins < weights.size(); ++k) {
    bound = std::max(bound, before[k * bins + 1] - before[k * bins - k]);
  }
  return bound;
}

}  // namespace tide::repack
