// All-to-all with even or uneven splits; a pair may exchange nothing.
//
//   zero_copy  every rank's output is its window. What a rank sends to a peer goes straight to its place there, which
//              the peer's splits tell; one data flag per peer says that it is all there.
//   staged     each pair (writer, reader) has its own chunk count. The writer copies chunks into its slice of the
//              reader's window; the reader copies a round of them to their places in the output and returns credits.
//
// A tensor that is not contiguous is read or written in rows; windows, and so the chunks, know nothing of that.
//
// What a rank sends to itself goes straight from input to output, once the first copies to peers are on their way.
#include <algorithm>
#include <numeric>

#include "plan_builder.h"

namespace tide {

namespace {

std::vector<int64_t> offsets(const std::vector<int64_t>& splits) {
  std::vector<int64_t> result(splits.size() + 1, 0);
  std::partial_sum(splits.begin(), splits.end(), result.begin() + 1);
  return result;
}

struct Shape {
  const Request& q;
  const std::vector<int64_t> in_offset = offsets(q.in_splits), out_offset = offsets(q.out_splits);
  const std::optional<Strided> none = std::nullopt;

  int64_t sent(int peer) const { return q.in_splits[static_cast<size_t>(peer)] * q.itemsize; }
  int64_t received(int peer) const { return q.out_splits[static_cast<size_t>(peer)] * q.itemsize; }
  // Bytes that lie in rows of `form`; offsets are counted without its gaps.
  struct Part {
    Address address;
    const std::optional<Strided>& form;
  };
  Part source(int peer, int64_t at) const {
    return {{Space::input, 0, in_offset[static_cast<size_t>(peer)] * q.itemsize + at}, q.in_form};
  }
  Part target(int peer, int64_t at) const {
    return {{Space::output, 0, out_offset[static_cast<size_t>(peer)] * q.itemsize + at}, q.out_form};
  }
  Part output_of(int peer) const {
    const auto p = static_cast<size_t>(peer);
    return {{Space::window, peer, q.peer_offsets.at(p) * q.itemsize}, q.peer_forms.empty() ? none : q.peer_forms[p]};
  }
  Part window(Address address) const { return {address, none}; }

  void copy(PlanBuilder& plan, const Part& from, const Part& to, int64_t bytes) const {
    for (const RowsAt& one : copies(from.form, from.address.offset, to.form, to.address.offset, bytes)) {
      Address source = from.address, target = to.address;
      source.offset = one.from;
      target.offset = one.to;
      plan.copy(source, target, one.rows);
    }
  }
};

void own(const Shape& shape, PlanBuilder& plan) {
  const int rank = shape.q.rank;
  shape.copy(plan, shape.source(rank, 0), shape.target(rank, 0), shape.sent(rank));
}

void zero_copy(const Shape& shape, PlanBuilder& plan) {
  plan.meet();
  for (int peer : plan.peers()) {
    if (shape.sent(peer) == 0) continue;
    shape.copy(plan, shape.source(peer, 0), shape.output_of(peer), shape.sent(peer));
    plan.signal(peer, Flag::data, 1);
  }
  own(shape, plan);
  for (int peer : plan.peers()) {
    if (shape.received(peer) > 0) plan.wait(peer, Flag::data, 1);
  }
}

void staged(const Shape& shape, PlanBuilder& plan, const Staging& staging) {
  const Request& q = shape.q;
  // The chunk size must be the same on every rank, whatever its own splits are: the full share of the budget.
  const int64_t chunk = std::max(staging.chunk_bytes(q.world - 1, INT64_MAX / 2), q.itemsize);
  const int64_t stride = staging.depth * chunk;
  auto slice = [](int writer, int reader) { return writer < reader ? writer : writer - 1; };
  auto place = [&](int writer, int reader, int64_t k) {
    return shape.window({Space::window, reader, slice(writer, reader) * stride + k % staging.depth * chunk});
  };
  auto chunks = [&](int64_t bytes) { return (bytes + chunk - 1) / chunk; };
  auto size = [&](int64_t bytes, int64_t k) { return std::min(chunk, bytes - k * chunk); };

  int64_t rounds = 0, received = 0;
  for (int peer : plan.peers()) {
    rounds = std::max({rounds, chunks(shape.sent(peer)), chunks(shape.received(peer))});
    received += shape.received(peer);
  }
  plan.window_bytes(received > 0 ? (q.world - 1) * stride : 0);
  plan.meet();
  for (int64_t k = 0; k <= rounds; ++k) {
    for (int reader : plan.peers()) {
      if (k >= chunks(shape.sent(reader))) continue;
      if (k >= staging.depth) plan.wait(reader, Flag::credit, k - staging.depth + 1);
      shape.copy(plan, shape.source(reader, k * chunk), place(q.rank, reader, k), size(shape.sent(reader), k));
      plan.signal(reader, Flag::data, k + 1);
    }
    if (k == 0) {
      own(shape, plan);
      continue;
    }
    // All of a round at once: where copies within a device are kernels, that is one kernel.
    std::vector<int> writers;
    for (int writer : plan.peers()) {
      if (k <= chunks(shape.received(writer))) writers.push_back(writer);
    }
    for (int writer : writers) plan.wait(writer, Flag::data, k);
    for (int writer : writers) {
      shape.copy(plan, place(writer, q.rank, k - 1), shape.target(writer, (k - 1) * chunk),
                 size(shape.received(writer), k - 1));
    }
    for (int writer : writers) {
      if (k - 1 + staging.depth < chunks(shape.received(writer))) plan.signal(writer, Flag::credit, k);
    }
  }
}

}  // namespace

Plan plan_all_to_all(const Request& q, Path path, const Staging& staging) {
  PlanBuilder plan(q, path);
  const Shape shape{q};
  switch (path) {
    case Path::zero_copy:
      zero_copy(shape, plan);
      break;
    case Path::staged:
      staged(shape, plan, staging);
      break;
    case Path::local:
      own(shape, plan);
      break;
    case Path::inner:
      break;
  }
  return plan.take();
}

}  // namespace tide
