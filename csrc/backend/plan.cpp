#include "plan.h"

#include <algorithm>

namespace tide {

int64_t Staging::chunk_bytes(int writers, int64_t needed_bytes) const {
  int64_t chunk = budget_bytes / (static_cast<int64_t>(std::max(writers, 1)) * depth) / 4096 * 4096;
  chunk = std::max(chunk, smallest_chunk_bytes);
  // A call smaller than a chunk asks for no more than it needs (rounded, so that pieces keep their alignment).
  return std::min(chunk, std::max<int64_t>((needed_bytes + 63) / 64 * 64, 64));
}

Plan make_plan(const Request& request, Path path, const Staging& staging) {
  switch (request.op) {
    case Channel::all_gather:
      return plan_all_gather(request, path, staging);
    case Channel::reduce_scatter:
      return plan_reduce_scatter(request, path, staging);
    case Channel::all_to_all:
      return plan_all_to_all(request, path, staging);
    case Channel::memory:
      break;
  }
  return {};
}

namespace {

std::string print(const Address& a) {
  switch (a.space) {
    case Space::none:
      return "nothing";
    case Space::input:
      return "in" + std::to_string(a.index) + "+" + std::to_string(a.offset);
    case Space::output:
      return "out+" + std::to_string(a.offset);
    case Space::window:
      return "win" + std::to_string(a.index) + "+" + std::to_string(a.offset);
    case Space::multicast:
      return "all+" + std::to_string(a.offset);
  }
  return "?";
}

std::string print(const Step& s) {
  switch (s.kind) {
    case StepKind::copy:
      return "copy " + print(s.from) + " -> " + print(s.to) + " " + std::to_string(s.bytes) + "B" +
             (s.rows == 1 ? ""
                          : " x " + std::to_string(s.rows) + " pitch " + std::to_string(s.from_pitch) + " -> " +
                                std::to_string(s.to_pitch));
    case StepKind::fill:
      return "fill " + print(s.to) + " " + std::to_string(s.bytes) + "B";
    case StepKind::signal:
      return std::string("signal ") + to_string(s.flag) + " -> " + std::to_string(s.peer) + " #" +
             std::to_string(s.value);
    case StepKind::wait:
      return std::string("wait ") + to_string(s.flag) + " <- " + std::to_string(s.peer) + " #" +
             std::to_string(s.value);
    case StepKind::accumulate:
      return "accumulate " + print(s.from) + ", staged+" + std::to_string(s.staged) + " stride " +
             std::to_string(s.stride) + " -> " + print(s.to) + " " + std::to_string(s.bytes) + "B" +
             (s.type == ElementType::bytes ? "" : std::string(" ") + to_string(s.type));
  }
  return "?";
}

}  // namespace

std::string Plan::print() const {
  std::string text = std::string(to_string(op)) + " " + to_string(path) + " rank " + std::to_string(rank) + "/" +
                     std::to_string(world) + " window " + std::to_string(window_bytes) + "B\n";
  for (const Step& step : steps) text += "  " + tide::print(step) + "\n";
  return text;
}

}  // namespace tide
