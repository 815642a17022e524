// A plan is data: the steps one rank takes, with byte offsets. Made once per (request shape, group), cached,
// printable; the same plan runs on any transport.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "request.h"
#include "select.h"

namespace tide {

// copy:       bytes from one address to another; several rows of them at a pitch of either end.
// fill:       zero bytes at an address (padding of uneven shards).
// signal:     tell `peer` that chunk `value` is there (data) or consumed (credit), or that the window is free (ready).
// wait:       until `peer` has told the same here.
// accumulate: out[] = scale * (sum over ranks, in rank order, of what rank r contributed): this rank's own piece is
//             read in place, every other rank's from the window.
enum class StepKind : uint8_t { copy, fill, signal, wait, accumulate };

// input:  the caller's input number `index`.      output: the caller's output.
// window: the window that rank `index` published for this call.
// multicast: the windows of all ranks at once, this rank's too, which must lie at the same place in their segments.
//            Only copies write there; nothing reads it.
enum class Space : uint8_t { none, input, output, window, multicast };

struct Address {
  Space space = Space::none;
  int index = 0;
  int64_t offset = 0;  // bytes
};

struct Step {
  StepKind kind = StepKind::copy;
  int peer = -1;  // signal, wait
  Flag flag = Flag::ready;
  int64_t value = 0;  // signal, wait: chunk number, from 1
  Address to, from;   // accumulate: from is this rank's own piece (space none: it has none, counts as zero)
  int64_t bytes = 0;  // copy: of one row; fill; accumulate: of the input piece
  int64_t rows = 1;   // copy
  int64_t to_pitch = 0, from_pitch = 0;   // copy of several rows
  int64_t staged = 0;                     // accumulate: where the piece of the first other rank lies in the window
  int64_t stride = 0;                     // accumulate: from one other rank's piece to the next
  ElementType type = ElementType::bytes;  // accumulate: of the pieces; bytes: the call's in_type
};

struct Plan {
  Channel op = Channel::all_gather;
  Path path = Path::local;
  int rank = 0;
  int world = 1;
  int64_t window_bytes = 0;  // staging that this rank must offer; 0 when the window is the output itself
  std::vector<Step> steps;

  std::string print() const;
};

// Staging geometry: a window holds `depth` buffers per writer (reduce-scatter, all-to-all: one writer per peer;
// all-gather: one writer, this rank), each of `chunk_bytes`.
struct Staging {
  int64_t budget_bytes = 4 << 20;  // of one rank's window, whatever the number of ranks
  int depth = 2;  // at least 2: with one buffer a rank would wait for a credit that its own next read gives
  int64_t smallest_chunk_bytes = 4096;

  int64_t chunk_bytes(int writers, int64_t needed_bytes) const;
};

Plan plan_all_gather(const Request& request, Path path, const Staging& staging);
Plan plan_reduce_scatter(const Request& request, Path path, const Staging& staging);
Plan plan_all_to_all(const Request& request, Path path, const Staging& staging);
Plan make_plan(const Request& request, Path path, const Staging& staging);

}  // namespace tide
