#include "select.h"

#include <optional>

namespace tide {

const char* to_string(Path path) {
  switch (path) {
    case Path::zero_copy:
      return "zero_copy";
    case Path::staged:
      return "staged";
    case Path::local:
      return "local";
    case Path::inner:
      return "inner";
  }
  return "?";
}

StridedLimits strided_limits(Device device) {
  switch (device) {
    case Device::cuda:
      // Copy engines take 2-D copies at full rate for rows from 256 bytes, of pitches below 2 GiB; one costs the host
      // some microseconds, in which a kernel moves what a block must have at least.
      return {256, 1, 256 << 10, int64_t{1} << 31};
    case Device::cpu:
      break;
  }
  return {64, 64, 16 << 10, INT64_MAX};
}

namespace {

// What a CUDA call without a layout is left to nccl for before the ranks agree on it: agreement is a host wait, which
// small calls are not worth. Sizes are the same on every rank of a right call, and slots are asked for together. bf16
// to fp32, which nccl has not, is agreed on unless only the inner backend may be called. Of an all-to-all, ranks may
// send different amounts, so no rank can tell alone whether all find it large enough; most are small. Only those into
// slots, which are asked for together, are worth the wait.
std::optional<Selection> not_worth_agreeing(const Capabilities& c, const Request& q) {
  if (c.device != Device::cuda || q.layout) return std::nullopt;
  if (!c.inner_only_reason.empty()) return Selection{Path::inner, c.inner_only_reason};
  const bool all_gather = q.op == Channel::all_gather;
  if (q.op == Channel::all_to_all && c.plain_bytes > 0 && !c.plain_slots) {
    return Selection{Path::inner, "a CUDA all-to-all, and no memory for outputs was taken from the group"};
  }
  if (!all_gather && (q.op != Channel::reduce_scatter || q.in_type != q.out_type)) return std::nullopt;
  if (q.numel * q.itemsize * q.world < c.plain_bytes) {
    return Selection{Path::inner, "a plain CUDA call of fewer than " + std::to_string(c.plain_bytes) +
                                      " bytes (TIDE_CUDA_PLAIN_BYTES)"};
  }
  if (all_gather && !c.plain_slots) {
    return Selection{Path::inner, "a plain CUDA all-gather, and no memory for outputs was taken from the group"};
  }
  return std::nullopt;
}

Selection select_all_gather(const Capabilities& c, const Request& q) {
  if (c.device == Device::cpu) {
    if (c.every_output_in_arena) return {Path::zero_copy, "every rank's output lies in the arena"};
    return {Path::staged, "the output is the caller's own memory"};
  }
  if (c.outputs_known && !c.every_output_in_arena) {
    return {Path::inner, "a rank had no slot in the arena for the output"};
  }
  Selection selection{Path::zero_copy, "every rank's output lies in the arena"};
  selection.multicast = c.multicast && q.world > 2;  // to one peer, a copy is one copy anyway
  if (selection.multicast) {
    selection.reason += "; multicast";
  } else if (!c.no_multicast_reason.empty()) {
    selection.reason += "; no multicast: " + c.no_multicast_reason;
  }
  return selection;
}

Selection select_reduce_scatter(const Capabilities& c, const Request& q) {
  if (c.input_types_differ) return {Path::inner, "ranks have gradients of different dtypes for the same parameters"};
  if (c.device == Device::cuda && !c.can_accumulate) return {Path::inner, "built without CUDA kernels"};
  if (!c.no_staging_reason.empty()) return {Path::inner, "no memory for staging: " + c.no_staging_reason};
  return {Path::staged, q.separate_inputs ? "per-parameter inputs, no packing" : "packed input"};
}

Selection select_all_to_all(const Capabilities& c) {
  const bool in_place = c.every_output_in_arena && c.unfit_reason.empty();
  if (in_place) return {Path::zero_copy, "every rank's output lies in the arena"};
  if (c.device == Device::cuda && c.outputs_known && c.plain_bytes > 0) {
    return {Path::inner, c.every_output_in_arena ? c.unfit_reason : "a rank had no slot in the arena for the output"};
  }
  if (!c.no_staging_reason.empty()) return {Path::inner, "no memory for staging: " + c.no_staging_reason};
  return {Path::staged, "through staging windows" + (c.every_output_in_arena ? ": " + c.unfit_reason : "")};
}

}  // namespace

Selection select(const Capabilities& c, const Request& q) {
  if (q.op == Channel::reduce_scatter) {
    if (q.reduction != Reduction::sum) {
      return {Path::inner, std::string("reduction ") + to_string(q.reduction) + " is left to the inner backend"};
    }
    if (q.in_type == ElementType::bytes) {
      return {Path::inner, "tide reduces float32, float64, bfloat16, int32 and int64"};
    }
  }
  if (q.world == 1) return {Path::local, "one rank"};
  if (auto early = not_worth_agreeing(c, q)) return *early;
  if (!c.shared_memory) return {Path::inner, c.no_memory_reason};
  switch (q.op) {
    case Channel::all_gather:
      return select_all_gather(c, q);
    case Channel::reduce_scatter:
      return select_reduce_scatter(c, q);
    case Channel::all_to_all:
      return select_all_to_all(c);
    case Channel::memory:
      break;
  }
  return {Path::inner, "no collective"};
}

}  // namespace tide
