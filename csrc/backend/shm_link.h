// Unix sockets between the ranks of a group: they carry the memfds once, and their end of file tells of a
// death.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fd.h"
#include "transport.h"

namespace tide {

// 128 random bits that a peer must show; known only to those who can read the group's store.
using Secret = std::array<unsigned char, 16>;

Secret random_secret();
std::string to_hex(const Secret& secret);
std::optional<Secret> secret_from_hex(const std::string& text);

// What one rank tells the other, once in each direction, with its two memfds.
struct Hello {
  uint32_t magic = 0;
  int32_t world = 0;
  int32_t rank = -1;
  int32_t pid = 0;
  int64_t table_bytes = 0;
  int64_t arena_bytes = 0;
  Secret secret{};  // the receiver's
};

// The descriptors are empty when the system could not hand them over (too many open files here).
struct Greeting {
  Hello hello;
  Fd table;
  Fd arena;
};

// An abstract socket: no file to clean up, gone with its last holder. `name` without the leading zero byte.
Fd listen_abstract(const std::string& name, int backlog);
Fd connect_abstract(const std::string& name);
// One connection that is already there; nothing when there is none.
std::optional<Fd> accept_now(const Fd& listener);

void send_greeting(const Fd& socket, const Hello& hello, const Fd& table, const Fd& arena);
// The one message of the other side, which must be there already (poll first). Nothing when it is not a
// greeting.
std::optional<Greeting> receive_greeting(const Fd& socket);

// Waits until one of the descriptors is readable or closed; false at the deadline.
bool poll_until(const std::vector<int>& descriptors, Clock::time_point deadline);

// The process at the other end: user id, and a pidfd where the system gives one (an empty Fd otherwise).
struct PeerProcess {
  uint32_t uid = 0;
  Fd pidfd;
};
PeerProcess peer_process(const Fd& socket);

// Whether the other end is gone: its socket is closed, or its process has exited although a forked child of
// it still holds the socket.
bool is_gone(const Fd& socket, const Fd& pidfd);

}  // namespace tide
