// One call, described without tensors: what the backend hands to select and to the planners.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "layout.h"
#include "strided.h"
#include "types.h"

namespace tide {

struct Request {
  Channel op = Channel::all_gather;
  int rank = 0;
  int world = 1;
  ElementType in_type = ElementType::bytes;   // bytes: moves without looking inside
  ElementType out_type = ElementType::bytes;  // differs from in_type only for bf16 -> fp32 reduce-scatter
  int scalar_type = 0;  // the caller's dtype as a number (separate inputs: the output's), for agreement only
  std::string type_name = "bytes";  // and as text, for people: "bfloat16", "bfloat16 -> float32"
  int64_t itemsize = 1;             // bytes of one input element
  int64_t out_itemsize = 1;
  int64_t numel = 0;  // elements of one shard: all-gather input, reduce-scatter output; all-to-all: whole input

  Reduction reduction = Reduction::none;
  double scale = 1.0;  // multiplies the sum, in the accumulation type

  // Null: rank-major, as c10d documents.
  std::shared_ptr<const ParameterLayout> layout;
  // all-gather, all-to-all: the output is an acquired window of the arena, so peers write it directly.
  bool output_in_arena = false;
  // all-gather: this rank's shard already lies at its place in the output.
  bool placed = false;
  // reduce-scatter with a layout: one input per parameter instead of one packed buffer.
  bool separate_inputs = false;
  // Separate inputs of two types, bf16 and fp32, reduced into fp32: one type per parameter, and in_type is fp32.
  // Empty: all are of in_type.
  std::vector<ElementType> in_types;
  // all-to-all, in elements, one per peer.
  std::vector<int64_t> in_splits, out_splits;
  // all-to-all: how the tensors lie that are not contiguous. Offsets above and below are counted without the gaps.
  std::optional<Strided> in_form, out_form;
  // zero-copy all-to-all, in elements: where what this rank sends begins in each peer's output. Known only once the
  // ranks have told each other their splits.
  std::vector<int64_t> peer_offsets;
  std::vector<std::optional<Strided>> peer_forms;  // of each peer's output; empty: all are contiguous
  // zero-copy all-gather: pieces go to all ranks at once. Known only once the ranks have told each other where their
  // outputs lie.
  bool multicast = false;
};

// Addresses of one call. reduce-scatter with separate inputs: one pointer per parameter; otherwise one.
struct Buffers {
  std::vector<const std::byte*> inputs;
  std::byte* output = nullptr;
};

}  // namespace tide
