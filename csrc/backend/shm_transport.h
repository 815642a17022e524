// The CPU transport: ranks of one host share memory through memfds passed over Unix sockets and wait on futexes.
//
// Ownership: each rank owns one control memfd (flag words, call records, journal) and one data memfd (the
// arena, sparse, pages on touch); peers map both. The descriptors vanish with the last process that holds them,
// so a crash leaves nothing behind. "Same node" means that this handshake succeeded, not that host names agree.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "bootstrap.h"
#include "error.h"
#include "transport.h"

namespace tide {

struct ShmOptions {
  int64_t arena_bytes = 0;  // upper bound of one rank's arena; 0: chosen from the memory of the machine / cgroup
  std::chrono::milliseconds handshake_timeout{20000};
  std::string refusal = "";                     // why this rank will not share memory; all of them then hear of it
  std::function<void()> interrupted = nullptr;  // called while ranks wait for each other; throws to give up
};

// The control memory behind an shm transport, for a device transport that keeps its flag words there: devices write
// and await them, the host reads them (who is missing) and releases them.
class SharedTables {
 public:
  virtual ~SharedTables() = default;
  // The whole table that `owner` lets its peers write, as mapped here.
  virtual std::pair<std::byte*, int64_t> table_memory(int owner) = 0;
  // The word that `source` sets at `owner`.
  virtual std::atomic<uint64_t>& flag_word(int owner, Channel channel, Flag flag, int source) = 0;
  // Why `rank` will never deliver, or "".
  virtual std::string lost(int rank) const = 0;
  // "rank 2 (pid 123; last all_gather: #416, done)".
  virtual std::string last_calls(int rank) = 0;
};

struct ShmResult {
  std::shared_ptr<Transport> transport;  // null when this group cannot share memory
  std::string reason;                    // then why, the same text on every rank
  std::shared_ptr<SharedTables> tables;  // the same object as transport
};

// Collective over the group: every rank calls it once with the same `name`. Either every rank gets a transport
// or none does.
ShmResult connect_shm(const Speaker& who, Bootstrap& bootstrap, const ShmOptions& options);

// Instead, by a rank that will never call it: the others then get no transport, with `why` as the reason, and do not
// wait for it. Returns at once.
void decline_shm(const Speaker& who, Bootstrap& bootstrap, const std::string& why);

}  // namespace tide
