#include "select.h"

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

namespace {

Selection select_all_gather(const Capabilities& c, const Request& q) {
  if (c.device == Device::cpu) {
    if (c.every_output_in_arena) return {Path::zero_copy, "every rank's output lies in the arena"};
    return {Path::staged, "the output is the caller's own memory"};
  }
  // A CUDA call takes part in the ranks' agreement, a host wait, only where its layout says that it is tide's.
  if (!q.layout) return {Path::inner, "a plain CUDA all-gather is left to nccl"};
  if (c.outputs_known && !c.every_output_in_arena) {
    return {Path::inner, "a rank had no slot in the arena for the output"};
  }
  return {Path::zero_copy, "every rank's output lies in the arena"};
}

Selection select_reduce_scatter(const Capabilities& c, const Request& q) {
  if (c.device == Device::cuda) {
    if (!c.can_accumulate) return {Path::inner, "built without CUDA kernels"};
    if (!q.layout && q.in_type == q.out_type) return {Path::inner, "a plain CUDA reduce-scatter is left to nccl"};
  }
  return {Path::staged, q.separate_inputs ? "per-parameter inputs, no packing" : "packed input"};
}

Selection select_all_to_all(const Capabilities& c) {
  if (c.every_output_in_arena) return {Path::zero_copy, "every rank's output lies in the arena"};
  if (!c.no_staging_reason.empty()) return {Path::inner, "no memory for staging: " + c.no_staging_reason};
  return {Path::staged, "through staging windows"};
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
