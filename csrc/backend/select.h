// The only place that decides which way a call goes. Pure: the same answer on every rank, because it reads only
// facts that the group has agreed on.
#pragma once

#include <string>

#include "request.h"

namespace tide {

// zero_copy: peers write straight into the caller's memory (all-gather, all-to-all into an arena window).
// staged:    chunks pass through windows of the arena; any tensor will do.
// local:     a group of one rank; copies only.
// inner:     handed to the inner backend (gloo, nccl).
enum class Path : uint8_t { zero_copy, staged, local, inner };
const char* to_string(Path path);

enum class Device : uint8_t { cpu, cuda };

struct Capabilities {
  Device device = Device::cpu;
  bool can_accumulate = true;    // there is a reduction kernel for the device
  bool shared_memory = false;    // every member's memory is mapped here
  std::string no_memory_reason;  // why not
  // CUDA, calls without a layout: those of fewer bytes are not worth the ranks' agreement; whether the ranks, together,
  // have asked for memory of the arena that such calls may write; why nccl has to take such a call (empty: it need
  // not).
  int64_t plain_bytes = 0;
  bool plain_slots = false;
  std::string inner_only_reason;
  // Per call, once the ranks have told each other.
  bool outputs_known = false;
  bool every_output_in_arena = false;
  bool input_types_differ = false;  // separate inputs: not every rank has the same dtype for the same parameter
  // Whether one write can reach the same place of every rank's output, and why not ("": nobody asked for it).
  bool multicast = false;
  std::string no_multicast_reason;
  // all-to-all: why a rank's input cannot go straight into a peer's output, both being strided; empty: it can.
  std::string unfit_reason;
  std::string no_staging_reason;  // why no rank could get staging for this kind of call; empty: not known to be so
};

// What a strided all-to-all is held to on the device.
StridedLimits strided_limits(Device device);

struct Selection {
  Path path;
  std::string reason;
  bool multicast = false;  // zero_copy: pieces go to all ranks at once
};

Selection select(const Capabilities& capabilities, const Request& request);

}  // namespace tide
