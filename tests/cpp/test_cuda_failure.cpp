// What happens when something of a CUDA group fails: memory, windows, the driver, a peer. Every rank must hear of it in
// words, nothing may be left behind, and no wait may end by itself before somebody has decided that.
// `test_cuda_failure CASE` runs one case; exit code 0 is success.
#include "cuda_rank.h"

namespace tide::test {
namespace {

std::shared_ptr<const ParameterLayout> layout(int world, std::vector<int64_t> shards = {900, 3}) {
  return std::make_shared<ParameterLayout>(world, std::move(shards), std::vector<int64_t>(), 256);
}

// One all-gather with the shard in place; the result is not looked at.
Selection gather(CudaRank& me, const Window& window) {
  const auto how = layout(me.world());
  return me.run(me.all_gather(how, me.transport()->device_arena().address(window), nullptr));
}

int64_t bytes(int world) { return layout(world)->total_gathered_numel() * 2; }

// What the watchdog said, and how often.
struct Reports {
  std::mutex mutex;
  std::string text;
  int count = 0;

  std::string wait(std::chrono::milliseconds time) {
    const auto end = Clock::now() + time;
    while (Clock::now() < end) {
      std::this_thread::sleep_for(1ms);
      std::lock_guard<std::mutex> lock(mutex);
      if (count > 0) return text;
    }
    throw std::runtime_error("no report");
  }
};

// The group raises instead of ending the process: reports are noted, the engine is told, waits are released.
struct Raising {
  std::shared_ptr<Reports> reports = std::make_shared<Reports>();
  std::shared_ptr<std::weak_ptr<Engine>> engine = std::make_shared<std::weak_ptr<Engine>>();

  Settings settings() const {
    Settings s;
    s.on_timeout = [reports = reports, engine = engine](const std::string& text) {
      if (auto known = engine->lock()) known->abort(text);
      std::lock_guard<std::mutex> lock(reports->mutex);
      reports->text = text;
      ++reports->count;
    };
    return s;
  }
  void watch(CudaRank& me) const { *engine = me.shared_engine(); }
};

bool drained(cuda::Stream stream, std::chrono::milliseconds time) {
  const auto end = Clock::now() + time;
  while (cuda::driver().stream_query(stream) != 0) {
    if (Clock::now() > end) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

// Every rank of three must give the same reason for not connecting, and have nothing left.
void refused(const std::string& reason, const std::function<void(int rank)>& spoil) {
  run_ranks(3, [&](int rank, const std::string& directory) {
    {
      CudaRank me(rank, 3, directory);
      spoil(rank);
      me.engine().connect();
      const auto [shared, why] = me.engine().shared_memory();
      check(!shared, "not connected");
      check_contains(why, reason);
      if (rank == 2) std::printf("%s\n", why.c_str());
    }
    check_nothing_left();
  });
}

void connect_refused() {
  refused("rank 1: no CUDA driver here", [](int rank) {
    if (rank != 1) return;
    cuda::Driver broken = cuda::driver();
    broken.problem = "no CUDA driver here";
    cuda::set_driver(broken);
  });
  refused("rank 2: NCCL 2.28.9 is too old", [](int rank) {
    if (rank != 2) return;
    cuda::Nccl old = FakeNccl::table();
    old.problem = "NCCL 2.28.9 is too old";
    cuda::set_nccl(old);
  });
  refused("rank 0: ncclGetUniqueId failed", [](int rank) {
    if (rank != 0) return;
    cuda::Nccl broken = FakeNccl::table();
    broken.unique_id = [](cuda::NcclUniqueId*) { return 3; };
    cuda::set_nccl(broken);
  });
  refused("ncclCommInitRank failed: unhandled cuda error (2, NCCL 2.32.3)",
          [](int) { FakeNccl::get().no_start = true; });
  refused("rank 1: tide: cuMemHostRegister failed", [](int rank) {
    if (rank == 1) FakeDriver::get().fails["host_register"] = 2;
  });
  refused("rank 1: tide: cuMemHostGetDevicePointer failed: CUDA_ERROR_LAUNCH_FAILED (719)", [](int rank) {
    if (rank == 1) FakeDriver::get().fails["host_device_pointer"] = 3;
  });
  refused("cuStreamWriteValue64 failed: CUDA_ERROR (801)",
          [](int rank) { FakeDriver::get().has_memory_operations = rank != 0; });
}

void windows_refused() {
  refused("rank 0: ncclMemAlloc of 2 MiB failed (unhandled cuda error); 1 of 8192 MiB are free", [](int rank) {
    if (rank == 0) FakeNccl::get().failing_allocations = {1};
  });
  refused("rank 1: tide: ncclCommWindowRegister failed", [](int rank) {
    if (rank == 1) FakeNccl::get().failing_registrations = {1};
  });
  refused("rank 0: ncclCommWindowRegister gave no window", [](int) { FakeNccl::get().no_windows = true; });
  refused("rank 2: ncclCommWindowRegister gave no window", [](int rank) { FakeNccl::get().no_windows = rank == 2; });
  refused("rank 0: ncclGetPeerDevicePointer gave no address for rank 1: it is not on this NVLink domain",
          [](int) { FakeNccl::get().no_address_for = 1; });
}

// Growth that one rank refuses is refused on all, and the call goes to the inner backend on all; later calls go on.
void growth_refused() {
  for (const bool registration : {false, true}) {
    run_ranks(3, [&](int rank, const std::string& directory) {
      {
        CudaRank me(rank, 3, directory);
        me.connect();
        const int64_t first = me.transport()->device_arena().bytes_committed();
        if (rank == 1)
          (registration ? FakeNccl::get().failing_registrations : FakeNccl::get().failing_allocations) = {2};
        std::string why;
        check(!me.slot(bytes(3), &why), "no slot");
        check_contains(why, registration ? "rank 1: tide: ncclCommWindowRegister failed" : "rank 1: ncclMemAlloc of ");
        check(FakeNccl::get().allocations == 1 && FakeNccl::get().windows == 1, "only staging is left");
        std::vector<std::byte> ordinary(static_cast<size_t>(bytes(3)));
        const Selection selection = me.run(me.all_gather(layout(3), ordinary.data(), nullptr));
        check(selection.path == Path::inner, "inner");
        check_contains(selection.reason, "a rank had no slot in the arena");
        const Window window = me.slot(bytes(3));  // room again
        check(gather(me, window).path == Path::zero_copy, "zero copy");
        check(me.transport()->device_arena().bytes_committed() > first, "grown");
        me.release(window);
      }
      check_nothing_left();
    });
  }
}

// The caller's allocator is asked for what it keeps before growth is refused.
void growth_after_making_room() {
  run_ranks(2, [](int rank, const std::string& directory) {
    {
      int asked = 0;
      Settings settings;
      settings.free_cached_memory = [&] { ++asked; };
      CudaRank me(rank, 2, directory, settings);
      me.connect();
      if (rank == 1) FakeNccl::get().failing_allocations = {2};
      me.release(me.slot(bytes(2)));
      check(asked == (rank == 1 ? 1 : 0), "asked once, where it was needed");
    }
    check_nothing_left();
  });
}

// A driver error in the middle of a plan on rank 0: it raises there; rank 1, whose device waits, is told.
void driver_error_in_a_plan() {
  for (const std::string call : {"copy_batch", "stream_write_value", "stream_wait_value", "event_record"}) {
    run_ranks(2, [&](int rank, const std::string& directory) {
      const Raising raising;
      CudaRank me(rank, 2, directory, raising.settings());
      raising.watch(me);
      me.connect();
      const Window window = me.slot(bytes(2));
      gather(me, window);
      check(drained(me.caller(), 20s), "first call");
      if (rank == 0) {
        // event_record: the first joins the streams, the second is complete()'s.
        FakeDriver::get().fails[call] = call == "event_record" ? 2 : 1;
        const Error error = caught([&] { gather(me, window); });
        check(error.kind() == ErrorKind::driver, error.what());
        check_contains(error.what(), "tide[rank 0/2, group \"test\", all_gather #2]: cu");
        check_contains(error.what(), "failed: CUDA_ERROR_LAUNCH_FAILED (719)");
      } else {
        try {
          gather(me, window);  // on the device before rank 0 fails, or told already
        } catch (const Error& error) {
          check_contains(error.what(), "aborted");
        }
      }
      // What rank 0 has put on its device ends by itself, and event_record fails behind a complete plan.
      if (rank == 1 && call != "event_record") {
        const std::string text = raising.reports->wait(10s);
        check_contains(text, "all_gather]: rank 0 (pid ");
        check_contains(text, "aborted: ");
      }
      check(drained(me.stream(Channel::all_gather), 10s), "the device is free again");
      const Error later = caught([&] { gather(me, window); });
      check_contains(later.what(), rank == 0 || call != "event_record" ? "the group cannot be used any more" : "abort");
      check(raising.reports->count <= 1, "reported once");
      std::cout.flush();
      _exit(0);  // a broken group keeps its memory
    });
  }
}

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
// kernel, which waits for the device and keeps everybody else out of the driver. The deadline holds even so.
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
    while (me.transport()->watchdog().outstanding() > 0) std::this_thread::sleep_for(1ms);
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

// The caller gives the group up: its device is free again, its peers are told.
void caller_aborts() {
  run_ranks(2, [](int rank, const std::string& directory) {
    const Raising raising;
    CudaRank me(rank, 2, directory, raising.settings());
    raising.watch(me);
    me.connect();
    const Window window = me.slot(bytes(2));
    std::atomic<bool> go{false};
    if (rank == 1) {
      FakeDriver::launch(me.copy_in(), [&] {
        while (!go) std::this_thread::sleep_for(1ms);
      });
    }
    gather(me, window);
    check(!drained(me.stream(Channel::all_gather), 200ms), "it waits");
    if (rank == 0) {
      me.engine().abort("enough");
      me.transport()->give_up("enough");
    } else {
      check_contains(raising.reports->wait(10s), "rank 0 (pid ");
    }
    go = true;
    check(drained(me.caller(), 10s), "the device is free again");
    const Error later = caught([&] { gather(me, window); });
    check_contains(later.what(), "the group cannot be used any more");
    std::string why;
    check_contains(caught([&] { me.slot(64, &why); }).what(), "the group cannot be used any more");
    std::cout.flush();
    _exit(0);
  });
}

// Ctrl-C while a slot is awaited that another rank does not ask for: it ends the wait, and the group.
void interrupted_slot() {
  run_ranks(2, [](int rank, const std::string& directory) {
    const Raising raising;
    CudaRank me(rank, 2, directory, raising.settings());
    raising.watch(me);
    me.connect();
    std::string why;
    if (rank == 0) {
      Wait wait = within(20s, "slot #1");
      wait.interrupted = [] { throw std::runtime_error("Ctrl-C"); };
      const auto start = Clock::now();
      bool ended = false;
      try {
        me.engine().guarded(wait.call, [&] { me.transport()->slot(4096, me.caller(), wait, &why); });
      } catch (const std::runtime_error& error) {
        ended = std::string(error.what()) == "Ctrl-C";
      }
      check(ended && seconds_since(start) < 5, "the interrupt ended the wait");
      check_contains(caught([&] { me.slot(4096, &why); }).what(), "interrupted during slot #1");
    } else {
      std::this_thread::sleep_for(500ms);
      check_contains(caught([&] { me.slot(4096, &why); }).what(), "rank 0 (pid ");
    }
    std::cout.flush();
    _exit(0);
  });
}

// A device that fails says so through the watchdog, whatever it was doing.
void device_lost() {
  run_ranks(2, [](int rank, const std::string& directory) {
    const Raising raising;
    CudaRank me(rank, 2, directory, raising.settings());
    raising.watch(me);
    me.connect();
    const Window window = me.slot(bytes(2));
    std::atomic<bool> go{false};
    FakeDriver::launch(me.copy_in(), [&] {
      while (!go) std::this_thread::sleep_for(1ms);
    });
    gather(me, window);
    if (rank == 0) {
      FakeDriver::get().device_error = 700;
      const std::string text = raising.reports->wait(10s);
      check_contains(text, "all_gather #1]: the device failed while this call was on it: ");
      check_contains(text, "cuEventQuery failed: CUDA_ERROR (700)");
      std::printf("%s\n", text.c_str());
    } else {
      check_contains(raising.reports->wait(10s), "rank 0 (pid ");
    }
    std::cout.flush();
    _exit(0);
  });
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

// The group is destroyed while its device is stuck, with raising chosen: the deadline ends that too.
void destroyed_while_stuck() {
  run_ranks(2, [](int rank, const std::string& directory) {
    const Raising raising;
    CudaRank me(rank, 2, directory, raising.settings());
    raising.watch(me);
    me.connect();
    const Window window = me.slot(bytes(2));
    if (rank == 1) FakeDriver::launch(me.copy_in(), [] { std::this_thread::sleep_for(3s); });
    const auto call = me.all_gather(layout(2), me.transport()->device_arena().address(window), nullptr);
    me.run(call, 500ms);
    const auto start = Clock::now();
    me.engine().shutdown();
    if (rank == 0) check(seconds_since(start) < 2.5, "over soon after the deadline");
    check(raising.reports->count == 1, "reported");
    std::cout.flush();
    _exit(0);
  });
}

const std::map<std::string, void (*)()> kCases{{"caller_aborts", caller_aborts},
                                               {"connect_refused", connect_refused},
                                               {"dead_peer", dead_peer},
                                               {"destroyed_while_stuck", destroyed_while_stuck},
                                               {"device_lost", device_lost},
                                               {"driver_error_in_a_plan", driver_error_in_a_plan},
                                               {"early_leaver", early_leaver},
                                               {"growth_after_making_room", growth_after_making_room},
                                               {"growth_refused", growth_refused},
                                               {"interrupted_slot", interrupted_slot},
                                               {"nothing_runs_on_garbage", nothing_runs_on_garbage},
                                               {"stuck_peer", stuck_peer},
                                               {"stuck_peer_and_blocked_host", stuck_peer_and_blocked_host},
                                               {"stuck_peer_with_multicast", stuck_peer_with_multicast},
                                               {"windows_refused", windows_refused}};

}  // namespace
}  // namespace tide::test

int main(int argc, char** argv) {
  int code = 0;
  tide::test::run_case(tide::test::kCases, argc, argv, &code);
  return code;
}
