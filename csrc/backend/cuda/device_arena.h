// The arena in device memory: segments that every rank of the group allocated and registered together.
//
// A segment is one ncclMemAlloc allocation and one window, never one window per parameter. Offsets carry the
// segment in their upper bits, so an offset published by one rank means the same segment on every other. Growth is
// collective and therefore explicit (allocate() and what follows it); acquire() never allocates. Freed ranges come back
// with the event of the stream that last used them; whoever gets such a range waits for it on its own stream.
// Parameters of successive layers take turns in two ranges, so that a layer's gather does not wait for the compute
// before it.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "../fork_guard.h"
#include "../range_allocator.h"
#include "../transport.h"
#include "driver.h"
#include "nccl.h"

namespace tide::cuda {

constexpr int kSegmentShift = 40;

class DeviceArena : public Arena {
 public:
  DeviceArena(int rank, int world) : rank_(rank), world_(world) {}
  ~DeviceArena() override;

  // Collective, in three steps that the caller puts host exchanges between, so that one rank's failure is every
  // rank's: allocate locally, register together (both: "" or why not), then either commit on all or drop on all.
  std::string allocate(int64_t bytes);
  std::string register_pending(NcclComm comm);
  // Between registering, on every rank, and committing, together: the segment's multicast address. "" or why there is
  // none; a rank that has none makes all forget theirs.
  std::string find_multicast(NcclComm comm);
  void forget_multicast(const std::string& why);
  // Gives `bytes` of it to the caller, before anybody else can take them; none when 0.
  Window commit_pending(int64_t bytes);
  void drop_pending(NcclComm comm);

  std::optional<Window> acquire(int64_t bytes, std::string* why) override { return acquire(bytes, 0, nullptr, why); }
  // Calls with turns 0, 1, 2, ... get two ranges alternately, where there are two that fit best; `alone` says whether
  // there is one only. By offsets, not by what is over on the device, so that ranks with the same ranges free choose
  // the same.
  std::optional<Window> acquire(int64_t bytes, uint64_t turn, bool* alone, std::string* why);
  // Whether the device may still use `window`.
  bool busy(const Window& window);
  void release(const Window& window) override;  // nothing on the device uses it any more
  std::byte* address(const Window& window) override;
  std::optional<int64_t> offset_of(const void* pointer, int64_t bytes) override;
  int64_t bytes_in_use() const override;
  int64_t bytes_committed() const override;
  int64_t bytes_limit() const override { return INT64_MAX; }

  // `event` is recorded behind the last use of the range. It belongs to `owner`, or to the arena when that is null.
  void release_behind(const Window& window, Event event, std::shared_ptr<void> owner);
  // With an event of the arena's own on `stream`, which takes the place of the one before there.
  void note_use(const Window& window, Event event, Stream stream);
  // Makes `stream` wait for the last use of everything that overlaps `window`.
  void wait_until_free(const Window& window, Stream stream);

  // Byte `offset` of `rank`'s arena in this process's address space; nullptr outside.
  std::byte* peer_address(int rank, int64_t offset, int64_t bytes) const;

  // The same bytes of all ranks' arenas at once, to be written only; nullptr outside, and where the segment has none.
  std::byte* multicast_address(int64_t offset, int64_t bytes) const;
  // Why the segment at `offset` has none.
  std::string no_multicast(int64_t offset) const;

  // Ends the windows; the memory itself stays until the last storage in it dies.
  void deregister(NcclComm comm);

  // The memory outlives the group: peers' copies may still be on their way into it.
  void quarantine();

 private:
  struct Segment {
    std::byte* base = nullptr;
    int64_t bytes = 0;
    NcclWindow window = nullptr;
    std::vector<std::byte*> peers;  // by rank; own address for this rank
    std::byte* multicast = nullptr;
    std::string no_multicast;
    RangeAllocator ranges;
  };
  struct Pending {
    Window window;
    Event event;
    Stream stream;  // null: not known
    std::shared_ptr<void> owner;
  };
  static void drop(Pending& pending);
  const Segment* segment_of(int64_t offset, int64_t bytes) const;  // with the lock held
  void collect_finished();                                         // with the lock held

  const int rank_, world_;
  const ForkGuard guard_;
  mutable std::mutex mutex_;
  std::vector<Segment> segments_;
  std::list<Pending> pending_;
  Segment new_segment_;
  bool quarantined_ = false;
};

}  // namespace tide::cuda
