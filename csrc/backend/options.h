// Options of one tide group. argument > environment > default.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "env.h"

namespace tide {

inline constexpr char kCudaOff[] = "CUDA calls are left to nccl (TIDE_CUDA_TRANSPORT=0 or Options.cuda)";

struct BackendOptions : public c10d::Backend::Options {
  BackendOptions() : c10d::Backend::Options("tide") {
    const Env env = read_env();
    arena_bytes = env.arena_bytes;
    staging_bytes = env.staging_bytes;
    handshake_seconds = env.handshake_seconds;
    recorded_calls = env.recorded_calls;
    shared_memory = env.shared_memory;
    cuda = env.cuda;
    cuda_staging_bytes = env.cuda_staging_bytes;
    slot_reuse = env.slot_reuse;
    multicast = env.multicast;
    accumulate_ctas = env.accumulate_ctas;
    cuda_plain_bytes = env.cuda_plain_bytes;
    raise_on_timeout = env.raise_on_timeout;
  }
#ifdef C10D_BACKEND_HAS_HOOKS
  c10::intrusive_ptr<c10d::Backend::Options> clone() const override {
    return c10::make_intrusive<BackendOptions>(*this);
  }
#endif

  int64_t arena_bytes = 0;
  int64_t staging_bytes = 0;
  int64_t handshake_seconds = 0;
  int64_t recorded_calls = 0;
  bool shared_memory = true;
  bool cuda = true;
  int64_t cuda_staging_bytes = 0;
  bool slot_reuse = false;
  bool multicast = false;
  int64_t accumulate_ctas = 0;
  int64_t cuda_plain_bytes = 0;
  bool raise_on_timeout = false;
};

}  // namespace tide
