// The CUDA transport and the engine on a fake driver and a fake NCCL, ranks as processes: results, order, memory.
// `test_cuda_transport CASE` runs one case; exit code 0 is success.
#include <numeric>
#include <set>

#include "cuda_rank.h"

namespace tide::test {
namespace {

// All-gathers into slots that are given back after each call, so that the next call meets them while peers may still
// be reading. Shards are put in place on one stream and results are read on another, never by the host.
struct Gather {
  CudaRank& rank;
  std::shared_ptr<const ParameterLayout> layout;
  std::shared_ptr<std::atomic<int>> wrong = std::make_shared<std::atomic<int>>(0);

  uint16_t* place(uint16_t* output, size_t parameter, int r) const {
    return output + layout->gathered_offset(parameter) + r * layout->shard_numel(parameter);
  }

  void call(int number, bool placed) {
    const Window window = rank.slot(layout->total_gathered_numel() * 2);
    std::byte* memory = rank.transport()->device_arena().address(window);
    auto* output = reinterpret_cast<uint16_t*>(memory);
    auto shard = std::make_shared<Words>(static_cast<size_t>(layout->total_shard_numel()));
    FakeDriver::launch(rank.copy_in(), [=, *this] {
      for (size_t p = 0; p < layout->parameters(); ++p) {
        for (int64_t i = 0; i < layout->shard_numel(p); ++i) {
          const int64_t at = layout->shard_offset(p) + i;
          (*shard)[static_cast<size_t>(at)] = value(rank.rank(), at, number);
          if (placed) place(output, p, rank.rank())[i] = value(rank.rank(), at, number);
        }
      }
    });
    const Selection selection = rank.run(rank.all_gather(layout, memory, placed ? nullptr : shard.get()));
    check(selection.path == Path::zero_copy, selection.reason);
    FakeDriver::launch(rank.caller(), [=, *this] {
      (void)shard;  // read until here
      for (int r = 0; r < rank.world(); ++r) {
        for (size_t p = 0; p < layout->parameters(); ++p) {
          for (int64_t i = 0; i < layout->shard_numel(p); ++i) {
            *wrong += place(output, p, r)[i] != value(r, layout->shard_offset(p) + i, number);
          }
        }
      }
    });
    rank.release(window);
  }

  void finish() {
    cuda::driver().stream_synchronize(rank.caller());
    check(*wrong == 0, std::to_string(*wrong) + " elements are wrong");
  }
};

std::shared_ptr<const ParameterLayout> slot_layout(int world, std::vector<int64_t> shards) {
  return std::make_shared<ParameterLayout>(world, std::move(shards), std::vector<int64_t>(), 256);
}

void gather_many(int rank, int world, const std::string& directory) {
  {
    CudaRank me(rank, world, directory);
    me.connect();
    int number = 0;
    for (const auto& shards :
         std::vector<std::vector<int64_t>>{{1}, {3, 1, 4097, 2}, {70000, 5}, {8, 8, 8, 8, 8, 8, 8}}) {
      Gather gather{me, slot_layout(world, shards)};
      for (int i = 0; i < 12; ++i) gather.call(++number, i % 3 != 0);
      gather.finish();
    }
    const auto transport = me.transport();
    check(transport->device_arena().bytes_in_use() == (2 << 20), "only staging is in use");
  }
  check_nothing_left();
}

void all_gather() {
  for (const int world : {2, 3}) {
    run_ranks(world, [&](int rank, const std::string& directory) {
      FakeDriver::get().jitter_us = 300;
      gather_many(rank, world, directory);
      check(FakeDriver::get().batches > 0, "copies went in batches");
    });
  }
}

// Drivers without batches; and every stream of a rank in one queue.
void all_gather_in_one_queue() {
  run_ranks(3, [](int rank, const std::string& directory) {
    FakeDriver::get().merged = true;
    FakeDriver::get().has_batches = false;
    gather_many(rank, 3, directory);
    check(FakeDriver::get().batches == 0, "no batches");
  });
}

// Gradients with padding on the last rank, in chunks that cut through parameters.
struct Scatter {
  CudaRank& rank;
  ElementType in, out;
  double scale;
  std::shared_ptr<const ParameterLayout> layout;
  std::shared_ptr<std::atomic<int>> wrong = std::make_shared<std::atomic<int>>(0);

  // Bytes of element i of parameter p of `r`'s gradients.
  float contribution(int r, size_t p, int64_t i, int number) const {
    return widen(value(r, static_cast<int64_t>(p) * 100000 + i, number));
  }
  void put(std::byte* to, int64_t i, ElementType type, float number) const {
    if (type == ElementType::bf16) {
      reinterpret_cast<uint16_t*>(to)[i] = narrow(number);
    } else {
      reinterpret_cast<float*>(to)[i] = number;
    }
  }

  void call(int number) {
    using Bytes = std::vector<std::byte>;
    auto gradients = std::make_shared<std::vector<Bytes>>();
    auto output = std::make_shared<Bytes>(static_cast<size_t>(layout->total_shard_numel() * element_size(out)));
    CollectiveCall call;
    Request& q = call.request = rank.request(Channel::reduce_scatter, in, out);
    for (size_t p = 0; p < layout->parameters(); ++p) {
      gradients->emplace_back(static_cast<size_t>(layout->numel(p) * element_size(in)));
      call.buffers.inputs.push_back(gradients->back().data());
    }
    for (size_t p = 0; p < layout->parameters(); ++p) call.buffers.inputs[p] = (*gradients)[p].data();
    FakeDriver::launch(rank.caller(), [=, *this] {
      for (size_t p = 0; p < layout->parameters(); ++p) {
        for (int64_t i = 0; i < layout->numel(p); ++i) {
          put((*gradients)[p].data(), i, in, contribution(rank.rank(), p, i, number));
        }
      }
    });
    q.numel = layout->total_shard_numel();
    q.layout = layout;
    q.separate_inputs = true;
    q.reduction = Reduction::sum;
    q.scale = scale;
    call.buffers.output = output->data();
    const Selection selection = rank.run(call);
    check(selection.path == Path::staged, selection.reason);
    FakeDriver::launch(rank.caller(), [=, *this] {
      (void)gradients;
      for (size_t p = 0; p < layout->parameters(); ++p) {
        for (int64_t i = 0; i < layout->shard_numel(p); ++i) {
          const int64_t at = rank.rank() * layout->shard_numel(p) + i;
          float sum = 0;
          for (int r = 0; r < rank.world() && at < layout->numel(p); ++r) {
            sum = r == 0 ? contribution(r, p, at, number) : sum + contribution(r, p, at, number);
          }
          Bytes expected(4);
          put(expected.data(), 0, out, sum * static_cast<float>(scale));
          const std::byte* got = output->data() + (layout->shard_offset(p) + i) * element_size(out);
          *wrong += std::memcmp(got, expected.data(), static_cast<size_t>(element_size(out))) != 0;
        }
      }
    });
  }

  void finish() {
    cuda::driver().stream_synchronize(rank.caller());
    check(*wrong == 0, std::to_string(*wrong) + " elements are wrong");
  }
};

std::shared_ptr<const ParameterLayout> gradient_layout(int world, const std::vector<int64_t>& numels) {
  std::vector<int64_t> shards;
  for (const int64_t n : numels) shards.push_back((n + world - 1) / world);
  return std::make_shared<ParameterLayout>(world, shards, numels, 1);
}

void scatter_many(int rank, int world, const std::string& directory) {
  {
    Settings settings;
    settings.staging_bytes = 64 << 10;  // several chunks a call
    CudaRank me(rank, world, directory, settings);
    me.connect();
    int number = 0;
    const std::pair<ElementType, ElementType> types[] = {{ElementType::bf16, ElementType::f32},
                                                         {ElementType::f32, ElementType::f32},
                                                         {ElementType::bf16, ElementType::bf16}};
    for (const auto& [in, out] : types) {
      for (const auto& numels : std::vector<std::vector<int64_t>>{{1}, {7, 30001, 2, 5003}, {90000}}) {
        Scatter scatter{me, in, out, 1.0 / world, gradient_layout(world, numels)};
        for (int i = 0; i < 4; ++i) scatter.call(++number);
        scatter.finish();
      }
    }
  }
  check_nothing_left();
}

void reduce_scatter() {
  for (const int world : {2, 3}) {
    run_ranks(world, [&](int rank, const std::string& directory) {
      FakeDriver::get().jitter_us = 200;
      scatter_many(rank, world, directory);
    });
  }
}

void reduce_scatter_in_one_queue() {
  run_ranks(3, [](int rank, const std::string& directory) {
    FakeDriver::get().merged = true;
    scatter_many(rank, 3, directory);
  });
}

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

using Splits = std::vector<std::vector<int64_t>>;  // elements that rank [r] sends to rank [q]

// All-to-alls of two-byte elements. Outputs lie in slots on the ranks of `slots`, in ordinary memory on the others.
struct Exchange {
  CudaRank& rank;
  Splits splits;
  std::set<int> slots;
  std::shared_ptr<std::atomic<int>> wrong = std::make_shared<std::atomic<int>>(0);

  static int64_t total(const std::vector<int64_t>& numbers) {
    return std::accumulate(numbers.begin(), numbers.end(), int64_t{0});
  }
  std::vector<int64_t> received(int reader) const {
    std::vector<int64_t> result;
    for (const auto& row : splits) result.push_back(row[static_cast<size_t>(reader)]);
    return result;
  }
  // Where in the input of `writer` the part for `reader` begins.
  int64_t begin(int writer, int reader) const {
    const auto& row = splits[static_cast<size_t>(writer)];
    return std::accumulate(row.begin(), row.begin() + reader, int64_t{0});
  }

  Selection call(int number) {
    const auto& sent = splits[static_cast<size_t>(rank.rank())];
    const auto got = received(rank.rank());
    const bool in_slot = slots.count(rank.rank()) != 0;
    auto input = std::make_shared<Words>(static_cast<size_t>(total(sent)));
    auto ordinary = std::make_shared<Words>(in_slot ? 0 : static_cast<size_t>(total(got)));
    std::optional<Window> window;
    if (!slots.empty()) window = rank.slot(1 << 20);  // collective
    std::byte* output =
        in_slot ? rank.transport()->device_arena().address(*window) : reinterpret_cast<std::byte*>(ordinary->data());
    FakeDriver::launch(rank.caller(), [=, *this] {
      (void)ordinary;  // also when the call raises
      for (size_t i = 0; i < input->size(); ++i) (*input)[i] = value(rank.rank(), static_cast<int64_t>(i), number);
      if (total(got) > 0) std::memset(output, 0xA5, static_cast<size_t>(total(got) * 2));
    });
    CollectiveCall call;
    Request& q = call.request = rank.request(Channel::all_to_all, ElementType::bf16, ElementType::bf16);
    q.numel = total(sent);
    q.in_splits = sent;
    q.out_splits = got;
    q.output_in_arena = in_slot && total(got) > 0;
    call.buffers.inputs = {reinterpret_cast<const std::byte*>(input->data())};
    call.buffers.output = output;
    call.output_bytes = total(got) * 2;
    const Selection selection = rank.run(call);
    if (selection.path != Path::inner) {
      FakeDriver::launch(rank.caller(), [=, *this] {
        (void)input, (void)ordinary;
        const auto* words = reinterpret_cast<const uint16_t*>(output);
        for (int writer = 0; writer < rank.world(); ++writer) {
          for (int64_t i = 0; i < got[static_cast<size_t>(writer)]; ++i) {
            *wrong += *words++ != value(writer, begin(writer, rank.rank()) + i, number);
          }
        }
      });
    }
    if (window) rank.release(*window);
    return selection;
  }

  void call(int number, Path path, const std::string& reason) {
    const Selection selection = call(number);
    check(selection.path == path, std::string(to_string(selection.path)) + ": " + selection.reason);
    check(selection.reason == reason, selection.reason);
  }

  void finish() {
    cuda::driver().stream_synchronize(rank.caller());
    check(*wrong == 0, std::to_string(*wrong) + " elements are wrong");
  }
};

// Even; the same but for what rank 0 sends to the last, so that others' places move and nothing else of theirs does;
// uneven, with up to six chunks of a pair, zero rows and a rank that receives nothing; one way only; nothing.
std::vector<Splits> exchanges(int world) {
  const auto n = static_cast<size_t>(world);
  Splits even(n, std::vector<int64_t>(n, 5000)), shifted = even, uneven = even, one_way = even, nothing = even;
  shifted[0][n - 1] += 77;
  for (size_t r = 0; r < n; ++r) {
    for (size_t q = 0; q < n; ++q) {
      uneven[r][q] = q == n - 1 ? 0 : static_cast<int64_t>((r * 17011 + q * 40503 + 8191) % 50000 / (r == q ? 7 : 1));
      one_way[r][q] = q > r ? 9 : 0;
      nothing[r][q] = 0;
    }
  }
  return {even, shifted, uneven, one_way, nothing, uneven};
}

void exchange_many(int rank, int world, const std::string& directory) {
  {
    Settings settings;
    settings.staging_bytes = 64 << 10;  // several chunks a call
    CudaRank me(rank, world, directory, settings);
    me.connect();
    const int64_t before = me.transport()->device_arena().bytes_committed();
    std::set<int> all, some;
    for (int r = 0; r < world; ++r) all.insert(r);
    for (int r = 1; r < world; ++r) some.insert(r);
    int number = 0;
    for (const Splits& splits : exchanges(world)) {
      const bool moves = splits != exchanges(world)[4];
      Exchange slots{me, splits, all};
      for (int i = 0; i < 4; ++i) {
        slots.call(++number, moves ? Path::zero_copy : Path::staged,
                   moves ? "every rank's output lies in the arena" : "through staging windows");
      }
      slots.finish();
    }
    for (const Splits& splits : exchanges(world)) {
      Exchange staged{me, splits, {}};
      for (int i = 0; i < 4; ++i) staged.call(++number, Path::staged, "through staging windows");
      staged.finish();
    }
    Exchange mixed{me, exchanges(world)[0], some};
    for (int i = 0; i < 4; ++i) {
      const std::string of = std::to_string(world) + " ranks";
      mixed.call(++number, Path::staged, "1 of " + of + " had no slot in the arena for the output");
    }
    mixed.finish();
    check(me.transport()->device_arena().bytes_committed() > before, "staging of its own");
    check(me.transport()->device_arena().bytes_in_use() == 128 << 10, "only staging is in use");
  }
  check_nothing_left();
}

void all_to_all() {
  for (const int world : {2, 3}) {
    run_ranks(world, [&](int rank, const std::string& directory) {
      FakeDriver::get().jitter_us = 200;
      exchange_many(rank, world, directory);
      check(FakeDriver::get().placings > 0, "kernels copy within the device");
    });
  }
}

// Every stream of a rank in one queue; and a build without kernels.
void all_to_all_in_one_queue() {
  run_ranks(3, [](int rank, const std::string& directory) {
    FakeDriver::get().merged = true;
    FakeDriver::get().has_placing = false;
    exchange_many(rank, 3, directory);
    check(FakeDriver::get().placings == 0, "no kernels");
  });
}

// Copies within the device by its copy engine, on streams that nothing else puts in order.
void all_to_all_without_kernels() {
  run_ranks(3, [](int rank, const std::string& directory) {
    FakeDriver::get().jitter_us = 200;
    FakeDriver::get().has_placing = false;
    exchange_many(rank, 3, directory);
    check(FakeDriver::get().placings == 0, "no kernels");
  });
}

// Splits that do not fit, also before there is staging: every rank hears of it, and the group goes on.
void all_to_all_of_other_splits() {
  run_ranks(2, [](int rank, const std::string& directory) {
    {
      CudaRank me(rank, 2, directory);
      me.connect();
      for (int number = 0; number < 2; ++number) {
        Exchange wrong{me, {{1, 2}, {rank == 0 ? 3 : 4, 5}}, {}};
        const Error error = caught([&] { wrong.call(number); });
        check(error.kind() == ErrorKind::usage, error.what());
        check_contains(error.what(), "split sizes do not match; rank 1 sends 4 elements to rank 0, which expects 3");
        Exchange right{me, {{1, 2}, {3, 4}}, {}};
        right.call(number, Path::staged, "through staging windows");
        right.finish();
      }
    }
    check_nothing_left();
  });
}

// Staging that one rank has no memory for: the call is the inner backend's on all; later ones find it.
void all_to_all_without_staging() {
  run_ranks(3, [](int rank, const std::string& directory) {
    {
      CudaRank me(rank, 3, directory);
      me.connect();
      if (rank == 1) FakeNccl::get().failing_allocations = {2};
      Exchange exchange{me, exchanges(3)[2], {}};
      const Selection selection = exchange.call(1);
      check(selection.path == Path::inner, selection.reason);
      check_contains(selection.reason, "no memory for staging: rank 1: ncclMemAlloc of 2 MiB failed");
      exchange.call(2, Path::staged, "through staging windows");
      exchange.finish();
    }
    check_nothing_left();
  });
}

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
        const Error error = caught([&] { transport->slot(64, me.caller(), within(1s), &why); });
        check_contains(error.what(), "before fork()");
      });
      check(wait_rank(child, 20s) == 0, "the child ends well");
      for (int i = 2; i < 5; ++i) gather.call(i, true);
      gather.finish();
    }
    check_nothing_left();
  });
}

const std::map<std::string, void (*)()> kCases{{"all_gather", all_gather},
                                               {"all_gather_in_one_queue", all_gather_in_one_queue},
                                               {"all_to_all", all_to_all},
                                               {"all_to_all_in_one_queue", all_to_all_in_one_queue},
                                               {"all_to_all_of_other_splits", all_to_all_of_other_splits},
                                               {"all_to_all_without_kernels", all_to_all_without_kernels},
                                               {"all_to_all_without_staging", all_to_all_without_staging},
                                               {"bad_call_of_one_rank", bad_call_of_one_rank},
                                               {"capture_elsewhere", capture_elsewhere},
                                               {"forked_child", forked_child},
                                               {"overlap", overlap},
                                               {"overlap_with_slot_reuse", overlap_with_slot_reuse},
                                               {"plain_bytes_differ", plain_bytes_differ},
                                               {"plain_calls", plain_calls},
                                               {"reduce_scatter", reduce_scatter},
                                               {"reduce_scatter_in_one_queue", reduce_scatter_in_one_queue},
                                               {"slot_reuse", slot_reuse},
                                               {"slot_reuse_behind_a_reader", slot_reuse_behind_a_reader},
                                               {"slot_reuse_differs", slot_reuse_differs},
                                               {"storage_outlives_group", storage_outlives_group},
                                               {"two_groups", two_groups},
                                               {"uneven_free_lists", uneven_free_lists}};

}  // namespace
}  // namespace tide::test

int main(int argc, char** argv) {
  int code = 0;
  tide::test::run_case(tide::test::kCases, argc, argv, &code);
  return code;
}
