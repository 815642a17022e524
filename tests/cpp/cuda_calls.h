// Calls of the three collectives on the fake device, each with what must come out of it in plain loops. Inputs are
// written and results are read by the device, in the order of the streams, never by the host.
#pragma once

#include <numeric>
#include <set>

#include "cuda_rank.h"

namespace tide::test {

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

inline std::shared_ptr<const ParameterLayout> slot_layout(int world, std::vector<int64_t> shards) {
  return std::make_shared<ParameterLayout>(world, std::move(shards), std::vector<int64_t>(), 256);
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

inline std::shared_ptr<const ParameterLayout> gradient_layout(int world, const std::vector<int64_t>& numels) {
  std::vector<int64_t> shards;
  for (const int64_t n : numels) shards.push_back((n + world - 1) / world);
  return std::make_shared<ParameterLayout>(world, shards, numels, 1);
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
inline std::vector<Splits> exchanges(int world) {
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

}  // namespace tide::test
