// The tables of driver and NCCL functions. `test_cuda_tables CASE [LIBRARIES...]`; the libraries are stand-ins that the
// Python test has compiled: old, incomplete, wrong and good.
#include <dlfcn.h>

#include <map>

#include "../../csrc/backend/cuda/nccl.h"
#include "ranks.h"

namespace tide::test {
namespace {

using cuda::load_nccl;
using cuda::Nccl;

void versions() {
  check(cuda::version_text(23203) == "2.32.3" && cuda::version_text(21805) == "2.18.5", "version_text");
  check(cuda::version_text(cuda::kOldestNccl) == "2.31.0", "the oldest that will do");
}

void nothing_there() {
  const Nccl none = load_nccl({"", "/nowhere/libnccl.so.2"});
  check(none.version == 0 && none.allocate == nullptr, "an empty table");
  check_contains(none.problem, "no NCCL 2.31.0 or newer; /nowhere/libnccl.so.2: ");
  check_contains(none.problem, "install nvidia-nccl-cu13 (or -cu12), or set TIDE_NCCL_LIBRARY to a libnccl.so.2");
}

void candidates(const std::string& directory) {
  const std::string old = directory + "/libold.so", incomplete = directory + "/libincomplete.so";
  const std::string wrong = directory + "/libwrong.so", good = directory + "/libgood.so";
  const Nccl none = load_nccl({wrong, old, incomplete});
  check_contains(none.problem, wrong + " is no NCCL library");
  check_contains(none.problem, "NCCL 2.28.9 (" + old + ") is older than 2.31.0");
  check_contains(none.problem, "NCCL 2.32.3 (" + incomplete + ") has no ncclGetPeerDevicePointer");
  // Loaded again after they were found wanting: they were not closed.
  check(load_nccl({old}).problem == load_nccl({old}).problem, "the same answer twice");

  const Nccl found = load_nccl({"", old, good, "/never/looked/at.so"});
  check(found.problem.empty(), found.problem);
  check(found.library == good && found.version == 23203, found.library);
  check(found.multicast_pointer == nullptr, "a library without multicast will do");
  check(load_nccl({directory + "/libmulticast.so"}).multicast_pointer != nullptr, "and one with it gives the call");
  void* memory = nullptr;
  check(found.allocate(&memory, 64) == 0 && memory != nullptr && found.free(memory) == 0, "its functions");
}

// torch has an older NCCL in the process, for all to see; the library's calls to itself must not end there.
void second_library(const std::string& directory) {
  check(dlopen((directory + "/libold.so").c_str(), RTLD_NOW | RTLD_GLOBAL) != nullptr, "the process's own library");
  const Nccl found = load_nccl({directory + "/libgood.so"});
  check(found.problem.empty(), found.problem);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  cuda::NcclUniqueId id{};
  check(found.unique_id(&id) == 0 && id.bytes[0] == 2, "a function of its own that it calls is the good library's");
#endif
}

void table_of_the_process(const std::string& directory) {
  cuda::set_nccl_candidates({directory + "/libgood.so"});
  const Nccl& first = cuda::nccl();
  check(first.library == directory + "/libgood.so", first.library + first.problem);
  cuda::set_nccl_candidates({"/nowhere.so"});
  check(&cuda::nccl() == &first, "loaded once");
  Nccl replacement = first;
  replacement.version = 24000;
  cuda::set_nccl(replacement);
  check(cuda::nccl().version == 24000 && first.version == 23203, "what was handed out stays as it was");
}

void nccl_errors() {
  Nccl table;
  table.version = 23203;
  cuda::set_nccl(table);
  cuda::check_nccl(0, "ncclMemAlloc");
  Error error = caught([] { cuda::check_nccl(5, "ncclMemAlloc"); });
  check(error.kind() == ErrorKind::driver, "kind");
  check(error.what() == std::string("tide: ncclMemAlloc failed: unknown error (5, NCCL 2.32.3)"), error.what());
  table.error_string = [](cuda::NcclResult) { return "invalid usage"; };
  table.last_error = [](cuda::NcclComm) { return "two ranks use one GPU"; };
  cuda::set_nccl(table);
  error = caught([] { cuda::check_nccl(5, "ncclCommInitRank"); });
  check(error.what() ==
            std::string("tide: ncclCommInitRank failed: invalid usage: two ranks use one GPU (5, NCCL 2.32.3)"),
        error.what());
}

void driver_errors() {
  cuda::Driver table;
  cuda::set_driver(table);
  cuda::check(0, "cuMemcpyAsync");
  Error error = caught([] { cuda::check(700, "cuMemcpyAsync"); });
  check(error.what() == std::string("tide: cuMemcpyAsync failed: unknown error (700)"), error.what());
  table.error_name = [](cuda::Result, const char** name) { return *name = "CUDA_ERROR_ILLEGAL_ADDRESS", 0; };
  cuda::set_driver(table);
  error = caught([] { cuda::check(700, "cuMemcpyAsync"); });
  check(error.what() == std::string("tide: cuMemcpyAsync failed: CUDA_ERROR_ILLEGAL_ADDRESS (700)"), error.what());
}

void contexts() {
  static void* current = nullptr;
  static int changes = 0;
  cuda::Driver table;
  table.get_context = [](void** context) { return *context = current, 0; };
  table.set_context = [](void* context) { return current = context, ++changes, 0; };
  cuda::set_driver(table);
  int one = 0, two = 0;
  cuda::bind_context(&one);
  check(current == &one && changes == 1, "a thread without a context gets one");
  cuda::bind_context(&two);
  check(current == &one && changes == 1, "one that has a context keeps it");
}

// Where there is no driver the table says so instead of failing later; where there is one it must be complete.
void real_driver() {
  const cuda::Driver& driver = cuda::driver();
  if (driver.library.empty()) {
    check_contains(driver.problem, "no CUDA driver (libcuda.so.1 was not found)");
  } else {
    check(driver.problem.empty() && driver.stream_wait_value && driver.exchange_capture_mode, driver.problem);
  }
}

}  // namespace
}  // namespace tide::test

int main(int argc, char** argv) {
  using namespace tide::test;
  const std::map<std::string, std::function<void()>> cases{
      {"candidates", [&] { candidates(argv[2]); }},
      {"contexts", contexts},
      {"driver_errors", driver_errors},
      {"nccl_errors", nccl_errors},
      {"nothing_there", nothing_there},
      {"real_driver", real_driver},
      {"second_library", [&] { second_library(argv[2]); }},
      {"table_of_the_process", [&] { table_of_the_process(argv[2]); }},
      {"versions", versions}};
  if (argc == 2 && std::string(argv[1]) == "--list") {
    for (const auto& [name, body] : cases) std::cout << name << "\n";
    return 0;
  }
  try {
    if (argc != 3) throw std::runtime_error("usage: test_cuda_tables CASE DIRECTORY");
    cases.at(argv[1])();
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
  return 0;
}
