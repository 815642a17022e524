// All-to-alls of tensors with gaps, on the fake driver: a rank's tokens, cut by heads, go to where the output has gaps
// as well. `test_cuda_strided CASE` runs one case; exit code 0 is success.
#include <numeric>

#include "cuda_rank.h"

namespace tide::test {
namespace {

// Rank r holds tokens[r] tokens of all heads, [token, head, dim]; reader q gets heads[q] of them from each rank, in the
// order [rank, head, token, dim], every [dim] behind the one before and a gap.
struct Exchange {
  CudaRank& rank;
  std::vector<int64_t> tokens, heads;
  int64_t dim;
  bool strided_input, slots;
  std::vector<int64_t> gaps;  // by reader, in elements; 0: the output is contiguous
  std::shared_ptr<std::atomic<int>> wrong = std::make_shared<std::atomic<int>>(0);

  int64_t all_heads() const { return std::accumulate(heads.begin(), heads.end(), int64_t{0}); }
  int64_t all_tokens() const { return std::accumulate(tokens.begin(), tokens.end(), int64_t{0}); }
  int64_t at(int64_t i, const std::vector<int64_t>& of) const { return of[static_cast<size_t>(i)]; }
  int64_t first_head(int reader) const { return std::accumulate(heads.begin(), heads.begin() + reader, int64_t{0}); }
  // In this rank's input, which is [head, token, dim] where it is not strided.
  int64_t place(int64_t token, int64_t head) const {
    return (strided_input ? token * all_heads() + head : head * at(rank.rank(), tokens) + token) * dim;
  }

  Selection call(int number) {
    const int me = rank.rank();
    const int64_t mine = at(me, tokens), got = all_tokens() * at(me, heads), step = dim + at(me, gaps);
    auto input = std::make_shared<Words>(static_cast<size_t>(mine * all_heads() * dim));
    auto ordinary = std::make_shared<Words>(static_cast<size_t>(got * step));
    std::optional<Window> window;
    if (slots) window = rank.slot(1 << 20);  // collective
    auto* output =
        slots ? reinterpret_cast<uint16_t*>(rank.transport()->device_arena().address(*window)) : ordinary->data();
    FakeDriver::launch(rank.caller(), [=, *this] {
      (void)ordinary;  // also when the call raises
      for (int64_t t = 0; t < mine; ++t) {
        for (int64_t h = 0; h < all_heads(); ++h) {
          for (int64_t i = 0; i < dim; ++i) {
            (*input)[static_cast<size_t>(place(t, h) + i)] = value(me, (t * 1000 + h) * dim + i, number);
          }
        }
      }
      if (got > 0) std::memset(output, 0xA5, static_cast<size_t>(got * step * 2));
    });
    CollectiveCall call;
    Request& q = call.request = rank.request(Channel::all_to_all, ElementType::bf16, ElementType::bf16);
    q.numel = mine * all_heads() * dim;
    for (int peer = 0; peer < rank.world(); ++peer) {
      q.in_splits.push_back(mine * at(peer, heads) * dim);
      q.out_splits.push_back(at(peer, tokens) * at(me, heads) * dim);
    }
    if (strided_input && mine > 1) q.in_form = Strided{dim * 2, mine, dim * 2, all_heads() * dim * 2};
    if (step > dim && got > 1) q.out_form = Strided{step * 2, 1, dim * 2, dim * 2};
    q.output_in_arena = slots && got > 0;
    call.buffers.inputs = {reinterpret_cast<const std::byte*>(input->data())};
    call.buffers.output = reinterpret_cast<std::byte*>(output);
    call.output_bytes = got > 0 ? (got * step - at(me, gaps)) * 2 : 0;
    const Selection selection = rank.run(call);
    FakeDriver::launch(rank.caller(), [=, *this] {
      (void)input, (void)ordinary;
      const uint16_t* word = output;
      for (int writer = 0; writer < rank.world(); ++writer) {
        for (int64_t h = first_head(me); h < first_head(me) + at(me, heads); ++h) {
          for (int64_t t = 0; t < at(writer, tokens); ++t) {
            for (int64_t i = 0; i < dim; ++i) *wrong += *word++ != value(writer, (t * 1000 + h) * dim + i, number);
            for (int64_t i = dim; i < step; ++i) *wrong += *word++ != 0xA5A5;
          }
        }
      }
    });
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

// Gaps on some ranks only, odd rows and pitches, several chunks of a pair that end within rows, a rank without tokens
// and one without heads.
void exchange_many(int rank, int world, const std::string& directory) {
  {
    Settings settings;
    settings.staging_bytes = 64 << 10;
    CudaRank me(rank, world, directory, settings);
    me.connect();
    const auto n = static_cast<size_t>(world);
    std::vector<int64_t> even(n, 50), some(n, 70), heads(n, 4), fewer(n, 3), none(n, 0), gap(n, 24), odd(n, 3);
    some[0] = 0;
    some[1] = 173;
    fewer[n - 1] = 0;
    fewer[0] = 5;
    odd[1] = 0;
    int number = 0;
    for (const bool slots : {true, false}) {
      const Path path = slots ? Path::zero_copy : Path::staged;
      const char* reason = slots ? "every rank's output lies in the arena" : "through staging windows";
      for (const Exchange& exchange :
           {Exchange{me, even, heads, 64, true, slots, none}, Exchange{me, even, heads, 64, false, slots, gap},
            Exchange{me, even, heads, 64, true, slots, gap}, Exchange{me, some, fewer, 37, true, slots, none},
            Exchange{me, some, fewer, 37, true, slots, odd}, Exchange{me, some, fewer, 37, rank == 1, slots, odd}}) {
        Exchange one = exchange;
        for (int i = 0; i < 3; ++i) one.call(++number, path, reason);
        one.finish();
      }
    }
    check(me.transport()->device_arena().bytes_in_use() == 128 << 10, "only staging is in use");
  }
  check_nothing_left();
}

void exchange() {
  for (const int world : {2, 3}) {
    run_ranks(world, [&](int rank, const std::string& directory) {
      FakeDriver::get().jitter_us = 200;
      exchange_many(rank, world, directory);
      check(FakeDriver::get().copies_2d > 0, "rows went at a pitch");
      check(FakeDriver::get().placings > 0, "kernels copy within the device");
    });
  }
}

// Every stream of a rank in one queue, drivers without batches, builds without kernels.
void exchange_in_one_queue() {
  run_ranks(3, [](int rank, const std::string& directory) {
    FakeDriver::get().merged = true;
    FakeDriver::get().has_batches = false;
    FakeDriver::get().has_placing = false;
    exchange_many(rank, 3, directory);
    check(FakeDriver::get().placings == 0, "no kernels");
  });
}

// Copies within the device by its copy engine, on streams that nothing else puts in order.
void exchange_without_kernels() {
  run_ranks(2, [](int rank, const std::string& directory) {
    FakeDriver::get().jitter_us = 200;
    FakeDriver::get().has_placing = false;
    exchange_many(rank, 2, directory);
  });
}

// An even part is one 2-D copy, however many rows it has.
void one_copy_a_part() {
  run_ranks(3, [](int rank, const std::string& directory) {
    {
      CudaRank me(rank, 3, directory);
      me.connect();
      Exchange exchange{me, {500, 500, 500}, {1, 1, 1}, 128, true, true, {0, 0, 0}};
      exchange.call(1, Path::zero_copy, "every rank's output lies in the arena");
      exchange.finish();
      check(FakeDriver::get().copies_2d == 2, std::to_string(FakeDriver::get().copies_2d) + " copies");
      check(FakeDriver::get().placings == 1, "and a kernel for its own part");
    }
    check_nothing_left();
  });
}

// Rows that neither end can be cut into go through staging, on all ranks.
void rows_that_do_not_fit() {
  run_ranks(2, [](int rank, const std::string& directory) {
    {
      CudaRank me(rank, 2, directory);
      me.connect();
      Exchange exchange{me, {40, 40}, {2, 2}, 96, true, true, {0, 32}};
      // Rank 1 wants rows of two thirds as many bytes.
      CollectiveCall call;
      Request& q = call.request = me.request(Channel::all_to_all, ElementType::bf16, ElementType::bf16);
      Words input(40 * 4 * 96, static_cast<uint16_t>(rank + 1));
      const Window window = me.slot(1 << 20);
      auto* output = reinterpret_cast<uint16_t*>(me.transport()->device_arena().address(window));
      q.numel = 40 * 4 * 96;
      q.in_splits = q.out_splits = {40 * 2 * 96, 40 * 2 * 96};
      q.output_in_arena = true;
      if (rank == 0) q.in_form = Strided{96 * 2, 40, 96 * 2, 4 * 96 * 2};
      if (rank == 1) q.out_form = Strided{64 * 2 + 32, 1, 64 * 2, 64 * 2};
      call.buffers.inputs = {reinterpret_cast<const std::byte*>(input.data())};
      call.buffers.output = reinterpret_cast<std::byte*>(output);
      call.output_bytes = rank == 0 ? 40 * 4 * 96 * 2 : 240 * (64 * 2 + 32) - 32;
      const Selection selection = me.run(call);
      check(selection.path == Path::staged, selection.reason);
      check(selection.reason == "through staging windows: rows of 192 bytes into rows of 128, from rank 0 to rank 1",
            selection.reason);
      cuda::driver().stream_synchronize(me.caller());
      for (int64_t row = 0; row < 240; ++row) {
        for (int64_t i = 0; i < 64; ++i) {
          const int64_t at = row * (rank == 0 ? 64 : 80) + i;
          check(output[at] == (row < 120 ? 1 : 2), "row " + std::to_string(row));
        }
      }
      me.release(window);
      exchange.call(1, Path::zero_copy, "every rank's output lies in the arena");
      exchange.finish();
    }
    check_nothing_left();
  });
}

// A copy that the driver refuses is named, and poisons the group as any other.
void refused_copy() {
  run_ranks(2, [](int rank, const std::string& directory) {
    Settings settings;
    settings.on_timeout = [](const std::string&) {};
    CudaRank me(rank, 2, directory, settings);
    me.connect();
    if (rank == 0) FakeDriver::get().fails["copy_2d"] = 1;
    Exchange exchange{me, {40, 40}, {2, 2}, 64, true, false, {0, 0}};
    if (rank == 0) {
      const Error error = caught([&] { exchange.call(1); });
      check_contains(error.what(), "cuMemcpy2DAsync failed");
      check_contains(error.what(), "all_to_all #1");
    } else {
      try {
        exchange.call(1);  // on the device before rank 0 fails, or told already
      } catch (const Error& error) {
        check_contains(error.what(), "aborted");
      }
    }
    _exit(0);  // rank 1's device waits for what will not come
  });
}

const std::map<std::string, void (*)()> kCases{{"exchange", exchange},
                                               {"exchange_in_one_queue", exchange_in_one_queue},
                                               {"exchange_without_kernels", exchange_without_kernels},
                                               {"one_copy_a_part", one_copy_a_part},
                                               {"refused_copy", refused_copy},
                                               {"rows_that_do_not_fit", rows_that_do_not_fit}};

}  // namespace
}  // namespace tide::test

int main(int argc, char** argv) { return tide::test::run_case(tide::test::kCases, argc, argv); }
