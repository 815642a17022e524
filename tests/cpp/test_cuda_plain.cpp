// Calls without a layout: which of them are tide's, and their results.
// `test_cuda_plain CASE` runs one case; exit code 0 is success.
#include "cuda_rank.h"

namespace tide::test {
namespace {

// Calls without a layout: an all-gather of two-byte elements, a reduce-scatter of packed float32.
struct Plain {
  CudaRank& rank;
  std::shared_ptr<std::atomic<int>> wrong = std::make_shared<std::atomic<int>>(0);

  CollectiveCall gathering(int64_t numel, std::byte* output, const Words* shard) const {
    CollectiveCall call;
    Request& q = call.request = rank.request(Channel::all_gather, ElementType::bf16, ElementType::bf16);
    q.numel = numel;
    call.buffers.inputs = {shard ? reinterpret_cast<const std::byte*>(shard->data()) : nullptr};
    call.buffers.output = output;
    call.output_bytes = numel * rank.world() * 2;
    auto arena = rank.engine().arena_if_connected();
    q.output_in_arena = arena && arena->offset_of(output, call.output_bytes).has_value();
    return call;
  }
  CollectiveCall reducing(int64_t numel, float* output, const float* input) const {
    CollectiveCall call;
    Request& q = call.request = rank.request(Channel::reduce_scatter, ElementType::f32, ElementType::f32);
    q.numel = numel;
    q.reduction = Reduction::sum;
    call.buffers.inputs = {reinterpret_cast<const std::byte*>(input)};
    call.buffers.output = reinterpret_cast<std::byte*>(output);
    call.output_bytes = numel * 4;
    return call;
  }

  void gather(int64_t numel, int number) {
    const Window window = rank.slot(numel * rank.world() * 2);
    auto* output = reinterpret_cast<uint16_t*>(rank.transport()->device_arena().address(window));
    auto shard = std::make_shared<Words>(static_cast<size_t>(numel));
    FakeDriver::launch(rank.copy_in(), [=, *this] {
      for (int64_t i = 0; i < numel; ++i) (*shard)[static_cast<size_t>(i)] = value(rank.rank(), i, number);
    });
    const Selection selection = rank.run(gathering(numel, reinterpret_cast<std::byte*>(output), shard.get()));
    check(selection.path == Path::zero_copy, selection.reason);
    FakeDriver::launch(rank.caller(), [=, *this] {
      (void)shard;
      for (int64_t i = 0; i < numel * rank.world(); ++i) {
        *wrong += output[i] != value(static_cast<int>(i / numel), i % numel, number);
      }
    });
    rank.release(window);
  }

  void reduce(int64_t numel, int number) {
    auto input = std::make_shared<std::vector<float>>(static_cast<size_t>(numel * rank.world()));
    auto output = std::make_shared<std::vector<float>>(static_cast<size_t>(numel));
    FakeDriver::launch(rank.caller(), [=, *this] {
      for (size_t i = 0; i < input->size(); ++i)
        (*input)[i] = widen(value(rank.rank(), static_cast<int64_t>(i), number));
    });
    const Selection selection = rank.run(reducing(numel, output->data(), input->data()));
    check(selection.path == Path::staged && selection.reason == "packed input", selection.reason);
    FakeDriver::launch(rank.caller(), [=, *this] {
      (void)input;
      for (int64_t i = 0; i < numel; ++i) {
        float sum = widen(value(0, rank.rank() * numel + i, number));
        for (int r = 1; r < rank.world(); ++r) sum += widen(value(r, rank.rank() * numel + i, number));
        *wrong += (*output)[static_cast<size_t>(i)] != sum;
      }
    });
  }
};

void plain_calls() {
  run_ranks(3, [](int rank, const std::string& directory) {
    FakeDriver::get().jitter_us = 200;
    {
      Settings settings;
      settings.staging_bytes = 64 << 10;
      settings.plain_bytes = 6000;
      CudaRank me(rank, 3, directory, settings);
      Plain plain{me};
      Engine& engine = me.engine();
      std::vector<std::byte> ordinary(60000);
      const auto early = [&](const CollectiveCall& call, const std::string& inner_only = "") {
        const Selection selection = engine.preselect(call.request, inner_only);
        return selection.path == Path::inner ? selection.reason : std::string();
      };
      // What nccl is left costs neither agreement nor, before the first call, a connection.
      const std::string small = "a plain CUDA call of fewer than 6000 bytes (TIDE_CUDA_PLAIN_BYTES)";
      const std::string no_slots = "a plain CUDA all-gather, and no memory for outputs was taken from the group";
      const CollectiveCall gathering = plain.gathering(1000, ordinary.data(), nullptr);
      check(early(plain.gathering(999, ordinary.data(), nullptr)) == small, "small all-gather");
      check(early(gathering) == no_slots, "no slots");
      check(early(plain.reducing(499, nullptr, nullptr)) == small, "small reduce-scatter");
      check(early(plain.reducing(500, nullptr, nullptr)).empty(), "large reduce-scatter");
      check(early(plain.reducing(500, nullptr, nullptr), "captured") == "captured", "nccl only");
      CollectiveCall widening = plain.reducing(1, nullptr, nullptr);
      widening.request.in_type = ElementType::bf16;
      widening.request.itemsize = 2;
      check(early(widening).empty(), "bf16 to fp32 is always tide's");
      CollectiveCall exchange;
      exchange.request = me.request(Channel::all_to_all, ElementType::bytes, ElementType::bytes);
      const std::string ordinary_memory = "a CUDA all-to-all, and no memory for outputs was taken from the group";
      check(early(exchange) == ordinary_memory, "an all-to-all through staging");
      check(!engine.connected(), "not connected");

      me.connect();
      for (int number = 1; number <= 5; ++number) plain.reduce(number * 3001, number);
      engine.expect_plain_slots();
      check(early(gathering).empty() && early(exchange).empty(), "slots");
      for (int number = 6; number <= 10; ++number) plain.gather(number * 2001, number);
      // A rank whose output lies elsewhere: agreed on, and nccl's on every rank.
      const Window window = me.slot(6000);
      std::byte* slot = me.transport()->device_arena().address(window);
      Words shard(1000);
      const Selection selection = me.run(plain.gathering(1000, rank == 1 ? ordinary.data() : slot, &shard));
      check(selection.path == Path::inner, selection.reason);
      check(selection.reason == "a rank had no slot in the arena for the output", selection.reason);
      me.release(window);
      plain.gather(1000, 11);
      cuda::driver().stream_synchronize(me.caller());
      check(*plain.wrong == 0, std::to_string(*plain.wrong) + " elements are wrong");
    }
    check_nothing_left();
  });
}

// Ranks that leave calls of different sizes to nccl hear of it at the first call at which they meet.
void plain_bytes_differ() {
  run_ranks(2, [](int rank, const std::string& directory) {
    {
      Settings settings;
      settings.plain_bytes = rank == 0 ? 4096 : 8192;
      CudaRank me(rank, 2, directory, settings);
      me.connect();
      std::vector<float> input(8192), output(4096);
      const Plain plain{me};
      const Error error = caught([&] { me.run(plain.reducing(4096, output.data(), input.data())); });
      check(error.kind() == ErrorKind::usage, error.what());
      check_contains(error.what(), "got fewer than 4096 bytes on rank 0 and 8192 on rank 1, expected the same");
    }
    check_nothing_left();
  });
}

const std::map<std::string, void (*)()> kCases{{"plain_bytes_differ", plain_bytes_differ},
                                               {"plain_calls", plain_calls}};

}  // namespace
}  // namespace tide::test

int main(int argc, char** argv) { return tide::test::run_case(tide::test::kCases, argc, argv); }
