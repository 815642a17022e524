// The shm transport with real processes: records, flags, copies, memory, and what is left behind.
// `test_shm CASE` runs one case; exit code 0 is success.
#include <fcntl.h>

#include <atomic>
#include <cstring>
#include <random>
#include <set>

#include "shm_rank.h"

namespace tide::test {
namespace {

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

const std::map<std::string, void (*)()> kCases{{"copies", copies},
                                               {"exchange", exchange_many},
                                               {"forked_child", forked_child},
                                               {"nothing_left", nothing_left},
                                               {"out_of_memory", out_of_memory},
                                               {"ping_pong", ping_pong},
                                               {"random_arrival", random_arrival},
                                               {"threads", threads}};

}  // namespace
}  // namespace tide::test

int main(int argc, char** argv) { return tide::test::run_case(tide::test::kCases, argc, argv); }
