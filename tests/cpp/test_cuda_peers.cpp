// A peer of a CUDA group that is stuck, dies or leaves. The others must hear of it in words, and no wait may end by
// itself before somebody has decided that.
// `test_cuda_peers CASE` runs one case; exit code 0 is success.
#include "cuda_reports.h"

namespace tide::test {
namespace {

// Returns when every rank has come here.
void everyone(const std::string& prefix, int rank, int world) {
  std::ofstream(prefix + std::to_string(rank)) << "here";
  const auto end = Clock::now() + 20s;
  for (int r = 0; r < world; ++r) {
    while (access((prefix + std::to_string(r)).c_str(), F_OK) != 0) {
      check(Clock::now() < end, "rank " + std::to_string(r) + " came");
      std::this_thread::sleep_for(1ms);
    }
  }
}

// Rank 1 has agreed to the call, but its device does not get to it. Ranks 0 and 2 name it at the deadline, once.
void stuck(bool multicast) {
  run_ranks(3, [=](int rank, const std::string& directory) {
    const Raising raising;
    Settings settings = raising.settings();
    settings.multicast = multicast;
    CudaRank me(rank, 3, directory, settings);
    raising.watch(me);
    me.connect();
    const Window window = me.slot(bytes(3));
    check(gather(me, window).multicast == multicast, "multicast");
    check(drained(me.caller(), 20s), "first call");
    std::atomic<bool> go{false};
    if (rank == 1) {
      FakeDriver::launch(me.copy_in(), [&] {
        while (!go) std::this_thread::sleep_for(1ms);
      });
    }
    const auto call = me.all_gather(layout(3), me.transport()->device_arena().address(window), nullptr);
    const auto start = Clock::now();
    me.run(call, 700ms);
    check(seconds_since(start) < 0.5, "the host does not wait for the device");
    const std::string text = raising.reports->wait(10s);
    check(seconds_since(start) > 0.69, "not before the deadline");
    check(seconds_since(start) < 4, "soon after it");
    if (rank == 0) std::printf("%s\n", text.c_str());
    check_contains(text, "tide[rank " + std::to_string(rank) + "/3, group \"test\", all_gather");
    // First hand, or from a rank that gave up a moment before.
    check_contains(text, "all_gather #2]: not over at its deadline: ");
    if (rank != 1) {
      check_contains(text, "rank 1 (pid ");
      check_contains(text, "last all_gather: #2 (all_gather bytes[903]");
      check_contains(text, "in progress; memory: ");
      check_contains(text, "owes its flags: ready, data");
    }
    check(drained(me.stream(Channel::all_gather), rank == 1 ? 0ms : 10s) == (rank != 1), "waits are released");
    // Rank 1's flags would end the others' waits before they look at their own clocks.
    everyone(directory + "/reported", rank, 3);
    go = true;
    check(drained(me.caller(), 10s), "the device is free again");
    const Error later = caught([&] { gather(me, window); });
    check_contains(later.what(), "an earlier failure: tide[rank");
    std::this_thread::sleep_for(300ms);
    check(raising.reports->count == 1, "reported once");
    if (multicast) check(FakeDriver::get().multicasts == 4, "two pieces a call, those of the broken call late");
    // Where what was late has landed: memory, windows and addresses outlive the group.
    auto transport = me.transport();
    me.engine().shutdown();
    check(FakeNccl::get().allocations == 2 && FakeNccl::get().windows == 2, "the segments are quarantined");
    const cuda::DeviceArena& arena = transport->device_arena();
    check((arena.multicast_address(window.offset, window.bytes) != nullptr) == multicast, "still mapped");
    std::cout.flush();
    _exit(0);
  });
}

void stuck_peer() { stuck(false); }
void stuck_peer_with_multicast() { stuck(true); }

// Rank 1's device does not get to a reduce-scatter, and the host of rank 0 is blocked meanwhile: its driver loads a
// kernel, which waits for the device and keeps everybody else out of the driver. The deadline holds even so, also while
// the watchdog is asking for the end of the call before.
void stuck_peer_and_blocked_host() {
  run_ranks(2, [](int rank, const std::string& directory) {
    const Raising raising;
    CudaRank me(rank, 2, directory, raising.settings());
    raising.watch(me);
    me.connect();
    check(FakeDriver::get().loaded, "kernels are loaded before anything waits");
    std::vector<float> output(1000), input(2000);
    CollectiveCall call;
    Request& q = call.request = me.request(Channel::reduce_scatter, ElementType::f32, ElementType::f32);
    q.numel = 1000;
    q.reduction = Reduction::sum;
    call.buffers.inputs = {reinterpret_cast<const std::byte*>(input.data())};
    call.buffers.output = reinterpret_cast<std::byte*>(output.data());
    call.output_bytes = 4000;
    me.run(call);
    check(drained(me.caller(), 20s), "first call");
    std::atomic<bool> go{false};
    if (rank == 1) {
      FakeDriver::launch(me.caller(), [&] {
        while (!go) std::this_thread::sleep_for(1ms);
      });
    }
    FakeDriver::get().loaded = rank == 1;
    const auto start = Clock::now();
    try {
      me.run(call, 700ms);
    } catch (const Error&) {  // what comes behind the launch is refused
    }
    check(seconds_since(start) < 5, "over soon after the deadline");
    if (rank == 0) {
      const std::string text = raising.reports->wait(10s);
      check(seconds_since(start) > 0.69, "not before the deadline");
      std::printf("%s\n", text.c_str());
      check_contains(text, "reduce_scatter #2]: not over at its deadline: ");
      check_contains(text, "rank 1 (pid ");
      check_contains(text, "owes its flags: ");
      check(drained(me.stream(Channel::reduce_scatter), 10s), "waits are released");
    }
    everyone(directory + "/reported", rank, 2);
    go = true;
    check(drained(me.caller(), 10s), "the device is free again");
    std::cout.flush();
    _exit(0);
  });
}

// Rank 1 dies with its part of the call undone. The others say so within a fraction of a second, not at the deadline.
void dead_peer() {
  const TemporaryDirectory directory;
  std::vector<pid_t> pids;
  for (int rank = 0; rank < 3; ++rank) {
    pids.push_back(start_rank(rank, [&, rank] {
      const Raising raising;
      CudaRank me(rank, 3, directory.path(), raising.settings());
      raising.watch(me);
      me.connect();
      const Window window = me.slot(bytes(3));
      gather(me, window);
      check(drained(me.caller(), 20s), "first call");
      if (rank == 1) FakeDriver::launch(me.copy_in(), [] { std::this_thread::sleep_for(60s); });
      gather(me, window);
      if (rank == 1) kill(getpid(), SIGKILL);
      const auto start = Clock::now();
      const std::string text = raising.reports->wait(10s);
      check(seconds_since(start) < 3, "noticed soon, took " + std::to_string(seconds_since(start)));
      if (rank == 0) std::printf("%s\n", text.c_str());
      check_contains(text, "all_gather]: ");
      check(text.find("rank 1 (pid ") != std::string::npos || text.find("aborted") != std::string::npos, text);
      check_contains(text, "while the device waits: ");
      check(drained(me.caller(), 10s), "waits are released");
      std::cout.flush();
      _exit(0);
    }));
  }
  bool good = true;
  for (int rank = 0; rank < 3; ++rank)
    good &= wait_rank(pids[static_cast<size_t>(rank)], 30s) == (rank == 1 ? -SIGKILL : 0);
  check(good, "the living ranks end well");
}

// By default nothing is released: what is queued behind the wait must not run before the process is ended. That holds
// too when the host notices first, in the next call.
void nothing_runs_on_garbage() {
  for (const bool host_first : {false, true}) {
    const TemporaryDirectory directory;
    const std::string ran = directory.path() + "/ran";
    std::vector<pid_t> pids;
    for (int rank = 0; rank < 2; ++rank) {
      pids.push_back(start_rank(rank, [&, rank] {
        Settings settings;
        settings.on_timeout = [](const std::string& text) {
          std::this_thread::sleep_for(300ms);  // time for whatever was released to run
          check_contains(text, "rank 1 (pid ");
          _exit(77);
        };
        CudaRank me(rank, 2, directory.path(), settings);
        me.connect();
        const Window window = me.slot(bytes(2));
        if (rank == 1) FakeDriver::launch(me.copy_in(), [] { std::this_thread::sleep_for(60s); });
        gather(me, window);
        FakeDriver::launch(me.caller(), [=] { std::ofstream(ran + std::to_string(rank)) << "optimizer step"; });
        if (rank == 1) kill(getpid(), SIGKILL);
        if (host_first) {
          const Error error = caught([&] { gather(me, window); });
          check_contains(error.what(), "rank 1 (pid ");
        }
        std::this_thread::sleep_for(20s);
      }));
    }
    check(wait_rank(pids[1], 20s) == -SIGKILL, "rank 1 was killed");
    check(wait_rank(pids[0], 20s) == 77, "rank 0 was ended by its watchdog");
    check(!std::filesystem::exists(ran + "0"), "nothing ran behind the wait");
  }
}

// A rank that has done its part and leaves in good order is not taken for dead, however slow the others are.
void early_leaver() {
  run_ranks(2, [](int rank, const std::string& directory) {
    FakeDriver::get().jitter_us = 500;
    for (int round = 0; round < 20; ++round) {
      const std::string own = directory + "/" + std::to_string(round);
      std::filesystem::create_directories(own);
      {
        CudaRank me(rank, 2, own);  // a report would end the rank
        me.connect();
        const Window window = me.slot(bytes(2));
        gather(me, window);
        if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(round * 10));
        me.release(window);
      }
      check_nothing_left();
    }
  });
}

const std::map<std::string, void (*)()> kCases{{"dead_peer", dead_peer},
                                               {"early_leaver", early_leaver},
                                               {"nothing_runs_on_garbage", nothing_runs_on_garbage},
                                               {"stuck_peer", stuck_peer},
                                               {"stuck_peer_and_blocked_host", stuck_peer_and_blocked_host},
                                               {"stuck_peer_with_multicast", stuck_peer_with_multicast}};

}  // namespace
}  // namespace tide::test

int main(int argc, char** argv) { return tide::test::run_case(tide::test::kCases, argc, argv); }
