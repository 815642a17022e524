// The NCCL calls that tide makes (memory, windows, peer addresses), as a table of functions found at run time.
//
// Which library: the one already in the process (torch's) when it is new enough, else the path in
// TIDE_NCCL_LIBRARY, else an installed nvidia-nccl-cu12 / -cu13 package. `library` and `version` say which it is.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "driver.h"

namespace tide::cuda {

using NcclResult = int;
using NcclComm = void*;
using NcclWindow = void*;

struct NcclUniqueId {
  char bytes[128];
};

constexpr int kWindowCollectiveSymmetric = 1;
constexpr int kOldestNccl = 23100;  // 2.31.0: peer pointers, and barriers after binding

struct Nccl {
  NcclResult (*get_version)(int*) = nullptr;
  const char* (*error_string)(NcclResult) = nullptr;
  const char* (*last_error)(NcclComm) = nullptr;
  NcclResult (*unique_id)(NcclUniqueId*) = nullptr;
  NcclResult (*init_rank)(NcclComm*, int ranks, NcclUniqueId, int rank) = nullptr;
  NcclResult (*abort)(NcclComm) = nullptr;
  NcclResult (*allocate)(void**, size_t) = nullptr;
  NcclResult (*free)(void*) = nullptr;
  NcclResult (*window_register)(NcclComm, void*, size_t, NcclWindow*, int flags) = nullptr;
  NcclResult (*window_deregister)(NcclComm, NcclWindow) = nullptr;
  NcclResult (*peer_pointer)(NcclWindow, size_t offset, int peer, void**) = nullptr;
  // May be null. Collective at its first call on a communicator, where it may create the multicast object.
  NcclResult (*multicast_pointer)(NcclWindow, size_t offset, void**) = nullptr;

  std::string library;
  int version = 0;
  std::string problem;  // why there is none, with the remedy; empty: usable
};

// "2.32.3"
std::string version_text(int version);

// The first of `candidates` (paths; "" means what the process has loaded already) that is new enough.
Nccl load_nccl(const std::vector<std::string>& candidates);

// The process's table. set_nccl_candidates() must come first (registration does it); tests replace the table.
const Nccl& nccl();
void set_nccl_candidates(std::vector<std::string> candidates);
void set_nccl(Nccl replacement);

// Throws Error(driver) unless `result` is success.
void check_nccl(NcclResult result, const char* call, NcclComm comm = nullptr);

}  // namespace tide::cuda
