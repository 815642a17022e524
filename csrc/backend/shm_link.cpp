#include "shm_link.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "error.h"
#include "shm_segment.h"

namespace tide {
namespace {

// Message boundaries kept: a greeting arrives whole or not at all.
Fd new_socket() {
  Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) throw ShmUnavailable(errno_text("socket(AF_UNIX)", errno));
  return socket;
}

struct Address {
  sockaddr_un address{};
  socklen_t length = 0;

  explicit Address(const std::string& name) {
    address.sun_family = AF_UNIX;
    const size_t size = std::min(name.size(), sizeof(address.sun_path) - 1);
    std::memcpy(address.sun_path + 1, name.data(), size);
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + size);
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
};

}  // namespace

Secret random_secret() {
  Secret secret;
  if (getrandom(secret.data(), secret.size(), 0) != static_cast<ssize_t>(secret.size()))
    throw ShmUnavailable(errno_text("getrandom", errno));
  return secret;
}

std::string to_hex(const Secret& secret) {
  std::string text;
  for (const unsigned char byte : secret) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

std::optional<Secret> secret_from_hex(const std::string& text) {
  Secret secret{};
  if (text.size() != 2 * secret.size()) return std::nullopt;
  const std::string digits = "0123456789abcdef";
  for (size_t i = 0; i < text.size(); ++i) {
    const size_t digit = digits.find(text[i]);
    if (digit == std::string::npos) return std::nullopt;
    secret[i / 2] = static_cast<unsigned char>(secret[i / 2] << 4 | digit);
  }
  return secret;
}

Fd listen_abstract(const std::string& name, int backlog) {
  Fd socket = new_socket();
  const Address address(name);
  if (bind(socket.get(), address.get(), address.length) != 0) throw ShmUnavailable(errno_text("bind", errno));
  if (listen(socket.get(), backlog) != 0) throw ShmUnavailable(errno_text("listen", errno));
  return socket;
}

Fd connect_abstract(const std::string& name) {
  Fd socket = new_socket();
  const Address address(name);
  while (connect(socket.get(), address.get(), address.length) != 0)
    if (errno != EINTR) throw ShmUnavailable(errno_text("connect", errno));
  return socket;
}

std::optional<Fd> accept_now(const Fd& listener) {
  Fd socket(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket && (errno == EMFILE || errno == ENFILE || errno == ENOMEM))
    throw ShmUnavailable(errno_text("accept4", errno));
  if (!socket) return std::nullopt;
  return socket;
}

void send_greeting(const Fd& socket, const Hello& hello, const Fd& table, const Fd& arena) {
  Hello copy = hello;
  iovec part{&copy, sizeof(copy)};
  alignas(cmsghdr) char control[CMSG_SPACE(2 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(2 * sizeof(int));
  const int descriptors[2] = {table.get(), arena.get()};
  std::memcpy(CMSG_DATA(header), descriptors, sizeof(descriptors));
  while (sendmsg(socket.get(), &message, MSG_NOSIGNAL) < 0)
    if (errno != EINTR) throw ShmUnavailable(errno_text("sendmsg", errno));
}

std::optional<Greeting> receive_greeting(const Fd& socket) {
  Greeting greeting;
  iovec part{&greeting.hello, sizeof(greeting.hello)};
  // Room for more descriptors than expected, so that none of a stranger's is left open.
  alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t size;
  do size = recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  while (size < 0 && errno == EINTR);
  if (size < 0) return std::nullopt;
  std::vector<Fd> received;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int descriptor;
      std::memcpy(&descriptor, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      received.emplace_back(descriptor);
    }
  }
  if (size != sizeof(Hello) || (message.msg_flags & MSG_TRUNC) != 0) return std::nullopt;
  if (received.size() == 2 && (message.msg_flags & MSG_CTRUNC) == 0) {
    greeting.table = std::move(received[0]);
    greeting.arena = std::move(received[1]);
  }
  return greeting;
}

bool poll_until(const std::vector<int>& descriptors, Clock::time_point deadline) {
  std::vector<pollfd> polled;
  for (const int descriptor : descriptors) polled.push_back({descriptor, POLLIN, 0});
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    const int timeout = static_cast<int>(std::clamp<int64_t>(left, 0, 60000));
    const int ready = poll(polled.data(), polled.size(), timeout);
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) throw ShmUnavailable(errno_text("poll", errno));
    if (Clock::now() >= deadline) return false;
  }
}

PeerProcess peer_process(const Fd& socket) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0)
    throw ShmUnavailable(errno_text("getsockopt(SO_PEERCRED)", errno));
  PeerProcess process;
  process.uid = credentials.uid;
#ifdef SYS_pidfd_open
  // The pid is 0 when the peer lives in a pid namespace that this process cannot see.
  if (credentials.pid > 0) process.pidfd = Fd(static_cast<int>(syscall(SYS_pidfd_open, credentials.pid, 0)));
#endif
  return process;
}

bool is_gone(const Fd& socket, const Fd& pidfd) {
  // A negative descriptor is skipped by poll.
  pollfd polled[2] = {{socket.get(), POLLRDHUP, 0}, {pidfd.get(), POLLIN, 0}};
  if (poll(polled, 2, 0) <= 0) return false;
  return (polled[0].revents & (POLLHUP | POLLRDHUP | POLLERR)) != 0 || (polled[1].revents & POLLIN) != 0;
}

}  // namespace tide
