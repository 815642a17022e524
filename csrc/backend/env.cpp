#include "env.h"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "error.h"

namespace tide {

namespace {

constexpr int64_t kMost = INT64_MAX;
constexpr const char* kBuildVariable = "TIDE_CUDA";

[[noreturn]] void bad(const EnvVariable& variable, const std::string& value) {
  throw Error(ErrorKind::usage, std::string("tide: environment variable ") + variable.name + "=" + value +
                                    " is not allowed; expected " + variable.allowed + "; it sets " + variable.meaning);
}

const EnvVariable& find(const char* name) {
  for (const auto& variable : env_table()) {
    if (std::strcmp(variable.name, name) == 0) return variable;
  }
  throw Error(ErrorKind::usage, std::string("tide: no such environment variable: ") + name);
}

bool within(const EnvVariable& variable, int64_t value) {
  return value >= variable.smallest && value <= variable.largest;
}

int64_t number(const char* name) {
  const EnvVariable& variable = find(name);
  const char* set = std::getenv(name);
  const std::string text = set ? set : variable.standard;
  char* end = nullptr;
  errno = 0;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || errno == ERANGE || !within(variable, value)) bad(variable, text);
  return value;
}

bool flag(const char* name) {
  const EnvVariable& variable = find(name);
  const char* set = std::getenv(name);
  const std::string text = set ? set : variable.standard;
  if (text != "0" && text != "1") bad(variable, text);
  return text == "1";
}

void reject_unknown() {
  for (char** entry = environ; entry && *entry; ++entry) {
    if (std::strncmp(*entry, "TIDE_", 5) != 0) continue;
    const std::string name(*entry, std::strcspn(*entry, "="));
    if (name == kBuildVariable) continue;
    bool known = false;
    for (const auto& variable : env_table()) known = known || name == variable.name;
    if (known) continue;
    std::string all;
    for (const auto& variable : env_table()) all += std::string(all.empty() ? "" : ", ") + variable.name;
    throw Error(ErrorKind::usage, "tide: environment variable " + name + " does not exist; expected one of " + all +
                                      "; correct or unset it");
  }
}

}  // namespace

const std::vector<EnvVariable>& env_table() {
  static const std::vector<EnvVariable> table = {
      {"TIDE_ARENA_BYTES", "upper bound of the memory of one rank and group that peers can write",
       "0 or more; 0: the machine's or cgroup's memory", "0", "arena_bytes", 0, kMost},
      {"TIDE_STAGING_BYTES", "budget of one rank's staging window, whatever the number of ranks", "65536 or more",
       "4194304", "staging_bytes", 65536, kMost},
      {"TIDE_HANDSHAKE_SECONDS", "how long ranks that have all arrived may take to share memory", "1 to 1000000", "20",
       "handshake_seconds", 1, 1000000},
      {"TIDE_RECORDED_CALLS", "length of the ring of recent calls", "1 or more", "1000", "recorded_calls", 1, kMost},
      {"TIDE_SHARED_MEMORY", "0 hands every CPU collective to the inner backend", "0 or 1", "1", "shared_memory", 0, 1},
      {"TIDE_FSDP2", "0 leaves FSDP2 untouched; plain collectives still go through tide", "0 or 1", "1", "", 0, 1},
      {"TIDE_CUDA_TRANSPORT", "0 hands every CUDA collective to nccl", "0 or 1", "1", "cuda", 0, 1},
      {"TIDE_NCCL_LIBRARY", "a libnccl.so.2 of 2.31 or newer, used when torch's own is older", "a path", "", "", 0, 0},
      {"TIDE_CUDA_STAGING_BYTES",
       "budget of one rank's staging in device memory, of reduce-scatter and of all-to-all each", "1048576 or more",
       "268435456", "cuda_staging_bytes", 1 << 20, kMost},
      {"TIDE_SLOT_REUSE",
       "1: staging in device memory lies in slots that reshard has vacated, where one is large enough", "0 or 1", "0",
       "slot_reuse", 0, 1},
      {"TIDE_MULTICAST",
       "1: CUDA all-gathers into memory of the group write to all ranks at once through NVSwitch, where NCCL can; "
       "not yet run on hardware",
       "0 or 1", "0", "multicast", 0, 1},
      {"TIDE_ACCUMULATE_CTAS", "most thread blocks of one addition, cast or copy on a GPU", "1 or more", "132",
       "accumulate_ctas", 1, kMost},
      {"TIDE_CUDA_PLAIN_BYTES",
       "CUDA calls without a layout of fewer bytes, over all ranks, go to nccl; 0 also stages all-to-alls", "0 or more",
       "33554432", "cuda_plain_bytes", 0, kMost},
      {"TIDE_RAISE_ON_TIMEOUT", "1: a CUDA call past its deadline poisons the group and raises; 0: ends the process",
       "0 or 1", "0", "raise_on_timeout", 0, 1},
  };
  return table;
}

Env read_env() {
  reject_unknown();
  Env env{};
  env.arena_bytes = number("TIDE_ARENA_BYTES");
  env.staging_bytes = number("TIDE_STAGING_BYTES");
  env.handshake_seconds = number("TIDE_HANDSHAKE_SECONDS");
  env.recorded_calls = number("TIDE_RECORDED_CALLS");
  env.shared_memory = flag("TIDE_SHARED_MEMORY");
  env.fsdp2 = flag("TIDE_FSDP2");
  env.cuda = flag("TIDE_CUDA_TRANSPORT");
  const char* nccl = std::getenv("TIDE_NCCL_LIBRARY");
  env.nccl_library = nccl ? nccl : "";
  env.cuda_staging_bytes = number("TIDE_CUDA_STAGING_BYTES");
  env.slot_reuse = flag("TIDE_SLOT_REUSE");
  env.multicast = flag("TIDE_MULTICAST");
  env.accumulate_ctas = number("TIDE_ACCUMULATE_CTAS");
  env.cuda_plain_bytes = number("TIDE_CUDA_PLAIN_BYTES");
  env.raise_on_timeout = flag("TIDE_RAISE_ON_TIMEOUT");
  return env;
}

int64_t allowed_option(const char* option, std::optional<int64_t> value, const std::string& text) {
  for (const auto& variable : env_table()) {
    if (std::strcmp(variable.option, option) != 0) continue;
    if (value && within(variable, *value)) return *value;
    throw Error(ErrorKind::usage, std::string("tide: Options.") + option + "=" + text + " is not allowed; expected " +
                                      variable.allowed + "; it sets " + variable.meaning);
  }
  throw Error(ErrorKind::usage, std::string("tide: no such option: ") + option);
}

std::string option_names() {
  std::string all;
  for (const auto& variable : env_table()) {
    if (*variable.option) all += std::string(all.empty() ? "" : ", ") + variable.option;
  }
  return all;
}

bool is_option(const std::string& name) {
  for (const auto& variable : env_table()) {
    if (!name.empty() && name == variable.option) return true;
  }
  return false;
}

// On some machines a multicast object takes GPUs out of service, and these variables are how their owners say so. A
// value that is not understood forbids.
std::string multicast_forbidden() {
  if (const char* set = std::getenv("NCCL_NVLS_ENABLE")) {
    if (*set && std::strtoll(set, nullptr, 0) == 0) return std::string("NCCL_NVLS_ENABLE=") + set;
  }
  for (const char* name : {"TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"}) {
    const char* set = std::getenv(name);
    if (set && *set && std::strcmp(set, "0") != 0) return std::string(name) + "=" + set;
  }
  return "";
}

}  // namespace tide
