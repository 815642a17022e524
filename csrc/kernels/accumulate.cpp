#include "accumulate.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>

#include "../backend/error.h"

// One copy per instruction set, chosen when the library is loaded. Contraction into FMA is off in setup.py: a fused
// multiply-add rounds once where the contract rounds twice.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define TIDE_SIMD __attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3")))
#else
#define TIDE_SIMD
#endif

// Everything below must end up inside the multi-versioned functions, or it is compiled for the baseline only.
#define TIDE_INLINE inline __attribute__((always_inline))

namespace tide {

namespace {

// Elements of a block: the fp32 accumulator (16 KiB) and one source stay in the first-level cache.
constexpr int64_t kBlock = 4096;

struct Bf16 {
  uint16_t bits;
};

template <typename T>
struct Accumulator {
  using type = T;
};
template <>
struct Accumulator<Bf16> {
  using type = float;
};

TIDE_INLINE float widen(Bf16 v) {
  const uint32_t bits = static_cast<uint32_t>(v.bits) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// Round to nearest even; NaN stays NaN (quiet), as torch rounds.
TIDE_INLINE Bf16 narrow(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const uint32_t nan = 0x7fc0;
  return {static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded)};
}

template <typename T>
TIDE_INLINE typename Accumulator<T>::type load(const std::byte* p, int64_t i) {
  T v;
  std::memcpy(&v, p + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  if constexpr (std::is_same_v<T, Bf16>) {
    return widen(v);
  } else {
    return v;
  }
}

template <typename T, typename A>
TIDE_INLINE void store(std::byte* p, int64_t i, A value) {
  T v;
  if constexpr (std::is_same_v<T, Bf16>) {
    v = narrow(value);
  } else {
    v = static_cast<T>(value);
  }
  std::memcpy(p + i * static_cast<int64_t>(sizeof(T)), &v, sizeof(T));
}

// Integers add as unsigned: the same bits, and overflow is defined.
template <typename A>
TIDE_INLINE A plus(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    using U = std::make_unsigned_t<A>;
    return static_cast<A>(static_cast<U>(a) + static_cast<U>(b));
  } else {
    return a + b;
  }
}

template <typename In, typename Out>
TIDE_INLINE void run(const AccumulateArgs& args) {
  using A = typename Accumulator<In>::type;
  alignas(64) A sum[kBlock];
  const A scale = static_cast<A>(args.scale);
  for (int64_t begin = 0; begin < args.numel; begin += kBlock) {
    const int64_t n = std::min(kBlock, args.numel - begin);
    for (int r = 0, other = 0; r < args.ranks; ++r) {
      const std::byte* source = r == args.own_rank ? args.own : args.staged + args.stride * other++;
      source += begin * static_cast<int64_t>(sizeof(In));
      if (r == 0) {
        for (int64_t i = 0; i < n; ++i) sum[i] = load<In>(source, i);
      } else {
        for (int64_t i = 0; i < n; ++i) sum[i] = plus(sum[i], load<In>(source, i));
      }
    }
    std::byte* out = args.out + begin * static_cast<int64_t>(sizeof(Out));
    if (std::is_integral_v<A> || args.scale == 1.0) {
      for (int64_t i = 0; i < n; ++i) store<Out>(out, i, sum[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) store<Out>(out, i, sum[i] * scale);
    }
  }
}

TIDE_SIMD void run_bf16_f32(const AccumulateArgs& args) { run<Bf16, float>(args); }
TIDE_SIMD void run_bf16(const AccumulateArgs& args) { run<Bf16, Bf16>(args); }
TIDE_SIMD void run_f32(const AccumulateArgs& args) { run<float, float>(args); }
TIDE_SIMD void run_f64(const AccumulateArgs& args) { run<double, double>(args); }
TIDE_SIMD void run_i32(const AccumulateArgs& args) { run<int32_t, int32_t>(args); }
TIDE_SIMD void run_i64(const AccumulateArgs& args) { run<int64_t, int64_t>(args); }

}  // namespace

void accumulate(ElementType in, ElementType out, const AccumulateArgs& args) {
  if (in == ElementType::bf16 && out == ElementType::f32) return run_bf16_f32(args);
  if (in == out) {
    switch (in) {
      case ElementType::bf16:
        return run_bf16(args);
      case ElementType::f32:
        return run_f32(args);
      case ElementType::f64:
        return run_f64(args);
      case ElementType::i32:
        return run_i32(args);
      case ElementType::i64:
        return run_i64(args);
      case ElementType::bytes:
        break;
    }
  }
  throw Error(ErrorKind::usage, std::string("tide has no reduction of ") + to_string(in) + " into " + to_string(out));
}

}  // namespace tide
