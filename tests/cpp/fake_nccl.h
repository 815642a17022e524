// An NCCL whose device memory is files that forked ranks share, in a directory of the test's own. Its multicast
// addresses are memory that nothing may touch: the fake driver knows where writes to them go.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <set>

#include "../../csrc/backend/cuda/nccl.h"
#include "fake_driver.h"
#include "ranks.h"

namespace tide::test {

class FakeNccl {
 public:
  // What tests set, per rank.
  std::set<int> failing_allocations;    // by number, from 1
  std::set<int> failing_registrations;  // after every rank has come: the others succeed
  bool no_windows = false;              // success, and no window: GPUs that cannot reach each other
  int no_address_for = -1;              // this rank's memory cannot be addressed
  bool no_start = false;
  bool has_multicast = true;         // false: a library without the call
  bool no_multicast = false;         // success, and no address: NVLS is off
  std::set<int> failing_multicasts;  // by number of the window, from 1; after every rank has come

  // What tests read: what is there now.
  std::atomic<int> allocations{0}, windows{0}, communicators{0};
  std::atomic<int> tried_allocations{0}, multicast_calls{0};

  static FakeNccl& get() {
    static auto* const one = new FakeNccl;
    return *one;
  }

  static cuda::Nccl table() {
    cuda::Nccl n;
    n.library = "fake";
    n.version = 23203;
    n.get_version = [](int* version) { return *version = 23203, 0; };
    n.error_string = [](cuda::NcclResult) { return "unhandled cuda error"; };
    n.last_error = [](cuda::NcclComm) { return ""; };
    n.unique_id = unique_id;
    n.init_rank = init_rank;
    n.abort = abort;
    n.allocate = allocate;
    n.free = free;
    n.window_register = window_register;
    n.window_deregister = window_deregister;
    n.peer_pointer = peer_pointer;
    if (get().has_multicast) n.multicast_pointer = multicast_pointer;
    return n;
  }

  static void install(const std::string& directory) {
    get().directory_ = directory;
    cuda::set_nccl(table());
  }

 private:
  struct Memory {
    std::string file;
    size_t bytes;
  };
  struct Comm {
    std::string id;
    int rank, world, windows = 0;
  };
  struct Window {
    std::vector<std::pair<void*, size_t>> peers;  // own one empty
    Comm* comm = nullptr;
    int number = 0;
    void* own = nullptr;
    std::byte* multicast = nullptr;
  };

  // Leaves a note that every other rank of the communicator reads; waits for theirs.
  static std::vector<std::string> meet(const std::string& what, int rank, int world, const std::string& mine) {
    FileBootstrap store(get().directory_, 20s);
    store.set("nccl-" + what + "-" + std::to_string(rank), mine);
    std::vector<std::string> notes;
    for (int r = 0; r < world; ++r) notes.push_back(store.get("nccl-" + what + "-" + std::to_string(r)));
    return notes;
  }

  static cuda::NcclResult unique_id(cuda::NcclUniqueId* id) {
    const std::string text = std::to_string(getpid()) + "." + std::to_string(++get().ids_);
    std::memcpy(id->bytes, text.c_str(), text.size() + 1);
    return 0;
  }
  static cuda::NcclResult init_rank(cuda::NcclComm* comm, int world, cuda::NcclUniqueId id, int rank) {
    if (get().no_start) return 2;
    auto* made = new Comm{id.bytes, rank, world};
    meet("init-" + made->id, rank, world, "here");
    ++get().communicators;
    *comm = made;
    return 0;
  }
  static cuda::NcclResult abort(cuda::NcclComm comm) {
    delete static_cast<Comm*>(comm);
    --get().communicators;
    return 0;
  }

  static cuda::NcclResult allocate(void** pointer, size_t bytes) {
    const int number = ++get().tried_allocations;
    if (get().failing_allocations.count(number) != 0) return 1;
    const std::string file = get().directory_ + "/mem-" + std::to_string(getpid()) + "-" + std::to_string(number);
    *pointer = map(file, bytes);
    std::lock_guard<std::mutex> lock(get().mutex_);
    get().memory_[*pointer] = {file, bytes};
    ++get().allocations;
    return 0;
  }
  static cuda::NcclResult free(void* pointer) {
    std::lock_guard<std::mutex> lock(get().mutex_);
    const auto found = get().memory_.find(pointer);
    if (found == get().memory_.end()) return 4;
    munmap(pointer, found->second.bytes);
    unlink(found->second.file.c_str());
    get().memory_.erase(found);
    --get().allocations;
    return 0;
  }

  static cuda::NcclResult window_register(cuda::NcclComm handle, void* pointer, size_t bytes, cuda::NcclWindow* window,
                                          int flags) {
    auto* comm = static_cast<Comm*>(handle);
    if (flags != cuda::kWindowCollectiveSymmetric || bytes % 4096 != 0) return 4;
    std::string file;
    {
      std::lock_guard<std::mutex> lock(get().mutex_);
      file = get().memory_.at(pointer).file;
    }
    const int number = ++comm->windows;
    const auto files = meet("win-" + comm->id + "-" + std::to_string(number), comm->rank, comm->world,
                            file + " " + std::to_string(bytes));
    *window = nullptr;
    if (get().failing_registrations.count(number) != 0) return 1;
    if (get().no_windows) return 0;
    auto* made = new Window{{}, comm, number, pointer, nullptr};
    for (int r = 0; r < comm->world; ++r) {
      std::istringstream note(files[static_cast<size_t>(r)]);
      std::string path;
      size_t size = 0;
      note >> path >> size;
      made->peers.emplace_back(r == comm->rank ? nullptr : map(path, size), size);
    }
    *window = made;
    ++get().windows;
    return 0;
  }
  static cuda::NcclResult window_deregister(cuda::NcclComm, cuda::NcclWindow window) {
    auto* mine = static_cast<Window*>(window);
    if (mine->multicast) {
      FakeDriver::get().remove_multicast(mine->multicast);
      munmap(mine->multicast, mine->peers[0].second);
    }
    for (auto [pointer, bytes] : mine->peers) {
      if (pointer) munmap(pointer, bytes);
    }
    delete mine;
    --get().windows;
    return 0;
  }
  static cuda::NcclResult peer_pointer(cuda::NcclWindow window, size_t offset, int peer, void** address) {
    const auto [pointer, bytes] = static_cast<Window*>(window)->peers[static_cast<size_t>(peer)];
    if (offset >= bytes) return 4;
    *address = peer == get().no_address_for ? nullptr : static_cast<char*>(pointer) + offset;
    return 0;
  }

  // Waits for all ranks at every window, not only at the first as the real one may.
  static cuda::NcclResult multicast_pointer(cuda::NcclWindow window, size_t offset, void** address) {
    auto* mine = static_cast<Window*>(window);
    ++get().multicast_calls;
    meet("mc-" + mine->comm->id + "-" + std::to_string(mine->number), mine->comm->rank, mine->comm->world, "here");
    *address = nullptr;
    if (get().failing_multicasts.count(mine->number) != 0) return 1;
    if (get().no_multicast) return 0;
    const size_t bytes = mine->peers[0].second;
    void* reserved = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) throw std::runtime_error("mmap of a multicast range");
    mine->multicast = static_cast<std::byte*>(reserved);
    std::vector<std::byte*> targets;
    for (auto [pointer, size] : mine->peers) {
      targets.push_back(static_cast<std::byte*>(pointer ? pointer : mine->own));
      if (size != bytes) return 4;
    }
    FakeDriver::get().add_multicast(mine->multicast, bytes, targets);
    *address = mine->multicast + offset;
    return 0;
  }

  static void* map(const std::string& file, size_t bytes) {
    const int descriptor = open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (descriptor < 0 || ftruncate(descriptor, static_cast<off_t>(bytes)) != 0)
      throw std::runtime_error("map " + file);
    void* pointer = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (pointer == MAP_FAILED) throw std::runtime_error("mmap " + file);
    return pointer;
  }

  std::string directory_;
  std::mutex mutex_;
  std::map<void*, Memory> memory_;
  int ids_ = 0;
};

}  // namespace tide::test
