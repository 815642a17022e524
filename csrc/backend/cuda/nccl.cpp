#include "nccl.h"

#include <dlfcn.h>

#include <atomic>
#include <deque>
#include <mutex>

#include "../error.h"

namespace tide::cuda {

namespace {

template <typename F>
void find(void* library, const char* name, F& function, std::string* missing) {
  function = reinterpret_cast<F>(dlsym(library, name));
  if (!function && missing->empty()) *missing = name;
}

std::string file_of(void* symbol, const std::string& fallback) {
  Dl_info info;
  return dladdr(symbol, &info) && info.dli_fname ? info.dli_fname : fallback;
}

// Fills the table from one library; says in `problem` what is wrong with it.
Nccl load_one(void* library, const std::string& name) {
  Nccl n;
  std::string missing;
  find(library, "ncclGetVersion", n.get_version, &missing);
  if (!n.get_version || n.get_version(&n.version) != 0) {
    n.problem = name + " is no NCCL library";
    return n;
  }
  n.library = file_of(reinterpret_cast<void*>(n.get_version), name);
  const std::string what = "NCCL " + version_text(n.version) + " (" + n.library + ")";
  if (n.version < kOldestNccl) {
    n.problem = what + " is older than " + version_text(kOldestNccl);
    return n;
  }
  find(library, "ncclGetErrorString", n.error_string, &missing);
  find(library, "ncclGetLastError", n.last_error, &missing);
  find(library, "ncclGetUniqueId", n.unique_id, &missing);
  find(library, "ncclCommInitRank", n.init_rank, &missing);
  find(library, "ncclCommAbort", n.abort, &missing);
  find(library, "ncclMemAlloc", n.allocate, &missing);
  find(library, "ncclMemFree", n.free, &missing);
  find(library, "ncclCommWindowRegister", n.window_register, &missing);
  find(library, "ncclCommWindowDeregister", n.window_deregister, &missing);
  find(library, "ncclGetPeerDevicePointer", n.peer_pointer, &missing);
  if (!missing.empty()) n.problem = what + " has no " + missing;
  std::string without;  // tide does
  find(library, "ncclGetLsaMultimemDevicePointer", n.multicast_pointer, &without);
  return n;
}

// A second NCCL beside torch's. RTLD_LOCAL: it must not shadow torch's symbols. RTLD_DEEPBIND: NCCL calls functions of
// its own that it also exports, and those calls must not end in torch's older library.
void* open_apart(const std::string& path) {
  int mode = RTLD_NOW | RTLD_LOCAL;
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // which refuse the flag
  mode |= RTLD_DEEPBIND;
#endif
  return dlopen(path.c_str(), mode);
}

std::mutex mutex;
std::vector<std::string> search;
std::atomic<const Nccl*> table{nullptr};

// With the lock held. Tables are never freed: streams and storages may need them while the process ends.
void install(Nccl next) {
  static auto* const kept = new std::deque<Nccl>;
  kept->push_back(std::move(next));
  table.store(&kept->back(), std::memory_order_release);
}

}  // namespace

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

Nccl load_nccl(const std::vector<std::string>& candidates) {
  std::string tried;
  for (const std::string& path : candidates) {
    void* library = path.empty() ? dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD) : open_apart(path);
    if (!library) {
      if (!path.empty()) tried += "; " + path + ": " + dlerror();
      continue;
    }
    // Never closed, even when it does not fit: it may be torch's, and unloading a CUDA library is not safe.
    Nccl n = load_one(library, path.empty() ? "the process's libnccl.so.2" : path);
    if (n.problem.empty()) return n;
    tried += "; " + n.problem;
  }
  Nccl none;
  none.problem = "no NCCL " + version_text(kOldestNccl) + " or newer" + tried +
                 "; install nvidia-nccl-cu13 (or -cu12), or set TIDE_NCCL_LIBRARY to a libnccl.so.2";
  return none;
}

const Nccl& nccl() {
  if (const Nccl* known = table.load(std::memory_order_acquire)) return *known;
  std::lock_guard<std::mutex> lock(mutex);
  if (!table.load()) install(load_nccl(search));
  return *table.load();
}

void set_nccl_candidates(std::vector<std::string> candidates) {
  std::lock_guard<std::mutex> lock(mutex);
  search = std::move(candidates);
}

void set_nccl(Nccl replacement) {
  std::lock_guard<std::mutex> lock(mutex);
  install(std::move(replacement));
}

void check_nccl(NcclResult result, const char* call, NcclComm comm) {
  if (result == 0) return;
  std::string text = std::string("tide: ") + call + " failed: ";
  text += nccl().error_string ? nccl().error_string(result) : "unknown error";
  if (nccl().last_error) {
    const char* detail = nccl().last_error(comm);
    if (detail && *detail) text += std::string(": ") + detail;
  }
  throw Error(ErrorKind::driver, text + " (" + std::to_string(result) + ", NCCL " + version_text(nccl().version) + ")");
}

}  // namespace tide::cuda
