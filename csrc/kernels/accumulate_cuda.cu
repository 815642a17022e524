// The reduction on a GPU: launch config, arguments, kernel, launcher.
//
// A chunk is read once and written once, so a block's speed is its bytes in flight: every thread issues kUnroll
// 16-byte loads per rank before it adds the first. Not bulk copies through shared memory (cp.async.bulk): beside GEMMs
// on two H200 they gave wrong values in a few 256-byte pieces, and for this no reason was found.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "accumulate_cuda.h"
#include "kernel_cuda.h"
#include "load_cuda.h"

namespace tide {

namespace {

constexpr int kThreads = 512;
constexpr int kUnroll = 4;
constexpr int kMost = 64;  // pieces of one launch; they travel in its arguments

struct Piece {
  const char* own;
  const char* staged;
  char* out;
  long long stride;
  long long numel;
};

struct Args {
  Piece pieces[kMost];
  int count;
  int own_rank;
  int ranks;
  double scale;
};

template <typename T>
struct Sum {
  using type = T;
};
template <>
struct Sum<__nv_bfloat16> {
  using type = float;
};

__device__ inline float widen(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ inline float widen(float v) { return v; }
__device__ inline double widen(double v) { return v; }
__device__ inline int widen(int v) { return v; }
__device__ inline long long widen(long long v) { return v; }

// Explicit roundings: no contraction into a fused multiply-add, so that CPU and GPU agree bit for bit.
__device__ inline float plus(float a, float b) { return __fadd_rn(a, b); }
__device__ inline double plus(double a, double b) { return __dadd_rn(a, b); }
__device__ inline int plus(int a, int b) {
  return static_cast<int>(static_cast<unsigned>(a) + static_cast<unsigned>(b));
}
__device__ inline long long plus(long long a, long long b) {
  return static_cast<long long>(static_cast<unsigned long long>(a) + static_cast<unsigned long long>(b));
}
__device__ inline float times(float a, double s) { return __fmul_rn(a, static_cast<float>(s)); }
__device__ inline double times(double a, double s) { return __dmul_rn(a, s); }
__device__ inline int times(int a, double) { return a; }
__device__ inline long long times(long long a, double) { return a; }

template <typename Out, typename A>
__device__ inline Out narrow(A v) {
  return static_cast<Out>(v);
}
template <>
__device__ inline __nv_bfloat16 narrow<__nv_bfloat16, float>(float v) {
  return __float2bfloat16_rn(v);
}

__device__ inline const char* source(const Args& a, const Piece& p, int rank) {
  if (rank == a.own_rank) return p.own;
  return p.staged + p.stride * (rank < a.own_rank ? rank : rank - 1);
}

// Whether 16-byte loads and stores can take the piece.
__host__ __device__ inline bool aligned(const Piece& p) {
  return (reinterpret_cast<uintptr_t>(p.own) | reinterpret_cast<uintptr_t>(p.staged) |
          reinterpret_cast<uintptr_t>(p.out) | static_cast<uintptr_t>(p.stride)) %
             16 ==
         0;
}

// One element per step; for ends and for pieces that 16-byte loads cannot take.
template <typename In, typename Out>
__device__ void one(const Args& a, const Piece& p, long long i) {
  typename Sum<In>::type sum = widen(reinterpret_cast<const In*>(source(a, p, 0))[i]);
  for (int r = 1; r < a.ranks; ++r) sum = plus(sum, widen(reinterpret_cast<const In*>(source(a, p, r))[i]));
  reinterpret_cast<Out*>(p.out)[i] = narrow<Out>(a.scale == 1.0 ? sum : times(sum, a.scale));
}

// The first `vectors` 16-byte loads of every rank.
template <typename In, typename Out>
__device__ void add_vectors(const Args& a, const Piece& p, long long vectors, long long first, long long step) {
  using S = typename Sum<In>::type;
  constexpr int kVector = 16 / sizeof(In);
  for (long long base = first; base < vectors; base += step * kUnroll) {
    S sum[kUnroll][kVector];
    for (int r = 0; r < a.ranks; ++r) {
      const uint4* from = reinterpret_cast<const uint4*>(source(a, p, r));
      uint4 loaded[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (base + u * step < vectors) loaded[u] = __ldcs(from + base + u * step);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const In* values = reinterpret_cast<const In*>(&loaded[u]);
#pragma unroll
        for (int e = 0; e < kVector; ++e) sum[u][e] = r == 0 ? widen(values[e]) : plus(sum[u][e], widen(values[e]));
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (base + u * step >= vectors) break;
      alignas(16) Out result[kVector];
#pragma unroll
      for (int e = 0; e < kVector; ++e) result[e] = narrow<Out>(a.scale == 1.0 ? sum[u][e] : times(sum[u][e], a.scale));
      uint4* to = reinterpret_cast<uint4*>(p.out + (base + u * step) * kVector * sizeof(Out));
#pragma unroll
      for (int w = 0; w < static_cast<int>(kVector * sizeof(Out) / 16); ++w) {
        __stcs(to + w, reinterpret_cast<const uint4*>(result)[w]);
      }
    }
  }
}

template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads) accumulate_kernel(const __grid_constant__ Args a) {
  constexpr int kVector = 16 / sizeof(In);
  const long long step = thread_count<kThreads>();
  const long long first = thread_index<kThreads>();
  for (int n = 0; n < a.count; ++n) {
    const Piece& p = a.pieces[n];
    const long long vectors = aligned(p) ? p.numel / kVector : 0;
    add_vectors<In, Out>(a, p, vectors, first, step);
    for (long long i = vectors * kVector + first; i < p.numel; i += step) one<In, Out>(a, p, i);
  }
}

template <typename In, typename Out>
void launch(const std::vector<AccumulateArgs>& pieces, int ctas, cudaStream_t stream) {
  for (size_t first = 0; first < pieces.size(); first += kMost) {
    Args args{};
    args.count = static_cast<int>(std::min<size_t>(pieces.size() - first, kMost));
    args.own_rank = pieces[first].own_rank;
    args.ranks = pieces[first].ranks;
    args.scale = pieces[first].scale;
    int64_t most = 1;  // blocks that have something to do
    for (int i = 0; i < args.count; ++i) {
      const AccumulateArgs& a = pieces[first + static_cast<size_t>(i)];
      Piece& p = args.pieces[i];
      p = {reinterpret_cast<const char*>(a.own), reinterpret_cast<const char*>(a.staged),
           reinterpret_cast<char*>(a.out), a.stride, a.numel};
      const int64_t per_block = static_cast<int64_t>(kThreads) * (aligned(p) ? kUnroll * (16 / sizeof(In)) : 1);
      most = std::max(most, (a.numel + per_block - 1) / per_block);
    }
    accumulate_kernel<In, Out><<<static_cast<unsigned>(std::min<int64_t>(most, ctas)), kThreads, 0, stream>>>(args);
    check_launch("accumulate");
  }
}

void dispatch(ElementType in, ElementType out, const std::vector<AccumulateArgs>& pieces, int ctas,
              void* stream_handle) {
  auto stream = static_cast<cudaStream_t>(stream_handle);
  if (in == ElementType::bf16 && out == ElementType::f32) return launch<__nv_bfloat16, float>(pieces, ctas, stream);
  if (in == out) {
    switch (in) {
      case ElementType::bf16:
        return launch<__nv_bfloat16, __nv_bfloat16>(pieces, ctas, stream);
      case ElementType::f32:
        return launch<float, float>(pieces, ctas, stream);
      case ElementType::f64:
        return launch<double, double>(pieces, ctas, stream);
      case ElementType::i32:
        return launch<int, int>(pieces, ctas, stream);
      case ElementType::i64:
        return launch<long long, long long>(pieces, ctas, stream);
      case ElementType::bytes:
        break;
    }
  }
  throw Error(ErrorKind::usage, std::string("tide has no reduction of ") + to_string(in) + " into " + to_string(out));
}

}  // namespace

AccumulateLaunch accumulate_launch() { return dispatch; }

void load_accumulate_kernels() {
  load_kernel(accumulate_kernel<__nv_bfloat16, float>, "accumulate");
  load_kernel(accumulate_kernel<__nv_bfloat16, __nv_bfloat16>, "accumulate");
  load_kernel(accumulate_kernel<float, float>, "accumulate");
  load_kernel(accumulate_kernel<double, double>, "accumulate");
  load_kernel(accumulate_kernel<int, int>, "accumulate");
  load_kernel(accumulate_kernel<long long, long long>, "accumulate");
}

}  // namespace tide
