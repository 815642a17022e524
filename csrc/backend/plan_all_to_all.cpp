// All-to-all with even or uneven splits; a pair may exchange nothing.
//
//   staged  each pair (writer, reader) has its own chunk count. The writer copies chunks into its slice of the
//           reader's window; the reader copies them to their place in the output and returns a credit. What a rank
//           sends to itself goes straight from input to output.
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

}  // namespace

Plan plan_all_to_all(const Request& q, Path path, const Staging& staging) {
  PlanBuilder plan(q, path);
  const auto in_offset = offsets(q.in_splits), out_offset = offsets(q.out_splits);
  auto own = [&] {
    plan.copy({Space::input, 0, in_offset[q.rank] * q.itemsize}, {Space::output, 0, out_offset[q.rank] * q.itemsize},
              q.in_splits[q.rank] * q.itemsize);
  };
  if (path == Path::local) own();
  if (path != Path::staged) return plan.take();

  // The chunk size must be the same on every rank, whatever its own splits are: the full share of the budget.
  const int64_t chunk = std::max(staging.chunk_bytes(q.world - 1, INT64_MAX / 2), q.itemsize);
  const int64_t stride = staging.depth * chunk;
  auto slice = [](int writer, int reader) { return writer < reader ? writer : writer - 1; };
  auto buffer = [&](int64_t k) { return k % staging.depth * chunk; };
  auto chunks = [&](int64_t elements) { return (elements * q.itemsize + chunk - 1) / chunk; };

  int64_t rounds = 0, received = 0;
  for (int peer : plan.peers()) {
    rounds = std::max({rounds, chunks(q.in_splits[peer]), chunks(q.out_splits[peer])});
    received += q.out_splits[peer];
  }
  plan.window_bytes(received > 0 ? (q.world - 1) * stride : 0);
  plan.meet();
  own();
  for (int64_t k = 0; k <= rounds; ++k) {
    for (int reader : plan.peers()) {
      const int64_t bytes = q.in_splits[reader] * q.itemsize;
      if (k >= chunks(q.in_splits[reader])) continue;
      if (k >= staging.depth) plan.wait(reader, Flag::credit, k - staging.depth + 1);
      plan.copy({Space::input, 0, in_offset[reader] * q.itemsize + k * chunk},
                {Space::window, reader, slice(q.rank, reader) * stride + buffer(k)}, std::min(chunk, bytes - k * chunk));
      plan.signal(reader, Flag::data, k + 1);
    }
    if (k == 0) continue;
    for (int writer : plan.peers()) {
      const int64_t bytes = q.out_splits[writer] * q.itemsize, count = chunks(q.out_splits[writer]);
      if (k - 1 >= count) continue;
      plan.wait(writer, Flag::data, k);
      plan.copy({Space::window, q.rank, slice(writer, q.rank) * stride + buffer(k - 1)},
                {Space::output, 0, out_offset[writer] * q.itemsize + (k - 1) * chunk},
                std::min(chunk, bytes - (k - 1) * chunk));
      if (k - 1 + staging.depth < count) plan.signal(writer, Flag::credit, k);
    }
  }
  return plan.take();
}

}  // namespace tide
