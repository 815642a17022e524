#include "backend_cuda.h"

#include <ATen/core/ivalue.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdio>
#include <cstdlib>

#include "../kernels/accumulate_cuda.h"

namespace tide {

namespace {

constexpr int kHighPriority = -1;

c10::Stream current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(device);
}

EngineOptions engine_options(const BackendOptions& options, std::array<cuda::Stream, kChannels> streams,
                             std::function<void(const std::string&)> on_timeout,
                             std::shared_ptr<cuda::CudaTransport>* made) {
  EngineOptions result;
  cuda::CudaOptions cuda;
  cuda.shm.handshake_timeout = std::chrono::seconds(options.handshake_seconds);
  cuda.staging_bytes = options.cuda_staging_bytes;
  cuda.accumulate_ctas = static_cast<int>(options.accumulate_ctas);
  cuda.streams = streams;
  cuda.on_timeout = std::move(on_timeout);
  result.connect = [cuda, made, use = options.cuda](const Speaker& who, Bootstrap& bootstrap) -> Connection {
    if (!use) return {nullptr, "CUDA calls are left to nccl (TIDE_CUDA_TRANSPORT=0 or Options.cuda)"};
    cuda::CudaResult connected = cuda::connect_cuda(who, bootstrap, cuda);
    *made = connected.transport;
    return {connected.transport, connected.reason};
  };
  result.device = Device::cuda;
  result.can_accumulate = accumulate_launch() != nullptr;
  result.staging.budget_bytes = options.cuda_staging_bytes;
  result.recorded_calls = static_cast<size_t>(options.recorded_calls);
  return result;
}

}  // namespace

CudaSide::CudaSide(Speaker who, std::shared_ptr<Bootstrap> bootstrap, const BackendOptions& options, at::Device device)
    : device_(device) {
  c10::DeviceGuard guard(device_);
  if (cuda::driver().problem.empty()) {
    for (cuda::Stream& s : streams_) {
      cuda::check(cuda::driver().stream_create(&s, cuda::kStreamNonBlocking, kHighPriority), "cuStreamCreateWithPriority");
    }
  }
  auto on_timeout = [this, raise = options.raise_on_timeout](const std::string& text) {
    if (raise) {
      engine_->abort(text);
      return;
    }
    std::fprintf(stderr, "%s\ntide ends this process: nothing may run on what did not arrive.\n", text.c_str());
    std::fflush(stderr);
    std::abort();
  };
  engine_ = std::make_shared<Engine>(who, std::move(bootstrap), engine_options(options, streams_, on_timeout, &transport_));
}

CudaSide::~CudaSide() {
  engine_->shutdown();
  // The streams stay: outputs may still be recorded on them. A group has four, and the process few groups.
}

bool CudaSide::connect() {
  c10::DeviceGuard guard(device_);
  engine_->connect();
  return engine_->shared_memory().first;
}

c10::Stream CudaSide::current_stream() const { return tide::current_stream(device_); }

// torch's stream id of a stream that it did not make is the handle itself.
c10::Stream CudaSide::stream(Channel channel) const {
  return c10::Stream(c10::Stream::UNSAFE, device_,
                     reinterpret_cast<c10::StreamId>(streams_[static_cast<size_t>(channel)]));
}

void CudaSide::before(Channel channel) {
  c10::Event ready(c10::DeviceType::CUDA);
  ready.record(current_stream());
  ready.block(stream(channel));
  int capturing = 0;
  cuda::check(cuda::driver().stream_is_capturing(streams_[static_cast<size_t>(channel)], &capturing),
              "cuStreamIsCapturing");
  if (capturing != 0) {
    fail(ErrorKind::usage, engine_->speaker(), to_string(channel),
         "called while a CUDA graph is captured; tide's calls wait on the host and cannot be captured; capture the "
         "compute between collectives, or set TIDE_CUDA_TRANSPORT=0");
  }
}

c10::Event CudaSide::after(Channel channel, const std::vector<at::Tensor>& reads) {
  c10::Event done(c10::DeviceType::CUDA);
  done.record(stream(channel));
  for (const at::Tensor& t : reads) t.record_stream(stream(channel));
  return done;
}

std::optional<at::Tensor> CudaSide::slot(int64_t bytes, void* current, std::chrono::milliseconds timeout,
                                         std::string* reason) {
  if (!connect()) {
    *reason = engine_->shared_memory().second;
    return std::nullopt;
  }
  c10::DeviceGuard guard(device_);
  const Wait wait{Clock::now() + timeout, nullptr, "slot"};
  const auto window = transport_->slot(std::max<int64_t>(bytes, 1), current, wait, reason);
  if (!window) return std::nullopt;
  auto transport = transport_;
  auto release = [transport, window = *window, device = device_](void*) {
    // On the host, at the moment the last storage lets go: what this thread's current stream has been given by now
    // is the last that reads the slot.
    auto last_use = std::make_shared<c10::Event>(c10::DeviceType::CUDA);
    last_use->record(tide::current_stream(device));
    // An all-gather whose result nobody waited for may still be writing.
    transport->note_use(Channel::all_gather, window);
    transport->device_arena().release_behind(window, last_use->eventId(), last_use);
  };
  return at::from_blob(transport->device_arena().address(*window), {bytes}, release,
                       at::TensorOptions().dtype(at::kByte).device(device_), device_);
}

CudaWork::CudaWork(int rank, c10d::OpType op, c10::Event done, std::vector<at::Tensor> outputs,
                   std::shared_ptr<Engine> engine, c10::Stream stream)
    : c10d::Work(rank, op), done_(std::move(done)), outputs_(std::move(outputs)), engine_(std::move(engine)) {
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                     std::vector<c10::Device>{stream.device()});
  // Callbacks then run on streams that are ordered behind the channel's.
  c10::StreamGuard guard(stream);
  future_->markCompleted(c10::IValue(outputs_));
}

bool CudaWork::isCompleted() { return done_.query(); }

bool CudaWork::wait(std::chrono::milliseconds timeout) {
  (void)timeout;  // the watchdog keeps the call's deadline; the host does not wait here
  engine_->raise_if_poisoned("Work.wait");
  if (!outputs_.empty()) done_.block(tide::current_stream(outputs_[0].device()));
  return true;
}

}  // namespace tide
