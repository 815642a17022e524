// How the ranks of a CUDA group agree on a step that any of them may be unable to take.
#pragma once

#include <string>

#include "../transport.h"

namespace tide::cuda {

// Tells every rank this rank's problem ("" for none) and returns the first one, with its rank.
inline std::string agree(Transport& control, uint64_t sequence, const std::string& problem, const Wait& wait) {
  constexpr size_t kLongestProblem = 1500;  // bytes; a record also holds more than that
  const auto all = control.exchange(Channel::memory, sequence, problem.substr(0, kLongestProblem), wait);
  control.complete(Channel::memory, sequence);
  for (size_t r = 0; r < all.size(); ++r) {
    if (!all[r].empty()) return "rank " + std::to_string(r) + ": " + all[r];
  }
  return "";
}

}  // namespace tide::cuda
