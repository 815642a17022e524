// A CUDA group that breaks on this rank: a driver call that fails, a lost device, a caller that gives up. Every
// rank must hear of it in words.
// `test_cuda_failure CASE` runs one case; exit code 0 is success.
#include "cuda_reports.h"

namespace tide::test {
namespace {

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

// A thread is at a call when another gives the group up: its error says which call, why, and what to do.
void aborted_during_a_call() {
  run_ranks(2, [](int rank, const std::string& directory) {
    const Raising raising;
    CudaRank me(rank, 2, directory, raising.settings());
    raising.watch(me);
    me.connect();
    const auto transport = me.transport();
    transport->exchange(Channel::all_to_all, 1, "", within(20s, "all_to_all #7"));
    transport->signal(Channel::all_to_all, 1 - rank, Flag::data, 1);
    transport->abort("enough");
    const Error error = caught([&] { transport->complete(Channel::all_to_all, 1); });
    check(error.kind() == ErrorKind::peer, error.what());
    check(error.what() == "tide[rank " + std::to_string(rank) +
                              "/2, group \"test\", all_to_all #7]: the group was aborted on this rank while this call "
                              "was put on its stream; got an aborted group (enough), expected one in use; destroy the "
                              "group and make a new one",
          error.what());
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
        me.engine().guarded(wait.call,
                            [&] { me.transport()->slot(4096, cuda::kNoParameters, me.caller(), wait, &why); });
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

const std::map<std::string, void (*)()> kCases{
    {"aborted_during_a_call", aborted_during_a_call},   {"caller_aborts", caller_aborts},
    {"destroyed_while_stuck", destroyed_while_stuck},   {"device_lost", device_lost},
    {"driver_error_in_a_plan", driver_error_in_a_plan}, {"interrupted_slot", interrupted_slot}};

}  // namespace
}  // namespace tide::test

int main(int argc, char** argv) { return tide::test::run_case(tide::test::kCases, argc, argv); }
