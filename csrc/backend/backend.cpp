// A group's life, its inner backends, and how a call is issued.
#include "backend.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "inner_call.h"
#include "shm_transport.h"
#include "store_bootstrap.h"
#include "work.h"

namespace tide {

namespace {

EngineOptions engine_options(const BackendOptions& options, std::function<void()> interrupted) {
  EngineOptions result;
  ShmOptions shm;
  shm.interrupted = std::move(interrupted);
  if (!options.shared_memory) {
    shm.refusal = "shared memory is switched off (TIDE_SHARED_MEMORY=0 or Options.shared_memory)";
  }
  shm.arena_bytes = options.arena_bytes;
  shm.handshake_timeout = std::chrono::seconds(options.handshake_seconds);
  result.connect = [shm](const Speaker& who, Bootstrap& bootstrap) -> Connection {
    ShmResult shared = connect_shm(who, bootstrap, shm);
    return {shared.transport, shared.reason};
  };
  result.staging.budget_bytes = options.staging_bytes;
  result.recorded_calls = static_cast<size_t>(options.recorded_calls);
  return result;
}

// An inner backend pairs the ranks' calls by the order in which they are issued, and the lane's thread is in no order
// with what the caller's thread issues there.
[[noreturn]] void refuse_late_inner(const Speaker& who, const std::string& call, const std::string& why) {
  fail(ErrorKind::usage, who, call,
       "an asynchronous call turned out to be the inner backend's (" + why +
           "), which it can no longer be given to in order; got async_op=True, expected False for such a call; make it "
           "synchronous, or pass the same dtypes on every rank");
}

std::string call_name(Channel channel, uint64_t ticket) {
  return std::string(to_string(channel)) + " #" + std::to_string(ticket);
}

}  // namespace

TideBackend::TideBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                         c10::intrusive_ptr<BackendOptions> options, InnerFactory make_inner, Interrupted interrupted)
    : c10d::Backend(rank, size),
      store_(store),
      options_(std::move(options)),
      make_inner_(std::move(make_inner)),
      interrupted_(std::move(interrupted)),
      owner_(getpid()) {
  Speaker who{rank, size, options_->group_name};
  auto on_cpu = c10::make_intrusive<c10d::PrefixStore>("cpu/", store);
  auto on_cuda = c10::make_intrusive<c10d::PrefixStore>("cuda/", store);
  engine_ = std::make_shared<Engine>(who, std::make_shared<StoreBootstrap>(on_cpu, options_->timeout),
                                     engine_options(*options_, interrupted_));
  cuda_bootstrap_ = std::make_shared<StoreBootstrap>(on_cuda, options_->timeout);
  if (size > 1 && options_->cuda) return;
  EngineOptions off;
  off.device = Device::cuda;
  off.connect = [](const Speaker&, Bootstrap&) { return Connection{nullptr, kCudaOff}; };
  off.recorded_calls = static_cast<size_t>(options_->recorded_calls);
  cuda_off_ = std::make_shared<Engine>(who, cuda_bootstrap_, off);
  if (size > 1) decline_shm(who, *cuda_bootstrap_, kCudaOff);
}

TideBackend::~TideBackend() {
  if (!guard_.in_child()) {
    engine_->shutdown();
    return;
  }
  // A forked child: threads, sockets and device memory belong to the parent. Dropped, never destroyed.
  cuda_.release();
  new std::map<c10::DeviceType, InnerPtr>(std::move(inner_));
}

void TideBackend::leave() {
  if (!guard_.in_child()) engine_->shutdown();
}

void TideBackend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  std::lock_guard<std::mutex> lock(inner_mutex_);
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13  // gloo has none before
  for (auto& [device, backend] : inner_) backend->setTimeout(timeout);
#endif
}

void TideBackend::abort() {
  run_abort_hooks();
  const std::string reason = "the process group was aborted on rank " + std::to_string(getRank());
  engine_->abort(reason);
  {
    std::lock_guard<std::mutex> lock(cuda_mutex_);
    if (cuda_) cuda_->abort(reason);
  }
  if (cuda_off_) cuda_off_->abort(reason);
  std::lock_guard<std::mutex> lock(inner_mutex_);
  for (auto& [device, backend] : inner_) backend->abort();
}

void TideBackend::shutdown() {
  if (guard_.in_child()) return;
  engine_->shutdown();
  {
    std::lock_guard<std::mutex> lock(cuda_mutex_);
    if (cuda_) cuda_->shutdown();
  }
  if (cuda_off_) cuda_off_->shutdown();
  std::lock_guard<std::mutex> lock(inner_mutex_);
  for (auto& [device, backend] : inner_) backend->shutdown();
  inner_.clear();
}

CudaSide* TideBackend::cuda_side(at::Device device, bool nccl_has_it) {
  if (getSize() == 1 || !options_->cuda) return nullptr;
  std::lock_guard<std::mutex> lock(cuda_mutex_);
  if (!cuda_) cuda_ = std::make_unique<CudaSide>(engine_->speaker(), cuda_bootstrap_, *options_, device);
  if (cuda_->device() == device) return cuda_.get();
  if (nccl_has_it) return nullptr;
  fail(ErrorKind::usage, engine_->speaker(), "",
       "a group uses one GPU per rank; got a tensor on " + device.str() + ", expected " + cuda_->device().str() +
           "; move it, or call torch.cuda.set_device first");
}

TideBackend::Left TideBackend::without_side(const at::Tensor& input, const at::Tensor& output) {
  const at::Device device = output.device();
  Engine* engine = cuda_off_.get();
  std::string why = getSize() == 1 ? "one rank" : kCudaOff;
  if (!engine) {
    std::lock_guard<std::mutex> lock(cuda_mutex_);
    engine = cuda_ ? &cuda_->engine() : engine_.get();
    why = "a group uses one GPU per rank; got " + device.str() + ", this one's is " +
          (cuda_ ? cuda_->device().str() : std::string("not known yet"));
  }
  if (!device.is_cuda()) why = "tide carries CPU and CUDA tensors; got one on " + device.str();
  if (input.device() != device) why = "an input on " + input.device().str() + " and an output on " + device.str();
  return {engine, std::move(why)};
}

std::optional<TideBackend::Left> TideBackend::left_to_inner(CudaSide* side, const Request& q, const at::Tensor& input,
                                                            const at::Tensor& output) {
  check_process(to_string(q.op));
  if (!side) return without_side(input, output);
  if (q.layout) return std::nullopt;
  Selection early = side->engine().preselect(q, inner_only_reason(*side, q));
  if (early.path != Path::inner) return std::nullopt;
  return Left{&side->engine(), std::move(early.reason)};
}

c10::intrusive_ptr<c10d::Backend::Options> TideBackend::getBackendOptions() {
  return c10::make_intrusive<BackendOptions>(*options_);
}

void TideBackend::check_process(const char* what) const {
  if (!guard_.in_child()) return;
  fail(ErrorKind::usage, engine_->speaker(), what,
       "called in a forked child; got pid " + std::to_string(getpid()) + ", expected " + std::to_string(owner_) +
           "; call collectives only in the process that made the group, or start workers with spawn");
}

void TideBackend::check_usable(const char* call) {
  check_process(call);
  for (const auto& [device, engine] : engines()) engine->raise_if_poisoned(call);
}

std::chrono::milliseconds TideBackend::timeout_or_default(std::chrono::milliseconds given) const {
  return given.count() > 0 ? given : options_->timeout;
}

const TideBackend::InnerPtr& TideBackend::inner(c10::DeviceType device) {
  std::lock_guard<std::mutex> lock(inner_mutex_);
  auto found = inner_.find(device);
  if (found == inner_.end()) {  // nothing is left there when it cannot be made
    const std::string name = c10::DeviceTypeName(device, /*lower_case=*/true);
    InnerPtr made = make_inner_(name, store_, getRank(), getSize(), options_->timeout);
    if (bound_device_id_ && bound_device_id_->type() == device) made->setBoundDeviceId(bound_device_id_);
    found = inner_.emplace(device, std::move(made)).first;
  }
  const InnerPtr& backend = found->second;
  if (coalescing_ && backend->supportsCoalescing() &&
      std::find(coalescing_inner_.begin(), coalescing_inner_.end(), backend) == coalescing_inner_.end()) {
    backend->startCoalescing();
    coalescing_inner_.push_back(backend);
  }
  return backend;
}

Request TideBackend::request(Channel op, const at::Tensor& input, const at::Tensor& output) const {
  Request q;
  q.op = op;
  q.rank = getRank();
  q.world = getSize();
  q.scalar_type = static_cast<int>(input.scalar_type()) * 256 + static_cast<int>(output.scalar_type());
  q.type_name = c10::toString(input.scalar_type());
  if (input.scalar_type() != output.scalar_type()) {
    q.type_name += std::string(" -> ") + c10::toString(output.scalar_type());
  }
  q.itemsize = static_cast<int64_t>(input.element_size());
  q.out_itemsize = static_cast<int64_t>(output.element_size());
  return q;
}

at::Tensor TideBackend::repaired(const at::Tensor& tensor, Issue& issue, const std::string& why) const {
  if (tensor.is_contiguous()) {
    issue.hold.push_back(tensor);
    return tensor;
  }
  issue.copied("input", why);
  issue.hold.push_back(tensor.contiguous());
  return issue.hold.back();
}

at::Tensor TideBackend::apart(at::Tensor input, const at::Tensor& output, const void* place, Issue& issue) const {
  const auto* in = static_cast<const std::byte*>(input.const_data_ptr());
  const auto* out = static_cast<const std::byte*>(output.const_data_ptr());
  if (in == place || in + input.nbytes() <= out || out + output.nbytes() <= in) return input;
  issue.copied("input", "overlaps the output");
  issue.hold.push_back(input.clone());
  return issue.hold.back();
}

at::Tensor TideBackend::repaired_output(at::Tensor& output, Issue& issue, const std::string& why) const {
  if (output.is_contiguous()) {
    issue.hold.push_back(output);
    return output;
  }
  issue.copied("output", why);
  at::Tensor temporary = at::empty_like(output, at::MemoryFormat::Contiguous);
  issue.hold.push_back(temporary);
  issue.after = [output, temporary] { output.copy_(temporary); };
  return temporary;
}

uint64_t TideBackend::begin_record(Engine& engine, const Issue& issue, uint64_t ticket, const std::string* why_inner) {
  calls_ += 1;
  Call entry;
  entry.op = issue.call.request.op;
  entry.sequence = ticket;
  entry.label = issue.label;
  entry.text = issue.call.request.type_name;
  entry.bytes = issue.bytes;
  entry.repair_copies = issue.repair_copies;
  entry.repair_reason = issue.repair_reason;
  if (why_inner) {
    entry.path = Path::inner;
    entry.reason = *why_inner;
    entry.state = CallState::running;
  }
  return engine.recorder().begin(std::move(entry));
}

c10::intrusive_ptr<c10d::Work> TideBackend::issue(Issue issue, InnerCall inner) {
  const Channel channel = issue.call.request.op;
  check_process(to_string(channel));
  at::RecordFunction profiled(at::RecordScope::USER_SCOPE);
  if (profiled.isActive()) profiled.before(std::string("tide::") + to_string(channel));
  engine_->connect();

  Lane& lane = engine_->lane(channel);
  const uint64_t ticket = lane.take_ticket();
  const std::string name = call_name(channel, ticket);
  issue.call.record_id = begin_record(*engine_, issue, ticket);

  const auto timeout = timeout_or_default(issue.timeout);
  const bool to_inner = engine_->preselect(issue.call.request).path == Path::inner;
  const bool here = !issue.async || to_inner || !issue.call.problem.empty();
  auto work = c10::make_intrusive<Work>(getRank(), issue.op, issue.outputs, ticket, interrupted_);
  if (!here) {  // before it is over, the caller may give its tensors other memory (t.data = ...)
    for (const at::Tensor& tensor : issue.hold) issue.memory.push_back(tensor.storage());
  }
  if (issue.after && !here) {
    // On the lane's thread, as the caller would: without gradients, in inference mode.
    issue.after = [after = std::move(issue.after), state = at::ThreadLocalState()] {
      const at::ThreadLocalStateGuard guard(state);
      after();
    };
  }
  auto shared = std::make_shared<Issue>(std::move(issue));
  // The engine outlives the backend object while a call is under way.
  // Gives the reason why the call is the inner backend's, or "" when it is over.
  using Body = std::function<std::string(const std::function<void()>& interrupted)>;
  Body body = [shared, name, timeout, here, engine = engine_](const std::function<void()>& interrupted) -> std::string {
    Wait wait{Clock::now() + timeout, interrupted, name};
    try {
      const Selection selection = engine->run(shared->call, wait);
      if (selection.path == Path::inner) {
        engine->recorder().update(shared->call.record_id, selection.path, selection.reason);
        if (!here) refuse_late_inner(engine->speaker(), name, selection.reason);
        return selection.reason;
      }
      if (shared->after) shared->after();
      engine->recorder().end(shared->call.record_id, false);
      return "";
    } catch (...) {
      engine->recorder().end(shared->call.record_id, true);
      throw;
    }
  };

  if (!here) {
    lane.post(ticket, [shared, body, work]() mutable {
      std::exception_ptr error;
      try {
        body(nullptr);
      } catch (...) {
        error = std::current_exception();
      }
      shared.reset();
      body = nullptr;
      work->finish_call(error);
    });
    return work;
  }
  std::string why_inner;
  lane.run(ticket, [&] { why_inner = body(interrupted_); }, interrupted_);
  if (why_inner.empty()) {
    work->finish_call(nullptr);
    return work;
  }
  return call_inner({engine_.get(), why_inner}, *shared, ticket, [&] {
    auto made = inner();
    if (!shared->async) wait_for(made);
    return made;
  });
}

c10::intrusive_ptr<c10d::Work> TideBackend::call_inner(const Left& left, const Issue& issue, uint64_t ticket,
                                                       InnerCall inner) {
  Engine& engine = *left.engine;
  note_inner_copies(engine, issue);
  const auto context = [&] {
    return engine.speaker().prefix(call_name(issue.call.request.op, ticket)) + "handed to the inner backend (" +
           left.why + ")";
  };
  try {
    auto work = handed_down(context, inner);
    engine.recorder().end(issue.call.record_id, false);
    return work;
  } catch (...) {
    engine.recorder().end(issue.call.record_id, true);
    throw;
  }
}

c10::intrusive_ptr<c10d::Work> TideBackend::leave_to_inner(const Left& left, Issue& issue, InnerCall inner) {
  const Channel channel = issue.call.request.op;
  at::RecordFunction profiled(at::RecordScope::USER_SCOPE);
  if (profiled.isActive()) profiled.before(std::string("tide::") + to_string(channel));
  Engine& engine = *left.engine;
  engine.raise_if_poisoned(to_string(channel));
  // Without waiting for its turn: a call of tide's on another thread may be at it for long.
  const uint64_t ticket = engine.lane(channel).pass();
  issue.call.record_id = begin_record(engine, issue, ticket, &left.why);
  return call_inner(left, issue, ticket, inner);
}

c10::intrusive_ptr<c10d::Work> TideBackend::issue_cuda(CudaSide& side, Issue issue, InnerCall inner) {
  const Channel channel = issue.call.request.op;
  check_process(to_string(channel));
  at::RecordFunction profiled(at::RecordScope::USER_SCOPE);
  if (profiled.isActive()) profiled.before(std::string("tide::") + to_string(channel));
  c10::DeviceGuard guard(side.device());
  Engine& engine = side.engine();
  side.connect();
  Lane& lane = engine.lane(channel);
  const uint64_t ticket = lane.take_ticket();
  issue.call.record_id = begin_record(engine, issue, ticket);
  const Wait wait{Clock::now() + timeout_or_default(issue.timeout), interrupted_, call_name(channel, ticket)};
  Selection selection{Path::inner, ""};
  std::optional<c10::Event> done;
  auto body = [&] {
    try {
      done = side.enqueue(channel, issue.hold, !issue.async, [&] { selection = engine.run(issue.call, wait); });
    } catch (...) {
      engine.recorder().end(issue.call.record_id, true);
      throw;
    }
  };
  lane.run(ticket, body, interrupted_);
  engine.recorder().update(issue.call.record_id, selection.path, selection.reason);
  if (selection.path == Path::inner) return call_inner({&engine, selection.reason}, issue, ticket, inner);
  engine.recorder().end(issue.call.record_id, false);
  const c10::Stream current = side.current_stream();
  if (!issue.async || issue.after) done->block(current);
  if (issue.after) issue.after();
  c10::intrusive_ptr<c10d::Work> work = c10::make_intrusive<CudaWork>(
      getRank(), issue.op, std::move(*done), issue.outputs, side.shared_engine(), side.device());
  std::lock_guard<std::mutex> lock(inner_mutex_);
  if (coalescing_) coalesced_.push_back(work);
  return work;
}

}  // namespace tide
