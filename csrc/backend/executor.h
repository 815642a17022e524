// Runs a plan on a transport. Knows neither tensors nor how memory is shared.
#pragma once

#include "plan.h"
#include "transport.h"

namespace tide {

// What one call adds to a plan: addresses, the windows that every rank published, its sequence number.
struct Execution {
  Channel channel = Channel::all_gather;
  uint64_t sequence = 0;
  Buffers buffers;
  std::vector<int64_t> windows;  // offset of each rank's window in its segment; -1: it has none
  ElementType in_type = ElementType::bytes;
  ElementType out_type = ElementType::bytes;
  double scale = 1.0;
};

// Flag words only grow: call `sequence`, chunk `value` is written as sequence * 2^24 + value. A wait for a later
// call therefore never returns on an earlier call's flag, and nothing is reset between calls.
constexpr int kChunkBits = 24;
uint64_t flag_value(uint64_t sequence, int64_t value);

// Plans between ranks must run after Transport::exchange of the same (channel, sequence), which tells the windows.
// `transport` may be null for plans without windows and flags, on host memory.
void execute(const Plan& plan, const Execution& call, Transport* transport, const Wait& wait);

}  // namespace tide
