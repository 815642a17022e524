// The arena of the shm transport: ranges of this rank's data memfd, with pages that are known to exist.
#pragma once

#include <mutex>

#include "fork_guard.h"
#include "range_allocator.h"
#include "shm_segment.h"
#include "transport.h"

namespace tide {

// Owns the mapping, so that a storage which holds the arena keeps its memory after the group is gone.
class ShmArena : public Arena {
 public:
  // `ranks_here`: how many ranks of this machine may grow at the same time, for the margin.
  ShmArena(Fd memfd, int64_t bytes, int ranks_here);

  std::optional<Window> acquire(int64_t bytes, std::string* why) override;
  void release(const Window& window) override;
  std::byte* address(const Window& window) override;
  std::optional<int64_t> offset_of(const void* pointer, int64_t bytes) override;
  int64_t bytes_in_use() const override;
  int64_t bytes_committed() const override;
  int64_t bytes_limit() const override { return segment_.bytes(); }

  const Fd& memfd() const { return memfd_; }
  std::byte* data() const { return segment_.data(); }
  int64_t bytes() const { return segment_.bytes(); }

 private:
  bool commit(int64_t bytes, std::string* why);

  const ForkGuard guard_;
  const Fd memfd_;
  const Segment segment_;
  const int ranks_here_;
  mutable std::mutex mutex_;
  RangeAllocator ranges_;  // its span is what has been committed
};

}  // namespace tide
