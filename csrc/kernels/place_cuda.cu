// Copies within one GPU: arguments, kernel, launcher.
//
// Every block takes its share of every placement, in units of 16 bytes where the two addresses allow it and of what
// they have in common otherwise (rows at a pitch: what lengths and pitches have in common too). As in the additions,
// bytes in flight decide the speed of a block.
#include <cuda_runtime.h>

#include <algorithm>

#include "kernel_cuda.h"
#include "load_cuda.h"
#include "place_cuda.h"

namespace tide {

namespace {

constexpr int kThreads = 512;
constexpr int kUnroll = 4;
constexpr int kMost = 64;  // placements of one launch; they travel in its arguments

struct Args {
  int count;
  char* to[kMost];
  const char* from[kMost];
  long long bytes[kMost];  // of one row
  long long rows[kMost];
  long long to_pitch[kMost];
  long long from_pitch[kMost];
};
static_assert(sizeof(Args) <= 4096);  // what a launch takes on every architecture and driver

template <typename Unit>
__device__ void copy_units(char* to, const char* from, long long units) {
  auto* target = reinterpret_cast<Unit*>(to);
  const auto* source = reinterpret_cast<const Unit*>(from);
  const long long step = thread_count<kThreads>();
  for (long long base = thread_index<kThreads>(); base < units; base += step * kUnroll) {
    Unit loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (base + u * step < units) loaded[u] = __ldcs(source + base + u * step);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (base + u * step < units) __stcs(target + base + u * step, loaded[u]);
    }
  }
}

// Bytes up to the first address that is a multiple of the unit, units, and what is left.
template <typename Unit>
__device__ void copy_as(char* to, const char* from, long long bytes) {
  constexpr long long kUnit = sizeof(Unit);
  const long long over = static_cast<long long>(reinterpret_cast<uintptr_t>(to) % kUnit);
  const long long head = min(bytes, over == 0 ? 0 : kUnit - over), units = (bytes - head) / kUnit;
  copy_units<Unit>(to + head, from + head, units);
  const long long tail = head + units * kUnit;
  const long long i = thread_index<kThreads>();
  if (i < head) to[i] = from[i];
  if (i < bytes - tail) to[tail + i] = from[tail + i];
}

// Rows whose lengths, pitches and addresses are whole units.
template <typename Unit>
__device__ void copy_rows(const Args& args, int p) {
  const long long rows = args.rows[p], width = args.bytes[p] / static_cast<long long>(sizeof(Unit));
  const long long step_rows = thread_count<kThreads>() / width, step_units = thread_count<kThreads>() % width;
  long long row = thread_index<kThreads>() / width, unit = thread_index<kThreads>() % width;
  while (row < rows) {
    Unit loaded[kUnroll];
    Unit* target[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      target[u] = nullptr;
      if (row < rows) {
        target[u] = reinterpret_cast<Unit*>(args.to[p] + row * args.to_pitch[p]) + unit;
        loaded[u] = __ldcs(reinterpret_cast<const Unit*>(args.from[p] + row * args.from_pitch[p]) + unit);
      }
      row += step_rows;
      unit += step_units;
      if (unit >= width) {
        unit -= width;
        ++row;
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (target[u]) __stcs(target[u], loaded[u]);
    }
  }
}

__device__ void place_rows(const Args& args, int p) {
  const auto all = reinterpret_cast<uintptr_t>(args.to[p]) | reinterpret_cast<uintptr_t>(args.from[p]) |
                   static_cast<uintptr_t>(args.bytes[p] | args.to_pitch[p] | args.from_pitch[p]);
  if (all % 16 == 0) {
    copy_rows<uint4>(args, p);
  } else if (all % 8 == 0) {
    copy_rows<uint2>(args, p);
  } else if (all % 4 == 0) {
    copy_rows<unsigned>(args, p);
  } else if (all % 2 == 0) {
    copy_rows<unsigned short>(args, p);
  } else {
    copy_rows<unsigned char>(args, p);
  }
}

__global__ void __launch_bounds__(kThreads) place_kernel(const __grid_constant__ Args args) {
  for (int p = 0; p < args.count; ++p) {
    if (args.rows[p] > 1) {
      place_rows(args, p);
      continue;
    }
    char* to = args.to[p];
    const char* from = args.from[p];
    const auto apart = reinterpret_cast<uintptr_t>(to) ^ reinterpret_cast<uintptr_t>(from);
    if (apart % 16 == 0) {
      copy_as<uint4>(to, from, args.bytes[p]);
    } else if (apart % 8 == 0) {
      copy_as<uint2>(to, from, args.bytes[p]);
    } else if (apart % 4 == 0) {
      copy_as<unsigned>(to, from, args.bytes[p]);
    } else if (apart % 2 == 0) {
      copy_as<unsigned short>(to, from, args.bytes[p]);
    } else {
      copy_as<unsigned char>(to, from, args.bytes[p]);
    }
  }
}

void place(const std::vector<Placement>& placements, int ctas, void* stream) {
  for (size_t first = 0; first < placements.size(); first += kMost) {
    Args args{};
    int64_t longest = 0;
    args.count = static_cast<int>(std::min<size_t>(placements.size() - first, kMost));
    for (int i = 0; i < args.count; ++i) {
      const Placement& p = placements[first + static_cast<size_t>(i)];
      args.to[i] = static_cast<char*>(p.to);
      args.from[i] = static_cast<const char*>(p.from);
      args.bytes[i] = p.bytes;
      args.rows[i] = p.rows;
      args.to_pitch[i] = p.to_pitch;
      args.from_pitch[i] = p.from_pitch;
      longest = std::max(longest, p.rows * p.bytes);
    }
    constexpr int64_t kPerBlock = int64_t{kThreads} * kUnroll * 16;
    const int64_t blocks = std::clamp<int64_t>((longest + kPerBlock - 1) / kPerBlock, 1, ctas);
    place_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
    check_launch("placing");
  }
}

}  // namespace

PlaceLaunch place_launch() { return place; }

void load_place_kernel() { load_kernel(place_kernel, "placing"); }

}  // namespace tide
