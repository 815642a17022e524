#include "guard.h"

#include <algorithm>
#include <limits>

namespace tide::repack {
namespace {

size_t own_cheapest(const std::vector<Way>& ways) {
  auto cheaper = [](const Way& a, const Way& b) { return a.rows_us < b.rows_us; };
  return std::min_element(ways.begin(), ways.end(), cheaper) - ways.begin();
}

// Smallest sparse_us a parent can have without exceeding `full` in its full layers; infinite if it cannot.
double sparse_within(const std::vector<Way>& ways, double full) {
  double least = std::numeric_limits<double>::infinity();
  for (const Way& way : ways) {
    if (way.full_us <= full) least = std::min(least, way.sparse_us);
  }
  return least;
}

std::vector<size_t> choose_for_layer(const std::vector<std::vector<Way>>& ways) {
  double best = std::numeric_limits<double>::infinity(), best_full = best, best_sparse = best;
  for (const auto& parent : ways) {
    for (const Way& limit : parent) {
      double sparse = 0;
      for (const auto& other : ways) sparse = std::max(sparse, sparse_within(other, limit.full_us));
      if (limit.full_us + sparse < best) {
        best = limit.full_us + sparse;
        best_full = limit.full_us;
        best_sparse = sparse;
      }
    }
  }
  std::vector<size_t> chosen;
  for (const auto& parent : ways) {
    size_t pick = parent.size();
    for (size_t i = 0; i < parent.size(); ++i) {
      if (parent[i].full_us > best_full || parent[i].sparse_us > best_sparse) continue;
      if (pick == parent.size() || parent[i].rows_us < parent[pick].rows_us) pick = i;
    }
    chosen.push_back(pick);
  }
  return chosen;
}

}  // namespace

double total_us(const std::vector<double>& attention_us, const std::vector<Way>& chosen, Sync sync) {
  double attention = 0, full = 0, sparse = 0, slowest = 0;
  for (size_t g = 0; g < chosen.size(); ++g) {
    attention = std::max(attention, attention_us[g]);
    full = std::max(full, chosen[g].full_us);
    sparse = std::max(sparse, chosen[g].sparse_us);
    slowest = std::max(slowest, attention_us[g] + chosen[g].rows_us);
  }
  return sync == Sync::step ? slowest : attention + full + sparse;
}

std::vector<size_t> choose(const std::vector<std::vector<Way>>& ways, Sync sync) {
  if (sync == Sync::layer) return choose_for_layer(ways);
  std::vector<size_t> chosen;
  for (const auto& parent : ways) chosen.push_back(own_cheapest(parent));
  return chosen;
}

}  // namespace tide::repack
