// One rank of a group on the fake device: engine, transport, two streams of the caller's (one fills slots, the other
// computes), and the calls that tests make.
// Included by one file of a test program: it brings the launchers that a build without CUDA has not.
#pragma once

#include "../../csrc/backend/cuda/cuda_transport.h"
#include "../../csrc/backend/engine.h"
#include "fake_driver.h"
#include "fake_nccl.h"

namespace tide {
AccumulateLaunch accumulate_launch() { return test::launch_accumulate; }
PlaceLaunch place_launch() { return test::FakeDriver::get().has_placing ? test::launch_place : nullptr; }
PlaceLaunch small_copies_launch() { return test::FakeDriver::get().has_placing ? test::launch_small_copies : nullptr; }
void load_kernels() { test::FakeDriver::get().loaded = true; }
}  // namespace tide

namespace tide::test {

using Words = std::vector<uint16_t>;  // bf16, or anything else of two bytes

struct Settings {
  int64_t staging_bytes = 2 << 20;  // a whole segment: every slot needs growth
  int64_t plain_bytes = 0;          // calls without a layout of fewer bytes are not tide's
  bool slot_reuse = false;
  bool multicast = false;
  std::chrono::milliseconds handshake = 10s;
  std::chrono::milliseconds timeout = 20s;
  std::function<void(const std::string&)> on_timeout;  // default: print, fail the rank
  std::function<void()> free_cached_memory;
  std::function<void(const std::string&)> on_no_multicast;
  std::function<void(const std::string&)> on_one_slot;
};

// Work on `second` from here on comes behind that on `first` so far.
inline void join(cuda::Stream first, cuda::Stream second) {
  cuda::Event event = nullptr;
  cuda::check(cuda::driver().event_create(&event, 0), "event");
  cuda::check(cuda::driver().event_record(event, first), "event");
  cuda::check(cuda::driver().stream_wait_event(second, event, 0), "event");
  cuda::driver().event_destroy(event);
}

class CudaRank {
 public:
  CudaRank(int rank, int world, const std::string& directory, Settings settings = {})
      : rank_(rank), world_(world), bootstrap_(std::make_shared<FileBootstrap>(directory, settings.handshake)) {
    FakeDriver::install();
    FakeNccl::install(directory);
    for (cuda::Stream& stream : streams_) cuda::check(cuda::driver().stream_create(&stream, 1, -1), "stream");
    cuda::check(cuda::driver().stream_create(&caller_, 1, 0), "stream");
    cuda::check(cuda::driver().stream_create(&copy_in_, 1, 0), "stream");
    cuda::CudaOptions options;
    options.shm.handshake_timeout = settings.handshake;
    options.timeout = settings.timeout;
    options.staging_bytes = settings.staging_bytes;
    options.slot_reuse = settings.slot_reuse;
    options.multicast = settings.multicast;
    options.on_no_multicast = settings.on_no_multicast;
    options.on_one_slot = settings.on_one_slot;
    options.streams = streams_;
    options.free_cached_memory = settings.free_cached_memory;
    options.on_timeout = settings.on_timeout ? settings.on_timeout : [](const std::string& text) {
      std::cerr << text << std::endl;
      _exit(70);
    };
    EngineOptions engine;
    engine.device = Device::cuda;
    engine.staging.budget_bytes = settings.staging_bytes;
    engine.plain_bytes = settings.plain_bytes;
    engine.connect = [options](const Speaker& who, Bootstrap& bootstrap) -> Connection {
      auto made = cuda::connect_cuda(who, bootstrap, options);
      return {made.transport, made.reason};
    };
    engine_ = std::make_shared<Engine>(Speaker{rank, world, "test"}, bootstrap_, engine);
  }

  // In good order: nothing of the group may be left.
  ~CudaRank() {
    engine_.reset();
    for (cuda::Stream stream : streams_) cuda::driver().stream_destroy(stream);
    cuda::driver().stream_destroy(caller_);
    cuda::driver().stream_destroy(copy_in_);
  }

  int rank() const { return rank_; }
  int world() const { return world_; }
  Engine& engine() { return *engine_; }
  std::shared_ptr<Engine> shared_engine() { return engine_; }
  cuda::Stream caller() const { return caller_; }
  cuda::Stream copy_in() const { return copy_in_; }
  cuda::Stream stream(Channel channel) const { return streams_[static_cast<size_t>(channel)]; }
  std::shared_ptr<cuda::CudaTransport> transport() {
    return std::static_pointer_cast<cuda::CudaTransport>(engine_->transport());
  }

  void connect() {
    engine_->connect();
    check(engine_->shared_memory().first, "connected: " + engine_->shared_memory().second);
  }

  // Nothing when this rank has no memory; `why` then says so.
  std::optional<Window> slot(int64_t bytes, std::string* why, cuda::ParameterGroup group = cuda::kNoParameters) {
    std::optional<Window> window;
    engine_->guarded("slot", [&] { window = transport()->slot(bytes, group, copy_in_, within(20s), why); });
    return window;
  }
  Window slot(int64_t bytes) {
    std::string why;
    auto window = slot(bytes, &why);
    check(window.has_value(), "slot: " + why);
    return *window;
  }
  // As the last storage in it does.
  void release(const Window& window) { release(window, caller_); }
  void release(const Window& window, cuda::Stream reader) {
    auto transport = this->transport();
    cuda::Event last_use = nullptr;
    cuda::check(cuda::driver().event_create(&last_use, 0), "event");
    cuda::check(cuda::driver().event_record(last_use, reader), "event");
    transport->note_use(Channel::all_gather, window);
    transport->device_arena().release_behind(window, last_use, nullptr);
  }

  // A call as the backend makes it: joined with the caller's streams on both sides.
  Selection run(const CollectiveCall& call, std::chrono::milliseconds timeout = 20s) {
    const Channel channel = call.request.op;
    const std::string name = std::string(to_string(channel)) + " #" + std::to_string(++calls_[channel]);
    join(channel == Channel::all_gather ? copy_in_ : caller_, stream(channel));
    CollectiveCall recorded = call;
    Call entry;
    entry.op = channel;
    recorded.record_id = engine_->recorder().begin(entry);
    Selection selection = engine_->run(recorded, within(timeout, name));
    join(stream(channel), caller_);
    return selection;
  }

  Request request(Channel op, ElementType in, ElementType out) const {
    Request q;
    q.op = op;
    q.rank = rank_;
    q.world = world_;
    q.in_type = in;
    q.out_type = out;
    q.itemsize = element_size(in);
    q.out_itemsize = element_size(out);
    return q;
  }

  // All-gather of two-byte elements into `output`, which lies in the arena or does not. `placed`: the shard is there.
  CollectiveCall all_gather(std::shared_ptr<const ParameterLayout> layout, std::byte* output,
                            const Words* shard) const {
    CollectiveCall call;
    Request& q = call.request = request(Channel::all_gather, ElementType::bf16, ElementType::bf16);
    q.numel = layout->total_shard_numel();
    q.layout = layout;
    q.placed = shard == nullptr;
    call.output_bytes = layout->total_gathered_numel() * 2;
    call.buffers.output = output;
    call.buffers.inputs = {shard ? reinterpret_cast<const std::byte*>(shard->data()) : nullptr};
    q.output_in_arena = engine_->arena_if_connected()->offset_of(output, call.output_bytes).has_value();
    return call;
  }

 private:
  const int rank_, world_;
  std::shared_ptr<FileBootstrap> bootstrap_;
  std::array<cuda::Stream, kChannels> streams_{};
  cuda::Stream caller_ = nullptr, copy_in_ = nullptr;
  std::shared_ptr<Engine> engine_;
  std::map<Channel, int> calls_;
};

// Everything that the fakes count is gone.
inline void check_nothing_left() {
  FakeDriver& driver = FakeDriver::get();
  FakeNccl& nccl = FakeNccl::get();
  const std::string left = "allocations " + std::to_string(nccl.allocations) + ", windows " +
                           std::to_string(nccl.windows) + ", communicators " + std::to_string(nccl.communicators) +
                           ", streams " + std::to_string(driver.streams) + ", events " + std::to_string(driver.events) +
                           ", registrations " + std::to_string(driver.registrations);
  check(left == "allocations 0, windows 0, communicators 0, streams 0, events 0, registrations 0", "left: " + left);
  check(driver.without_context == 0, "every call had a context");
  check(driver.broke_capture == 0, "no capture was broken");
}

// ---- What must come out, in plain loops -----------------------------------------------------------------------------

// Element i of what `rank` contributes to a call: a finite bf16 of either sign, of which every bit counts.
inline uint16_t value(int rank, int64_t i, int call) {
  uint32_t h = static_cast<uint32_t>(i) * 2654435761u + static_cast<uint32_t>(rank) * 40503u +
               static_cast<uint32_t>(call) * 977u;
  h ^= h >> 15;
  return static_cast<uint16_t>((h & 0x807F) | (((h >> 16) % 16 + 119) << 7));
}

inline float widen(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float result;
  std::memcpy(&result, &word, sizeof result);
  return result;
}

inline uint16_t narrow(float number) {  // to nearest, ties to even
  uint32_t word;
  std::memcpy(&word, &number, sizeof word);
  return static_cast<uint16_t>((word + 0x7FFF + ((word >> 16) & 1)) >> 16);
}

}  // namespace tide::test
