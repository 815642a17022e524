// The three collectives with a layout or splits, in every way that moves bytes: results and order.
// `test_cuda_collectives CASE` runs one case; exit code 0 is success.
#include "cuda_calls.h"

namespace tide::test {
namespace {

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

// Layers of many tiny parameters beside one that is not: those go by a kernel, together, and flags by few calls.
void tiny_parameters(int rank, int world, const std::string& directory, bool jitter) {
  FakeDriver& driver = FakeDriver::get();
  if (jitter) driver.jitter_us = 100;
  {
    CudaRank me(rank, world, directory);
    me.connect();
    std::vector<int64_t> numels(40);
    for (size_t i = 0; i < numels.size(); ++i) numels[i] = static_cast<int64_t>(i * i + 1);
    numels[7] = 150000;
    Gather gather{me, slot_layout(world, numels)};
    Scatter scatter{me, ElementType::bf16, ElementType::f32, 1.0, gradient_layout(world, numels)};
    for (int i = 0; i < 6; ++i) {
      gather.call(2 * i, i % 2 == 0);
      scatter.call(2 * i + 1);
    }
    gather.finish();
    scatter.finish();
    const int peers = world - 1, all = driver.small_copies;
    // Of the smallest gradients not every rank owns something.
    check(!driver.has_placing || all >= 6 * (39 + 35) * peers, "tiny pieces, by the kernel: " + std::to_string(all));
    int64_t recorded = 0;
    for (const Call& call : me.engine().recorder().recent()) recorded += call.kernel_copies;
    check(recorded == all, "each is recorded");
    check(driver.has_placing || all == 0, "no kernel, no copies by it");
    check((driver.word_batches > 0) == driver.has_words, "flags went together");
  }
  check_nothing_left();
}

void tiny_parameters() {
  for (const int world : {2, 4}) {
    run_ranks(world, [&](int rank, const std::string& directory) { tiny_parameters(rank, world, directory, true); });
  }
}

void tiny_parameters_in_one_queue() {
  run_ranks(3, [](int rank, const std::string& directory) {
    FakeDriver::get().merged = true;
    FakeDriver::get().has_words = false;
    tiny_parameters(rank, 3, directory, false);
  });
}

void tiny_parameters_without_kernels() {
  run_ranks(2, [](int rank, const std::string& directory) {
    FakeDriver::get().has_placing = false;
    FakeDriver::get().has_batches = false;
    tiny_parameters(rank, 2, directory, false);
  });
}

const std::map<std::string, void (*)()> kCases{{"all_gather", all_gather},
                                               {"all_gather_in_one_queue", all_gather_in_one_queue},
                                               {"all_to_all", all_to_all},
                                               {"all_to_all_in_one_queue", all_to_all_in_one_queue},
                                               {"all_to_all_of_other_splits", all_to_all_of_other_splits},
                                               {"all_to_all_without_kernels", all_to_all_without_kernels},
                                               {"all_to_all_without_staging", all_to_all_without_staging},
                                               {"reduce_scatter", reduce_scatter},
                                               {"reduce_scatter_in_one_queue", reduce_scatter_in_one_queue},
                                               {"tiny_parameters", tiny_parameters},
                                               {"tiny_parameters_in_one_queue", tiny_parameters_in_one_queue},
                                               {"tiny_parameters_without_kernels", tiny_parameters_without_kernels}};

}  // namespace
}  // namespace tide::test

int main(int argc, char** argv) { return tide::test::run_case(tide::test::kCases, argc, argv); }
