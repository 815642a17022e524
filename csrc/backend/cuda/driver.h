// The CUDA driver calls that tide makes, as a table of functions found at run time.
//
// Types are opaque and constants are spelled out, so this compiles without CUDA headers and one build serves
// machines with and without a GPU; tests put their own functions into the table. The signatures are the stable
// C ABI of libcuda.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tide::cuda {

using Result = int;  // CUresult; 0 is success
using Stream = void*;
using Event = void*;
using DevicePtr = uint64_t;

constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kHostRegisterPortable = 1;
constexpr unsigned kHostRegisterDeviceMap = 2;
constexpr unsigned kWaitGreaterOrEqual = 0;
constexpr unsigned kWriteDefault = 0;  // with a barrier: everything earlier on the stream is visible first
constexpr int kCaptureThreadLocal = 1;
constexpr Result kDeinitialized = 4;  // the process is ending
constexpr Result kNotReady = 600;
constexpr Result kContextDestroyed = 709;

// CUmemcpyAttributes of cuMemcpyBatchAsync.
struct CopyAttributes {
  int source_access_order = 1;  // in stream order
  struct Location {
    int type = 0;
    int id = 0;
  } source_hint, target_hint;
  unsigned flags = 1;  // prefer overlap with compute
};

// CUstreamBatchMemOpParams of cuStreamBatchMemOp_v2.
struct WordOperation {
  static constexpr int kWait64 = 4, kWrite64 = 5;
  int operation = 0;
  DevicePtr word = 0;
  uint64_t value = 0;
  unsigned flags = 0;
  DevicePtr alias = 0;
  uint64_t unused = 0;
};
static_assert(sizeof(WordOperation) == 48 && offsetof(WordOperation, flags) == 24);

// CUDA_MEMCPY2D of cuMemcpy2DAsync_v2.
struct Copy2D {
  static constexpr int kUnified = 4;  // an address says by itself whose memory it is
  struct End {
    size_t x_bytes = 0, y = 0;
    int memory_type = kUnified;
    void* host = nullptr;
    DevicePtr device = 0;
    void* array = nullptr;
    size_t pitch = 0;
  } from, to;
  size_t width_bytes = 0, height = 0;
};
static_assert(sizeof(Copy2D) == 128 && offsetof(Copy2D, to) == 56 && offsetof(Copy2D::End, device) == 32);

struct Driver {
  Result (*stream_create)(Stream*, unsigned flags, int priority) = nullptr;
  Result (*stream_destroy)(Stream) = nullptr;
  Result (*stream_query)(Stream) = nullptr;
  Result (*stream_synchronize)(Stream) = nullptr;
  Result (*stream_wait_event)(Stream, Event, unsigned flags) = nullptr;
  Result (*stream_is_capturing)(Stream, int* status) = nullptr;
  Result (*stream_write_value)(Stream, DevicePtr, uint64_t, unsigned flags) = nullptr;
  Result (*stream_wait_value)(Stream, DevicePtr, uint64_t, unsigned flags) = nullptr;
  // Several of them, in order. May be null.
  Result (*stream_words)(Stream, unsigned count, WordOperation*, unsigned flags) = nullptr;
  Result (*event_create)(Event*, unsigned flags) = nullptr;
  Result (*event_destroy)(Event) = nullptr;
  Result (*event_record)(Event, Stream) = nullptr;
  Result (*event_query)(Event) = nullptr;
  Result (*event_synchronize)(Event) = nullptr;
  Result (*copy)(DevicePtr to, DevicePtr from, size_t bytes, Stream) = nullptr;
  // May be null: driver older than 12.8.
  Result (*copy_batch)(DevicePtr* to, DevicePtr* from, size_t* bytes, size_t count, CopyAttributes*, size_t* indices,
                       size_t attributes, Stream) = nullptr;
  Result (*copy_2d)(const Copy2D*, Stream) = nullptr;
  Result (*fill)(DevicePtr, unsigned char value, size_t bytes, Stream) = nullptr;
  Result (*host_register)(void*, size_t bytes, unsigned flags) = nullptr;
  Result (*host_unregister)(void*) = nullptr;
  Result (*host_device_pointer)(DevicePtr*, void*, unsigned flags) = nullptr;
  Result (*get_context)(void**) = nullptr;
  Result (*set_context)(void*) = nullptr;
  // While any thread captures a graph, a thread whose own mode is not kCaptureThreadLocal may not even query an event.
  Result (*exchange_capture_mode)(int* mode) = nullptr;
  Result (*memory_info)(size_t* free, size_t* total) = nullptr;
  Result (*error_name)(Result, const char**) = nullptr;
  int (*version)(int*) = nullptr;
  std::string library;  // where the table came from

  // Why there is no usable driver: the library or the call that is missing. Empty: usable.
  std::string problem;
};

// The process's table; loaded on first use. Never creates a context.
const Driver& driver();
// Tests: replaces the table for the life of the process.
void set_driver(Driver replacement);

// Gives this thread `context` when it has none: the driver's calls need one, and a new thread has none until its first
// call of the CUDA runtime.
void bind_context(void* context);

// Throws Error(driver) "tide: cuMemcpyAsync failed: CUDA_ERROR_... (700)" unless `result` is success.
void check(Result result, const char* call);

}  // namespace tide::cuda
