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

Selection select(const Capabilities& capabilities, const Request& request) {
  if (request.op == Channel::reduce_scatter) {
    if (request.reduction != Reduction::sum) {
      return {Path::inner, std::string("reduction ") + to_string(request.reduction) + " is left to the inner backend"};
    }
    if (request.in_type == ElementType::bytes) {
      return {Path::inner, "tide reduces float32, float64, bfloat16, int32 and int64"};
    }
  }
  if (request.world == 1) return {Path::local, "one rank"};
  if (!capabilities.shared_memory) return {Path::inner, capabilities.no_memory_reason};
  switch (request.op) {
    case Channel::all_gather:
      if (capabilities.every_output_in_arena) return {Path::zero_copy, "every rank's output lies in the arena"};
      return {Path::staged, "the output is the caller's own memory"};
    case Channel::reduce_scatter:
      return {Path::staged, request.separate_inputs ? "per-parameter inputs, no packing" : "packed input"};
    case Channel::all_to_all:
      return {Path::staged, "through staging windows"};
  }
  return {Path::inner, "unknown operation"};
}

}  // namespace tide
