// The control table: what one rank lets its peers read and write besides data. Lives in the rank's control
// memfd; the owner and every peer map it. All words start as zero; sequences are stored plus one, so zero
// means "none".
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "transport.h"
#include "types.h"

namespace tide {

static_assert(std::atomic<uint64_t>::is_always_lock_free, "words shared between processes must be lock-free");

// Rung after a change that somebody may be waiting for. One bell per thing that can be awaited, so that a
// waiter is not woken by what it does not wait for.
struct Bell {
  std::atomic<uint32_t> rings;
  std::atomic<uint32_t> waiters;  // a waiter that is killed stays counted: costs the ringer a system call, no more
};

// Set by one peer, awaited by the table's owner.
struct alignas(64) FlagWord {
  std::atomic<uint64_t> value;
  Bell bell;
};

// Written by the owner. Its sequence is zero while the text changes.
struct alignas(64) Record {
  std::atomic<uint64_t> sequence;
  std::atomic<uint32_t> length;
  char text[Transport::kRecordBytes];
};

struct alignas(64) Journal {
  Bell bell;
  std::atomic<uint64_t> published;
  std::atomic<uint64_t> completed;
};

enum class RankState : uint32_t { open = 0, closed = 1, aborted = 2 };

// A view of one rank's table; the memory belongs to a Segment.
class Table {
 public:
  static int64_t bytes(int world);

  Table() = default;
  Table(std::byte* memory, int world);

  // Rung by the owner when it has published a record; awaited by all peers, so one wake-up serves them all.
  Bell& published_bell(Channel channel) const;
  // The word that `source` sets at this table's owner.
  FlagWord& flag(Channel channel, Flag flag, int source) const;

  // Owner only.
  void publish(Channel channel, uint64_t sequence, const std::string& text) const;
  void complete(Channel channel, uint64_t sequence) const;
  void leave(RankState state, const std::string& reason) const;

  // The record of call `sequence`, if it is there.
  std::optional<std::string> record(Channel channel, uint64_t sequence) const;
  // The last call published; nothing before the first.
  std::optional<uint64_t> published(Channel channel) const;
  RankState state() const;
  std::string reason() const;
  // "last all_gather: #416 (bf16, 4 MiB), done; reduce_scatter: #12, in progress", or "no call yet".
  std::string last_calls() const;

 private:
  struct Layout;
  Layout* layout_ = nullptr;
  int world_ = 0;
};

// Wakes whoever waits on the bell. Call it after the change itself.
void ring(Bell& bell);

}  // namespace tide
