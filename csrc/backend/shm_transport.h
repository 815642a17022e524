// The CPU transport: ranks of one host share memory through memfds passed over Unix sockets and wait on futexes.
//
// Ownership: each rank owns one control memfd (flag words, call records, journal) and one data memfd (the
// arena, sparse, pages on touch); peers map both. The descriptors vanish with the last process that holds them,
// so a crash leaves nothing behind. "Same node" means that this handshake succeeded, not that host names agree.
#pragma once

#include <memory>
#include <string>

#include "bootstrap.h"
#include "error.h"
#include "transport.h"

namespace tide {

struct ShmOptions {
  int64_t arena_bytes = 0;  // upper bound of one rank's arena; 0: chosen from the memory of the machine / cgroup
  std::chrono::milliseconds handshake_timeout{20000};
};

struct ShmResult {
  std::shared_ptr<Transport> transport;  // null when this group cannot share memory
  std::string reason;                    // then why, the same text on every rank
};

// Collective over the group: every rank calls it once with the same `name`. Either every rank gets a transport
// or none does.
ShmResult connect_shm(const Speaker& who, Bootstrap& bootstrap, const ShmOptions& options);

}  // namespace tide
