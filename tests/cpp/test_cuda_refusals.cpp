// Memory, windows or a driver that a CUDA group cannot have. Every rank must hear of it in words, and nothing may be
// left behind.
// `test_cuda_refusals CASE` runs one case; exit code 0 is success.
#include "cuda_reports.h"

namespace tide::test {
namespace {

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

// A rank whose CUDA calls are left to nccl has no transport to connect; it has said so in the store and gone on.
void one_rank_declines() {
  run_ranks(3, [](int rank, const std::string& directory) {
    const std::string off = "CUDA calls are left to nccl";
    if (rank == 1) {
      FileBootstrap bootstrap(directory, 10s);
      return decline_shm(Speaker{rank, 3, "test"}, bootstrap, off);
    }
    {
      CudaRank me(rank, 3, directory);
      const auto start = Clock::now();
      me.engine().connect();
      check(seconds_since(start) < 5, "nobody waits for a transport of rank 1");
      check(me.engine().shared_memory() == std::make_pair(false, "rank 1: " + off), "the reason");
    }
    check_nothing_left();
  });
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

const std::map<std::string, void (*)()> kCases{{"connect_refused", connect_refused},
                                               {"growth_after_making_room", growth_after_making_room},
                                               {"growth_refused", growth_refused},
                                               {"one_rank_declines", one_rank_declines},
                                               {"windows_refused", windows_refused}};

}  // namespace
}  // namespace tide::test

int main(int argc, char** argv) { return tide::test::run_case(tide::test::kCases, argc, argv); }
