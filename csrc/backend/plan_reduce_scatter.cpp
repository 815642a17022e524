// Reduce-scatter.
//
//   staged  the owner's shard is cut into chunks. Every rank copies its piece of each chunk straight from where the
//           gradient lies into the owner's window (one slice per writer, `depth` buffers each); the owner adds its
//           own piece, read in place, and the staged ones in rank order, and returns a credit.
//
// Element (rank o, parameter i, position x) is read from
//   rank-major input            in[o*S + o_i + x]
//   parameter-contiguous input  in[p_i + o*s_i + x]
//   separate inputs             in_i[o*s_i + x], and zero behind the end of in_i (padding never travels)
// Separate inputs may be bf16 and fp32 side by side. Each travels as it is and is added as it is; in the windows all
// have fp32's room, so that where a piece lies depends on sizes only.
#include <algorithm>

#include "plan_builder.h"

namespace tide {

namespace {

struct Piece {
  Address from;    // this rank's contribution; space none for padding
  int64_t offset;  // elements, in the owner's shard
  int64_t numel;
  int64_t itemsize;
  ElementType type = ElementType::bytes;  // bytes: the call's
};

// What this rank contributes to [begin, end) (elements) of `owner`'s shard. The cut depends on the owner only, so
// every writer and the owner agree on it.
std::vector<Piece> pieces(const Request& q, int owner, int64_t begin, int64_t end) {
  if (!q.layout) return {{{Space::input, 0, (owner * q.numel + begin) * q.itemsize}, begin, end - begin, q.itemsize}};
  std::vector<Piece> result;
  const ParameterLayout& layout = *q.layout;
  for (const auto& p : layout.pieces(begin, end)) {
    const int64_t in_parameter = owner * layout.shard_numel(p.parameter) + p.within;
    const int64_t valid = std::clamp<int64_t>(layout.valid_numel(p.parameter, owner) - p.within, 0, p.numel);
    const ElementType type = q.in_types.empty() ? ElementType::bytes : q.in_types[p.parameter];
    const int64_t itemsize = q.in_types.empty() ? q.itemsize : element_size(type);
    const Address from =
        q.separate_inputs ? Address{Space::input, static_cast<int>(p.parameter), in_parameter * itemsize}
                          : Address{Space::input, 0, (layout.gathered_offset(p.parameter) + in_parameter) * q.itemsize};
    if (valid > 0) result.push_back({from, p.shard_offset, valid, itemsize, type});
    if (valid < p.numel) result.push_back({{}, p.shard_offset + valid, p.numel - valid, itemsize});
  }
  return result;
}

}  // namespace

Plan plan_reduce_scatter(const Request& q, Path path, const Staging& staging) {
  PlanBuilder plan(q, path);
  const int writers = q.world - 1;
  int64_t chunk_bytes = staging.chunk_bytes(writers, q.numel * q.itemsize);
  if (path == Path::local) chunk_bytes = q.numel * q.itemsize;
  const int64_t chunk = std::max(chunk_bytes / q.itemsize, int64_t{1});
  chunk_bytes = chunk * q.itemsize;
  const int64_t chunks = (q.numel + chunk - 1) / chunk;
  const int64_t stride = staging.depth * chunk_bytes;  // one writer's slice
  auto slot = [](int writer, int owner) { return writer < owner ? writer : writer - 1; };
  auto buffer = [&](int64_t k) { return k % staging.depth * chunk_bytes; };
  auto add = [&](int64_t k) {
    const int64_t begin = k * chunk, end = std::min(q.numel, begin + chunk);
    for (const Piece& p : pieces(q, q.rank, begin, end)) {
      const Address to{Space::output, 0, p.offset * q.out_itemsize};
      if (p.from.space == Space::none) {
        plan.fill(to, p.numel * q.out_itemsize);
      } else {
        plan.accumulate(p.from, buffer(k) + (p.offset - begin) * q.itemsize, stride, to, p.numel * p.itemsize, p.type);
      }
    }
  };

  if (path == Path::local) {
    for (int64_t k = 0; k < chunks; ++k) add(k);
    return plan.take();
  }
  if (path != Path::staged) return plan.take();

  plan.window_bytes(chunks > 0 ? writers * stride : 0);
  plan.meet();
  for (int64_t k = 0; k <= chunks; ++k) {
    if (k < chunks) {
      const int64_t begin = k * chunk, end = std::min(q.numel, begin + chunk);
      for (int owner : plan.peers()) {
        if (k >= staging.depth) plan.wait(owner, Flag::credit, k - staging.depth + 1);
        for (const Piece& p : pieces(q, owner, begin, end)) {
          if (p.from.space == Space::none) continue;
          const int64_t at = slot(q.rank, owner) * stride + buffer(k) + (p.offset - begin) * q.itemsize;
          plan.copy(p.from, {Space::window, owner, at}, p.numel * p.itemsize);
        }
        plan.signal(owner, Flag::data, k + 1);
      }
    }
    if (k == 0) continue;
    for (int writer : plan.peers()) plan.wait(writer, Flag::data, k);
    add(k - 1);
    if (k - 1 + staging.depth < chunks) {
      for (int writer : plan.peers()) plan.signal(writer, Flag::credit, k);
    }
  }
  return plan.take();
}

}  // namespace tide
