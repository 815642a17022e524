// A CUDA group in use: collectives beside each other, groups beside each other, a call that one rank cannot make, a
// capture elsewhere, a forked child.
// `test_cuda_group CASE` runs one case; exit code 0 is success.
#include "cuda_calls.h"

namespace tide::test {
namespace {

// As in a backward pass: gathers of the next layer between reductions of the last one and exchanges of tokens, each
// rank at its own pace.
void all_at_once(int world, bool slot_reuse) {
  run_ranks(world, [&](int rank, const std::string& directory) {
    FakeDriver::get().jitter_us = 200 * (rank + 1);
    {
      Settings settings;
      settings.slot_reuse = slot_reuse;
      settings.staging_bytes = 32 << 10;
      CudaRank me(rank, world, directory, settings);
      me.connect();
      Gather gather{me, slot_layout(world, {700, 3, 2000})};
      Scatter scatter{me, ElementType::bf16, ElementType::f32, 0.5, gradient_layout(world, {9001, 33})};
      std::set<int> all;
      for (int r = 0; r < world; ++r) all.insert(r);
      Exchange staged{me, exchanges(world)[2], {}}, straight{me, exchanges(world)[0], all};
      for (int i = 1; i <= 25; ++i) {
        gather.call(i, true);
        scatter.call(i);
        staged.call(i);
        straight.call(i);
      }
      gather.finish();
      scatter.finish();
      staged.finish();
      straight.finish();
    }
    check_nothing_left();
  });
}

void overlap() {
  all_at_once(2, false);
  all_at_once(3, false);
}

void overlap_with_slot_reuse() {
  all_at_once(2, true);
  all_at_once(3, true);
}

// Two groups of the same ranks, used by turns.
void two_groups() {
  run_ranks(2, [](int rank, const std::string& directory) {
    FakeDriver::get().jitter_us = 200;
    const std::string other = directory + "/other";
    std::filesystem::create_directories(other);
    {
      CudaRank first(rank, 2, directory), second(rank, 2, other);
      first.connect();
      second.connect();
      Gather one{first, slot_layout(2, {500, 40})}, two{second, slot_layout(2, {77})};
      for (int i = 1; i <= 20; ++i) {
        one.call(i, true);
        two.call(i, true);
      }
      one.finish();
      two.finish();
    }
    check_nothing_left();
  });
}

// A call that one rank cannot make: all hear of it, nothing moves, the group goes on.
void bad_call_of_one_rank() {
  run_ranks(2, [](int rank, const std::string& directory) {
    {
      CudaRank me(rank, 2, directory);
      me.connect();
      Gather gather{me, slot_layout(2, {900})};
      gather.call(1, true);
      const Window window = me.slot(gather.layout->total_gathered_numel() * 2);
      CollectiveCall call = me.all_gather(gather.layout, me.transport()->device_arena().address(window), nullptr);
      if (rank == 1) call.problem = "sizes do not fit";
      Error error = caught([&] { me.run(call); });
      check(error.kind() == ErrorKind::usage, error.what());
      check_contains(error.what(), "sizes do not fit");
      me.release(window);

      std::string why;
      error = caught([&] { me.slot(rank == 1 ? 4096 : 8192, &why); });
      check(error.kind() == ErrorKind::usage, error.what());
      check_contains(error.what(), "ranks asked for different memory; got");
      for (int i = 2; i < 6; ++i) gather.call(i, true);
      gather.finish();
      check(me.transport()->arena()->bytes_in_use() == (2 << 20), "no slot is lost");
    }
    check_nothing_left();
  });
}

// A graph that another thread captures must not be broken by the watchdog's look at its events.
void capture_elsewhere() {
  run_ranks(2, [](int rank, const std::string& directory) {
    {
      CudaRank me(rank, 2, directory);
      me.connect();
      Gather gather{me, slot_layout(2, {900})};
      gather.call(1, true);
      FakeDriver::get().captured = true;
      const auto end = Clock::now() + 10s;
      while (me.transport()->watchdog().outstanding() > 0 && Clock::now() < end) std::this_thread::sleep_for(10ms);
      check(me.transport()->watchdog().outstanding() == 0, "the watchdog still sees calls end");
      FakeDriver::get().captured = false;
      gather.finish();
    }
    check_nothing_left();
  });
}

// A child that was forked from a rank owns nothing of it: no call of the driver, no thread to wait for.
void forked_child() {
  run_ranks(2, [](int rank, const std::string& directory) {
    {
      CudaRank me(rank, 2, directory);
      me.connect();
      Gather gather{me, slot_layout(2, {900})};
      gather.call(1, true);
      gather.finish();
      auto engine = me.shared_engine();
      auto transport = me.transport();
      const pid_t child = start_rank(rank, [&] {
        const int before = FakeDriver::get().calls;
        transport->abort("child");
        transport->close("child");
        auto* last = new std::shared_ptr<cuda::CudaTransport>(transport);
        delete last;
        check(FakeDriver::get().calls == before, "no call of the driver");
        std::string why;
        const Error error = caught([&] { transport->slot(64, cuda::kNoParameters, me.caller(), within(1s), &why); });
        check_contains(error.what(), "before fork()");
      });
      check(wait_rank(child, 20s) == 0, "the child ends well");
      for (int i = 2; i < 5; ++i) gather.call(i, true);
      gather.finish();
    }
    check_nothing_left();
  });
}

const std::map<std::string, void (*)()> kCases{{"bad_call_of_one_rank", bad_call_of_one_rank},
                                               {"capture_elsewhere", capture_elsewhere},
                                               {"forked_child", forked_child},
                                               {"overlap", overlap},
                                               {"overlap_with_slot_reuse", overlap_with_slot_reuse},
                                               {"two_groups", two_groups}};

}  // namespace
}  // namespace tide::test

int main(int argc, char** argv) { return tide::test::run_case(tide::test::kCases, argc, argv); }
