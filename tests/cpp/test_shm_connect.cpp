// The handshake of the shm transport with ranks that are missing or unable, in limits and namespaces, among strangers.
// `test_shm_connect CASE` runs one case; exit code 0 is success.
#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "../../csrc/backend/shm_link.h"
#include "shm_rank.h"

namespace tide::test {
namespace {

void missing_rank() {
  // Never shows up at all: the store's timeout.
  run_ranks(2, [](int rank, const std::string& directory) {
    const auto start = Clock::now();
    const Error error = caught([&] { try_join(rank, 3, directory, small_arena(), 500ms); });
    check(seconds_since(start) < 1.5, "bounded");
    check(error.kind() == ErrorKind::timeout, error.what());
    check_contains(error.what(), "rank 2 did not take part in the shared-memory handshake");
  });
  // Publishes itself and then hangs: the handshake timeout.
  run_ranks(3, [](int rank, const std::string& directory) {
    const auto start = Clock::now();
    if (rank == 2) {
      class Hanging : public FileBootstrap {
       public:
        using FileBootstrap::FileBootstrap;
        std::string get(const std::string&) override {
          std::this_thread::sleep_for(1500ms);
          throw std::runtime_error("hung");
        }
      } bootstrap(directory, 1s);
      caught([&] { connect_shm(Speaker{rank, 3, "test"}, bootstrap, small_arena()); });
      return;
    }
    const Error error = caught([&] { try_join(rank, 3, directory, small_arena(600ms)); });
    check(seconds_since(start) < 1.2, "bounded by the handshake timeout");
    check_contains(error.what(), "waited 0.6 s for rank 2 to connect in the shared-memory handshake");
  });
}

// Runs its hook before or after one key of the store.
class Held : public FileBootstrap {
 public:
  Held(const std::string& directory, std::string key, std::function<void()> hook)
      : FileBootstrap(directory, 10s), key_(std::move(key)), hook_(std::move(hook)) {}
  void set(const std::string& key, const std::string& value) override {
    if (key == key_ && value == "ok") hook_();
    FileBootstrap::set(key, value);
  }
  std::string get(const std::string& key) override {
    const std::string value = FileBootstrap::get(key);
    if (key == key_) hook_();
    return value;
  }

 private:
  const std::string key_;
  const std::function<void()> hook_;
};

// A rank that has come, and is held up for longer than the handshake may take: all raise, also the late one, and none
// of them takes it for a rank that cannot share memory.
void late_rank() {
  for (int late = 0; late < 3; ++late) {
    for (const bool at_the_end : {false, true}) {
      const std::string key =
          at_the_end ? "shm/outcome/" + std::to_string(late) : "shm/contact/" + std::to_string(late == 2 ? 1 : 2);
      run_ranks(3, [&](int rank, const std::string& directory) {
        Held bootstrap(directory, rank == late ? key : "", [] { std::this_thread::sleep_for(2500ms); });
        const auto start = Clock::now();
        const Error error = caught([&] { connect_shm(Speaker{rank, 3, "test"}, bootstrap, small_arena(600ms)); });
        const std::string step = !at_the_end ? late == 0 ? "greet back" : "" : "say how it went";
        check_contains(error.what(), "waited 0.6 s for rank " + std::to_string(late) + " to " + step);
        if (rank == late)
          check_contains(error.what(), "the shared-memory handshake ended with an error on another rank");
        if (rank != late) check(seconds_since(start) < 2.4, "bounded, whatever the late rank does");
        if (late == 1) std::printf("%s\n", error.what());
      });
    }
  }
}

// A rank that dies with the memory of all mapped: the others raise, at once.
void killed_in_the_handshake() {
  const TemporaryDirectory directory;
  std::vector<pid_t> pids;
  for (int rank = 0; rank < 3; ++rank) {
    pids.push_back(start_rank(rank, [&, rank] {
      Held bootstrap(directory.path(), rank == 1 ? "shm/outcome/1" : "", [] { kill(getpid(), SIGKILL); });
      const auto start = Clock::now();
      const Error error = caught([&] { connect_shm(Speaker{rank, 3, "test"}, bootstrap, small_arena()); });
      check(error.kind() == ErrorKind::peer, error.what());
      check_contains(error.what(), "rank 1 (pid ");
      check_contains(error.what(), "died in the shared-memory handshake");
      check(seconds_since(start) < 2, "soon");
    }));
  }
  for (int rank = 0; rank < 3; ++rank)
    check(wait_rank(pids[static_cast<size_t>(rank)], 20s) == (rank == 1 ? -SIGKILL : 0), "how the ranks end");
}

// A store that works when no descriptor is left, as one with an open connection does.
class ReservingBootstrap : public FileBootstrap {
 public:
  explicit ReservingBootstrap(const std::string& directory) : FileBootstrap(directory, 10s) {}
  ~ReservingBootstrap() override { close(reserve_); }
  void set(const std::string& key, const std::string& value) override {
    close(reserve_);
    FileBootstrap::set(key, value);
    reserve_ = dup(2);
  }
  std::string get(const std::string& key) override {
    close(reserve_);
    const std::string value = FileBootstrap::get(key);
    reserve_ = dup(2);
    return value;
  }

 private:
  int reserve_ = dup(2);
};

// Rank 1 may open a few files only, so it fails at another step each time (or not at all, in the end): nobody
// gets a transport, all give the same reason, soon.
void unable_rank() {
  for (int spare = 1; spare <= 14; ++spare) {
    run_ranks(3, [&](int rank, const std::string& directory) {
      ReservingBootstrap bootstrap(directory);
      std::vector<int> taken;
      if (rank == 1) {
        const rlimit few{64, 64};
        setrlimit(RLIMIT_NOFILE, &few);
        for (int copy = dup(2); copy >= 0; copy = dup(2)) taken.push_back(copy);
        for (int i = 0; i < spare; ++i) close(taken[taken.size() - 1 - static_cast<size_t>(i)]);
      }
      const auto start = Clock::now();
      ShmResult result;
      std::string reason;
      try {
        result = connect_shm(Speaker{rank, 3, "test"}, bootstrap, small_arena());
        reason = result.reason;
      } catch (const std::exception& error) {
        check(false, "spare " + std::to_string(spare) + ": " + error.what());
      }
      check(seconds_since(start) < 2, "soon");
      check((result.transport == nullptr) == !reason.empty(), "a transport or a reason");
      if (spare < 6) check(result.transport == nullptr, "too few descriptors");
      if (spare == 14) check(result.transport != nullptr, reason);
      if (!reason.empty()) check_contains(reason, "rank 1");
      bootstrap.set("reason/" + std::to_string(rank), reason);
      check(bootstrap.get("reason/0") == reason, "the same reason");
      if (rank == 2) std::printf("%d spare: %s\n", spare, reason.c_str());
    });
  }
}

// A limit on address space: an arena shrinks to what all its mappings allow; a peer's arena that does not fit is a
// reason, the same on every rank.
void address_space() {
  const rlimit two_gib{2048 * kMiB, 2048 * kMiB};
  run_ranks(2, [&](int rank, const std::string& directory) {
    setrlimit(RLIMIT_AS, &two_gib);
    const auto result = try_join(rank, 2, directory, ShmOptions{64 * 1024 * kMiB, 10s});
    check(result.transport != nullptr, result.reason);
    std::string why;
    check(result.transport->arena()->acquire(64 * kMiB, &why).has_value(), why);
    result.transport->address(1 - rank, 256 * kMiB, 1);
    caught([&] { result.transport->address(1 - rank, 2048 * kMiB, 1); });
    barrier(*result.transport, 0);
  });
  run_ranks(3, [&](int rank, const std::string& directory) {
    if (rank == 1) setrlimit(RLIMIT_AS, &two_gib);
    const auto result = try_join(rank, 3, directory, ShmOptions{4096 * kMiB, 10s});
    check(result.transport == nullptr, "no transport");
    FileBootstrap bootstrap(directory, 10s);
    bootstrap.set("reason/" + std::to_string(rank), result.reason);
    check(bootstrap.get("reason/0") == result.reason, "the same reason");
    check_contains(result.reason, "rank 1 with rank 2: mmap of 4294967296 bytes failed: Cannot allocate memory");
  });
}

// Ranks in two network namespaces, as two containers of one machine are, cannot reach each other's sockets.
void network_namespace() {
  if (unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0 && unshare(CLONE_NEWNET) != 0) {
    std::printf("skipped: this system lets no process make a network namespace\n");
    return;
  }
  run_ranks(2, [](int rank, const std::string& directory) {
    if (rank == 1) check(unshare(CLONE_NEWNET) == 0, "unshare");
    const auto start = Clock::now();
    const auto result = try_join(rank, 2, directory);
    check(seconds_since(start) < 1, "at once");
    check(result.transport == nullptr, "no transport");
    check_contains(result.reason, "rank 1 has network namespace net:[");
  });
}

// Another process that finds the socket: one that says nothing and one that sends rubbish. Neither becomes a
// rank, neither holds the group up.
void stranger() {
  run_ranks(2, [](int rank, const std::string& directory) {
    class Meddling : public FileBootstrap {
     public:
      using FileBootstrap::FileBootstrap;
      std::string get(const std::string& key) override {
        const std::string value = FileBootstrap::get(key);
        std::istringstream words(value);
        for (std::string word; words >> word;) {
          if (word.rfind("tide-", 0) != 0) continue;
          strangers_.push_back(connect_abstract(word));
          strangers_.push_back(connect_abstract(word));
          check(send(strangers_.back().get(), "rubbish", 7, 0) == 7, "send");
          strangers_.push_back(connect_abstract(word));
          send_greeting(strangers_.back(), Hello{0x74696465, 2, 1, 1, 4096, 4096, Secret{}}, Fd(dup(0)), Fd(dup(0)));
        }
        return value;
      }
      std::vector<Fd> strangers_;
    } bootstrap(directory, 10s);
    const auto result = connect_shm(Speaker{rank, 2, "test"}, bootstrap, small_arena());
    check(result.transport != nullptr, result.reason);
    barrier(*result.transport, 0);
  });
}

const std::map<std::string, void (*)()> kCases{{"address_space", address_space},
                                               {"killed_in_the_handshake", killed_in_the_handshake},
                                               {"late_rank", late_rank},
                                               {"missing_rank", missing_rank},
                                               {"network_namespace", network_namespace},
                                               {"stranger", stranger},
                                               {"unable_rank", unable_rank}};

}  // namespace
}  // namespace tide::test

int main(int argc, char** argv) { return tide::test::run_case(tide::test::kCases, argc, argv); }
