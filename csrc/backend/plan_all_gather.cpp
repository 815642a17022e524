// All-gather.
//
//   zero_copy  every rank's output is its window. Own shard is placed, then pushed piece by piece to the same
//              place in each peer's window; one data flag per peer says that all pieces are there. With multicast a
//              piece is pushed once, to all of them.
//   staged     every rank publishes its shard chunk by chunk in its own window (`depth` buffers); peers copy each
//              chunk to its place in their output and return a credit.
//
// Where a piece goes is the layout's business: rank-major without one, parameter-contiguous with one.
#include <algorithm>

#include "plan_builder.h"

namespace tide {

namespace {

struct Piece {
  int64_t input, output, bytes;
};

// Where [begin, end) (bytes) of rank `rank`'s shard goes in the gathered buffer.
std::vector<Piece> pieces(const Request& q, int rank, int64_t begin, int64_t end) {
  if (!q.layout) return {{begin, rank * q.numel * q.itemsize + begin, end - begin}};
  std::vector<Piece> result;
  const ParameterLayout& layout = *q.layout;
  for (const auto& p : layout.pieces(begin / q.itemsize, end / q.itemsize)) {
    const int64_t output = layout.gathered_offset(p.parameter) + rank * layout.shard_numel(p.parameter) + p.within;
    result.push_back({p.shard_offset * q.itemsize, output * q.itemsize, p.numel * q.itemsize});
  }
  return result;
}

// Where this rank's own piece is read: from the input, or from its place in the output when the caller put it there.
Address own_source(const Request& q, const Piece& p) {
  return q.placed ? Address{Space::output, 0, p.output} : Address{Space::input, 0, p.input};
}

// The switch writes this rank's own window as well. From the caller's input that is a second, equal write to where the
// shard was placed before the meeting. A shard that the caller placed is its own source: every byte is overwritten with
// the value it has, so the copy reads the same whether the switch was there before it or not. Nobody else is at these
// bytes meanwhile: peers write other pieces, whoever reads this one waits for the call, and the copy ends, own window
// and all, before this rank's flags are set. So the window is not free for anything else while a write is on its way.
void multicast(const Request& q, const std::vector<Piece>& own, PlanBuilder& plan) {
  for (const Piece& p : own) {
    const Address from = q.placed ? Address{Space::window, q.rank, p.output} : Address{Space::input, 0, p.input};
    plan.copy(from, {Space::multicast, 0, p.output}, p.bytes);
  }
  for (int peer : plan.peers()) plan.signal(peer, Flag::data, 1);
}

void zero_copy(const Request& q, PlanBuilder& plan) {
  const int64_t bytes = q.numel * q.itemsize;
  const auto own = pieces(q, q.rank, 0, bytes);
  if (!q.placed) {
    for (const Piece& p : own) plan.copy({Space::input, 0, p.input}, {Space::window, q.rank, p.output}, p.bytes);
  }
  plan.meet();
  if (q.multicast) {
    multicast(q, own, plan);
  } else {
    for (int peer : plan.peers()) {
      for (const Piece& p : own) {
        plan.copy({Space::window, q.rank, p.output}, {Space::window, peer, p.output}, p.bytes);
      }
      plan.signal(peer, Flag::data, 1);
    }
  }
  for (int peer : plan.peers()) plan.wait(peer, Flag::data, 1);
}

void staged(const Request& q, PlanBuilder& plan, const Staging& staging) {
  const int64_t bytes = q.numel * q.itemsize;
  int64_t chunk = staging.chunk_bytes(1, bytes);
  chunk = std::max(chunk / q.itemsize, int64_t{1}) * q.itemsize;
  const int64_t chunks = (bytes + chunk - 1) / chunk;
  plan.window_bytes(std::min<int64_t>(chunks, staging.depth) * chunk);
  plan.meet();
  auto buffer = [&](int64_t k) { return k % staging.depth * chunk; };
  for (int64_t k = 0; k <= chunks; ++k) {
    if (k < chunks) {
      const int64_t begin = k * chunk, end = std::min(bytes, begin + chunk);
      if (k >= staging.depth) {
        for (int peer : plan.peers()) plan.wait(peer, Flag::credit, k - staging.depth + 1);
      }
      const auto own = pieces(q, q.rank, begin, end);
      for (const Piece& p : own) {
        plan.copy(own_source(q, p), {Space::window, q.rank, buffer(k) + p.input - begin}, p.bytes);
      }
      for (int peer : plan.peers()) plan.signal(peer, Flag::data, k + 1);
      if (!q.placed) {
        for (const Piece& p : own) plan.copy({Space::input, 0, p.input}, {Space::output, 0, p.output}, p.bytes);
      }
    }
    if (k == 0) continue;
    const int64_t begin = (k - 1) * chunk, end = std::min(bytes, begin + chunk);
    for (int peer : plan.peers()) {
      plan.wait(peer, Flag::data, k);
      for (const Piece& p : pieces(q, peer, begin, end)) {
        plan.copy({Space::window, peer, buffer(k - 1) + p.input - begin}, {Space::output, 0, p.output}, p.bytes);
      }
      plan.signal(peer, Flag::credit, k);
    }
  }
  // A window goes back to the pool when its call is over: not before its last reader is.
  for (int peer : plan.peers()) {
    if (chunks > 0) plan.wait(peer, Flag::credit, chunks);
  }
}

}  // namespace

Plan plan_all_gather(const Request& q, Path path, const Staging& staging) {
  PlanBuilder plan(q, path);
  switch (path) {
    case Path::zero_copy:
      zero_copy(q, plan);
      break;
    case Path::staged:
      staged(q, plan, staging);
      break;
    case Path::local:
      if (!q.placed) {
        for (const Piece& p : pieces(q, 0, 0, q.numel * q.itemsize)) {
          plan.copy({Space::input, 0, p.input}, {Space::output, 0, p.output}, p.bytes);
        }
      }
      break;
    case Path::inner:
      break;
  }
  return plan.take();
}

}  // namespace tide
