#include "shm_handshake.h"

#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <sstream>

namespace tide {
namespace {

constexpr uint32_t kMagic = 0x74696465;  // "tide"
const char* const kProtocol = "shm-1";
const char* const kFailed = "failed: ";
const char* const kGaveUp = "gave up: ";
// A rank that waits for the one that is late speaks before a rank that waits for the outcome of both.
constexpr auto kGrace = std::chrono::seconds(1);

// A reason that names its rank already.
class Blamed : public ShmUnavailable {
 public:
  using ShmUnavailable::ShmUnavailable;
};

std::string contact_key(int rank) { return "shm/contact/" + std::to_string(rank); }
std::string outcome_key(int rank) { return "shm/outcome/" + std::to_string(rank); }

bool is_failure(const std::string& text) { return text.rfind(kFailed, 0) == 0; }
bool gave_up(const std::string& text) { return text.rfind(kGaveUp, 0) == 0; }
std::string failure_in(const std::string& text) { return text.substr(std::string(kFailed).size()); }

std::string first_word(const std::string& path) {
  errno = 0;
  std::ifstream file(path);
  if (!file && (errno == EMFILE || errno == ENFILE)) throw ShmUnavailable(errno_text("open of " + path, errno));
  std::string word;
  file >> word;
  return word.empty() ? "unknown" : word;
}

// Abstract sockets exist per network namespace; without this check the two sides would learn it by a timeout.
std::string network_namespace() {
  char target[64] = {};
  return readlink("/proc/self/ns/net", target, sizeof(target) - 1) > 0 ? target : "unknown";
}

std::string list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return text;
}

}  // namespace

Handshake::Handshake(const Speaker& who, Bootstrap& bootstrap, std::chrono::milliseconds timeout,
                     std::function<void()> interrupted)
    : who_(who), bootstrap_(bootstrap), timeout_(timeout), interrupted_(std::move(interrupted)) {}

std::string Handshake::get(const std::string& key, int rank, const Peer* peer) const {
  bool ended = false;
  const std::string name = "rank " + std::to_string(rank);
  const auto tick = [&] {
    ended = true;
    if (interrupted_) interrupted_();
    if (peer && peer->socket && is_gone(peer->socket, peer->pidfd) && !bootstrap_.has(key)) {
      fail(ErrorKind::peer, who_, "",
           name + (peer->pid ? " (pid " + std::to_string(peer->pid) + ")" : "") +
               " died in the shared-memory handshake; look at that rank");
    }
    if (peer && Clock::now() > deadline_ + kGrace && !bootstrap_.has(key)) {
      fail(ErrorKind::timeout, who_, "",
           waited(name, "say how it went") + "; look at " + name + ", or set a longer handshake timeout");
    }
    ended = false;
  };
  try {
    return bootstrap_.await(key, tick);
  } catch (const std::exception& error) {
    if (ended) throw;
    fail(ErrorKind::timeout, who_, "",
         name +
             " did not take part in the shared-memory handshake; look at that rank, or give the store a longer "
             "timeout (" +
             error.what() + ")");
  }
}

std::string Handshake::own_contact() {
  secret_ = random_secret();
  // Names of abstract sockets can be listed by anyone, so the name is not the secret.
  const std::string name = "tide-" + to_hex(random_secret());
  listener_ = listen_abstract(name, who_.world + 16);
  std::ostringstream text;
  text << kProtocol << ' ' << who_.world << ' ' << geteuid() << ' ' << first_word("/proc/sys/kernel/random/boot_id")
       << ' ' << network_namespace() << ' ' << name << ' ' << to_hex(secret_);
  return text.str();
}

std::string Handshake::meet(std::string own_failure) {
  std::string mine;
  try {
    if (own_failure.empty()) mine = own_contact();
  } catch (const ShmUnavailable& error) {
    own_failure = error.what();
  }
  if (!own_failure.empty()) mine = kFailed + own_failure;
  bootstrap_.set(contact_key(who_.rank), mine);

  // Every rank judges the same texts in the same order, so all come to the same answer.
  const char* const what[] = {"tide protocol", "world size", "user id", "machine (boot id)", "network namespace"};
  std::vector<std::string> first;
  std::string reason;
  contacts_.resize(static_cast<size_t>(who_.world));
  for (int rank = 0; rank < who_.world; ++rank) {
    const std::string text = rank == who_.rank ? mine : get(contact_key(rank), rank);
    if (!reason.empty()) continue;  // still read: every rank must have come
    const std::string name = "rank " + std::to_string(rank);
    if (is_failure(text)) {
      reason = name + ": " + failure_in(text);
      continue;
    }
    std::istringstream words(text);
    std::vector<std::string> fields;
    for (std::string word; words >> word;) fields.push_back(word);
    if (rank == 0) first = fields;
    const auto secret = fields.size() == 7 ? secret_from_hex(fields[6]) : std::nullopt;
    if (!secret || first.size() != 7) {
      reason = name + " speaks another tide protocol: got \"" + text.substr(0, 40) + "\", expected " + kProtocol;
      continue;
    }
    for (size_t i = 0; i < 5 && reason.empty(); ++i)
      if (fields[i] != first[i]) reason = name + " has " + what[i] + " " + fields[i] + ", rank 0 has " + first[i];
    contacts_[static_cast<size_t>(rank)] = {fields[5], *secret};
  }
  deadline_ = Clock::now() + timeout_;
  return reason;
}

void Handshake::swap(const Offer& offer, std::vector<Peer>* peers) {
  peers->resize(static_cast<size_t>(who_.world));
  // No rank waits for another before all its own connections and greetings to lower ranks are out: no cycle.
  try {
    connect_lower(offer, peers);
    accept_higher(offer, peers);
    collect_lower(peers);
  } catch (const Blamed&) {
    throw;
  } catch (const ShmUnavailable& error) {
    throw ShmUnavailable("rank " + std::to_string(who_.rank) + ": " + error.what());
  }
}

void Handshake::greet(int rank, const Offer& offer, const Fd& socket) const {
  const Hello hello{kMagic,
                    who_.world,
                    who_.rank,
                    getpid(),
                    offer.table_bytes,
                    offer.arena_bytes,
                    contacts_[static_cast<size_t>(rank)].secret};
  send_greeting(socket, hello, offer.table, offer.arena);
}

void Handshake::connect_lower(const Offer& offer, std::vector<Peer>* peers) {
  for (int rank = 0; rank < who_.rank; ++rank) {
    Peer& peer = (*peers)[static_cast<size_t>(rank)];
    try {
      peer.socket = connect_abstract(contacts_[static_cast<size_t>(rank)].socket_name);
      greet(rank, offer, peer.socket);
    } catch (const ShmUnavailable& error) {
      blame(rank, std::string("cannot reach it: ") + error.what());
    }
  }
}

void Handshake::accept_higher(const Offer& offer, std::vector<Peer>* peers) {
  std::vector<Fd> pending;  // accepted, not yet greeted
  for (;;) {
    std::vector<int> missing;
    for (int rank = who_.rank + 1; rank < who_.world; ++rank)
      if (!(*peers)[static_cast<size_t>(rank)].socket) missing.push_back(rank);
    if (missing.empty()) return;
    std::vector<int> watched{listener_.get()};
    for (const Fd& socket : pending) watched.push_back(socket.get());
    pause(watched, missing, "connect");
    while (auto socket = accept_now(listener_)) pending.push_back(std::move(*socket));
    for (Fd& socket : pending) {
      auto greeting = receive_greeting(socket);
      if (!greeting) {
        if (is_gone(socket, Fd())) socket.reset();
        continue;
      }
      // Anyone on the machine can connect; whoever lacks the secret is not a rank and is dropped.
      const Hello& hello = greeting->hello;
      const int rank = hello.rank;
      if (hello.magic != kMagic || hello.secret != secret_ || hello.world != who_.world || rank <= who_.rank ||
          rank >= who_.world || (*peers)[static_cast<size_t>(rank)].socket) {
        socket.reset();
        continue;
      }
      (*peers)[static_cast<size_t>(rank)].socket = std::move(socket);
      try {
        greet(rank, offer, (*peers)[static_cast<size_t>(rank)].socket);
        adopt(std::move(*greeting), rank, peers);
      } catch (const ShmUnavailable& error) {
        blame(rank, error.what());
      }
    }
    std::vector<Fd> rest;
    for (Fd& socket : pending)
      if (socket) rest.push_back(std::move(socket));
    pending = std::move(rest);
  }
}

void Handshake::collect_lower(std::vector<Peer>* peers) {
  for (int rank = 0; rank < who_.rank; ++rank) {
    Peer& peer = (*peers)[static_cast<size_t>(rank)];
    for (;;) {
      if (auto greeting = receive_greeting(peer.socket)) {
        const Hello& hello = greeting->hello;
        if (hello.magic != kMagic || hello.secret != secret_ || hello.rank != rank || hello.world != who_.world)
          blame(rank, "its greeting is not the expected one");
        try {
          adopt(std::move(*greeting), rank, peers);
        } catch (const ShmUnavailable& error) {
          blame(rank, error.what());
        }
        break;
      }
      if (is_gone(peer.socket, Fd())) blame(rank, "it closed the connection");
      pause({peer.socket.get()}, {rank}, "greet back");
    }
  }
}

void Handshake::adopt(Greeting greeting, int rank, std::vector<Peer>* peers) const {
  Peer& peer = (*peers)[static_cast<size_t>(rank)];
  if (!greeting.table || !greeting.arena)
    throw ShmUnavailable("its memfds did not arrive with its greeting; are too many files open?");
  PeerProcess process = peer_process(peer.socket);
  if (process.uid != geteuid())
    throw ShmUnavailable("its process belongs to user " + std::to_string(process.uid) + ", this one to user " +
                         std::to_string(geteuid()));
  peer.pid = greeting.hello.pid;
  peer.pidfd = std::move(process.pidfd);
  peer.table = Segment(greeting.table, greeting.hello.table_bytes);
  peer.arena = Segment(greeting.arena, greeting.hello.arena_bytes);
}

void Handshake::follow_into_error(const std::string& outcome) {
  heard_ = outcome.substr(std::string(kGaveUp).size());
  fail(ErrorKind::peer, who_, "", "the shared-memory handshake ended with an error on another rank: " + heard_);
}

void Handshake::look_at(int rank) {
  if (rank == who_.rank || !bootstrap_.has(outcome_key(rank))) return;
  const std::string outcome = get(outcome_key(rank), rank);
  if (gave_up(outcome)) follow_into_error(outcome);
  if (is_failure(outcome)) throw Blamed(failure_in(outcome));
}

void Handshake::blame(int rank, const std::string& what) {
  // What the other side says of itself is nearer to the cause than what this side sees of it.
  look_at(rank);
  throw Blamed("rank " + std::to_string(who_.rank) + " with rank " + std::to_string(rank) + ": " + what);
}

std::string Handshake::waited(const std::string& ranks, const std::string& step) const {
  std::ostringstream text;
  text << "waited " << static_cast<double>(timeout_.count()) / 1000.0 << " s for " << ranks << " to " << step
       << " in the shared-memory handshake";
  return text.str();
}

void Handshake::pause(const std::vector<int>& descriptors, const std::vector<int>& missing, const std::string& step) {
  const auto soon = Clock::now() + std::chrono::milliseconds(250);
  // A stranger that keeps a descriptor readable must not keep the deadline from being seen.
  if (poll_until(descriptors, std::min(deadline_, soon)) && Clock::now() < deadline_) return;
  if (interrupted_) interrupted_();
  for (int rank = 0; rank < who_.world; ++rank) look_at(rank);
  if (Clock::now() < deadline_) return;
  const std::string names = list(missing);
  fail(ErrorKind::timeout, who_, "",
       waited(names, step) + "; look at " + names + ", or set a longer handshake timeout");
}

std::string Handshake::agree(const std::string& own_failure, const std::vector<Peer>& peers) {
  const std::string mine = own_failure.empty() ? "ok" : kFailed + own_failure;
  bootstrap_.set(outcome_key(who_.rank), mine);
  listener_.reset();
  std::string reason;
  for (int rank = 0; rank < who_.world; ++rank) {
    const std::string outcome =
        rank == who_.rank ? mine : get(outcome_key(rank), rank, &peers[static_cast<size_t>(rank)]);
    if (gave_up(outcome)) follow_into_error(outcome);
    if (reason.empty() && is_failure(outcome)) reason = failure_in(outcome);
  }
  return reason;
}

void Handshake::give_up(const std::string& why) {
  try {
    bootstrap_.set(outcome_key(who_.rank), kGaveUp + (heard_.empty() ? why : heard_));
  } catch (const std::exception&) {  // the store is gone, and the others know that too
  }
}

void decline_handshake(Bootstrap& bootstrap, int rank, const std::string& why) {
  bootstrap.set(contact_key(rank), kFailed + why);
}

}  // namespace tide
