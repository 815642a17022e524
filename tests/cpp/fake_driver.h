// A CUDA driver made of host threads: a stream is a thread that runs its queue in order, device memory is host memory.
//
// It keeps to what the real one promises and no more: copies of a batch run in any order, waits compare as signed
// 64-bit numbers, registered host memory has another address on the device, a thread without a context gets errors, a
// write to a multicast address reaches the ranks one by one.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>

#include "../../csrc/backend/cuda/driver.h"
#include "../../csrc/kernels/accumulate_cuda.h"
#include "../../csrc/kernels/small_copies_cuda.h"
#include "ranks.h"

namespace tide::test {

// Runs what it is given, in order, on a thread of its own.
class Queue {
 public:
  Queue() : thread_([this] { work(); }) {}
  ~Queue() {
    push(nullptr);
    thread_.join();
  }
  void push(std::function<void()> job) {
    std::lock_guard<std::mutex> lock(mutex_);
    jobs_.push_back(std::move(job));
    ++given_;
    changed_.notify_all();
  }
  bool idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return given_ == done_;
  }

 private:
  void work() {
    for (;;) {
      std::function<void()> job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return !jobs_.empty(); });
        job = std::move(jobs_.front());
        jobs_.pop_front();
      }
      if (!job) return;
      job();
      job = nullptr;
      std::lock_guard<std::mutex> lock(mutex_);
      ++done_;
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  uint64_t given_ = 0, done_ = 0;
  std::thread thread_;
};

class FakeDriver {
 public:
  // What tests set, before there are streams.
  bool merged = false;      // all streams share one queue, as with CUDA_DEVICE_MAX_CONNECTIONS=1
  bool has_batches = true;  // false: a driver older than 12.8
  bool has_words = true;    // false: a driver that takes flags one by one
  bool has_memory_operations = true;
  bool has_placing = true;            // false: a build without kernels
  int jitter_us = 0;                  // longest pause before a job
  std::map<std::string, int> fails;   // the how-manieth next call of that name fails, with 719
  std::atomic<int> device_error{0};   // what the device has come to: every query says so
  std::atomic<bool> captured{false};  // some thread captures a graph, in the strictest mode
  std::atomic<bool> loaded{
      false};  // kernels; one that is not blocks its launch, and all else, until its stream is idle

  // What tests read.
  std::atomic<int> streams{0}, events{0}, registrations{0}, batches{0}, copies{0}, calls{0}, placings{0}, multicasts{0};
  std::atomic<int> copies_2d{0}, small_copies{0}, word_batches{0};
  std::atomic<int> without_context{0}, broke_capture{0};

  static FakeDriver& get() {
    static auto* const one = new FakeDriver;
    return *one;
  }

  // Puts it in the place of the real one, and gives this thread a context.
  static void install() {
    cuda::Driver d;
    d.library = "fake";
    d.stream_create = stream_create;
    d.stream_destroy = stream_destroy;
    d.stream_query = stream_query;
    d.stream_synchronize = stream_synchronize;
    d.stream_wait_event = stream_wait_event;
    d.stream_is_capturing = [](cuda::Stream, int* status) { return *status = 0, 0; };
    d.stream_write_value = stream_write_value;
    d.stream_wait_value = stream_wait_value;
    if (get().has_words) d.stream_words = stream_words;
    d.event_create = event_create;
    d.event_destroy = event_destroy;
    d.event_record = event_record;
    d.event_query = event_query;
    d.event_synchronize = event_synchronize;
    d.copy = copy;
    if (get().has_batches) d.copy_batch = copy_batch;
    d.copy_2d = copy_2d;
    d.fill = fill;
    d.host_register = host_register;
    d.host_unregister = host_unregister;
    d.host_device_pointer = host_device_pointer;
    d.get_context = [](void** current) { return *current = context(), 0; };
    d.set_context = [](void* next) { return context() = next, 0; };
    d.exchange_capture_mode = [](int* mode) { return std::swap(*mode, capture_mode()), 0; };
    d.memory_info = [](size_t* free, size_t* total) { return *free = size_t{1} << 20, *total = size_t{8} << 30, 0; };
    d.error_name = [](cuda::Result code, const char** name) {
      return *name = code == 719 ? "CUDA_ERROR_LAUNCH_FAILED" : "CUDA_ERROR", 0;
    };
    d.version = [](int* version) { return *version = 13000, 0; };
    cuda::set_driver(d);
    context() = &get();
  }

  // Writes to [start, start + bytes) reach the same place behind each of `targets` instead.
  void add_multicast(std::byte* start, size_t bytes, std::vector<std::byte*> targets) {
    std::lock_guard<std::mutex> lock(mutex_);
    multicast_[reinterpret_cast<uintptr_t>(start)] = {bytes, std::move(targets)};
  }
  void remove_multicast(std::byte* start) {
    std::lock_guard<std::mutex> lock(mutex_);
    multicast_.erase(reinterpret_cast<uintptr_t>(start));
  }

  // Runs `job` on the stream, as a kernel of the caller's would.
  static void launch(cuda::Stream stream, std::function<void()> job) {
    queue(stream).push([job = std::move(job)] {
      pause();
      job();
    });
  }

  static void load_kernel(cuda::Stream stream) {
    if (get().loaded) return;
    get().loading = true;
    while (!queue(stream).idle()) nap();
    get().loading = false;
    get().loaded = true;
  }

 private:
  struct Stream {
    std::shared_ptr<Queue> queue;
  };
  struct State {
    std::atomic<uint64_t> recorded{0}, done{0};
  };
  using EventBox = std::shared_ptr<State>;
  static constexpr cuda::DevicePtr kMapped = cuda::DevicePtr{1} << 60;  // no address of this process

  static void*& context() {
    thread_local void* current = nullptr;
    return current;
  }
  static int& capture_mode() {
    thread_local int mode = 0;
    return mode;
  }
  static Queue& queue(cuda::Stream stream) {
    if (stream) return *static_cast<Stream*>(stream)->queue;
    static auto* const default_stream = new Queue;
    return *default_stream;
  }
  static const EventBox& box(cuda::Event event) { return *static_cast<EventBox*>(event); }
  static void nap() { std::this_thread::sleep_for(std::chrono::microseconds(20)); }
  static void pause() {
    if (get().jitter_us == 0) return;
    thread_local std::mt19937 random(std::random_device{}());
    std::this_thread::sleep_for(std::chrono::microseconds(random() % static_cast<unsigned>(get().jitter_us)));
  }

  // What every call begins with: 0, or why it fails.
  static cuda::Result enter(const std::string& name) {
    FakeDriver& d = get();
    ++d.calls;
    if (!context()) return ++d.without_context, 201;
    std::lock_guard<std::mutex> lock(d.mutex_);
    auto found = d.fails.find(name);
    if (found == d.fails.end() || --found->second > 0) return 0;
    d.fails.erase(found);
    return 719;
  }
  static cuda::Result query(bool done) {
    if (get().captured && capture_mode() != cuda::kCaptureThreadLocal) return ++get().broke_capture, 900;
    if (get().device_error) return get().device_error;
    return done ? 0 : cuda::kNotReady;
  }

  static cuda::Result stream_create(cuda::Stream* stream, unsigned, int) {
    if (auto bad = enter("stream_create")) return bad;
    FakeDriver& d = get();
    std::lock_guard<std::mutex> lock(d.mutex_);
    if (!d.shared_ || !d.merged) d.shared_ = std::make_shared<Queue>();
    *stream = new Stream{d.shared_};
    if (!d.merged) d.shared_.reset();
    ++d.streams;
    return 0;
  }
  static cuda::Result stream_destroy(cuda::Stream stream) {
    delete static_cast<Stream*>(stream);
    if (--get().streams == 0) get().shared_.reset();
    return 0;
  }
  static cuda::Result stream_query(cuda::Stream stream) { return query(queue(stream).idle()); }
  static cuda::Result stream_synchronize(cuda::Stream stream) {
    if (auto bad = enter("stream_synchronize")) return bad;
    while (!queue(stream).idle()) nap();
    return 0;
  }
  static cuda::Result stream_wait_event(cuda::Stream stream, cuda::Event event, unsigned) {
    if (auto bad = enter("stream_wait_event")) return bad;
    const EventBox state = box(event);
    const uint64_t target = state->recorded;
    queue(stream).push([state, target] {
      while (state->done < target) nap();
    });
    return 0;
  }

  // The word behind a device address of registered host memory; null for any other address.
  static std::atomic<uint64_t>* word(cuda::DevicePtr address) {
    FakeDriver& d = get();
    if ((address & kMapped) == 0) return nullptr;
    const auto host = static_cast<uintptr_t>(address ^ kMapped);
    std::lock_guard<std::mutex> lock(d.mutex_);
    for (const auto& [start, bytes] : d.registered_) {
      if (host >= start && host + sizeof(uint64_t) <= start + bytes)
        return reinterpret_cast<std::atomic<uint64_t>*>(host);
    }
    return nullptr;
  }
  static cuda::Result stream_write_value(cuda::Stream stream, cuda::DevicePtr to, uint64_t value, unsigned) {
    if (auto bad = enter("stream_write_value")) return bad;
    if (!get().has_memory_operations) return 801;
    auto* target = word(to);
    if (!target) return 1;
    queue(stream).push([target, value] {
      pause();
      target->store(value);
    });
    return 0;
  }
  static cuda::Result stream_wait_value(cuda::Stream stream, cuda::DevicePtr at, uint64_t value, unsigned flags) {
    if (auto bad = enter("stream_wait_value")) return bad;
    if (!get().has_memory_operations) return 801;
    auto* awaited = word(at);
    if (!awaited || flags != cuda::kWaitGreaterOrEqual) return 1;
    queue(stream).push([awaited, value] {
      while (static_cast<int64_t>(awaited->load() - value) < 0) nap();
    });
    return 0;
  }

  static cuda::Result stream_words(cuda::Stream stream, unsigned count, cuda::WordOperation* operations,
                                   unsigned flags) {
    if (auto bad = enter("stream_words")) return bad;
    if (count == 0 || count > 255 || flags != 0) return 1;
    ++get().word_batches;
    for (unsigned i = 0; i < count; ++i) {
      const cuda::WordOperation& o = operations[i];
      if (o.operation != o.kWait64 && o.operation != o.kWrite64) return 1;
      const auto one = o.operation == o.kWait64 ? stream_wait_value : stream_write_value;
      if (auto bad = one(stream, o.word, o.value, o.flags)) return bad;
    }
    return 0;
  }

  static cuda::Result event_create(cuda::Event* event, unsigned) {
    if (auto bad = enter("event_create")) return bad;
    *event = new EventBox(std::make_shared<State>());
    ++get().events;
    return 0;
  }
  static cuda::Result event_destroy(cuda::Event event) {
    delete static_cast<EventBox*>(event);
    --get().events;
    return 0;
  }
  static cuda::Result event_record(cuda::Event event, cuda::Stream stream) {
    if (auto bad = enter("event_record")) return bad;
    const EventBox state = box(event);
    const uint64_t number = ++state->recorded;
    queue(stream).push([state, number] { state->done = number; });
    return 0;
  }
  static cuda::Result event_query(cuda::Event event) {
    if (auto bad = enter("event_query")) return bad;
    while (get().loading) nap();
    return query(box(event)->done >= box(event)->recorded);
  }
  static cuda::Result event_synchronize(cuda::Event event) {
    while (box(event)->done < box(event)->recorded) nap();
    return 0;
  }

  // Where a write to `to` lands.
  static std::vector<cuda::DevicePtr> places(cuda::DevicePtr to, size_t bytes) {
    FakeDriver& d = get();
    std::lock_guard<std::mutex> lock(d.mutex_);
    auto found = d.multicast_.upper_bound(to);
    if (found == d.multicast_.begin()) return {to};
    --found;
    const auto& [start, range] = *found;
    if (to + bytes > start + range.bytes) return {to};
    ++d.multicasts;
    std::vector<cuda::DevicePtr> result;
    for (std::byte* target : range.targets) result.push_back(reinterpret_cast<cuda::DevicePtr>(target) + (to - start));
    std::shuffle(result.begin(), result.end(), std::mt19937(std::random_device{}()));
    return result;
  }
  static std::function<void()> move(cuda::DevicePtr to, cuda::DevicePtr from, size_t bytes) {
    return [=, places = places(to, bytes)] {
      for (const cuda::DevicePtr place : places) {
        pause();
        // A shard that lies at its place in this rank's own memory is written over itself.
        std::memmove(reinterpret_cast<void*>(place), reinterpret_cast<const void*>(from), bytes);
      }
    };
  }
  static cuda::Result copy(cuda::DevicePtr to, cuda::DevicePtr from, size_t bytes, cuda::Stream stream) {
    if (auto bad = enter("copy")) return bad;
    ++get().copies;
    queue(stream).push(move(to, from, bytes));
    return 0;
  }
  static cuda::Result copy_batch(cuda::DevicePtr* to, cuda::DevicePtr* from, size_t* bytes, size_t count,
                                 cuda::CopyAttributes* attributes, size_t* first, size_t kinds, cuda::Stream stream) {
    if (auto bad = enter("copy_batch")) return bad;
    if (kinds != 1 || *first != 0 || attributes->source_access_order != 1) return 1;
    ++get().batches;
    std::vector<std::function<void()>> jobs;
    for (size_t i = 0; i < count; ++i) jobs.push_back(move(to[i], from[i], bytes[i]));
    std::shuffle(jobs.begin(), jobs.end(), std::mt19937(std::random_device{}()));
    for (auto& job : jobs) queue(stream).push(std::move(job));
    return 0;
  }
  // Row by row, in any order; pitches must hold a row and stay below 2 GiB.
  static cuda::Result copy_2d(const cuda::Copy2D* given, cuda::Stream stream) {
    if (auto bad = enter("copy_2d")) return bad;
    const cuda::Copy2D c = *given;
    for (const auto& end : {c.from, c.to}) {
      if (end.x_bytes != 0 || end.y != 0 || end.memory_type != cuda::Copy2D::kUnified) return 1;
      if (end.pitch < c.width_bytes || end.pitch >= size_t{1} << 31) return 1;
    }
    ++get().copies_2d;
    queue(stream).push([c] {
      pause();
      std::vector<size_t> rows(c.height);
      for (size_t r = 0; r < c.height; ++r) rows[r] = r;
      std::shuffle(rows.begin(), rows.end(), std::mt19937(std::random_device{}()));
      for (const size_t r : rows) {
        std::memcpy(reinterpret_cast<void*>(c.to.device + r * c.to.pitch),
                    reinterpret_cast<const void*>(c.from.device + r * c.from.pitch), c.width_bytes);
      }
    });
    return 0;
  }
  static cuda::Result fill(cuda::DevicePtr to, unsigned char value, size_t bytes, cuda::Stream stream) {
    if (auto bad = enter("fill")) return bad;
    queue(stream).push([=] { std::memset(reinterpret_cast<void*>(to), value, bytes); });
    return 0;
  }

  static cuda::Result host_register(void* host, size_t bytes, unsigned) {
    if (auto bad = enter("host_register")) return bad;
    std::lock_guard<std::mutex> lock(get().mutex_);
    if (!get().registered_.emplace(reinterpret_cast<uintptr_t>(host), bytes).second) return 712;
    ++get().registrations;
    return 0;
  }
  static cuda::Result host_unregister(void* host) {
    std::lock_guard<std::mutex> lock(get().mutex_);
    if (get().registered_.erase(reinterpret_cast<uintptr_t>(host)) == 0) return 713;
    --get().registrations;
    return 0;
  }
  static cuda::Result host_device_pointer(cuda::DevicePtr* mapped, void* host, unsigned) {
    if (auto bad = enter("host_device_pointer")) return bad;
    *mapped = reinterpret_cast<cuda::DevicePtr>(host) | kMapped;
    return 0;
  }

  std::atomic<bool> loading{false};
  std::mutex mutex_;
  struct Range {
    size_t bytes = 0;
    std::vector<std::byte*> targets;
  };
  std::map<uintptr_t, size_t> registered_;
  std::map<uintptr_t, Range> multicast_;
  std::shared_ptr<Queue> shared_;
};

// In the place of the kernels: the CPU's reduction and copies, on the stream.
inline void launch_accumulate(ElementType in, ElementType out, const std::vector<AccumulateArgs>& pieces, int,
                              void* stream) {
  FakeDriver::load_kernel(stream);
  FakeDriver::launch(stream, [=] {
    for (const AccumulateArgs& args : pieces) accumulate(in, out, args);
  });
}
inline void launch_small_copies(const std::vector<Placement>& pieces, int, void* stream) {
  FakeDriver::get().small_copies += static_cast<int>(pieces.size());
  FakeDriver::load_kernel(stream);
  FakeDriver::launch(stream, [=] {
    for (auto p = pieces.rbegin(); p != pieces.rend(); ++p) std::memcpy(p->to, p->from, static_cast<size_t>(p->bytes));
  });
}
inline void launch_place(const std::vector<Placement>& placements, int, void* stream) {
  ++FakeDriver::get().placings;
  FakeDriver::load_kernel(stream);
  FakeDriver::launch(stream, [=] {
    for (auto p = placements.rbegin(); p != placements.rend(); ++p) {
      for (int64_t r = 0; r < p->rows; ++r) {
        std::memcpy(static_cast<std::byte*>(p->to) + r * p->to_pitch,
                    static_cast<const std::byte*>(p->from) + r * p->from_pitch, static_cast<size_t>(p->bytes));
      }
    }
  });
}

}  // namespace tide::test
