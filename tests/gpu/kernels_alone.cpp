// The CUDA kernels in one process, without torch and NCCL: what compute-sanitizer can look at (kernels_alone.py).
//
// Every result is compared with plain loops on the host, and the bytes around every output must stay as they were.
// Inputs end where their memory ends, so that a read behind the end is seen too.
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/accumulate_cuda.h"
#include "kernels/cast.h"
#include "kernels/place_cuda.h"
#include "kernels/small_copies_cuda.h"

namespace {

using tide::ElementType;

constexpr size_t kGuard = 64;  // bytes in front of and behind an output
constexpr unsigned char kMark = 0xA5;
int wrong = 0, cases = 0;

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  std::printf("%s: %s\n", call, cudaGetErrorString(status));
  std::exit(2);
}

using Bytes = std::vector<unsigned char>;

// Device memory that begins `over` bytes behind an aligned address.
class Memory {
 public:
  Memory(const Bytes& content, size_t over) : bytes_(content.size()), over_(over) {
    check(cudaMalloc(&base_, over + std::max<size_t>(bytes_, 1)), "cudaMalloc");
    if (bytes_ > 0) check(cudaMemcpy(get(), content.data(), bytes_, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  ~Memory() { cudaFree(base_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::byte* get() const { return static_cast<std::byte*>(base_) + over_; }
  Bytes read() const {
    Bytes content(bytes_);
    check(cudaMemcpy(content.data(), get(), bytes_, cudaMemcpyDeviceToHost), "cudaMemcpy");
    return content;
  }

 private:
  void* base_ = nullptr;
  size_t bytes_, over_;
};

// An output between guards; `over` is where its first byte lies.
class Output {
 public:
  Output(size_t bytes, size_t over) : memory_(Bytes(bytes + 2 * kGuard, kMark), over) {}
  std::byte* get() const { return memory_.get() + kGuard; }
  void expect(const Bytes& wanted, const std::string& what) const {
    Bytes all(kGuard, kMark);
    all.insert(all.end(), wanted.begin(), wanted.end());
    all.insert(all.end(), kGuard, kMark);
    const Bytes got = memory_.read();
    ++cases;
    size_t differ = 0, first = 0;
    for (size_t i = got.size(); i-- > 0;) {
      if (got[i] == all[i]) continue;
      ++differ;
      first = i;
    }
    if (differ == 0) return;
    ++wrong;
    std::printf("WRONG %s: %zu bytes differ, the first at %td of %zu\n", what.c_str(), differ,
                static_cast<std::ptrdiff_t>(first) - static_cast<std::ptrdiff_t>(kGuard), wanted.size());
  }

 private:
  Memory memory_;
};

struct Bf16 {
  uint16_t bits;
};

float widen(Bf16 v) {
  const uint32_t bits = static_cast<uint32_t>(v.bits) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}
template <typename T>
T widen(T v) {
  return v;
}

// To nearest, ties to even; finite values only.
Bf16 rounded(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
void narrow(float v, Bf16* to) { *to = rounded(v); }
template <typename T>
void narrow(T v, T* to) {
  *to = v;
}

std::mt19937 generator(7);

void random_value(float* to) {
  *to = std::ldexp(std::uniform_real_distribution<float>(-1, 1)(generator), static_cast<int>(generator() % 16) - 8);
}
void random_value(double* to) { *to = std::uniform_real_distribution<double>(-100, 100)(generator); }
void random_value(int32_t* to) { *to = static_cast<int32_t>(generator()); }
void random_value(int64_t* to) { *to = static_cast<int64_t>((uint64_t{generator()} << 32) | generator()); }
void random_value(Bf16* to) {
  float v;
  random_value(&v);
  *to = rounded(v);
}

template <typename T>
Bytes bytes_of(const std::vector<T>& values) {
  Bytes result(values.size() * sizeof(T));
  if (!result.empty()) std::memcpy(result.data(), values.data(), result.size());
  return result;
}

template <typename A>
A plus(A a, A b) {
  return a + b;
}
int32_t plus(int32_t a, int32_t b) { return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b)); }
int64_t plus(int64_t a, int64_t b) { return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b)); }

float times(float a, double s) { return a * static_cast<float>(s); }
double times(double a, double s) { return a * s; }
int32_t times(int32_t a, double) { return a; }
int64_t times(int64_t a, double) { return a; }

struct Layout {
  int ranks, own_rank;
  double scale;
  size_t over;  // elements by which own and output are off
  int ctas;
};

// One launch of pieces with these numbers of elements.
template <typename In, typename Out>
void accumulate(ElementType in, ElementType out, const std::vector<int64_t>& numels, const Layout& layout,
                cudaStream_t stream) {
  std::vector<std::unique_ptr<Memory>> inputs;
  std::vector<std::unique_ptr<Output>> outputs;
  std::vector<Bytes> wanted;
  std::vector<tide::AccumulateArgs> pieces;
  for (const int64_t numel : numels) {
    const auto n = static_cast<size_t>(numel);
    const size_t stride = (n * sizeof(In) + 63) / 64 * 64;
    std::vector<std::vector<In>> ranks(static_cast<size_t>(layout.ranks), std::vector<In>(n));
    for (auto& values : ranks) {
      for (In& value : values) random_value(&value);
    }
    Bytes staged;
    for (int r = 0; r < layout.ranks; ++r) {
      if (r == layout.own_rank) continue;
      staged.resize((staged.size() + stride - 1) / std::max<size_t>(stride, 1) * stride);
      const Bytes one = bytes_of(ranks[static_cast<size_t>(r)]);
      staged.insert(staged.end(), one.begin(), one.end());
    }
    std::vector<Out> sums(n);
    for (size_t i = 0; i < n; ++i) {
      auto sum = widen(ranks[0][i]);
      for (size_t r = 1; r < ranks.size(); ++r) sum = plus(sum, widen(ranks[r][i]));
      narrow(layout.scale == 1.0 ? sum : times(sum, layout.scale), &sums[i]);
    }
    wanted.push_back(bytes_of(sums));
    inputs.push_back(
        std::make_unique<Memory>(bytes_of(ranks[static_cast<size_t>(layout.own_rank)]), layout.over * sizeof(In)));
    inputs.push_back(std::make_unique<Memory>(staged, 0));
    outputs.push_back(std::make_unique<Output>(n * sizeof(Out), layout.over * sizeof(Out)));
    tide::AccumulateArgs args;
    args.own = inputs[inputs.size() - 2]->get();
    args.staged = inputs.back()->get();
    args.stride = static_cast<int64_t>(stride);
    args.own_rank = layout.own_rank;
    args.ranks = layout.ranks;
    args.out = outputs.back()->get();
    args.numel = numel;
    args.scale = layout.scale;
    pieces.push_back(args);
  }
  tide::accumulate_launch()(in, out, pieces, layout.ctas, stream);
  check(cudaStreamSynchronize(stream), "the accumulate kernel");
  for (size_t i = 0; i < pieces.size(); ++i) {
    outputs[i]->expect(wanted[i], std::string("accumulate ") + to_string(in) + " to " + to_string(out) + ", " +
                                      std::to_string(numels[i]) + " elements of " + std::to_string(layout.ranks) +
                                      " ranks, own " + std::to_string(layout.own_rank) + ", off by " +
                                      std::to_string(layout.over));
  }
}

template <typename In, typename Out>
void accumulate_all(ElementType in, ElementType out, cudaStream_t stream) {
  // Around a 16-byte load, a thread's unrolled loads and a block's share.
  const std::vector<int64_t> sizes = {1, 3, 7, 8, 9, 31, 1000, 16'383, 16'385, 40'001};
  for (const Layout& layout : {Layout{2, 0, 0.5, 0, 132}, Layout{2, 1, 1.0, 1, 132}, Layout{1, 0, 0.3, 0, 4},
                               Layout{3, 1, 0.3, 0, 1}, Layout{8, 7, 0.125, 0, 132}, Layout{4, 0, 1.0, 3, 16}}) {
    accumulate<In, Out>(in, out, sizes, layout, stream);
  }
  accumulate<In, Out>(in, out, std::vector<int64_t>(130, 5), Layout{2, 0, 0.5, 0, 132}, stream);  // three launches
}

void cast_all(cudaStream_t stream) {
  for (const size_t over : {size_t{0}, size_t{1}, size_t{2}}) {
    std::vector<int64_t> sizes = {1, 2, 3, 4, 5, 1023, 16'384, 16'387, 70'001};
    if (over == 0) sizes.resize(260, 6);  // three launches
    std::vector<std::unique_ptr<Memory>> inputs;
    std::vector<std::unique_ptr<Output>> outputs;
    std::vector<Bytes> wanted;
    std::vector<tide::Cast> casts;
    for (const int64_t numel : sizes) {
      const auto n = static_cast<size_t>(numel);
      std::vector<float> from(n);
      std::vector<Bf16> to(n);
      for (size_t i = 0; i < n; ++i) {
        random_value(&from[i]);
        to[i] = rounded(from[i]);
      }
      wanted.push_back(bytes_of(to));
      inputs.push_back(std::make_unique<Memory>(bytes_of(from), over * sizeof(float)));
      outputs.push_back(std::make_unique<Output>(n * sizeof(Bf16), over * sizeof(Bf16)));
      casts.push_back({outputs.back()->get(), inputs.back()->get(), numel});
    }
    tide::cast_launch()(casts, 132, stream);
    check(cudaStreamSynchronize(stream), "the cast kernel");
    for (size_t i = 0; i < sizes.size(); ++i) {
      outputs[i]->expect(wanted[i], "cast of " + std::to_string(sizes[i]) + ", off by " + std::to_string(over));
    }
  }
}

void place_all(const std::string& name, tide::PlaceLaunch launch, cudaStream_t stream) {
  std::vector<std::unique_ptr<Memory>> inputs;
  std::vector<std::unique_ptr<Output>> outputs;
  std::vector<Bytes> wanted;
  std::vector<std::string> names;
  std::vector<tide::Placement> placements;
  for (size_t to = 0; to < 16; to += 3) {
    for (const size_t from : {to, to + 8, to + 4, to + 2, to + 1}) {  // every unit that two addresses have in common
      for (const size_t bytes : {size_t{1}, size_t{15}, size_t{33}, size_t{20'003}, size_t{70'000}}) {
        Bytes content(bytes);
        for (unsigned char& b : content) b = static_cast<unsigned char>(generator());
        inputs.push_back(std::make_unique<Memory>(content, from));
        outputs.push_back(std::make_unique<Output>(bytes, to));
        wanted.push_back(std::move(content));
        names.push_back(name + " of " + std::to_string(bytes) + " bytes from +" + std::to_string(from) + " to +" +
                        std::to_string(to));
        placements.push_back({outputs.back()->get(), inputs.back()->get(), static_cast<int64_t>(bytes)});
      }
    }
  }
  launch(placements, 16, stream);
  check(cudaStreamSynchronize(stream), name.c_str());
  for (size_t i = 0; i < names.size(); ++i) outputs[i]->expect(wanted[i], names[i]);
}

// Rows at a pitch of either end; what lies between them stays.
void place_rows(cudaStream_t stream) {
  std::vector<std::unique_ptr<Memory>> inputs;
  std::vector<std::unique_ptr<Output>> outputs;
  std::vector<Bytes> wanted;
  std::vector<std::string> names;
  std::vector<tide::Placement> placements;
  for (const size_t width : {size_t{1}, size_t{6}, size_t{48}, size_t{262}, size_t{4096}}) {
    for (const size_t rows : {size_t{2}, size_t{5}, size_t{301}}) {
      for (const auto [to_gap, from_gap, over] :
           {std::array<size_t, 3>{0, 16, 0}, {32, 0, 0}, {8, 16, 8}, {3, 2, 1}, {0, 5, 4}}) {
        const size_t to_pitch = width + to_gap, from_pitch = width + from_gap;
        Bytes content(rows * from_pitch - from_gap), image(rows * to_pitch - to_gap, kMark);
        for (unsigned char& b : content) b = static_cast<unsigned char>(generator());
        for (size_t r = 0; r < rows; ++r) std::copy_n(&content[r * from_pitch], width, &image[r * to_pitch]);
        inputs.push_back(std::make_unique<Memory>(content, over));
        outputs.push_back(std::make_unique<Output>(image.size(), 0));
        wanted.push_back(std::move(image));
        names.push_back("place " + std::to_string(rows) + " rows of " + std::to_string(width) + " bytes, gaps of " +
                        std::to_string(from_gap) + " and " + std::to_string(to_gap) + ", off by " +
                        std::to_string(over));
        placements.push_back({outputs.back()->get(), inputs.back()->get(), static_cast<int64_t>(width),
                              static_cast<int64_t>(rows), static_cast<int64_t>(to_pitch),
                              static_cast<int64_t>(from_pitch)});
      }
    }
  }
  tide::place_launch()(placements, 16, stream);
  check(cudaStreamSynchronize(stream), "the placing kernel on rows");
  for (size_t i = 0; i < names.size(); ++i) outputs[i]->expect(wanted[i], names[i]);
}

}  // namespace

int main() {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  accumulate_all<Bf16, float>(ElementType::bf16, ElementType::f32, stream);
  accumulate_all<Bf16, Bf16>(ElementType::bf16, ElementType::bf16, stream);
  accumulate_all<float, float>(ElementType::f32, ElementType::f32, stream);
  accumulate_all<double, double>(ElementType::f64, ElementType::f64, stream);
  accumulate_all<int32_t, int32_t>(ElementType::i32, ElementType::i32, stream);
  accumulate_all<int64_t, int64_t>(ElementType::i64, ElementType::i64, stream);
  cast_all(stream);
  place_all("place", tide::place_launch(), stream);
  place_all("small copies", tide::small_copies_launch(), stream);
  place_rows(stream);
  check(cudaStreamDestroy(stream), "cudaStreamDestroy");
  std::printf("%d results, %d wrong\n", cases, wrong);
  return wrong == 0 ? 0 : 1;
}
