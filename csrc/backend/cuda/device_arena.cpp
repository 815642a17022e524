#include "device_arena.h"

#include <algorithm>
#include <tuple>

#include "../error.h"

namespace tide::cuda {

namespace {

constexpr int64_t kAlign = 4096;
constexpr int64_t kGranularity = 2 << 20;  // of ncclMemAlloc
constexpr int64_t kLocalMask = (int64_t{1} << kSegmentShift) - 1;

int64_t round_up(int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; }

// What is as good a fit as a range of `bytes`: more would break up the room of larger slots.
int64_t about(int64_t bytes) { return bytes + bytes / 4; }

}  // namespace

DeviceArena::~DeviceArena() {
  // A quarantined arena keeps its memory for the life of the process: that is its purpose. A forked child has no
  // device memory to free.
  if (quarantined_ || guard_.in_child()) return;
  for (Pending& p : pending_) {
    driver().event_synchronize(p.event);
    drop(p);
  }
  for (Segment& s : segments_) nccl().free(s.base);
  if (new_segment_.base) nccl().free(new_segment_.base);
}

void DeviceArena::quarantine() {
  std::lock_guard<std::mutex> lock(mutex_);
  quarantined_ = true;
}

std::string DeviceArena::allocate(int64_t bytes) {
  bytes = round_up(bytes, kGranularity);
  if (bytes > kLocalMask) return "a segment of " + std::to_string(bytes) + " bytes is too large";
  void* pointer = nullptr;
  const NcclResult result = nccl().allocate(&pointer, static_cast<size_t>(bytes));
  if (result != 0) {
    size_t free_bytes = 0, total = 0;
    driver().memory_info(&free_bytes, &total);
    return "ncclMemAlloc of " + std::to_string(bytes >> 20) + " MiB failed (" + nccl().error_string(result) + "); " +
           std::to_string(free_bytes >> 20) + " of " + std::to_string(total >> 20) + " MiB are free";
  }
  std::lock_guard<std::mutex> lock(mutex_);
  new_segment_.base = static_cast<std::byte*>(pointer);
  new_segment_.bytes = bytes;
  return "";
}

void DeviceArena::drop_pending(NcclComm comm) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (new_segment_.window) nccl().window_deregister(comm, new_segment_.window);
  if (new_segment_.base) nccl().free(new_segment_.base);
  new_segment_ = Segment();
}

// Without the lock across NCCL's calls, which wait for peers: a storage may be released meanwhile.
std::string DeviceArena::register_pending(NcclComm comm) {
  std::byte* base;
  int64_t bytes;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    base = new_segment_.base;
    bytes = new_segment_.bytes;
  }
  NcclWindow window = nullptr;
  std::vector<std::byte*> peers;
  std::string problem;
  try {
    check_nccl(nccl().window_register(comm, base, static_cast<size_t>(bytes), &window, kWindowCollectiveSymmetric),
               "ncclCommWindowRegister", comm);
    if (!window) problem = "ncclCommWindowRegister gave no window: these GPUs cannot address each other's memory";
    for (int peer = 0; peer < world_ && problem.empty(); ++peer) {
      void* address = base;
      if (peer != rank_) {
        check_nccl(nccl().peer_pointer(window, 0, peer, &address), "ncclGetPeerDevicePointer", comm);
      }
      if (!address) {
        problem = "ncclGetPeerDevicePointer gave no address for rank " + std::to_string(peer) +
                  ": it is not on this NVLink domain";
      }
      peers.push_back(static_cast<std::byte*>(address));
    }
  } catch (const Error& error) {
    problem = error.what();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  new_segment_.window = window;
  new_segment_.peers = std::move(peers);
  return problem;
}

// Without the lock, as above.
std::string DeviceArena::find_multicast(NcclComm comm) {
  NcclWindow window;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    window = new_segment_.window;
  }
  void* address = nullptr;
  try {
    check_nccl(nccl().multicast_pointer(window, 0, &address), "ncclGetLsaMultimemDevicePointer", comm);
  } catch (const Error& error) {
    return error.what();
  }
  if (!address) return "ncclGetLsaMultimemDevicePointer gave no address: NCCL has no multicast between these GPUs";
  std::lock_guard<std::mutex> lock(mutex_);
  new_segment_.multicast = static_cast<std::byte*>(address);
  return "";
}

void DeviceArena::forget_multicast(const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  new_segment_.multicast = nullptr;
  new_segment_.no_multicast = why;
}

Window DeviceArena::commit_pending(int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  Window taken{static_cast<int64_t>(segments_.size()) << kSegmentShift, round_up(bytes, kAlign)};
  new_segment_.ranges.grow(new_segment_.bytes);
  if (bytes > 0) taken.offset += new_segment_.ranges.take(taken.bytes).value();
  segments_.push_back(std::move(new_segment_));
  new_segment_ = Segment();
  return taken;
}

std::optional<Window> DeviceArena::acquire(int64_t bytes, uint64_t turn, bool* alone, std::string* why) {
  bytes = round_up(std::max<int64_t>(bytes, 1), kAlign);
  std::lock_guard<std::mutex> lock(mutex_);
  collect_finished();
  int64_t smallest = INT64_MAX;
  for (const Segment& segment : segments_) {
    const auto fitting = segment.ranges.free_ranges(bytes, INT64_MAX);
    if (!fitting.empty()) smallest = std::min(smallest, fitting.front().bytes);
  }
  if (smallest == INT64_MAX) {
    *why = "no free range of " + std::to_string(bytes) + " bytes in " + std::to_string(segments_.size()) + " segments";
    return std::nullopt;
  }
  struct Room {
    size_t segment;
    Range free, wanted;
  };
  std::vector<Room> rooms;  // the lowest first
  for (size_t s = 0; s < segments_.size(); ++s) {
    for (const Range& free : segments_[s].ranges.free_ranges(bytes, about(smallest))) {
      rooms.push_back({s, free, {free.offset, bytes}});
      if (free.bytes >= 2 * bytes) rooms.push_back({s, free, {free.offset + bytes, bytes}});
    }
  }
  std::sort(rooms.begin(), rooms.end(), [](const Room& a, const Room& b) {
    return std::tie(a.segment, a.wanted.offset) < std::tie(b.segment, b.wanted.offset);
  });
  if (alone) *alone = rooms.size() == 1;
  const Room& room = rooms[turn % std::min<size_t>(rooms.size(), 2)];
  segments_[room.segment].ranges.take(room.free, room.wanted);
  return Window{(static_cast<int64_t>(room.segment) << kSegmentShift) + room.wanted.offset, bytes};
}

bool DeviceArena::busy(const Window& window) {
  std::lock_guard<std::mutex> lock(mutex_);
  collect_finished();
  return std::any_of(pending_.begin(), pending_.end(), [&](const Pending& p) { return p.window.overlaps(window); });
}

void DeviceArena::release(const Window& window) {
  std::lock_guard<std::mutex> lock(mutex_);
  segments_[static_cast<size_t>(window.offset >> kSegmentShift)].ranges.give_back(window.offset & kLocalMask);
}

void DeviceArena::drop(Pending& pending) {
  if (!pending.owner) driver().event_destroy(pending.event);
}

void DeviceArena::note_use(const Window& window, Event event, Stream stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  pending_.remove_if([&](Pending& p) {
    const bool same = p.stream == stream && p.window.offset == window.offset && p.window.bytes == window.bytes;
    if (same) drop(p);
    return same;
  });
  collect_finished();
  pending_.push_back({window, event, stream, nullptr});
}

void DeviceArena::release_behind(const Window& window, Event event, std::shared_ptr<void> owner) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    collect_finished();
    pending_.push_back({window, event, nullptr, std::move(owner)});
  }
  release(window);
}

void DeviceArena::deregister(NcclComm comm) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Segment& segment : segments_) {
    if (segment.window) nccl().window_deregister(comm, segment.window);
    segment.window = nullptr;
    segment.multicast = nullptr;
  }
}

void DeviceArena::collect_finished() {
  for (auto it = pending_.begin(); it != pending_.end();) {
    // Any other answer but success says nothing about the event: whoever gets the range waits for it.
    if (driver().event_query(it->event) != 0) {
      ++it;
      continue;
    }
    drop(*it);
    it = pending_.erase(it);
  }
}

void DeviceArena::wait_until_free(const Window& window, Stream stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Pending& p : pending_) {
    // A stream keeps its own order. Null is no match: of a use, an unknown stream; of the caller's, the default one.
    const bool in_order = p.stream && p.stream == stream;
    if (in_order || !p.window.overlaps(window)) continue;
    check(driver().stream_wait_event(stream, p.event, 0), "cuStreamWaitEvent");
  }
}

std::byte* DeviceArena::address(const Window& window) { return peer_address(rank_, window.offset, window.bytes); }

std::byte* DeviceArena::peer_address(int rank, int64_t offset, int64_t bytes) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const Segment* segment = segment_of(offset, bytes);
  return segment ? segment->peers[static_cast<size_t>(rank)] + (offset & kLocalMask) : nullptr;
}

std::byte* DeviceArena::multicast_address(int64_t offset, int64_t bytes) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const Segment* segment = segment_of(offset, bytes);
  return segment && segment->multicast ? segment->multicast + (offset & kLocalMask) : nullptr;
}

std::string DeviceArena::no_multicast(int64_t offset) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const Segment* segment = segment_of(offset, 0);
  return segment ? segment->no_multicast : "";
}

const DeviceArena::Segment* DeviceArena::segment_of(int64_t offset, int64_t bytes) const {
  const auto s = static_cast<size_t>(offset >> kSegmentShift);
  if (offset < 0 || s >= segments_.size() || bytes < 0) return nullptr;
  return (offset & kLocalMask) > segments_[s].bytes - bytes ? nullptr : &segments_[s];
}

std::optional<int64_t> DeviceArena::offset_of(const void* pointer, int64_t bytes) {
  const auto* p = static_cast<const std::byte*>(pointer);
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t s = 0; s < segments_.size(); ++s) {
    const Segment& segment = segments_[s];
    if (p < segment.base || p >= segment.base + segment.bytes) continue;
    const int64_t local = p - segment.base;
    if (segment.ranges.taken(local, bytes)) return (static_cast<int64_t>(s) << kSegmentShift) + local;
  }
  return std::nullopt;
}

int64_t DeviceArena::bytes_in_use() const {
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t bytes = 0;
  for (const Segment& s : segments_) bytes += s.ranges.in_use();
  return bytes;
}

int64_t DeviceArena::bytes_committed() const {
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t bytes = 0;
  for (const Segment& s : segments_) bytes += s.bytes;
  return bytes;
}

}  // namespace tide::cuda
