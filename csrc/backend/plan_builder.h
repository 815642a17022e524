// Steps that the planners share: each function appends one.
#pragma once

#include "plan.h"

namespace tide {

class PlanBuilder {
 public:
  PlanBuilder(const Request& request, Path path) {
    plan_.op = request.op;
    plan_.path = path;
    plan_.rank = request.rank;
    plan_.world = request.world;
  }

  // Peers of this rank, the next one first: so that at any moment ranks write to different peers.
  std::vector<int> peers() const {
    std::vector<int> result;
    for (int d = 1; d < plan_.world; ++d) result.push_back((plan_.rank + d) % plan_.world);
    return result;
  }

  void copy(Address from, Address to, int64_t bytes) { move(StepKind::copy, from, to, bytes); }
  void copy(Address from, Address to, const Rows& rows) {
    move(StepKind::copy, from, to, rows.bytes);
    Step& step = plan_.steps.back();
    step.rows = rows.rows;
    step.to_pitch = rows.to_pitch;
    step.from_pitch = rows.from_pitch;
  }
  void fill(Address to, int64_t bytes) { move(StepKind::fill, {}, to, bytes); }
  void signal(int peer, Flag flag, int64_t value) { tell(StepKind::signal, peer, flag, value); }
  void wait(int peer, Flag flag, int64_t value) { tell(StepKind::wait, peer, flag, value); }
  void accumulate(Address own, int64_t staged, int64_t stride, Address to, int64_t bytes, ElementType type) {
    if (bytes <= 0) return;
    move(StepKind::accumulate, own, to, bytes);
    plan_.steps.back().staged = staged;
    plan_.steps.back().stride = stride;
    plan_.steps.back().type = type;
  }

  // Every plan between ranks starts here: after it, every peer's window is known and free to be written.
  void meet() {
    for (int peer : peers()) signal(peer, Flag::ready, 1);
    for (int peer : peers()) wait(peer, Flag::ready, 1);
  }

  void window_bytes(int64_t bytes) { plan_.window_bytes = bytes; }
  Plan take() { return std::move(plan_); }

 private:
  void move(StepKind kind, Address from, Address to, int64_t bytes) {
    if (bytes <= 0) return;
    Step step;
    step.kind = kind;
    step.from = from;
    step.to = to;
    step.bytes = bytes;
    plan_.steps.push_back(step);
  }
  void tell(StepKind kind, int peer, Flag flag, int64_t value) {
    Step step;
    step.kind = kind;
    step.peer = peer;
    step.flag = flag;
    step.value = value;
    plan_.steps.push_back(step);
  }

  Plan plan_;
};

}  // namespace tide
