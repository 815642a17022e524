// What a plan runs on. An algorithm sees memory, copies, flags and one host-side exchange; never a socket, a
// stream or a file descriptor.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "strided.h"
#include "types.h"

// Plain description of one reduction; the kernels themselves are the transports' business.
#include "../kernels/accumulate.h"

namespace tide {

using Clock = std::chrono::steady_clock;

// How long a call may wait, and what to do meanwhile. `interrupted` is called at least every 100 ms of waiting
// and throws to give the call up (Ctrl-C).
struct Wait {
  Clock::time_point deadline;
  std::function<void()> interrupted;
  std::string call;  // "all_gather #417", for errors
};

// A range of this rank's own segment that peers can write. Offsets are in bytes from the segment's start.
struct Window {
  int64_t offset = 0;
  int64_t bytes = 0;

  bool overlaps(const Window& other) const {
    return offset < other.offset + other.bytes && other.offset < offset + bytes;
  }
};

// Whether one write can reach the same bytes of every rank's segment; the same on every rank.
struct Multicast {
  bool usable = false;
  std::string why_not;  // empty where nobody asked for it
};

// Memory of this rank that peers can address. Thread-safe; never blocks on a peer.
class Arena {
 public:
  virtual ~Arena() = default;
  // A free range of at least `bytes` bytes, aligned to 4096, or nothing when the limit or the machine's memory
  // does not allow it (`why` then says which). Freed ranges are reused first (best fit).
  virtual std::optional<Window> acquire(int64_t bytes, std::string* why) = 0;
  virtual void release(const Window& window) = 0;
  virtual std::byte* address(const Window& window) = 0;
  // Whether [pointer, pointer + bytes) lies in one acquired window; gives the offset in the segment.
  virtual std::optional<int64_t> offset_of(const void* pointer, int64_t bytes) = 0;
  virtual int64_t bytes_in_use() const = 0;
  virtual int64_t bytes_committed() const = 0;
  // What the arena may ever hold.
  virtual int64_t bytes_limit() const = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual const char* name() const = 0;
  virtual int rank() const = 0;
  virtual int world() const = 0;
  virtual std::shared_ptr<Arena> arena() = 0;

  // Publishes `mine` (at most kRecordBytes) as this rank's record of call `sequence` on `channel`, then waits
  // for the record that every peer publishes for the same sequence. Returns all of them, by rank. Everything
  // that this rank wrote before is visible to a peer that returns from the same exchange.
  static constexpr int64_t kRecordBytes = 4096;
  virtual std::vector<std::string> exchange(Channel channel, uint64_t sequence, const std::string& mine,
                                            const Wait& wait) = 0;
  // Says that call `sequence` is over on this rank, for the journal that peers print on a timeout.
  virtual void complete(Channel channel, uint64_t sequence) = 0;

  // Address in this process of byte `offset` of `rank`'s segment; [offset, offset + bytes) must lie in it.
  virtual std::byte* address(int rank, int64_t offset, int64_t bytes) = 0;

  // Bytes [offset, offset + bytes) of all segments at once, this rank's too; the address may only be written.
  virtual Multicast multicast(int64_t offset, int64_t bytes) {
    (void)offset, (void)bytes;
    return {};
  }
  virtual std::byte* multicast_address(int64_t offset, int64_t bytes) {
    (void)offset, (void)bytes;
    return nullptr;
  }

  // Memory for one call of `channel`; by default the arena's. A transport whose work goes on after the call
  // returns orders reuse behind it here.
  virtual std::optional<Window> acquire(Channel channel, int64_t bytes, std::string* why) {
    (void)channel;
    return arena()->acquire(bytes, why);
  }
  virtual void release(Channel channel, const Window& window) {
    (void)channel;
    arena()->release(window);
  }

  // Whether memory was made from which acquire(channel) can always be served; the same answer on every rank. Where it
  // was not and a rank has got nothing, all ranks call provide() together, between two exchanges: "", or why no rank
  // has it now.
  virtual bool provided(Channel channel) {
    (void)channel;
    return true;
  }
  virtual std::string provide(Channel channel, const Wait& wait) {
    (void)channel, (void)wait;
    return "";
  }

  // Work of one channel happens in the order in which it is given; copies between two flags may overlap.
  virtual void copy(Channel channel, std::byte* to, const std::byte* from, int64_t bytes) = 0;
  // A copy whose two ends are this rank's own memory.
  virtual void place(Channel channel, std::byte* to, const std::byte* from, int64_t bytes) {
    copy(channel, to, from, bytes);
  }
  // The same two for rows at a pitch.
  virtual void copy_rows(Channel channel, std::byte* to, const std::byte* from, const Rows& rows) {
    for (int64_t r = 0; r < rows.rows; ++r)
      copy(channel, to + r * rows.to_pitch, from + r * rows.from_pitch, rows.bytes);
  }
  virtual void place_rows(Channel channel, std::byte* to, const std::byte* from, const Rows& rows) {
    for (int64_t r = 0; r < rows.rows; ++r) {
      place(channel, to + r * rows.to_pitch, from + r * rows.from_pitch, rows.bytes);
    }
  }
  virtual void fill(Channel channel, std::byte* to, int64_t bytes) = 0;
  // How many copies of the channel's last call a kernel made in the place of copy engines.
  virtual int64_t kernel_copies(Channel channel) const {
    static_cast<void>(channel);
    return 0;
  }
  virtual void accumulate(Channel channel, ElementType in, ElementType out, const AccumulateArgs& args) = 0;

  // Sets this rank's flag word at `peer` to `value`. All copies issued before are visible to a peer whose
  // wait() for that value returned. Values of one (channel, peer, flag) only grow. Flag::ready says nothing new
  // where exchange() itself orders memory; such a transport does nothing for it.
  virtual void signal(Channel channel, int peer, Flag flag, uint64_t value) = 0;
  // Waits until the flag word that `peer` sets here has reached `value`.
  virtual void wait(Channel channel, int peer, Flag flag, uint64_t value, const Wait& wait) = 0;

  // Throws where this rank or a peer has aborted, for a call that will wait for the peers elsewhere.
  virtual void check_peers(const std::string& call) { static_cast<void>(call); }

  // Makes every later call on this transport, and every peer that waits for this rank, fail with `reason`.
  virtual void abort(const std::string& reason) = 0;
  // The group is destroyed in good order. Nothing may be waited for any more.
  virtual void close(const std::string& reason) { abort(reason); }
};

}  // namespace tide
