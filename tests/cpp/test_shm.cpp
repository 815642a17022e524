// The shm transport with real processes. `test_shm CASE` runs one case; exit code 0 is success.
#include <fcntl.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <atomic>
#include <cstring>
#include <map>
#include <random>
#include <set>

#include "../../csrc/backend/shm_link.h"
#include "../../csrc/backend/shm_transport.h"
#include "ranks.h"

namespace tide::test {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

ShmOptions small_arena(std::chrono::milliseconds handshake = 10s) { return ShmOptions{256 * kMiB, handshake}; }

ShmResult try_join(int rank, int world, const std::string& directory, const ShmOptions& options = small_arena(),
                   std::chrono::milliseconds store_timeout = 10s) {
  FileBootstrap bootstrap(directory, store_timeout);
  return connect_shm(Speaker{rank, world, "test"}, bootstrap, options);
}

std::shared_ptr<Transport> join(int rank, int world, const std::string& directory) {
  auto result = try_join(rank, world, directory);
  check(result.transport != nullptr, "connected: " + result.reason);
  return result.transport;
}

void barrier(Transport& transport, uint64_t sequence) {
  transport.exchange(Channel::all_to_all, sequence, "", within(20s, "barrier"));
}

void exchange_many() {
  for (const int world : {1, 2, 3, 4}) {
    run_ranks(world, [&](int rank, const std::string& directory) {
      const auto start = Clock::now();
      const auto transport = join(rank, world, directory);
      const double connected = seconds_since(start);
      check(transport->rank() == rank && transport->world() == world, "rank and world");
      const uint64_t rounds = 10000;
      for (uint64_t n = 0; n < rounds; ++n) {
        // Lengths from 8 bytes to the maximum; content that depends on rank and call everywhere.
        const auto text = [&](int who) {
          std::string body(8 + (n * 977 + static_cast<uint64_t>(who) * 131) % (Transport::kRecordBytes - 7), '\0');
          for (size_t i = 0; i < body.size(); ++i) body[i] = static_cast<char>(n * 7 + who * 31 + i);
          return body;
        };
        const auto records = transport->exchange(Channel::all_gather, n, text(rank), within(20s));
        for (int who = 0; who < world; ++who) check(records[static_cast<size_t>(who)] == text(who), "record");
        transport->complete(Channel::all_gather, n);
      }
      const auto begin = Clock::now();
      const std::string brief(200, 'x');
      for (uint64_t n = rounds; n < 2 * rounds; ++n)
        check(transport->exchange(Channel::all_gather, n, brief, within(20s)).back() == brief, "brief record");
      if (rank == 0)
        std::printf("world %d: connect %.2f ms, exchange %.2f us\n", world, connected * 1e3,
                    seconds_since(begin) / static_cast<double>(rounds) * 1e6);
    });
  }
}

// Ranks that come at random times: all of them sleep often, and none may sleep through what it waits for. A missed
// wake-up would end at the next look around, 100 ms later, which calls `interrupted`.
void random_arrival() {
  const int world = 5;
  run_ranks(world, [&](int rank, const std::string& directory) {
    const auto transport = join(rank, world, directory);
    std::mt19937 random(static_cast<unsigned>(rank));
    const auto dawdle = [&] { std::this_thread::sleep_for(std::chrono::microseconds(random() % 300)); };
    const int rounds = 500;
    int overslept = 0;
    auto wait = within(50s);
    wait.interrupted = [&] { ++overslept; };
    for (uint64_t n = 1; n <= rounds; ++n) {
      dawdle();
      transport->exchange(Channel::all_gather, n, "", wait);
      for (int step = 1; step < world; ++step) {
        dawdle();
        transport->signal(Channel::all_gather, (rank + step) % world, Flag::data, n);
      }
      for (int step = 1; step < world; ++step)
        transport->wait(Channel::all_gather, (rank + step) % world, Flag::data, n, wait);
    }
    check(overslept <= rounds / 50, "overslept " + std::to_string(overslept) + " times (a busy machine: a few)");
  });
}

void ping_pong() {
  run_ranks(2, [](int rank, const std::string& directory) {
    const auto transport = join(rank, 2, directory);
    const uint64_t rounds = 100000;
    const auto begin = Clock::now();
    for (uint64_t n = 1; n <= rounds; ++n) {
      if (rank == 0) transport->signal(Channel::all_gather, 1, Flag::data, n);
      transport->wait(Channel::all_gather, 1 - rank, Flag::data, n, within(20s));
      if (rank == 1) transport->signal(Channel::all_gather, 0, Flag::data, n);
    }
    if (rank == 0) std::printf("round trip %.0f ns\n", seconds_since(begin) / static_cast<double>(rounds) * 1e9);
    barrier(*transport, 0);
  });
}

// Every rank fills its part of every peer's window; three sizes, changed content each round, credits in
// between.
void copies() {
  const int world = 4;
  run_ranks(world, [&](int rank, const std::string& directory) {
    const auto transport = join(rank, world, directory);
    uint64_t call = 0;
    for (const int64_t piece : {int64_t{1}, int64_t{4097}, 3 * kMiB + 5}) {
      const auto arena = transport->arena();
      std::string why;
      const auto window = arena->acquire(piece * world, &why);
      check(window.has_value(), why);
      check(window->offset % 4096 == 0 && window->bytes >= piece * world, "aligned, large enough");
      std::byte* mine = arena->address(*window);
      check(arena->offset_of(mine + 1, 0) == window->offset + 1, "offset_of");
      check(!arena->offset_of(mine, window->bytes + 1), "offset_of beyond the window");
      const auto byte_of = [&](int who, int64_t i, uint64_t n) {
        return static_cast<std::byte>(static_cast<uint64_t>(i) * 13 + static_cast<uint64_t>(who) * 57 + n);
      };
      for (int round = 0; round < 5; ++round, ++call) {
        const auto offsets =
            transport->exchange(Channel::all_gather, call, std::to_string(window->offset), within(20s));
        std::vector<std::byte> shard(static_cast<size_t>(piece));
        for (int64_t i = 0; i < piece; ++i) shard[static_cast<size_t>(i)] = byte_of(rank, i, call);
        for (int step = 0; step < world; ++step) {
          const int peer = (rank + step) % world;
          const int64_t offset = std::stoll(offsets[static_cast<size_t>(peer)]) + rank * piece;
          transport->copy(Channel::all_gather, transport->address(peer, offset, piece), shard.data(), piece);
          transport->signal(Channel::all_gather, peer, Flag::data, call + 1);
        }
        for (int peer = 0; peer < world; ++peer) {
          transport->wait(Channel::all_gather, peer, Flag::data, call + 1, within(20s));
          for (int64_t i = 0; i < piece; ++i) check(mine[peer * piece + i] == byte_of(peer, i, call), "byte");
        }
      }
      barrier(*transport, call);
      arena->release(*window);
      check(arena->bytes_in_use() == 0, "nothing in use");
    }
    const Error error = caught([&] { transport->address(1, 256 * kMiB - 1, 2); });
    check(error.kind() == ErrorKind::usage, error.what());
  });
}

void killed_rank() {
  const int world = 4;
  const TemporaryDirectory directory;
  std::vector<pid_t> pids;
  for (int rank = 0; rank < world; ++rank) {
    pids.push_back(start_rank(rank, [&, rank] {
      const auto transport = join(rank, world, directory.path());
      transport->exchange(Channel::all_gather, 0, std::string("all_gather f32[8]\0rest", 22), within(20s));
      if (rank == 2) {
        // A child that outlives rank 2 and holds its sockets open, as a data loader's worker would.
        if (fork() == 0) {
          std::this_thread::sleep_for(2s);
          _exit(0);
        }
        kill(getpid(), SIGKILL);
      }
      const auto start = Clock::now();
      const Error error =
          caught([&] { transport->wait(Channel::all_gather, 2, Flag::data, 1, within(20s, "all_gather #0")); });
      check(seconds_since(start) < 0.5, "noticed within 0.5 s, took " + std::to_string(seconds_since(start)));
      check(error.kind() == ErrorKind::peer, error.what());
      check_contains(error.what(), "rank 2 (pid ");
      check_contains(error.what(), "exited while");
      check_contains(error.what(), "last all_gather: #0 (all_gather f32[8]), in progress");
      if (rank == 0) std::printf("%s\n", error.what());
      const auto again = Clock::now();
      const Error other = caught([&] { transport->exchange(Channel::all_gather, 1, "", within(20s)); });
      check(seconds_since(again) < 0.5, "exchange notices too");
      check_contains(other.what(), "rank 2 (pid ");
    }));
  }
  bool good = true;
  for (int rank = 0; rank < world; ++rank)
    good &= wait_rank(pids[static_cast<size_t>(rank)], 20s) == (rank == 2 ? -SIGKILL : 0);
  check(good, "the living ranks ended well");
}

void stopped_rank() {
  const TemporaryDirectory directory;
  const auto body = [&](int rank) {
    const auto transport = join(rank, 3, directory.path());
    transport->exchange(Channel::reduce_scatter, 7, "reduce_scatter bf16[64]", within(20s));
    if (rank == 2) raise(SIGSTOP);
    if (rank != 2) {
      int interrupts = 0;
      auto wait = within(700ms, "all_gather #3");
      wait.interrupted = [&] { ++interrupts; };
      const auto start = Clock::now();
      const Error error = caught([&] { transport->exchange(Channel::all_gather, 3, "all_gather f32[2]", wait); });
      const double took = seconds_since(start);
      check(took > 0.69 && took < 0.95, "at the deadline, took " + std::to_string(took));
      check(error.kind() == ErrorKind::timeout, error.what());
      check_contains(error.what(), "waited 0.7 s for rank 2 (pid ");
      check_contains(error.what(), "last reduce_scatter: #7 (reduce_scatter bf16[64]), in progress");
      check(interrupts >= 6, "looked up every 100 ms");
      if (rank == 0) std::printf("%s\n", error.what());
      struct Interrupt {};
      auto soon = within(20s);
      soon.interrupted = [] { throw Interrupt(); };
      const auto again = Clock::now();
      try {
        transport->wait(Channel::all_gather, 2, Flag::credit, 1, soon);
        check(false, "interrupted");
      } catch (const Interrupt&) {
        check(seconds_since(again) < 0.3, "within one tick");
      }
    }
  };
  std::vector<pid_t> pids;
  for (int rank = 0; rank < 3; ++rank) pids.push_back(start_rank(rank, [&, rank] { body(rank); }));
  const bool good = wait_rank(pids[0], 20s) == 0 && wait_rank(pids[1], 20s) == 0;
  kill(pids[2], SIGCONT);
  check(wait_rank(pids[2], 20s) == 0 && good, "all ended well");
}

// A rank that has done its part and leaves breaks nobody; whoever needs more from it is told at once.
void early_leaver() {
  run_ranks(3, [](int rank, const std::string& directory) {
    auto transport = join(rank, 3, directory);
    if (rank == 1) {
      for (const int peer : {0, 2}) transport->signal(Channel::all_gather, peer, Flag::data, 5);
      transport.reset();
      return;
    }
    std::this_thread::sleep_for(200ms);
    transport->wait(Channel::all_gather, 1, Flag::data, 5, within(20s));
    if (rank == 0) {
      std::this_thread::sleep_for(300ms);
      transport->signal(Channel::all_gather, 2, Flag::data, 1);
    } else {
      transport->wait(Channel::all_gather, 0, Flag::data, 1, within(20s));
    }
    const auto start = Clock::now();
    const Error error = caught([&] { transport->wait(Channel::all_gather, 1, Flag::data, 6, within(20s)); });
    check(seconds_since(start) < 0.05, "at once");
    check_contains(error.what(), "left the group while this rank waited for its data flag to reach 6 (it is at 5)");
    transport->complete(Channel::all_gather, 0);
  });
}

void aborting_rank() {
  run_ranks(3, [](int rank, const std::string& directory) {
    const auto transport = join(rank, 3, directory);
    if (rank == 1) {
      std::this_thread::sleep_for(150ms);
      transport->abort("out of memory in all_gather #9");
      const Error own = caught([&] { transport->signal(Channel::all_gather, 0, Flag::data, 1); });
      check_contains(own.what(), "the group was aborted: out of memory in all_gather #9");
      std::this_thread::sleep_for(500ms);
      return;
    }
    const auto start = Clock::now();
    const Error error = caught([&] { transport->exchange(Channel::all_gather, 0, "", within(20s)); });
    check(seconds_since(start) < 0.4, "promptly");
    check(error.kind() == ErrorKind::peer, error.what());
    check_contains(error.what(), "rank 1 (pid ");
    check_contains(error.what(), "aborted: out of memory in all_gather #9");
  });
}

void wrong_sequence() {
  run_ranks(2, [](int rank, const std::string& directory) {
    const auto transport = join(rank, 2, directory);
    const uint64_t sequence = rank == 0 ? 4 : 7;
    const Error error =
        caught([&] { transport->exchange(Channel::all_gather, sequence, "x", within(500ms, "all_gather")); });
    if (rank == 0) {
      check(error.kind() == ErrorKind::peer, error.what());
      check_contains(error.what(), "is at all_gather #7, this rank at #4");
    } else {
      check(error.kind() == ErrorKind::timeout, error.what());
    }
    std::this_thread::sleep_for(600ms);
  });
}

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

void out_of_memory() {
  run_ranks(2, [](int rank, const std::string& directory) {
    const auto result = try_join(rank, 2, directory, ShmOptions{64 * 1024, 10s});
    check(result.transport != nullptr, result.reason);
    const auto arena = result.transport->arena();
    std::string why;
    check(!arena->acquire(65537, &why), "too large");
    check_contains(why, "arena limit of 65536 bytes reached");
    const auto all = arena->acquire(65536, &why);
    check(all.has_value(), why);
    check(!arena->acquire(1, &why), "full");
    check_contains(why, "65536 in use");
    arena->release(*all);
    check(arena->acquire(1, &why).has_value(), why);
    const Error error = caught([&] { arena->release(Window{4096, 4096}); });
    check_contains(error.what(), "released twice");
    barrier(*result.transport, 0);
  });
  // More than the machine has: refused before a page is touched.
  run_ranks(1, [](int rank, const std::string& directory) {
    const auto result = try_join(rank, 1, directory, ShmOptions{int64_t{1} << 43, 10s});
    check(result.transport != nullptr, result.reason);
    std::string why;
    check(!result.transport->arena()->acquire(int64_t{1} << 42, &why), "more than the machine has");
    check_contains(why, "not enough memory");
    check(result.transport->arena()->bytes_committed() == 0, "nothing committed");
  });
}

void forked_child() {
  run_ranks(2, [](int rank, const std::string& directory) {
    auto transport = join(rank, 2, directory);
    auto arena = transport->arena();
    const pid_t child = start_rank(rank, [&] {
      check_contains(caught([&] { transport->signal(Channel::all_gather, 1 - rank, Flag::data, 1); }).what(), "fork()");
      std::string why;
      check(!arena->acquire(1, &why), "no memory in a child");
      check_contains(why, "forked");
      transport->abort("from a child");
      transport.reset();
      arena.reset();
    });
    check(wait_rank(child, 10s) == 0, "child");
    barrier(*transport, 0);
    // A storage may hold the arena longer than the group lives.
    std::string why;
    const auto window = arena->acquire(kMiB, &why);
    transport.reset();
    std::memset(arena->address(*window), 7, static_cast<size_t>(window->bytes));
  });
}

std::set<std::string> open_descriptors() {
  std::set<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) found.insert(entry.path().filename());
  return found;
}

size_t mappings() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("memfd:tide") != std::string::npos;
  return count;
}

void nothing_left() {
  const auto shm_before = std::distance(std::filesystem::directory_iterator("/dev/shm"), {});
  run_ranks(3, [](int rank, const std::string& directory) {
    const auto before = open_descriptors();
    for (int round = 0; round < 3; ++round) {
      const std::string subdirectory = directory + "/" + std::to_string(round);
      std::filesystem::create_directories(subdirectory);
      const auto first = join(rank, 3, subdirectory);
      std::filesystem::create_directories(subdirectory + "/second");
      const auto second = join(rank, 3, subdirectory + "/second");
      for (const std::string& name : open_descriptors()) {
        if (before.count(name) != 0) continue;
        const int flags = fcntl(std::stoi(name), F_GETFD);
        check(flags < 0 || (flags & FD_CLOEXEC) != 0, "closed on exec");
      }
      check(mappings() == 12, "two groups of three ranks, two segments each");
      barrier(*first, 0);
      barrier(*second, 0);
    }
    check(open_descriptors() == before, "descriptors as before");
    check(mappings() == 0, "no mapping left");
  });
  check(std::distance(std::filesystem::directory_iterator("/dev/shm"), {}) == shm_before, "nothing in /dev/shm");
}

// All ranks as threads of one process: several transports live side by side (and sanitizers see all of it).
void threads() {
  const int world = 3;
  const TemporaryDirectory directory;
  std::vector<std::thread> ranks;
  std::atomic<int> good{0};
  for (int rank = 0; rank < world; ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        const auto transport = join(rank, world, directory.path());
        for (uint64_t n = 0; n < 500; ++n) {
          const auto records = transport->exchange(Channel::all_gather, n, std::to_string(rank), within(20s));
          check(records[2] == "2", "record");
          for (int peer = 0; peer < world; ++peer) transport->signal(Channel::all_gather, peer, Flag::data, n);
          for (int peer = 0; peer < world; ++peer)
            transport->wait(Channel::all_gather, peer, Flag::data, n, within(20s));
        }
        std::thread aborter([&] {
          std::this_thread::sleep_for(50ms);
          transport->abort("stop");
        });
        const Error error = caught([&] { transport->wait(Channel::all_to_all, rank, Flag::credit, 1, within(20s)); });
        check_contains(error.what(), "stop");
        aborter.join();
        ++good;
      } catch (const std::exception& error) {
        std::cerr << error.what() << std::endl;
      }
    });
  }
  for (auto& thread : ranks) thread.join();
  check(good == world, "every rank ends well");
}

const std::map<std::string, void (*)()> kCases{{"exchange", exchange_many},
                                               {"ping_pong", ping_pong},
                                               {"copies", copies},
                                               {"killed_rank", killed_rank},
                                               {"random_arrival", random_arrival},
                                               {"stopped_rank", stopped_rank},
                                               {"early_leaver", early_leaver},
                                               {"aborting_rank", aborting_rank},
                                               {"address_space", address_space},
                                               {"network_namespace", network_namespace},
                                               {"wrong_sequence", wrong_sequence},
                                               {"missing_rank", missing_rank},
                                               {"unable_rank", unable_rank},
                                               {"out_of_memory", out_of_memory},
                                               {"forked_child", forked_child},
                                               {"nothing_left", nothing_left},
                                               {"stranger", stranger},
                                               {"threads", threads}};

}  // namespace
}  // namespace tide::test

int main(int argc, char** argv) {
  const std::string name = argc == 2 ? argv[1] : "";
  const auto found = tide::test::kCases.find(name);
  if (found == tide::test::kCases.end()) {
    for (const auto& [known, run] : tide::test::kCases) std::cout << known << "\n";
    return name == "--list" ? 0 : 2;
  }
  try {
    found->second();
  } catch (const std::exception& error) {
    std::cerr << name << ": " << error.what() << std::endl;
    return 1;
  }
  return 0;
}
