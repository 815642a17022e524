// fp32 to bf16, many pieces in one launch: arguments, kernel, launcher.
//
// It runs beside the compute of the layer before, so it is short: every thread keeps kUnroll 16-byte loads in flight,
// and memory decides the speed. Pieces that 16-byte loads cannot take, and ends, go element by element.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "cast.h"
#include "kernel_cuda.h"
#include "load_cuda.h"

namespace tide {

namespace {

constexpr int kThreads = 512;
constexpr int kUnroll = 8;
constexpr int kVector = 4;  // elements of a 16-byte load
constexpr int kMost = 128;  // pieces of one launch; they travel in its arguments

struct Args {
  int count;
  const float* from[kMost];
  __nv_bfloat16* to[kMost];
  long long numel[kMost];
};

__device__ inline uint2 narrow(float4 v) {
  const __nv_bfloat162 low = __floats2bfloat162_rn(v.x, v.y), high = __floats2bfloat162_rn(v.z, v.w);
  return make_uint2(*reinterpret_cast<const unsigned*>(&low), *reinterpret_cast<const unsigned*>(&high));
}

__device__ inline bool aligned(const Args& a, int piece) {
  return reinterpret_cast<uintptr_t>(a.from[piece]) % 16 == 0 && reinterpret_cast<uintptr_t>(a.to[piece]) % 8 == 0;
}

__global__ void __launch_bounds__(kThreads) cast_kernel(const __grid_constant__ Args a) {
  const long long first = thread_index<kThreads>();
  const long long step = thread_count<kThreads>();
  for (int piece = 0; piece < a.count; ++piece) {
    const long long vectors = aligned(a, piece) ? a.numel[piece] / kVector : 0;
    const auto* from = reinterpret_cast<const float4*>(a.from[piece]);
    auto* to = reinterpret_cast<uint2*>(a.to[piece]);
    for (long long base = first; base < vectors; base += step * kUnroll) {
      float4 loaded[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (base + u * step < vectors) loaded[u] = __ldcs(from + base + u * step);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (base + u * step < vectors) to[base + u * step] = narrow(loaded[u]);
      }
    }
    for (long long i = vectors * kVector + first; i < a.numel[piece]; i += step) {
      a.to[piece][i] = __float2bfloat16_rn(a.from[piece][i]);
    }
  }
}

void launch(const std::vector<Cast>& casts, int ctas, void* stream) {
  for (size_t first = 0; first < casts.size(); first += kMost) {
    Args args{};
    int64_t longest = 0;
    args.count = static_cast<int>(std::min<size_t>(casts.size() - first, kMost));
    for (int i = 0; i < args.count; ++i) {
      const Cast& c = casts[first + static_cast<size_t>(i)];
      args.from[i] = static_cast<const float*>(c.from);
      args.to[i] = static_cast<__nv_bfloat16*>(c.to);
      args.numel[i] = c.numel;
      longest = std::max(longest, c.numel);
    }
    constexpr int64_t kPerBlock = int64_t{kThreads} * kUnroll * kVector;
    const int64_t blocks = std::clamp<int64_t>((longest + kPerBlock - 1) / kPerBlock, 1, ctas);
    cast_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
    check_launch("cast");
  }
}

}  // namespace

CastLaunch cast_launch() { return launch; }

void load_cast_kernel() { load_kernel(cast_kernel, "cast"); }

}  // namespace tide
