// Peers of the shm transport that die, stop, leave, abort or are at another call: who hears of it, when, and in
// which words.
// `test_shm_peers CASE` runs one case; exit code 0 is success.
#include "shm_rank.h"

namespace tide::test {
namespace {

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

const std::map<std::string, void (*)()> kCases{{"aborting_rank", aborting_rank},
                                               {"early_leaver", early_leaver},
                                               {"killed_rank", killed_rank},
                                               {"stopped_rank", stopped_rank},
                                               {"wrong_sequence", wrong_sequence}};

}  // namespace
}  // namespace tide::test

int main(int argc, char** argv) { return tide::test::run_case(tide::test::kCases, argc, argv); }
