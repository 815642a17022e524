// One rank of a group on the shm transport.
#pragma once

#include "../../csrc/backend/shm_transport.h"
#include "ranks.h"

namespace tide::test {

constexpr int64_t kMiB = int64_t{1} << 20;

inline ShmOptions small_arena(std::chrono::milliseconds handshake = 10s) { return ShmOptions{256 * kMiB, handshake}; }

inline ShmResult try_join(int rank, int world, const std::string& directory, const ShmOptions& options = small_arena(),
                          std::chrono::milliseconds store_timeout = 10s) {
  FileBootstrap bootstrap(directory, store_timeout);
  return connect_shm(Speaker{rank, world, "test"}, bootstrap, options);
}

inline std::shared_ptr<Transport> join(int rank, int world, const std::string& directory) {
  auto result = try_join(rank, world, directory);
  check(result.transport != nullptr, "connected: " + result.reason);
  return result.transport;
}

inline void barrier(Transport& transport, uint64_t sequence) {
  transport.exchange(Channel::all_to_all, sequence, "", within(20s, "barrier"));
}

}  // namespace tide::test
