// How the ranks of a group come to hold each other's memfds, and agree that all of them do.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "bootstrap.h"
#include "error.h"
#include "fd.h"
#include "shm_link.h"
#include "shm_segment.h"

namespace tide {

// What this rank offers to its peers; the descriptors belong to the caller.
struct Offer {
  const Fd& table;
  const Fd& arena;
  int64_t table_bytes = 0;
  int64_t arena_bytes = 0;
};

// A peer as this rank holds it for the life of the group.
struct Peer {
  int pid = 0;
  Fd socket;
  Fd pidfd;
  Segment table;
  Segment arena;
};

// The three steps in order, each once. Two kinds of trouble: ranks that cannot share memory are an answer (a
// reason, the same on all of them); a rank that does not come or answer breaks the group, which is an Error: on all
// ranks that have not left the handshake by then.
class Handshake {
 public:
  // `interrupted` is called while this rank waits for others, and throws to give up.
  Handshake(const Speaker& who, Bootstrap& bootstrap, std::chrono::milliseconds timeout,
            std::function<void()> interrupted);

  // Publishes how this rank can be reached, or why it cannot take part (`own_failure`, else empty), and reads
  // the same of all others. Returns why the group cannot share memory, or "" when it may go on.
  std::string meet(std::string own_failure);
  // Connects to every lower rank, accepts every higher one, swaps memfds and maps them. Indexed by rank, this
  // rank's own entry empty. Throws ShmUnavailable; `peers` then holds those met so far.
  void swap(const Offer& offer, std::vector<Peer>* peers);
  // Publishes this rank's outcome ("" is success) and reads all of them: the lowest failed rank's, or "". Every rank
  // reads every outcome, whatever its own: one that gave up meanwhile is then an Error on all.
  std::string agree(const std::string& own_failure, const std::vector<Peer>& peers);
  // This rank raises `why`: the others shall too, instead of taking it for a rank that cannot share memory. Before this
  // rank's sockets close.
  void give_up(const std::string& why);

 private:
  struct Contact {
    std::string socket_name;
    Secret secret{};
  };

  std::string own_contact();
  void connect_lower(const Offer& offer, std::vector<Peer>* peers);
  void accept_higher(const Offer& offer, std::vector<Peer>* peers);
  void collect_lower(std::vector<Peer>* peers);
  void greet(int rank, const Offer& offer, const Fd& socket) const;
  void adopt(Greeting greeting, int rank, std::vector<Peer>* peers) const;
  // Polls for up to 250 ms; gives up when a missing rank has failed or the deadline has passed.
  void pause(const std::vector<int>& descriptors, const std::vector<int>& missing, const std::string& step);
  [[noreturn]] void blame(int rank, const std::string& what);
  // Throws when `rank` has published that it failed or gave up.
  void look_at(int rank);
  [[noreturn]] void follow_into_error(const std::string& outcome);
  // `peer`: how to see that the rank dies meanwhile; null when this one does not know it yet.
  std::string get(const std::string& key, int rank, const Peer* peer = nullptr) const;
  std::string waited(const std::string& ranks, const std::string& step) const;

  const Speaker who_;
  Bootstrap& bootstrap_;
  const std::chrono::milliseconds timeout_;
  const std::function<void()> interrupted_;
  Clock::time_point deadline_;
  Fd listener_;
  Secret secret_{};
  std::vector<Contact> contacts_;
  std::string heard_;  // what another rank gave up with
};

// For a rank that will not take part and waits for nobody: the others' meet() returns `why` as the reason.
void decline_handshake(Bootstrap& bootstrap, int rank, const std::string& why);

}  // namespace tide
