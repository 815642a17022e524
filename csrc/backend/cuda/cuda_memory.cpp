// Memory of a CUDA group: how it grows, slots for callers, staging for calls, and what its offsets mean as addresses.
#include "agree.h"
#include "cuda_transport.h"

namespace tide::cuda {

// Collective. "" or why no rank has grown. Where `taken` is empty, this rank gets the new room.
std::string CudaTransport::grow(int64_t bytes, const Wait& wait, std::optional<Window>* taken) {
  std::string problem = arena_->allocate(bytes);
  if (!problem.empty() && options_.free_cached_memory) {
    options_.free_cached_memory();
    problem = arena_->allocate(bytes);
  }
  std::string why = agree(*control_, ++memory_calls_, problem, wait);
  if (why.empty()) {
    {
      const Watchdog::HostCall guarded(*watchdog_, memory_calls_, Clock::now() + options_.timeout);
      problem = arena_->register_pending(comm_);
    }
    why = agree(*control_, ++memory_calls_, problem, wait);
  }
  if (why.empty() && multicast_.usable) find_multicast(wait);
  if (why.empty()) {
    const Window window = arena_->commit_pending(*taken ? 0 : bytes);
    if (!*taken) *taken = window;
  } else {
    arena_->drop_pending(comm_);
  }
  return why;
}

// Collective. Only where registration has succeeded on every rank: NCCL's call waits for all of them. One rank's
// refusal is everybody's, for this segment; the exchange is also the barrier behind the binding of the memory.
void CudaTransport::find_multicast(const Wait& wait) {
  std::string problem;
  {
    const Watchdog::HostCall guarded(*watchdog_, memory_calls_, Clock::now() + options_.timeout);
    problem = arena_->find_multicast(comm_);
  }
  const std::string why = agree(*control_, ++memory_calls_, problem, wait);
  if (why.empty()) return;
  arena_->forget_multicast(why);
  say_no_multicast(why);
}

void CudaTransport::say_no_multicast(const std::string& why) {
  if (!options_.multicast || !options_.on_no_multicast || said_no_multicast_) return;
  said_no_multicast_ = true;
  options_.on_no_multicast(who_.prefix("connect") + "no multicast: " + why + "; each piece is copied to every peer");
}

// Ranks tell each other what memory they ask for, and whether it takes growth. True: some rank needs that.
bool CudaTransport::ask_together(const std::string& what, bool grow, const Wait& wait) {
  constexpr char kFits[] = " fits", kGrow[] = " grow";
  const auto all = control_->exchange(Channel::memory, ++memory_calls_, what + (grow ? kGrow : kFits), wait);
  control_->complete(Channel::memory, memory_calls_);
  bool any = false;
  for (size_t r = 0; r < all.size(); ++r) {
    any = any || all[r] == what + kGrow;
    if (all[r] == what + kGrow || all[r] == what + kFits) continue;
    fail(ErrorKind::usage, who_, "memory #" + std::to_string(memory_calls_),
         "ranks asked for different memory; got " + what + " here and " + all[r] + " on rank " + std::to_string(r) +
             ", expected the same; shard the same parameters, or ask in the same order, on every rank");
  }
  return any;
}

// Whether the parameters of `group` would take the place of those that another group gathered last. Then the gather can
// not overlap the compute of that group.
bool CudaTransport::follows_in_place(const Window& window, ParameterGroup group) const {
  const auto& last = last_parameters_;
  return group != kNoParameters && last.group != kNoParameters && group != last.group && window.overlaps(last.window);
}

std::optional<Window> CudaTransport::slot(int64_t bytes, ParameterGroup group, Stream stream, const Wait& wait,
                                          std::string* why) {
  bool alone = false;
  auto window = arena_->acquire(bytes, group == kNoParameters ? 0 : turns_++, &alone, why);
  alone = alone && window && !one_slot_ && follows_in_place(*window, group);
  // Reshard is rank-local, so free lists may differ: one rank's need makes all grow, in the same call on all.
  std::string problem;
  try {
    const bool needs_room = !window || (alone && arena_->busy(*window));
    if (ask_together(std::to_string(bytes) + " bytes", needs_room, wait)) {
      std::optional<Window> room;
      if (window && !alone) room = window;  // has what it needs
      problem = grow(bytes, wait, &room);
      if (alone && room) arena_->release(*window);
      if (alone && !room) keep_one_slot(problem);
      if (room) window = room;
    }
  } catch (...) {
    if (window) arena_->release(*window);
    throw;
  }
  if (!window) {
    *why = problem;
    return std::nullopt;
  }
  if (group != kNoParameters) last_parameters_ = {group, *window};
  arena_->wait_until_free(*window, stream);
  return window;
}

// A rank tries growth once: it makes the allocator give back what it keeps, which costs more than the overlap is worth.
void CudaTransport::keep_one_slot(const std::string& why) {
  one_slot_ = true;
  if (!options_.on_one_slot) return;
  options_.on_one_slot(
      who_.prefix("slot") + "no memory for a second slot: " + why +
      "; all-gathers of parameters wait for the compute before them; leave room for one more slot on every "
      "GPU before the first step");
}

bool CudaTransport::provided(Channel channel) {
  std::lock_guard<std::mutex> lock(staging_mutex_);
  return staging_[static_cast<size_t>(channel)].segment.has_value();
}

std::string CudaTransport::provide(Channel channel, const Wait& wait) {
  std::optional<Window> segment;
  ask_together(
      std::string("staging of ") + to_string(channel) + ", " + std::to_string(options_.staging_bytes) + " bytes", true,
      wait);
  const std::string why = grow(options_.staging_bytes, wait, &segment);
  if (!why.empty()) return why;
  std::lock_guard<std::mutex> lock(staging_mutex_);
  Staging& staging = staging_[static_cast<size_t>(channel)];
  staging.ranges.grow(segment->bytes);
  staging.segment = segment;
  return "";
}

// Used in stream order, behind whatever the range held before: peers write it only after this rank's ready flag, which
// is behind that too. One call of a channel at a time comes here. A segment of its own never competes with parameters
// for room; a slot that was given back may.
std::optional<Window> CudaTransport::acquire(Channel channel, int64_t bytes, std::string* why) {
  if (options_.slot_reuse) {
    if (auto window = arena_->acquire(bytes, why)) {
      arena_->wait_until_free(*window, stream(channel));
      return window;
    }
  }
  Staging& staging = staging_[static_cast<size_t>(channel)];
  std::optional<int64_t> at;
  {
    std::lock_guard<std::mutex> lock(staging_mutex_);
    if (staging.segment) at = staging.ranges.take((bytes + 4095) / 4096 * 4096);
  }
  if (!at) {
    *why = staging.segment ? "the staging segment of " + std::to_string(staging.segment->bytes) + " bytes is full"
                           : "there is no staging segment";
    return std::nullopt;
  }
  const Window window{staging.segment->offset + *at, bytes};
  arena_->wait_until_free(window, stream(channel));
  return window;
}

// Runs while an exception unwinds too. What is still in the batch, copies and flags, belongs to a call that broke: it
// is dropped, and a range whose last use cannot be told is never given out again.
void CudaTransport::release(Channel channel, const Window& window) {
  Batch& batch = batches_[static_cast<size_t>(channel)];
  const bool broke = !batch.empty();
  batch.clear();
  try {
    note_use(channel, window);
  } catch (const Error&) {
    return;
  }
  if (broke) return;
  std::lock_guard<std::mutex> lock(staging_mutex_);
  Staging& staging = staging_[static_cast<size_t>(channel)];
  const int64_t local = staging.segment ? window.offset - staging.segment->offset : -1;
  if (local >= 0 && local < staging.segment->bytes) {
    staging.ranges.give_back(local);
  } else {
    arena_->release(window);
  }
}

std::byte* CudaTransport::address(int rank, int64_t offset, int64_t bytes) {
  std::byte* address = arena_->peer_address(rank, offset, bytes);
  if (!address) {
    fail(ErrorKind::usage, who_, "",
         "bytes [" + std::to_string(offset) + ", +" + std::to_string(bytes) + ") are not in the device arena of rank " +
             std::to_string(rank));
  }
  return address;
}

Multicast CudaTransport::multicast(int64_t offset, int64_t bytes) {
  if (!multicast_.usable || arena_->multicast_address(offset, bytes)) return multicast_;
  return {false, arena_->no_multicast(offset)};
}

std::byte* CudaTransport::multicast_address(int64_t offset, int64_t bytes) {
  std::byte* address = arena_->multicast_address(offset, bytes);
  if (!address) {
    fail(ErrorKind::usage, who_, "",
         "bytes [" + std::to_string(offset) + ", +" + std::to_string(bytes) + ") have no multicast address here");
  }
  return address;
}

}  // namespace tide::cuda
