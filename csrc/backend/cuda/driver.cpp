#include "driver.h"

#include <dlfcn.h>

#include <atomic>
#include <deque>
#include <mutex>

#include "../error.h"

namespace tide::cuda {

namespace {

template <typename F>
void find(void* library, const char* name, F& function, std::string* problem) {
  function = reinterpret_cast<F>(dlsym(library, name));
  if (!function && problem && problem->empty())
    *problem = std::string("libcuda has no ") + name + "; update the driver";
}

Driver load() {
  Driver d;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    d.problem = "no CUDA driver (libcuda.so.1 was not found)";
    return d;
  }
  d.library = "libcuda.so.1";
  std::string* p = &d.problem;
  find(library, "cuStreamCreateWithPriority", d.stream_create, p);
  find(library, "cuStreamDestroy_v2", d.stream_destroy, p);
  find(library, "cuStreamQuery", d.stream_query, p);
  find(library, "cuStreamSynchronize", d.stream_synchronize, p);
  find(library, "cuStreamWaitEvent", d.stream_wait_event, p);
  find(library, "cuStreamIsCapturing", d.stream_is_capturing, p);
  find(library, "cuStreamWriteValue64_v2", d.stream_write_value, p);
  find(library, "cuStreamWaitValue64_v2", d.stream_wait_value, p);
  find(library, "cuStreamBatchMemOp_v2", d.stream_words, nullptr);
  find(library, "cuEventCreate", d.event_create, p);
  find(library, "cuEventDestroy_v2", d.event_destroy, p);
  find(library, "cuEventRecord", d.event_record, p);
  find(library, "cuEventQuery", d.event_query, p);
  find(library, "cuEventSynchronize", d.event_synchronize, p);
  find(library, "cuMemcpyAsync", d.copy, p);
  find(library, "cuMemcpyBatchAsync_v2", d.copy_batch, nullptr);
  find(library, "cuMemcpy2DAsync_v2", d.copy_2d, p);
  find(library, "cuMemsetD8Async", d.fill, p);
  find(library, "cuMemHostRegister_v2", d.host_register, p);
  find(library, "cuMemHostUnregister", d.host_unregister, p);
  find(library, "cuMemHostGetDevicePointer_v2", d.host_device_pointer, p);
  find(library, "cuCtxGetCurrent", d.get_context, p);
  find(library, "cuCtxSetCurrent", d.set_context, p);
  find(library, "cuThreadExchangeStreamCaptureMode", d.exchange_capture_mode, p);
  find(library, "cuMemGetInfo_v2", d.memory_info, p);
  find(library, "cuGetErrorName", d.error_name, p);
  find(library, "cuDriverGetVersion", d.version, p);
  return d;
}

std::mutex mutex;
std::atomic<const Driver*> table{nullptr};

// With the lock held. Tables are never freed: streams and storages may need them while the process ends.
void install(Driver next) {
  static auto* const kept = new std::deque<Driver>;
  kept->push_back(std::move(next));
  table.store(&kept->back(), std::memory_order_release);
}

}  // namespace

// Read without the lock, which a forked child might find held.
const Driver& driver() {
  if (const Driver* known = table.load(std::memory_order_acquire)) return *known;
  std::lock_guard<std::mutex> lock(mutex);
  if (!table.load()) install(load());
  return *table.load();
}

void set_driver(Driver replacement) {
  std::lock_guard<std::mutex> lock(mutex);
  install(std::move(replacement));
}

void bind_context(void* context) {
  void* current = nullptr;
  if (driver().get_context(&current) == 0 && !current) check(driver().set_context(context), "cuCtxSetCurrent");
}

void check(Result result, const char* call) {
  if (result == 0) return;
  const char* name = nullptr;
  if (driver().error_name) driver().error_name(result, &name);
  throw Error(ErrorKind::driver, std::string("tide: ") + call + " failed: " + (name ? name : "unknown error") + " (" +
                                     std::to_string(result) + ")");
}

}  // namespace tide::cuda
