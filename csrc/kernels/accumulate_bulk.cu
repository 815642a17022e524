// bf16 into fp32 by bulk copies, for sm_90 and newer: what FSDP2's reduce-scatter adds.
//
// A block is one producer thread that keeps kRing bulk loads of 16 KiB in flight and eight warps that add. Loads come
// in the order (tile, rank); the adders hold the running sums of a tile in registers while the ranks' pieces arrive
// one after another, so the ring's depth does not depend on the number of ranks. A finished tile leaves by a bulk
// store while the next is being added. Bytes in flight decide the speed of a block, hence 128 KiB of ring.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "accumulate_bulk.h"
#include "ptx.cuh"

namespace tide {

namespace {

constexpr int kTile = 8192;  // elements
constexpr int kRing = 8;     // loads in flight
constexpr int kAdders = 256;
constexpr int kThreads = kAdders + 32;
constexpr int kVector = 8;                                // elements of a 16-byte load
constexpr int kPerThread = kTile / kVector / kAdders;     // vectors of a tile that one thread adds
constexpr uint32_t kLoadBytes = kTile * sizeof(__nv_bfloat16);
constexpr uint32_t kStoreBytes = kTile * sizeof(float);
constexpr uint32_t kSharedBytes = kRing * kLoadBytes + 2 * kStoreBytes;

struct Args {
  const char* own;
  const char* staged;
  long long stride;
  int own_rank, ranks;
  float* out;
  long long numel;
  float scale;
  bool scaled;
};

__device__ inline const __nv_bfloat16* source(const Args& a, int rank) {
  const char* p = rank == a.own_rank ? a.own : a.staged + a.stride * (rank < a.own_rank ? rank : rank - 1);
  return reinterpret_cast<const __nv_bfloat16*>(p);
}

[[maybe_unused]] __device__ void produce(const Args& a, long long tiles, unsigned char* ring, uint64_t* full, uint64_t* empty) {
  int load = 0;
  for (long long tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    for (int rank = 0; rank < a.ranks; ++rank, ++load) {
      const int slot = load % kRing;
      if (load >= kRing) ptx::wait(&empty[slot], (load / kRing - 1) & 1);
      ptx::arrive_expecting(&full[slot], kLoadBytes);
      ptx::bulk_load(ring + slot * kLoadBytes, source(a, rank) + tile * kTile, kLoadBytes, &full[slot]);
    }
  }
}

[[maybe_unused]] __device__ void add(const Args& a, long long tiles, const unsigned char* ring, unsigned char* results, uint64_t* full,
                    uint64_t* empty) {
  int load = 0, turn = 0;
  for (long long tile = blockIdx.x; tile < tiles; tile += gridDim.x, ++turn) {
    float sum[kPerThread][kVector];
    for (int rank = 0; rank < a.ranks; ++rank, ++load) {
      const int slot = load % kRing;
      ptx::wait(&full[slot], (load / kRing) & 1);
      const uint4* vectors = reinterpret_cast<const uint4*>(ring + slot * kLoadBytes);
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        const uint4 raw = vectors[threadIdx.x + i * kAdders];
        const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&raw);
#pragma unroll
        for (int p = 0; p < kVector / 2; ++p) {
          const float2 value = __bfloat1622float2(pairs[p]);
          sum[i][2 * p] = rank == 0 ? value.x : __fadd_rn(sum[i][2 * p], value.x);
          sum[i][2 * p + 1] = rank == 0 ? value.y : __fadd_rn(sum[i][2 * p + 1], value.y);
        }
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::arrive(&empty[slot]);
    }
    float4* result = reinterpret_cast<float4*>(results + (turn & 1) * kStoreBytes);
    // The store before last must have read this half of the results.
    if (threadIdx.x == 0) ptx::bulk_wait_read<1>();
    ptx::sync<1, kAdders>();
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      float* s = sum[i];
      if (a.scaled) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) s[e] = __fmul_rn(s[e], a.scale);
      }
      const int at = 2 * (threadIdx.x + i * kAdders);
      result[at] = make_float4(s[0], s[1], s[2], s[3]);
      result[at + 1] = make_float4(s[4], s[5], s[6], s[7]);
    }
    ptx::bulk_fence();
    ptx::sync<1, kAdders>();
    if (threadIdx.x == 0) {
      ptx::bulk_store(a.out + tile * kTile, result, kStoreBytes);
      ptx::bulk_commit();
    }
  }
  if (threadIdx.x == 0) ptx::bulk_wait<0>();
}

// What is left behind the last whole tile.
[[maybe_unused]] __device__ void add_tail(const Args& a, long long from) {
  for (long long i = from + threadIdx.x; i < a.numel; i += kThreads) {
    float sum = __bfloat162float(source(a, 0)[i]);
    for (int rank = 1; rank < a.ranks; ++rank) sum = __fadd_rn(sum, __bfloat162float(source(a, rank)[i]));
    a.out[i] = a.scaled ? __fmul_rn(sum, a.scale) : sum;
  }
}

__global__ void __launch_bounds__(kThreads) accumulate_bulk_kernel(Args a) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ uint64_t full[kRing], empty[kRing];
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kRing; ++slot) {
      ptx::barrier_init(&full[slot], 1);
      ptx::barrier_init(&empty[slot], kAdders / 32);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  const long long tiles = a.numel / kTile;
  if (threadIdx.x >= kAdders) {
    if (threadIdx.x == kAdders) produce(a, tiles, shared, full, empty);
  } else {
    add(a, tiles, shared, shared + kRing * kLoadBytes, full, empty);
  }
  if (blockIdx.x == gridDim.x - 1) add_tail(a, tiles * kTile);
#endif
}

// Whether the current device has bulk copies, and the kernel its shared memory. Asked once per device.
bool able() {
  static int known[64] = {};  // 0: not asked, 1: yes, 2: no; a race asks twice and writes the same
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= 64) return false;
  if (known[device] == 0) {
    int major = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    const bool yes = major >= 9 && cudaFuncSetAttribute(accumulate_bulk_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                        kSharedBytes) == cudaSuccess;
    known[device] = yes ? 1 : 2;
  }
  return known[device] == 1;
}

}  // namespace

bool accumulate_bulk(const AccumulateArgs& a, int ctas, void* stream) {
  const auto bits = reinterpret_cast<uintptr_t>(a.own) | reinterpret_cast<uintptr_t>(a.staged) |
                    reinterpret_cast<uintptr_t>(a.out) | static_cast<uintptr_t>(a.stride);
  const int64_t tiles = a.numel / kTile;
  if (bits % 16 != 0 || tiles < 4 || !able()) return false;
  const Args args{reinterpret_cast<const char*>(a.own),
                  reinterpret_cast<const char*>(a.staged),
                  a.stride,
                  a.own_rank,
                  a.ranks,
                  reinterpret_cast<float*>(a.out),
                  a.numel,
                  static_cast<float>(a.scale),
                  a.scale != 1.0};
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(tiles, ctas));
  accumulate_bulk_kernel<<<blocks, kThreads, kSharedBytes, static_cast<cudaStream_t>(stream)>>>(args);
  return true;
}

}  // namespace tide
