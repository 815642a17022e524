// Memory of a CUDA group: slots that are given back and used again, staging in them, free lists that differ.
// `test_cuda_slots CASE` runs one case; exit code 0 is success.
#include "cuda_calls.h"

namespace tide::test {
namespace {

// Staging lies in slots that were given back. A rank that has none makes all get a segment for it.
void slot_reuse() {
  run_ranks(3, [](int rank, const std::string& directory) {
    FakeDriver::get().jitter_us = 300;
    {
      Settings settings;
      settings.staging_bytes = 64 << 10;
      settings.slot_reuse = true;
      CudaRank me(rank, 3, directory, settings);
      me.connect();
      auto& arena = me.transport()->device_arena();
      check(arena.bytes_committed() == 0, "no segment for staging");
      Gather gather{me, slot_layout(3, {300000})};
      Scatter scatter{me, ElementType::bf16, ElementType::f32, 1.0, gradient_layout(3, {90000})};
      Exchange exchange{me, exchanges(3)[2], {}};
      gather.call(1, true);
      const int64_t slots = arena.bytes_committed();
      for (int i = 2; i < 12; ++i) {
        scatter.call(i);
        gather.call(i, true);
        exchange.call(i, Path::staged, "through staging windows");
      }
      check(arena.bytes_committed() == slots && arena.bytes_in_use() == 0, "staging took what the slots left");

      std::optional<Window> kept;
      if (rank == 1) {
        std::string why;
        kept = arena.acquire(slots, &why);  // no room left, on this rank alone
        check(kept.has_value(), why);
      }
      for (int i = 12; i < 16; ++i) scatter.call(i);
      check(arena.bytes_committed() == slots + (2 << 20), "one segment more, on every rank");
      check(me.transport()->provided(Channel::reduce_scatter), "for reduce-scatter");
      check(!me.transport()->provided(Channel::all_to_all), "and for nothing else");
      if (kept) arena.release(*kept);
      gather.call(16, true);
      gather.finish();
      scatter.finish();
      exchange.finish();
    }
    check_nothing_left();
  });
}

// A slot is given back while a stream, which nothing else is ordered behind, still reads it: staging that takes its
// place waits for that, and so do the peers that write it.
void slot_reuse_behind_a_reader() {
  run_ranks(2, [](int rank, const std::string& directory) {
    {
      Settings settings;
      settings.staging_bytes = 64 << 10;
      settings.slot_reuse = true;
      CudaRank me(rank, 2, directory, settings);
      me.connect();
      auto& arena = me.transport()->device_arena();
      cuda::Stream reader = nullptr;
      cuda::check(cuda::driver().stream_create(&reader, 1, 0), "stream");
      const auto layout = slot_layout(2, {500000});
      Scatter scatter{me, ElementType::bf16, ElementType::f32, 1.0, gradient_layout(2, {90000})};
      std::atomic<int> wrong{0};
      for (int number = 1; number <= 3; ++number) {
        const Window window = me.slot(layout->total_gathered_numel() * 2);
        auto* words = reinterpret_cast<uint16_t*>(arena.address(window));
        FakeDriver::launch(me.copy_in(), [=] {
          for (int64_t i = 0; i < 500000; ++i) words[rank * 500000 + i] = value(rank, i, number);
        });
        me.run(me.all_gather(layout, reinterpret_cast<std::byte*>(words), nullptr));
        join(me.caller(), reader);
        FakeDriver::launch(reader, [&wrong, words, number] {
          std::this_thread::sleep_for(200ms);
          for (int64_t i = 0; i < 1000000; ++i)
            wrong += words[i] != value(static_cast<int>(i / 500000), i % 500000, number);
        });
        me.release(window, reader);
        scatter.call(number);
        cuda::driver().stream_synchronize(reader);
      }
      scatter.finish();
      check(wrong == 0, std::to_string(wrong) + " elements were overwritten under the reader");
      cuda::driver().stream_destroy(reader);
    }
    check_nothing_left();
  });
}

// The caller's stream is the default one, whose handle is null: it waits for the reader of what had the room before.
void slot_on_the_default_stream() {
  run_ranks(2, [](int rank, const std::string& directory) {
    {
      CudaRank me(rank, 2, directory);
      me.connect();
      const Window first = me.slot(4096);
      std::atomic<bool> read{false}, early{false};
      FakeDriver::launch(me.caller(), [&] {
        std::this_thread::sleep_for(200ms);
        read = true;
      });
      me.release(first);
      std::string why;
      std::optional<Window> second;
      me.engine().guarded("slot", [&] {
        second = me.transport()->slot(4096, cuda::kNoParameters, /*stream=*/nullptr, within(20s), &why);
      });
      check(second.has_value() && second->offset == first.offset, "the same room " + why);
      FakeDriver::launch(nullptr, [&] { early = !read; });
      cuda::driver().stream_synchronize(nullptr);
      check(!early, "the default stream ran on while the slot was read");
      me.release(*second);
    }
    check_nothing_left();
  });
}

void slot_reuse_differs() {
  run_ranks(3, [](int rank, const std::string& directory) {
    {
      Settings settings;
      settings.slot_reuse = rank == 2;
      CudaRank me(rank, 3, directory, settings);
      me.engine().connect();
      const auto [shared, why] = me.engine().shared_memory();
      check(!shared, "not connected");
      check_contains(why, "got TIDE_SLOT_REUSE=0 on rank 0 and 1 on rank 2, expected the same on every rank");
    }
    check_nothing_left();
  });
}

// Storages may outlive their group: the memory goes with the last of them, and can be read until then.
void storage_outlives_group() {
  run_ranks(2, [](int rank, const std::string& directory) {
    std::shared_ptr<cuda::CudaTransport> transport;
    {
      CudaRank me(rank, 2, directory);
      me.connect();
      const Window window = me.slot(5 << 20);
      transport = me.transport();
      std::byte* memory = transport->device_arena().address(window);
      FakeDriver::launch(me.caller(), [memory] { memory[(5 << 20) - 1] = std::byte{7}; });
      me.engine().shutdown();
      check(FakeNccl::get().windows == 0 && FakeNccl::get().communicators == 0, "windows and communicator are gone");
      check(FakeNccl::get().allocations == 2, "memory is still there");
      cuda::Event last_use = nullptr;
      cuda::driver().event_create(&last_use, 0);
      cuda::driver().event_record(last_use, me.caller());
      transport->note_use(Channel::all_gather, window);
      transport->device_arena().release_behind(window, last_use, nullptr);
      cuda::driver().event_synchronize(last_use);
      check(memory[(5 << 20) - 1] == std::byte{7}, "the memory can be read");
      transport.reset();
    }
    check_nothing_left();
  });
}

// Reshard is a rank's own business, so free lists differ: whoever has no room makes all grow, and offsets may differ.
void uneven_free_lists() {
  run_ranks(3, [](int rank, const std::string& directory) {
    {
      CudaRank me(rank, 3, directory);
      me.connect();
      std::vector<Window> kept;
      Gather gather{me, slot_layout(3, {5000, 11})};
      for (int i = 1; i <= 12; ++i) {
        if (i % 3 == rank) kept.push_back(me.slot(400000));
        if (i % 3 != rank) me.release(me.slot(400000));
        gather.call(i, true);
      }
      gather.finish();
      for (const Window& window : kept) me.release(window);
    }
    check_nothing_left();
  });
}

// Layers of compute, each with the slot of its parameters, which the host gives back long before the device has read it
// where it computes for long. The layers are of `groups` parameter groups in turn. Offsets of the slots, and how many
// gathers after the first began while the compute before them ran.
struct Layers {
  std::vector<int64_t> offsets;
  int overlapped = 0, wrong = 0;
};

Layers run_layers(CudaRank& me, int count, int64_t numel, int groups, std::chrono::milliseconds compute = 100ms) {
  Layers layers;
  auto computed = std::make_shared<std::atomic<int>>(0), overlapped = std::make_shared<std::atomic<int>>(0),
       wrong = std::make_shared<std::atomic<int>>(0);
  const auto layout = slot_layout(2, {numel});
  for (int layer = 1; layer <= count; ++layer) {
    std::string why;
    const auto window =
        me.slot(layout->total_gathered_numel() * 2, &why, static_cast<cuda::ParameterGroup>(1 + layer % groups));
    check(window.has_value(), why);
    layers.offsets.push_back(window->offset);
    auto* words = reinterpret_cast<uint16_t*>(me.transport()->device_arena().address(*window));
    const int rank = me.rank();
    FakeDriver::launch(me.copy_in(), [=] {
      *overlapped += layer > 1 && *computed < layer - 1;
      for (int64_t i = 0; i < numel; ++i) words[rank * numel + i] = value(rank, i, layer);
    });
    me.run(me.all_gather(layout, reinterpret_cast<std::byte*>(words), nullptr));
    FakeDriver::launch(me.caller(), [=] {
      std::this_thread::sleep_for(compute);
      for (int64_t i = 0; i < 2 * numel; ++i)
        *wrong += words[i] != value(static_cast<int>(i / numel), i % numel, layer);
      *computed = layer;
    });
    me.release(*window);
  }
  cuda::driver().stream_synchronize(me.caller());
  layers.overlapped = *overlapped;
  layers.wrong = *wrong;
  return layers;
}

// The gather of a layer overlaps the compute of the one before: two slots take turns, in whatever order they were made.
void slots_take_turns() {
  run_ranks(2, [](int rank, const std::string& directory) {
    {
      CudaRank me(rank, 2, directory);
      me.connect();
      auto& arena = me.transport()->device_arena();
      const int64_t before = arena.bytes_committed();
      const Layers layers = run_layers(me, 6, 300000, 6);  // a segment each
      check(layers.wrong == 0, std::to_string(layers.wrong) + " elements are wrong");
      check(layers.overlapped == 5, "overlapped " + std::to_string(layers.overlapped) + " of 5");
      for (size_t i = 2; i < layers.offsets.size(); ++i) {
        check(layers.offsets[i] == layers.offsets[i - 2] && layers.offsets[i] != layers.offsets[i - 1], "by turns");
      }
      check(arena.bytes_committed() == before + 2 * (2 << 20), "two slots");
      const Window lowest = me.slot(1 << 20);
      check(lowest.offset == std::min(layers.offsets[0], layers.offsets[1]), "not by turns: anything else");
      me.release(lowest);
      const Layers small = run_layers(me, 5, 30000, 5);
      check(small.wrong == 0, std::to_string(small.wrong) + " elements are wrong");
      check(small.overlapped == 4, "overlapped " + std::to_string(small.overlapped) + " of 4");
      check(arena.bytes_committed() == before + 2 * (2 << 20), "within the room that is there");
    }
    check_nothing_left();
  });
}

// Only one rank's device is behind: all ranks get the second slot, at the same offset.
void slots_take_turns_behind_one_rank() {
  run_ranks(2, [](int rank, const std::string& directory) {
    {
      CudaRank me(rank, 2, directory);
      me.connect();
      const Layers layers = run_layers(me, 6, 300000, 6, rank == 0 ? 100ms : 0ms);
      check(layers.wrong == 0, std::to_string(layers.wrong) + " elements are wrong");
      check(rank == 1 || layers.overlapped == 5, "overlapped " + std::to_string(layers.overlapped) + " of 5");
      const int64_t segment = int64_t{1} << cuda::kSegmentShift;  // of staging, the first slot, the second
      for (size_t i = 0; i < layers.offsets.size(); ++i) {
        const int64_t expected = static_cast<int64_t>(1 + i % 2) * segment;
        check(layers.offsets[i] == expected, "slot " + std::to_string(i) + " at " + std::to_string(layers.offsets[i]));
      }
    }
    check_nothing_left();
  });
}

// Parameters that are gathered again and again with none of another group between: a second slot would only take room.
void one_group_of_parameters_has_one_slot() {
  run_ranks(2, [](int rank, const std::string& directory) {
    {
      CudaRank me(rank, 2, directory);
      me.connect();
      const int64_t before = me.transport()->device_arena().bytes_committed();
      const Layers layers = run_layers(me, 4, 300000, 1);
      check(layers.wrong == 0, std::to_string(layers.wrong) + " elements are wrong");
      for (const int64_t offset : layers.offsets) check(offset == layers.offsets[0], "always the same");
      check(me.transport()->device_arena().bytes_committed() == before + (2 << 20), "one slot");
    }
    check_nothing_left();
  });
}

void no_memory_for_a_second_slot() {
  run_ranks(2, [](int rank, const std::string& directory) {
    {
      auto told = std::make_shared<std::vector<std::string>>();
      Settings settings;
      settings.on_one_slot = [told](const std::string& text) { told->push_back(text); };
      if (rank == 1) FakeNccl::get().failing_allocations = {3};  // behind staging and the first slot
      CudaRank me(rank, 2, directory, settings);
      me.connect();
      const Layers layers = run_layers(me, 4, 300000, 4);
      check(layers.wrong == 0, std::to_string(layers.wrong) + " elements are wrong");
      check(layers.overlapped == 0, "one slot: nothing overlaps");
      for (const int64_t offset : layers.offsets) check(offset == layers.offsets[0], "always the same");
      check(told->size() == 1, "told " + std::to_string(told->size()) + " times");
      check_contains(told->at(0), "slot]: no memory for a second slot: ");
      check_contains(told->at(0), "rank 1: ncclMemAlloc");
      check(FakeNccl::get().tried_allocations == 3, "tried once");
    }
    check_nothing_left();
  });
}

const std::map<std::string, void (*)()> kCases{
    {"slot_on_the_default_stream", slot_on_the_default_stream},
    {"slot_reuse", slot_reuse},
    {"slots_take_turns", slots_take_turns},
    {"slots_take_turns_behind_one_rank", slots_take_turns_behind_one_rank},
    {"one_group_of_parameters_has_one_slot", one_group_of_parameters_has_one_slot},
    {"no_memory_for_a_second_slot", no_memory_for_a_second_slot},
    {"slot_reuse_behind_a_reader", slot_reuse_behind_a_reader},
    {"slot_reuse_differs", slot_reuse_differs},
    {"storage_outlives_group", storage_outlives_group},
    {"uneven_free_lists", uneven_free_lists}};

}  // namespace
}  // namespace tide::test

int main(int argc, char** argv) { return tide::test::run_case(tide::test::kCases, argc, argv); }
