#include "backend_cuda.h"

#include <ATen/core/ivalue.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>

#include "../kernels/accumulate_cuda.h"

namespace tide {

namespace {

constexpr int kHighPriority = -1;

c10::Stream current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(device);
}

cuda::Stream handle(const c10::Stream& stream) {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStreamNativeHandle(stream);
}

EngineOptions engine_options(const BackendOptions& options, std::array<cuda::Stream, kChannels> streams,
                             std::function<void(const std::string&)> on_timeout, std::string problem) {
  EngineOptions result;
  cuda::CudaOptions cuda;
  cuda.shm.handshake_timeout = std::chrono::seconds(options.handshake_seconds);
  cuda.shm.refusal = std::move(problem);
  cuda.staging_bytes = options.cuda_staging_bytes;
  cuda.slot_reuse = options.slot_reuse;
  cuda.multicast = options.multicast;
  cuda.on_no_multicast = [](const std::string& text) { TORCH_WARN_ONCE(text); };
  cuda.on_one_slot = [](const std::string& text) { TORCH_WARN_ONCE(text); };
  cuda.accumulate_ctas = static_cast<int>(std::min<int64_t>(options.accumulate_ctas, INT_MAX));
  cuda.streams = streams;
  cuda.timeout = options.timeout;
  cuda.on_timeout = std::move(on_timeout);
  cuda.free_cached_memory = [] {
    try {
      c10::getDeviceAllocator(c10::DeviceType::CUDA)->emptyCache();
    } catch (const std::exception&) {  // an allocator that cannot; the ranks hear that there is no memory
    }
  };
  result.connect = [cuda](const Speaker& who, Bootstrap& bootstrap) -> Connection {
    cuda::CudaResult connected = cuda::connect_cuda(who, bootstrap, cuda);
    return {connected.transport, connected.reason};
  };
  result.device = Device::cuda;
  result.can_accumulate = accumulate_launch() != nullptr;
  result.staging.budget_bytes = options.cuda_staging_bytes;
  result.plain_bytes = options.cuda_plain_bytes;
  result.recorded_calls = static_cast<size_t>(options.recorded_calls);
  return result;
}

// Channels whose streams may still use a slot that is given back without a wait for its last call.
std::vector<Channel> users(cuda::ParameterGroup group) {
  // Not behind the reductions that are queued while parameters are resharded.
  if (group != cuda::kNoParameters) return {Channel::all_gather};
  return {Channel::all_gather, Channel::reduce_scatter, Channel::all_to_all};
}

// Gives a slot back when its last storage lets go, on whichever thread that happens. What this thread's current
// stream has been given by now is the last that reads the slot. Never throws: a destructor calls it.
class SlotRelease {
 public:
  SlotRelease(std::shared_ptr<cuda::CudaTransport> transport, Window window, cuda::ParameterGroup group,
              at::Device device)
      : transport_(std::move(transport)), window_(window), group_(group), device_(device), owner_(getpid()) {}

  void operator()(void*) const {
    if (owner_ != getpid()) return;
    try {
      const c10::DeviceGuard guard(device_);
      // Also makes the device's context current, which the driver's own calls need.
      auto last_use = std::make_shared<c10::Event>(c10::DeviceType::CUDA);
      last_use->record(current_stream(device_));
      // A call whose result nobody waited for may still be at it; record_stream() knows nothing of this memory.
      for (const Channel channel : users(group_)) transport_->note_use(channel, window_);
      transport_->device_arena().release_behind(window_, last_use->eventId(), last_use);
    } catch (const std::exception&) {
      // The device is lost or the process is ending: nobody will ask for the range again.
    }
  }

 private:
  std::shared_ptr<cuda::CudaTransport> transport_;
  Window window_;
  cuda::ParameterGroup group_;
  at::Device device_;
  pid_t owner_;
};

}  // namespace

CudaSide::CudaSide(Speaker who, std::shared_ptr<Bootstrap> bootstrap, const BackendOptions& options, at::Device device)
    : device_(device) {
  c10::DeviceGuard guard(device_);
  std::string problem;  // the other ranks hear of it, instead of waiting for a rank that raises
  try {
    if (cuda::driver().problem.empty()) make_streams();
  } catch (const std::exception& error) {
    problem = error.what();
  }
  // The transport, and with it this function, may outlive both this object and the engine.
  auto known = std::make_shared<std::weak_ptr<Engine>>();
  auto on_timeout = [known, raise = options.raise_on_timeout](const std::string& text) {
    if (raise) {
      if (auto engine = known->lock()) engine->abort(text);
      return;
    }
    std::fprintf(stderr, "%s\ntide ends this process: nothing may run on what did not arrive.\n", text.c_str());
    std::fflush(stderr);
    std::abort();
  };
  engine_ = std::make_shared<Engine>(who, std::move(bootstrap), engine_options(options, streams_, on_timeout, problem));
  *known = engine_;
}

void CudaSide::make_streams() {
  // A call of the runtime makes the device's context and gives it to this thread.
  c10::Event(c10::DeviceType::CUDA).record(current_stream());
  cuda::check(cuda::driver().get_context(&context_), "cuCtxGetCurrent");
  for (cuda::Stream& s : streams_) {
    cuda::check(cuda::driver().stream_create(&s, cuda::kStreamNonBlocking, kHighPriority),
                "cuStreamCreateWithPriority");
  }
}

CudaSide::~CudaSide() {
  engine_->shutdown();
  // The streams stay: outputs may still be recorded on them. A group has four, and the process few groups.
}

// Before any call of the driver: a thread that has made no call of the runtime yet has no context.
void CudaSide::enter() {
  if (context_) cuda::bind_context(context_);
}

bool CudaSide::connect() {
  c10::DeviceGuard guard(device_);
  enter();
  if (context_) refuse_capture(handle(current_stream()), "connect");
  engine_->connect();
  return engine_->shared_memory().first;
}

void CudaSide::abort(const std::string& reason) {
  auto transport = std::static_pointer_cast<cuda::CudaTransport>(engine_->transport());
  engine_->abort(reason);
  if (!transport) return;
  c10::DeviceGuard guard(device_);
  enter();
  transport->give_up(reason);
}

c10::Stream CudaSide::current_stream() const { return tide::current_stream(device_); }

void* CudaSide::current_handle() const { return handle(current_stream()); }

bool CudaSide::capturing() {
  const cuda::Stream stream = handle(current_stream());
  if (!context_ || !stream) return false;  // CUDA captures no default stream
  enter();
  int capturing = 0;
  cuda::check(cuda::driver().stream_is_capturing(stream, &capturing), "cuStreamIsCapturing");
  return capturing != 0;
}

// torch's stream id of a stream that it did not make is the handle itself.
c10::Stream CudaSide::stream(Channel channel) const {
  return c10::Stream(c10::Stream::UNSAFE, device_,
                     reinterpret_cast<c10::StreamId>(streams_[static_cast<size_t>(channel)]));
}

// Before anything of tide's joins the capture, which would end it with an error of its own.
void CudaSide::refuse_capture(cuda::Stream stream, const std::string& call) {
  int capturing = 0;
  cuda::check(cuda::driver().stream_is_capturing(stream, &capturing), "cuStreamIsCapturing");
  if (capturing == 0) return;
  fail(ErrorKind::usage, engine_->speaker(), call,
       "called while a CUDA graph is captured; tide's calls wait on the host and cannot be captured; capture the "
       "compute between collectives, or set TIDE_CUDA_TRANSPORT=0");
}

void CudaSide::before(Channel channel) {
  refuse_capture(handle(current_stream()), to_string(channel));
  c10::Event ready(c10::DeviceType::CUDA);
  ready.record(current_stream());
  ready.block(stream(channel));
}

void CudaSide::record(Channel channel, const std::vector<at::Tensor>& touched) {
  for (const at::Tensor& t : touched) t.record_stream(stream(channel));
}

c10::Event CudaSide::after(Channel channel) {
  c10::Event done(c10::DeviceType::CUDA);
  done.record(stream(channel));
  return done;
}

std::optional<at::Tensor> CudaSide::slot(int64_t bytes, void* current, cuda::ParameterGroup group,
                                         std::chrono::milliseconds timeout, const std::function<void()>& interrupted,
                                         std::string* reason) {
  if (!connect()) {
    *reason = engine_->shared_memory().second;
    return std::nullopt;
  }
  c10::DeviceGuard guard(device_);
  refuse_capture(current, "slot");
  if (group == cuda::kNoParameters) engine_->expect_plain_slots();
  // Growth is collective, so slots are asked for in one order.
  Lane& lane = engine_->lane(Channel::memory);
  const uint64_t ticket = lane.take_ticket();
  const Wait wait{Clock::now() + timeout, interrupted, "slot #" + std::to_string(ticket)};
  std::shared_ptr<cuda::CudaTransport> transport;
  std::optional<Window> window;
  const auto ask = [&] {
    transport = std::static_pointer_cast<cuda::CudaTransport>(engine_->transport());
    window = transport->slot(std::max<int64_t>(bytes, 1), group, current, wait, reason);
  };
  lane.run(ticket, [&] { engine_->guarded(wait.call, ask); }, interrupted);
  if (!window) return std::nullopt;
  return at::from_blob(transport->device_arena().address(*window), {bytes},
                       SlotRelease(transport, *window, group, device_),
                       at::TensorOptions().dtype(at::kByte).device(device_), device_);
}

CudaWork::CudaWork(int rank, c10d::OpType op, c10::Event done, std::vector<at::Tensor> outputs,
                   std::shared_ptr<Engine> engine, at::Device device)
    : c10d::Work(rank, op),
      done_(std::move(done)),
      outputs_(std::move(outputs)),
      engine_(std::move(engine)),
      device_(device) {}

c10::intrusive_ptr<c10::ivalue::Future> CudaWork::getFuture() {
  std::lock_guard<std::mutex> lock(future_mutex_);
  if (future_) return future_;
  auto made = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       std::vector<c10::Device>{device_});
  // What waits for the future is ordered behind the stream that is current here: neither the caller's nor the
  // channel's, which may have been given much since the call.
  const c10::Stream behind = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStreamFromGlobalPool(device_);
  done_.block(behind);
  c10::StreamGuard guard(behind);
  made->markCompleted(c10::IValue(outputs_));
  future_ = std::move(made);  // not before: where the device is lost, the next call must fail too, not wait for ever
  return future_;
}

bool CudaWork::isCompleted() { return done_.query(); }

bool CudaWork::wait(std::chrono::milliseconds timeout) {
  (void)timeout;  // the watchdog keeps the call's deadline; the host does not wait here
  engine_->raise_if_poisoned("Work.wait");
  if (!outputs_.empty()) done_.block(tide::current_stream(outputs_[0].device()));
  return true;
}

}  // namespace tide
