// The only place that reads the environment. README's table is checked against this one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tide {

struct EnvVariable {
  const char* name;
  const char* meaning;
  const char* allowed;
  const char* standard;  // default
  // Of a number: the attribute of Options that sets it too, or "", and what it may be. A text has "" and 0, 0.
  const char* option;
  int64_t smallest, largest;
};

// Every TIDE_* variable that the running library reads (TIDE_CUDA is read by setup.py alone).
const std::vector<EnvVariable>& env_table();

// Values as read when a group is made; immutable afterwards.
struct Env {
  int64_t arena_bytes;         // TIDE_ARENA_BYTES
  int64_t staging_bytes;       // TIDE_STAGING_BYTES
  int64_t handshake_seconds;   // TIDE_HANDSHAKE_SECONDS
  int64_t recorded_calls;      // TIDE_RECORDED_CALLS
  bool shared_memory;          // TIDE_SHARED_MEMORY
  bool fsdp2;                  // TIDE_FSDP2
  bool cuda;                   // TIDE_CUDA_TRANSPORT
  std::string nccl_library;    // TIDE_NCCL_LIBRARY
  int64_t cuda_staging_bytes;  // TIDE_CUDA_STAGING_BYTES
  bool slot_reuse;             // TIDE_SLOT_REUSE
  bool multicast;              // TIDE_MULTICAST
  int64_t accumulate_ctas;     // TIDE_ACCUMULATE_CTAS
  int64_t cuda_plain_bytes;    // TIDE_CUDA_PLAIN_BYTES
  bool raise_on_timeout;       // TIDE_RAISE_ON_TIMEOUT
};

// Throws Error(usage) naming the variable for a value that is not allowed, and for a TIDE_* variable that does
// not exist (a misspelt one would otherwise be silently ignored).
Env read_env();

// `value` of Options' attribute `option`, held to what its variable may be; `text` is how the caller wrote it. Throws
// Error(usage).
int64_t allowed_option(const char* option, std::optional<int64_t> value, const std::string& text);

// "arena_bytes, staging_bytes, ...": every attribute of Options that has a variable.
std::string option_names();
bool is_option(const std::string& name);

// "NCCL_NVLS_ENABLE=0": the variable of another library that forbids NVSwitch multicast on this machine; "" for none.
std::string multicast_forbidden();

}  // namespace tide
