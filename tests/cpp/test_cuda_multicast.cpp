// All-gathers through multicast on a fake driver and a fake NCCL: one copy a piece where all ranks can, the same
// results with a copy to each peer where one cannot, and in every case the reason.
// `test_cuda_multicast CASE` runs one case; exit code 0 is success.
#include <cstdlib>

#include "cuda_rank.h"

namespace tide::test {
namespace {

constexpr char kInArena[] = "every rank's output lies in the arena";

// What a rank was told about having no multicast.
struct Told {
  std::shared_ptr<std::vector<std::string>> texts = std::make_shared<std::vector<std::string>>();

  Settings settings(bool multicast = true) const {
    Settings s;
    s.multicast = multicast;
    s.on_no_multicast = [texts = texts](const std::string& text) { texts->push_back(text); };
    return s;
  }
  void once(int rank, const std::string& why) const {
    check(texts->size() == 1, "told once, got " + std::to_string(texts->size()));
    check_contains(texts->front(), "tide[rank " + std::to_string(rank) + "/");
    check_contains(texts->front(), ", group \"test\", connect]: no multicast: " + why);
    check_contains(texts->front(), "; each piece is copied to every peer");
  }
};

// All-gathers into slots. The shard is put in place on one stream, or lies in the caller's memory; results are read on
// another stream, behind the call.
struct Gather {
  CudaRank& rank;
  std::shared_ptr<const ParameterLayout> layout;
  std::shared_ptr<std::atomic<int>> wrong = std::make_shared<std::atomic<int>>(0);

  Gather(CudaRank& of, std::vector<int64_t> shards)
      : rank(of),
        layout(std::make_shared<ParameterLayout>(of.world(), std::move(shards), std::vector<int64_t>(), 256)) {}

  int64_t bytes() const { return layout->total_gathered_numel() * 2; }

  template <typename Visit>
  void each(int r, Visit visit) const {
    for (size_t p = 0; p < layout->parameters(); ++p) {
      const int64_t start = layout->gathered_offset(p) + r * layout->shard_numel(p);
      for (int64_t i = 0; i < layout->shard_numel(p); ++i) visit(start + i, layout->shard_offset(p) + i);
    }
  }

  Selection into(const Window& window, int number, bool placed, std::chrono::milliseconds reading = 0ms) {
    std::byte* memory = rank.transport()->device_arena().address(window);
    auto* output = reinterpret_cast<uint16_t*>(memory);
    auto shard = std::make_shared<Words>(static_cast<size_t>(layout->total_shard_numel()));
    FakeDriver::launch(rank.copy_in(), [=, *this] {
      each(rank.rank(), [&](int64_t at, int64_t i) {
        (placed ? output[at] : (*shard)[static_cast<size_t>(i)]) = value(rank.rank(), i, number);
      });
    });
    const Selection selection = rank.run(rank.all_gather(layout, memory, placed ? nullptr : shard.get()));
    check(selection.path == Path::zero_copy, selection.reason);
    FakeDriver::launch(rank.caller(), [=, *this] {
      (void)shard;  // read until here
      std::this_thread::sleep_for(reading);
      for (int r = 0; r < rank.world(); ++r) {
        each(r, [&](int64_t at, int64_t i) { *wrong += output[at] != value(r, i, number); });
      }
    });
    return selection;
  }

  Selection call(int number, bool placed, std::chrono::milliseconds reading = 0ms) {
    const Window window = rank.slot(bytes());
    Selection selection = into(window, number, placed, reading);
    rank.release(window);
    return selection;
  }

  void finish() {
    cuda::driver().stream_synchronize(rank.caller());
    check(*wrong == 0, std::to_string(*wrong) + " elements are wrong");
  }
};

// Calls that must go to each peer on its own, for this reason.
void unicast(CudaRank& me, const std::string& reason) {
  Gather gather(me, {3, 1, 4097, 2});
  for (int i = 1; i <= 6; ++i) {
    const Selection selection = gather.call(i, i % 2 == 0);
    check(!selection.multicast, "no multicast");
    check(selection.reason == kInArena + reason, selection.reason);
  }
  gather.finish();
}

int gather_many(int rank, const std::string& directory) {
  int pieces = 0;
  {
    const Told told;
    CudaRank me(rank, 3, directory, told.settings());
    me.connect();
    int number = 0;
    const std::vector<std::vector<int64_t>> shapes{{1}, {3, 1, 4097, 2}, {70000, 5}, {8, 8, 8, 8, 8, 8, 8}};
    for (const auto& shards : shapes) {
      Gather gather(me, shards);
      for (int i = 0; i < 12; ++i) {
        const Selection selection = gather.call(++number, i % 3 != 0);
        check(selection.multicast && selection.reason == std::string(kInArena) + "; multicast", selection.reason);
        pieces += static_cast<int>(shards.size());
      }
      gather.finish();
    }
    check(FakeDriver::get().multicasts == pieces, "one copy a piece");
    check(told.texts->empty(), "nothing to tell");
    // The staging's segment and the slots'.
    check(FakeNccl::get().multicast_calls == 2, "asked once a segment");
  }
  check_nothing_left();
  return pieces;
}

void all_gather() {
  run_ranks(3, [](int rank, const std::string& directory) {
    FakeDriver::get().jitter_us = 300;
    gather_many(rank, directory);
    check(FakeDriver::get().batches > 0, "copies went in batches");
  });
}

void all_gather_in_one_queue() {
  run_ranks(3, [](int rank, const std::string& directory) {
    FakeDriver::get().merged = true;
    FakeDriver::get().has_batches = false;
    const int pieces = gather_many(rank, directory);
    check(FakeDriver::get().copies == pieces, "and no other copy");
  });
}

// A rank whose slot is still being read is written by nobody: the next call's copy waits for the slowest reader of all.
void while_a_slot_is_read() {
  run_ranks(3, [](int rank, const std::string& directory) {
    {
      CudaRank me(rank, 3, directory, Told().settings());
      me.connect();
      Gather gather(me, {900, 3});
      for (int i = 1; i <= 9; ++i) {
        check(gather.call(i, i % 2 == 0, i % 3 == rank ? 60ms : 0ms).multicast, "multicast");
      }
      gather.finish();
    }
    check_nothing_left();
  });
}

// Free lists differ from rank to rank, and so do slots: such a call goes to each peer, the next one to all again.
void other_offsets() {
  run_ranks(3, [](int rank, const std::string& directory) {
    FakeDriver::get().jitter_us = 200;
    {
      const Told told;
      CudaRank me(rank, 3, directory, told.settings());
      me.connect();
      Gather gather(me, {5000, 11});
      auto& arena = me.transport()->device_arena();
      for (int i = 1; i <= 12; ++i) {
        std::optional<Window> kept;
        std::string why;
        if (i == 1) me.release(me.slot(gather.bytes() * 4));  // room in one segment for what follows
        if (i % 2 == 0 && rank == i % 3) kept = arena.acquire(4096, &why);
        const Selection selection = gather.call(i, i % 4 < 2);
        check(selection.multicast == (i % 2 == 1), "call " + std::to_string(i) + ": " + selection.reason);
        const std::string reason = "; no multicast: ranks' outputs lie at different places in their segments";
        if (!selection.multicast) check(selection.reason == kInArena + reason, selection.reason);
        gather.finish();  // the slot is free again for the next call, on every rank
        if (kept) arena.release(*kept);
      }
      check(told.texts->empty(), "an odd call is not worth a word; its reason is recorded");
    }
    check_nothing_left();
  });
}

// By default nobody asks NCCL for multicast, which might make the object.
void not_asked_for() {
  run_ranks(3, [](int rank, const std::string& directory) {
    {
      const Told told;
      CudaRank me(rank, 3, directory, told.settings(false));
      me.connect();
      unicast(me, "");
      check(FakeNccl::get().multicast_calls == 0 && told.texts->empty(), "not asked for, and not a word");
    }
    check_nothing_left();
  });
}

// Every rank must have the same reason, and NCCL must not have been asked.
void refused(int world, const std::string& why, const std::function<void(int)>& spoil, int not_asking = -1) {
  run_ranks(world, [&](int rank, const std::string& directory) {
    {
      spoil(rank);
      const Told told;
      CudaRank me(rank, world, directory, told.settings(rank != not_asking));
      me.connect();
      unicast(me, "; no multicast: " + why);
      check(FakeNccl::get().multicast_calls == 0, "NCCL was not asked");
      if (rank == not_asking) {
        check(told.texts->empty(), "it has not asked");
      } else {
        told.once(rank, why);
      }
      if (rank == 0) std::printf("%s\n", told.texts->front().c_str());
    }
    check_nothing_left();
  });
}

void refused_by_environment() {
  const std::pair<const char*, const char*> forbidding[] = {{"NCCL_NVLS_ENABLE", "0"},
                                                            {"TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"},
                                                            {"NVSHMEM_DISABLE_NVLS", "1"},
                                                            {"NVSHMEM_DISABLE_NVLS", "true"}};
  for (const auto& [name, value] : forbidding) {
    refused(3, std::string("rank 1: ") + name + "=" + value + " forbids it", [&, name = name, value = value](int rank) {
      if (rank == 1) setenv(name, value, 1);
    });
  }
  // Values that forbid nothing.
  run_ranks(3, [](int rank, const std::string& directory) {
    setenv("NCCL_NVLS_ENABLE", "2", 1);
    setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0", 1);
    setenv("NVSHMEM_DISABLE_NVLS", "", 1);
    CudaRank me(rank, 3, directory, Told().settings());
    me.connect();
    Gather gather(me, {100});
    check(gather.call(1, true).multicast, "multicast");
    gather.finish();
  });
}

void two_ranks() {
  refused(2, "rank 0: a group of two ranks has one peer to copy to", [](int) {});
}

void library_without_it() {
  refused(3, "rank 2: NCCL 2.32.3 (fake) has no ncclGetLsaMultimemDevicePointer",
          [](int rank) { FakeNccl::get().has_multicast = rank != 2; });
}

void asked_by_some() {
  refused(
      3, "got TIDE_MULTICAST=1 on rank 0 and 0 on rank 1, expected the same on every rank; set it alike everywhere",
      [](int) {}, 1);
}

// NCCL has no multicast on one rank, or fails there for one segment: every rank does without it in that segment.
void segments_without_it() {
  run_ranks(3, [](int rank, const std::string& directory) {
    {
      FakeNccl::get().no_multicast = rank == 1;
      const Told told;
      CudaRank me(rank, 3, directory, told.settings());
      me.connect();
      const std::string why =
          "rank 1: ncclGetLsaMultimemDevicePointer gave no address: NCCL has no multicast between these GPUs";
      unicast(me, "; no multicast: " + why);
      told.once(rank, why);
      check(FakeNccl::get().multicast_calls == 2, "asked together, once a segment");
    }
    check_nothing_left();
  });
  run_ranks(3, [](int rank, const std::string& directory) {
    {
      if (rank == 2) FakeNccl::get().failing_multicasts = {2};
      const Told told;
      CudaRank me(rank, 3, directory, told.settings());
      me.connect();
      Gather gather(me, {3000000});
      const Window second = me.slot(gather.bytes()), third = me.slot(gather.bytes());
      const std::string why =
          "rank 2: tide: ncclGetLsaMultimemDevicePointer failed: unhandled cuda error (1, NCCL 2.32.3)";
      for (int i = 1; i <= 4; ++i) {
        Selection selection = gather.into(second, 2 * i, i % 2 == 0);
        check(!selection.multicast && selection.reason == kInArena + ("; no multicast: " + why), selection.reason);
        selection = gather.into(third, 2 * i + 1, i % 2 == 0);
        check(selection.multicast, selection.reason);
        gather.finish();
      }
      told.once(rank, why);
      me.release(second);
      me.release(third);
    }
    check_nothing_left();
  });
}

const std::map<std::string, void (*)()> kCases{{"all_gather", all_gather},
                                               {"all_gather_in_one_queue", all_gather_in_one_queue},
                                               {"asked_by_some", asked_by_some},
                                               {"library_without_it", library_without_it},
                                               {"not_asked_for", not_asked_for},
                                               {"other_offsets", other_offsets},
                                               {"refused_by_environment", refused_by_environment},
                                               {"segments_without_it", segments_without_it},
                                               {"two_ranks", two_ranks},
                                               {"while_a_slot_is_read", while_a_slot_is_read}};

}  // namespace
}  // namespace tide::test

int main(int argc, char** argv) { return tide::test::run_case(tide::test::kCases, argc, argv); }
