#include "shm_arena.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>

#include "error.h"
#include "memory_limit.h"

namespace tide {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kGrowth = int64_t{2} << 20;  // growth in whole huge pages
// Pages are committed piece by piece, each after a look at the memory left: ranks that grow at the same time
// see each other, and a signal that interrupts fallocate (which then undoes the piece) costs little.
constexpr int64_t kPiece = int64_t{64} << 20;

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

ShmArena::ShmArena(Fd memfd, int64_t bytes, int ranks_here)
    : memfd_(std::move(memfd)), segment_(memfd_, bytes), ranks_here_(ranks_here) {}

std::optional<Window> ShmArena::acquire(int64_t bytes, std::string* why) {
  const auto refuse = [&](const std::string& reason) -> std::optional<Window> {
    if (why != nullptr) *why = reason;
    return std::nullopt;
  };
  if (guard_.in_child()) return refuse("this process was forked from the one that owns the arena");
  if (bytes < 0) return refuse("a window of " + std::to_string(bytes) + " bytes was asked for");
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::string limit = "arena limit of " + std::to_string(segment_.bytes()) +
                            " bytes reached: " + std::to_string(bytes) + " asked for, " +
                            std::to_string(ranges_.in_use()) + " in use";
  if (bytes > segment_.bytes()) return refuse(limit);
  const int64_t size = std::max(kPage, round_up(bytes, kPage));
  auto offset = ranges_.take(size);
  if (!offset) {
    const int64_t missing = ranges_.missing(size);
    const int64_t left = segment_.bytes() - ranges_.span();
    if (missing > left) return refuse(limit);
    if (!commit(std::min(left, round_up(missing, kGrowth)), why)) return std::nullopt;
    offset = ranges_.take(size);
  }
  return Window{*offset, size};
}

bool ShmArena::commit(int64_t bytes, std::string* why) {
  while (bytes > 0) {
    const int64_t piece = std::min(bytes, kPiece);
    const MemoryRoom room = memory_room();
    // A margin for what the other ranks commit between this look and this fallocate, and for everyone else.
    const int64_t margin = std::min(ranks_here_ * kPiece, room.total / 16);
    if (bytes > room.available - margin) {
      if (why != nullptr)
        *why = "not enough memory: " + std::to_string(bytes) + " bytes more needed, " + std::to_string(room.available) +
               " available (" + room.limited_by + "), of which " + std::to_string(margin) + " are kept free";
      return false;
    }
    while (fallocate(memfd_.get(), 0, ranges_.span(), piece) != 0) {
      if (errno == EINTR) continue;
      if (why != nullptr) *why = errno_text("fallocate of " + std::to_string(piece) + " bytes", errno);
      return false;
    }
    ranges_.grow(piece);
    bytes -= piece;
  }
  return true;
}

void ShmArena::release(const Window& window) {
  if (guard_.in_child()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!ranges_.give_back(window.offset))
    throw Error(ErrorKind::usage, "tide: no window was acquired at offset " + std::to_string(window.offset) +
                                      ", or it was released twice");
}

std::byte* ShmArena::address(const Window& window) { return segment_.data() + window.offset; }

std::optional<int64_t> ShmArena::offset_of(const void* pointer, int64_t bytes) {
  const auto base = reinterpret_cast<uintptr_t>(segment_.data());
  const auto start = reinterpret_cast<uintptr_t>(pointer);
  if (guard_.in_child() || start < base || start - base >= static_cast<uintptr_t>(segment_.bytes()))
    return std::nullopt;
  const auto offset = static_cast<int64_t>(start - base);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!ranges_.taken(offset, bytes)) return std::nullopt;
  return offset;
}

int64_t ShmArena::bytes_in_use() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return ranges_.in_use();
}

int64_t ShmArena::bytes_committed() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return ranges_.span();
}

}  // namespace tide
