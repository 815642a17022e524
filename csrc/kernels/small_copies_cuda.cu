// Small copies: arguments, kernel, launcher.
//
// A block takes whole pieces, for which all of its loads are under way at once. Writes to a peer are seen there when
// the flag is: the stream's write of a flag comes behind a barrier for the whole system.
#include <algorithm>

#include "kernel_cuda.h"
#include "load_cuda.h"
#include "small_copies_cuda.h"

namespace tide {

namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;
constexpr int kMost = 128;  // pieces of one launch; they travel in its arguments

struct Args {
  int count;
  char* to[kMost];
  const char* from[kMost];
  long long bytes[kMost];
};
static_assert(sizeof(Args) <= 4096);  // what a launch takes on every architecture and driver

template <typename Unit>
__device__ void copy_piece(char* to, const char* from, long long bytes) {
  constexpr long long kUnit = sizeof(Unit);
  const long long over = static_cast<long long>(reinterpret_cast<uintptr_t>(to) % kUnit);
  const long long head = min(bytes, over == 0 ? 0 : kUnit - over), units = (bytes - head) / kUnit;
  const long long tail = head + units * kUnit;
  auto* target = reinterpret_cast<Unit*>(to + head);
  const auto* source = reinterpret_cast<const Unit*>(from + head);
  for (long long base = threadIdx.x; base < units; base += kThreads * kUnroll) {
    Unit loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (base + u * kThreads < units) loaded[u] = source[base + u * kThreads];
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (base + u * kThreads < units) target[base + u * kThreads] = loaded[u];
    }
  }
  const long long i = threadIdx.x;
  if (i < head) to[i] = from[i];
  if (i < bytes - tail) to[tail + i] = from[tail + i];
}

__global__ void __launch_bounds__(kThreads) small_copies_kernel(const __grid_constant__ Args args) {
  for (int p = blockIdx.x; p < args.count; p += gridDim.x) {
    const auto apart = reinterpret_cast<uintptr_t>(args.to[p]) ^ reinterpret_cast<uintptr_t>(args.from[p]);
    if (apart % 16 == 0) {
      copy_piece<uint4>(args.to[p], args.from[p], args.bytes[p]);
    } else if (apart % 4 == 0) {
      copy_piece<unsigned>(args.to[p], args.from[p], args.bytes[p]);
    } else if (apart % 2 == 0) {
      copy_piece<unsigned short>(args.to[p], args.from[p], args.bytes[p]);
    } else {
      copy_piece<unsigned char>(args.to[p], args.from[p], args.bytes[p]);
    }
  }
}

void launch(const std::vector<Placement>& pieces, int ctas, void* stream) {
  for (size_t first = 0; first < pieces.size(); first += kMost) {
    Args args{};
    args.count = static_cast<int>(std::min<size_t>(pieces.size() - first, kMost));
    for (int i = 0; i < args.count; ++i) {
      const Placement& p = pieces[first + static_cast<size_t>(i)];
      args.to[i] = static_cast<char*>(p.to);
      args.from[i] = static_cast<const char*>(p.from);
      args.bytes[i] = p.bytes;
    }
    const auto blocks = static_cast<unsigned>(std::min(args.count, ctas));
    small_copies_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
    check_launch("small copies");
  }
}

}  // namespace

PlaceLaunch small_copies_launch() { return launch; }

void load_small_copies_kernel() { load_kernel(small_copies_kernel, "small copies"); }

}  // namespace tide
