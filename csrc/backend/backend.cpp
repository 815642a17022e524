#include "backend.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "shm_transport.h"
#include "work.h"

namespace tide {

namespace {

class StoreBootstrap : public Bootstrap {
 public:
  StoreBootstrap(c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds timeout)
      : store_(std::move(store)), timeout_(timeout) {}
  void set(const std::string& key, const std::string& value) override {
    store_->set(key, std::vector<uint8_t>(value.begin(), value.end()));
  }
  std::string get(const std::string& key) override {
    store_->wait({key}, timeout_);
    const auto bytes = store_->get(key);
    return {bytes.begin(), bytes.end()};
  }
  // Asks again and again: a wait of the store that is cut short warns each time.
  std::string await(const std::string& key, const std::function<void()>& tick) override {
    constexpr std::chrono::microseconds kShortest(200), kLongest(20000);
    const auto end = Clock::now() + timeout_;
    auto pause = kShortest;
    auto ticked = Clock::now();
    while (!store_->check({key})) {
      const auto now = Clock::now();
      if (now >= end) {
        throw std::runtime_error("no answer in the store within " + std::to_string(timeout_.count()) + " ms");
      }
      if (now - ticked >= std::chrono::milliseconds(100)) {
        tick();
        ticked = now;
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, kLongest);
    }
    return get(key);
  }
  bool has(const std::string& key) override { return store_->check({key}); }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  std::chrono::milliseconds timeout_;
};

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

ElementType element_type(at::ScalarType type) {
  if (type == at::kFloat) return ElementType::f32;
  if (type == at::kDouble) return ElementType::f64;
  if (type == at::kBFloat16) return ElementType::bf16;
  if (type == at::kInt) return ElementType::i32;
  if (type == at::kLong) return ElementType::i64;
  return ElementType::bytes;
}

std::string shape(const at::Tensor& t) {
  std::string text = c10::toString(t.scalar_type());
  text += "[";
  for (int64_t d = 0; d < t.dim(); ++d) text += (d ? ", " : "") + std::to_string(t.size(d));
  return text + "]";
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
}

TideBackend::~TideBackend() {
  if (owner_ == getpid()) {
    engine_->shutdown();
    return;
  }
  // A forked child: threads, sockets and device memory belong to the parent. Dropped, never destroyed.
  cuda_.release();
  new std::map<c10::DeviceType, InnerPtr>(std::move(inner_));
}

void TideBackend::leave() {
  if (owner_ == getpid()) engine_->shutdown();
}

CudaSide* TideBackend::cuda_side(at::Device device) {
  if (getSize() == 1 || !options_->cuda) return nullptr;
  std::lock_guard<std::mutex> lock(cuda_mutex_);
  if (!cuda_) cuda_ = std::make_unique<CudaSide>(engine_->speaker(), cuda_bootstrap_, *options_, device);
  if (cuda_->device() != device) {
    fail(ErrorKind::usage, engine_->speaker(), "",
         "a group uses one GPU per rank; got a tensor on " + device.str() + ", expected " + cuda_->device().str() +
             "; move it, or call torch.cuda.set_device first");
  }
  return cuda_.get();
}

CudaSide* TideBackend::plain_side(at::Device device) {
  {
    std::lock_guard<std::mutex> lock(cuda_mutex_);
    if (cuda_ && cuda_->device() != device) return nullptr;
  }
  return cuda_side(device);
}

c10::intrusive_ptr<c10d::Backend::Options> TideBackend::getBackendOptions() {
  return c10::make_intrusive<BackendOptions>(*options_);
}

void TideBackend::check_process(const char* what) const {
  if (owner_ == getpid()) return;
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
  InnerPtr& backend = inner_[device];
  if (!backend) {
    backend =
        make_inner_(c10::DeviceTypeName(device, /*lower_case=*/true), store_, getRank(), getSize(), options_->timeout);
    if (bound_device_id_ && bound_device_id_->type() == device) backend->setBoundDeviceId(bound_device_id_);
  }
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

at::Tensor TideBackend::repaired(const at::Tensor& tensor, Issue& issue) const {
  if (tensor.is_contiguous()) {
    issue.hold.push_back(tensor);
    return tensor;
  }
  issue.repair_copies += 1;
  issue.hold.push_back(tensor.contiguous());
  return issue.hold.back();
}

at::Tensor TideBackend::apart(at::Tensor input, const at::Tensor& output, const void* place, Issue& issue) const {
  const auto* in = static_cast<const std::byte*>(input.const_data_ptr());
  const auto* out = static_cast<const std::byte*>(output.const_data_ptr());
  if (in == place || in + input.nbytes() <= out || out + output.nbytes() <= in) return input;
  issue.repair_copies += 1;
  issue.hold.push_back(input.clone());
  return issue.hold.back();
}

at::Tensor TideBackend::repaired_output(at::Tensor& output, Issue& issue) const {
  if (output.is_contiguous()) {
    issue.hold.push_back(output);
    return output;
  }
  issue.repair_copies += 1;
  at::Tensor temporary = at::empty_like(output, at::MemoryFormat::Contiguous);
  issue.hold.push_back(temporary);
  issue.after = [output, temporary] { output.copy_(temporary); };
  return temporary;
}

uint64_t TideBackend::begin_record(Engine& engine, const Issue& issue, uint64_t ticket) {
  calls_ += 1;
  Call entry;
  entry.op = issue.call.request.op;
  entry.sequence = ticket;
  entry.label = issue.label;
  entry.text = issue.call.request.type_name;
  entry.bytes = issue.bytes;
  entry.repair_copies = issue.repair_copies;
  return engine.recorder().begin(std::move(entry));
}

c10::intrusive_ptr<c10d::Work> TideBackend::issue(Issue issue) {
  const Channel channel = issue.call.request.op;
  check_process(to_string(channel));
  at::RecordFunction profiled(at::RecordScope::USER_SCOPE);
  if (profiled.isActive()) profiled.before(std::string("tide::") + to_string(channel));
  engine_->connect();

  Lane& lane = engine_->lane(channel);
  const uint64_t ticket = lane.take_ticket();
  const std::string name = std::string(to_string(channel)) + " #" + std::to_string(ticket);
  Recorder& recorder = engine_->recorder();
  issue.call.record_id = begin_record(*engine_, issue, ticket);

  const auto timeout = timeout_or_default(issue.timeout);
  const bool to_inner = engine_->preselect(issue.call.request).path == Path::inner;
  const bool here = !issue.async || to_inner || !issue.call.problem.empty();
  auto work = c10::make_intrusive<Work>(getRank(), issue.op, issue.outputs, ticket, interrupted_);
  if (issue.after && !here) {
    // On the lane's thread, as the caller would: without gradients, in inference mode.
    issue.after = [after = std::move(issue.after), state = at::ThreadLocalState()] {
      const at::ThreadLocalStateGuard guard(state);
      after();
    };
  }
  auto shared = std::make_shared<Issue>(std::move(issue));
  // The engine outlives the backend object while a call is under way.
  using Body = std::function<bool(const std::function<void()>& interrupted)>;
  Body body = [shared, ticket, name, timeout, engine = engine_](const std::function<void()>& interrupted) {
    Wait wait{Clock::now() + timeout, interrupted, name};
    try {
      const Selection selection = engine->run(shared->call, ticket, wait);
      if (selection.path == Path::inner) {
        engine->recorder().update(shared->call.record_id, selection.path, selection.reason);
        return true;
      }
      if (shared->after) shared->after();
      engine->recorder().end(shared->call.record_id, false);
      return false;
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
  bool left_to_inner = false;
  lane.run(ticket, [&] { left_to_inner = body(interrupted_); }, interrupted_);
  if (!left_to_inner) {
    work->finish_call(nullptr);
    return work;
  }
  auto inner_work = shared->inner();
  if (!shared->async) inner_work->wait();
  recorder.end(shared->call.record_id, false);
  return inner_work;
}

std::string TideBackend::inner_only_reason(CudaSide& side, const Request& q) {
  if (side.capturing()) return "called while a CUDA graph is captured";
  // Between startCoalescing and endCoalescing NCCL's own group may be open on this thread, and tide's start and growth
  // call NCCL.
  const bool nccl_has_it = q.op != Channel::reduce_scatter || q.in_type == q.out_type;
  std::lock_guard<std::mutex> lock(inner_mutex_);
  return coalescing_ && nccl_has_it ? "issued as one with other calls" : "";
}

// Packing reads a result as soon as its call is enqueued; inside NCCL's group nothing is before the group ends.
void TideBackend::refuse_coalesced_packing(Channel op) {
  std::lock_guard<std::mutex> lock(inner_mutex_);
  if (!coalescing_) return;
  fail(ErrorKind::usage, engine_->speaker(), to_string(op),
       "a layout or bfloat16 into float32 among calls issued as one, in a group whose CUDA calls are left to nccl; got "
       "a "
       "call that is unpacked before they end, expected none; issue it outside of the coalescing manager");
}

c10::intrusive_ptr<c10d::Work> TideBackend::leave_to_inner(Engine& engine, Issue& issue, const Selection& why) {
  const Channel channel = issue.call.request.op;
  engine.raise_if_poisoned(to_string(channel));
  // Without waiting for its turn: a call of tide's on another thread may be at it for long.
  const uint64_t id = begin_record(engine, issue, engine.lane(channel).pass());
  engine.recorder().update(id, why.path, why.reason);
  engine.recorder().end(id, false);
  return issue.inner();
}

c10::intrusive_ptr<c10d::Work> TideBackend::issue_cuda(CudaSide& side, Issue issue) {
  const Channel channel = issue.call.request.op;
  check_process(to_string(channel));
  at::RecordFunction profiled(at::RecordScope::USER_SCOPE);
  if (profiled.isActive()) profiled.before(std::string("tide::") + to_string(channel));
  c10::DeviceGuard guard(side.device());
  Engine& engine = side.engine();
  if (!issue.call.request.layout) {
    const Selection early = engine.preselect(issue.call.request, inner_only_reason(side, issue.call.request));
    if (early.path == Path::inner) return leave_to_inner(engine, issue, early);
  }
  side.connect();
  Lane& lane = engine.lane(channel);
  const uint64_t ticket = lane.take_ticket();
  issue.call.record_id = begin_record(engine, issue, ticket);
  const Wait wait{Clock::now() + timeout_or_default(issue.timeout), interrupted_,
                  std::string(to_string(channel)) + " #" + std::to_string(ticket)};
  Selection selection{Path::inner, ""};
  std::optional<c10::Event> done;
  auto body = [&] {
    try {
      done = side.enqueue(channel, issue.hold, !issue.async, [&] { selection = engine.run(issue.call, ticket, wait); });
    } catch (...) {
      engine.recorder().end(issue.call.record_id, true);
      throw;
    }
  };
  lane.run(ticket, body, interrupted_);
  engine.recorder().update(issue.call.record_id, selection.path, selection.reason);
  engine.recorder().end(issue.call.record_id, false);
  if (selection.path == Path::inner) return issue.inner();
  const c10::Stream current = side.current_stream();
  if (!issue.async || issue.after) done->block(current);
  if (issue.after) issue.after();
  c10::intrusive_ptr<c10d::Work> work = c10::make_intrusive<CudaWork>(
      getRank(), issue.op, std::move(*done), issue.outputs, side.shared_engine(), side.stream(channel));
  std::lock_guard<std::mutex> lock(inner_mutex_);
  if (coalescing_) coalesced_.push_back(work);
  return work;
}

c10::intrusive_ptr<c10d::Work> TideBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                            const c10d::AllgatherOptions& opts) {
  auto applied = LayoutTable::global().take(output);
  CudaSide* side = nullptr;
  if (!output.is_cpu() || !input.is_cpu()) {
    if (output.is_cuda() && input.is_cuda()) side = applied ? cuda_side(output.device()) : plain_side(output.device());
    if (!side && applied) refuse_coalesced_packing(Channel::all_gather);
    if (!side && applied) return gather_by_packing(*inner(output.device().type()), output, input, *applied, opts);
    if (!side) return inner(output.device().type())->_allgather_base(output, input, opts);
  }
  Issue issue;
  issue.op = c10d::OpType::_ALLGATHER_BASE;
  issue.async = opts.asyncOp;
  issue.timeout = opts.timeout;
  issue.outputs = {output};
  issue.bytes = static_cast<int64_t>(output.nbytes());
  Request& q = issue.call.request;
  q = request(Channel::all_gather, input, output);
  q.numel = input.numel();
  int64_t expected = q.numel * q.world;
  if (applied) {
    q.layout = applied->layout;
    q.placed = applied->placed;
    issue.label = applied->label;
    expected = q.layout->total_gathered_numel();
  }
  if (input.scalar_type() != output.scalar_type()) {
    issue.call.problem = "input and output differ in dtype; got " + shape(input) + " and " + shape(output) +
                         ", expected the same; convert one of them";
  } else if (output.numel() != expected || (q.layout && q.layout->total_shard_numel() != q.numel)) {
    issue.call.problem = "sizes do not fit; got input " + shape(input) + " and output " + shape(output) +
                         ", expected an output of " + std::to_string(expected) + " elements" +
                         (q.layout ? " and an input of " + std::to_string(q.layout->total_shard_numel()) + " (layout " +
                                         q.layout->describe() + ")"
                                   : " (input times " + std::to_string(q.world) + " ranks)") +
                         "; resize the output or the input";
  } else if (q.layout && q.layout->world() != q.world) {
    issue.call.problem = "the layout is for " + std::to_string(q.layout->world()) + " ranks; expected " +
                         std::to_string(q.world) + "; make it with the group's size";
  } else if (q.placed && !output.is_contiguous()) {
    issue.call.problem = "a placed shard needs a contiguous output; got strides that are not; pass a contiguous one";
  } else {
    at::Tensor out = repaired_output(output, issue);
    at::Tensor in = input;
    if (!q.placed) {
      const auto* place = static_cast<const std::byte*>(out.const_data_ptr()) + q.rank * input.nbytes();
      in = apart(repaired(input, issue), out, q.layout ? nullptr : place, issue);
    }
    q.output_in_arena = in_arena(out);
    issue.call.buffers.inputs = {static_cast<const std::byte*>(q.placed ? nullptr : in.const_data_ptr())};
    issue.call.buffers.output = static_cast<std::byte*>(out.mutable_data_ptr());
    issue.call.output_bytes = static_cast<int64_t>(out.nbytes());
  }
  issue.inner = [this, output, input, applied, opts]() mutable {
    auto& backend = *inner(output.device().type());
    if (applied) return gather_by_packing(backend, output, input, *applied, opts);
    return backend._allgather_base(output, input, opts);
  };
  if (side) return issue_cuda(*side, std::move(issue));
  return noted(c10::DeviceType::CPU, this->issue(std::move(issue)));
}

namespace {

// SUM, AVG and PREMUL_SUM are one operation with a scale; the others are left to the inner backend.
std::pair<Reduction, double> reduction(const c10d::ReduceOp& op, int world, bool integral) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return {Reduction::sum, 1.0};
    case c10d::ReduceOp::AVG:
      return {integral ? Reduction::other : Reduction::sum, 1.0 / world};
    case c10d::ReduceOp::PREMUL_SUM: {
      auto* supplement = dynamic_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
      if (!supplement || integral) return {Reduction::other, 1.0};
      const at::Tensor& factor = supplement->tensor_factor;
      if (factor.defined() && factor.numel() != 1) return {Reduction::other, 1.0};
      return {Reduction::sum, factor.defined() ? factor.item().toDouble() : supplement->double_factor};
    }
    case c10d::ReduceOp::MIN:
      return {Reduction::min, 1.0};
    case c10d::ReduceOp::MAX:
      return {Reduction::max, 1.0};
    case c10d::ReduceOp::PRODUCT:
      return {Reduction::product, 1.0};
    case c10d::ReduceOp::BAND:
    case c10d::ReduceOp::BOR:
    case c10d::ReduceOp::BXOR:
    case c10d::ReduceOp::UNUSED:
      return {Reduction::other, 1.0};
  }
  return {Reduction::other, 1.0};
}

bool widens(const at::Tensor& input, const at::Tensor& output) {
  return input.scalar_type() == at::kBFloat16 && output.scalar_type() == at::kFloat;
}

// The tensor that stands for all: one of the output's type if there is one, as bf16 beside it is widened.
const at::Tensor& widest(const std::vector<at::Tensor>& tensors, const at::Tensor& output) {
  for (const at::Tensor& t : tensors) {
    if (t.scalar_type() == output.scalar_type()) return t;
  }
  return tensors[0];
}

// One tensor per parameter: puts their types into the request when there are two. Returns the call's bytes.
int64_t note_types(const std::vector<at::Tensor>& tensors, Request& q) {
  const auto differs = [&](const at::Tensor& t) { return element_type(t.scalar_type()) != q.in_type; };
  if (std::none_of(tensors.begin(), tensors.end(), differs)) return q.numel * q.world * q.itemsize;
  q.type_name = "BFloat16 and Float -> Float";
  int64_t bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    q.in_types.push_back(element_type(tensors[i].scalar_type()));
    bytes += q.layout->shard_numel(i) * q.world * tensors[i].element_size();
  }
  return bytes;
}

}  // namespace

c10::intrusive_ptr<c10d::Work> TideBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                 const c10d::ReduceScatterOptions& opts) {
  auto applied = LayoutTable::global().take(input);
  const at::Tensor& sample = applied && !applied->tensors.empty() ? widest(applied->tensors, output) : input;
  const auto [op, scale] = reduction(opts.reduceOp, getSize(), at::isIntegralType(sample.scalar_type(), true));
  CudaSide* side = nullptr;
  if (!output.is_cpu() || !input.is_cpu()) {
    // One type in and out is nccl's as well.
    const bool plain = !applied && input.scalar_type() == output.scalar_type();
    if (output.is_cuda() && input.is_cuda()) side = plain ? plain_side(output.device()) : cuda_side(output.device());
    if (!side && plain) return inner(output.device().type())->_reduce_scatter_base(output, input, opts);
    if (!side) refuse_coalesced_packing(Channel::reduce_scatter);
    if (!side) return scatter_by_packing(*inner(output.device().type()), output, input, applied, scale, opts);
  }
  Issue issue;
  issue.op = c10d::OpType::_REDUCE_SCATTER_BASE;
  issue.async = opts.asyncOp;
  issue.timeout = opts.timeout;
  issue.outputs = {output};
  Request& q = issue.call.request;
  q = request(Channel::reduce_scatter, sample, output);
  q.numel = output.numel();
  q.in_type = element_type(sample.scalar_type());
  q.out_type = element_type(output.scalar_type());
  q.reduction = op;
  q.scale = scale;
  issue.bytes = q.numel * q.world * q.itemsize;
  std::string& problem = issue.call.problem;
  int64_t expected = q.numel * q.world;
  if (applied) {
    q.layout = applied->layout;
    q.separate_inputs = applied->separate;
    issue.label = applied->label;
    if (!applied->separate) expected = q.layout->total_gathered_numel();
    if (applied->separate) q.scalar_type = static_cast<int>(output.scalar_type());
  }
  const bool widening = widens(sample, output);
  if (sample.scalar_type() != output.scalar_type() && !widening) {
    problem = "input and output differ in dtype; got " + shape(sample) + " and " + shape(output) +
              ", expected the same, or bfloat16 into float32; convert one of them";
  } else if (widening && op != Reduction::sum) {
    problem = std::string("bfloat16 into float32 with ") + to_string(op) +
              "; expected SUM, AVG or PREMUL_SUM; convert the input to float32 first";
  } else if (applied && op != Reduction::sum) {
    problem = std::string("a layout with ") + to_string(op) + "; expected SUM, AVG or PREMUL_SUM; pack the input";
  } else if (q.layout && q.layout->world() != q.world) {
    problem = "the layout is for " + std::to_string(q.layout->world()) + " ranks; expected " + std::to_string(q.world) +
              "; make it with the group's size";
  } else if (input.numel() != expected || (q.layout && q.layout->total_shard_numel() != q.numel)) {
    problem = "sizes do not fit; got input " + shape(input) + " and output " + shape(output) +
              ", expected an input of " + std::to_string(expected) + " elements" +
              (q.layout ? " and an output of " + std::to_string(q.layout->total_shard_numel()) + " (layout " +
                              q.layout->describe() + ")"
                        : " (output times " + std::to_string(q.world) + " ranks)") +
              "; resize one of them";
  } else if (applied && applied->separate && applied->tensors.size() != q.layout->parameters()) {
    problem = "got " + std::to_string(applied->tensors.size()) + " tensors for a layout of " +
              std::to_string(q.layout->parameters()) + " parameters; pass one tensor per parameter";
  }
  if (problem.empty() && applied && applied->separate) {
    for (size_t i = 0; i < applied->tensors.size(); ++i) {
      const at::Tensor& t = applied->tensors[i];
      const bool known_type = t.scalar_type() == sample.scalar_type() || widens(t, output);
      if (t.numel() != q.layout->numel(i) || !known_type || t.device() != output.device()) {
        problem = "tensor " + std::to_string(i) + " does not fit the layout; got " + shape(t) + " on " +
                  t.device().str() + ", expected " + std::to_string(q.layout->numel(i)) + " elements of " +
                  c10::toString(sample.scalar_type()) + " on " + output.device().str() +
                  "; pass the tensors the layout was made for";
        break;
      }
    }
  }
  if (problem.empty()) {
    if (q.separate_inputs) {
      issue.bytes = note_types(applied->tensors, q);
      for (const at::Tensor& t : applied->tensors) {
        issue.call.buffers.inputs.push_back(static_cast<const std::byte*>(repaired(t, issue).const_data_ptr()));
      }
    } else {
      issue.call.buffers.inputs = {static_cast<const std::byte*>(repaired(input, issue).const_data_ptr())};
    }
    at::Tensor out = repaired_output(output, issue);
    issue.call.buffers.output = static_cast<std::byte*>(out.mutable_data_ptr());
    issue.call.output_bytes = static_cast<int64_t>(out.nbytes());
  }
  issue.inner = [this, output, input, applied, opts, scale = scale, sum = op == Reduction::sum]() mutable {
    auto& backend = *inner(output.device().type());
    // gloo has no AVG and no PREMUL_SUM; nccl has.
    const bool scaled = scale != 1.0 && output.is_cpu();
    if (applied || (sum && (scaled || input.scalar_type() != output.scalar_type()))) {
      return scatter_by_packing(backend, output, input, applied, scale, opts);
    }
    return backend._reduce_scatter_base(output, input, opts);
  };
  if (side) return issue_cuda(*side, std::move(issue));
  return noted(c10::DeviceType::CPU, this->issue(std::move(issue)));
}

namespace {

// Rows per peer -> elements per peer. Empty: equal parts. Says what is wrong in `problem`.
std::vector<int64_t> element_splits(const at::Tensor& t, const std::vector<int64_t>& splits, int world,
                                    const char* which, std::string& problem) {
  const int64_t rows = t.dim() > 0 ? t.size(0) : 0;
  int64_t row = 1;
  for (int64_t d = 1; d < t.dim(); ++d) row *= t.size(d);
  std::vector<int64_t> result;
  if (splits.empty()) {
    if (rows % world != 0) {
      problem = std::string("the ") + which + " tensor's dim 0 is not divisible by the group size; got " + shape(t) +
                " on " + std::to_string(world) + " ranks; pass " + which + "_split_sizes";
      return std::vector<int64_t>(static_cast<size_t>(world), 0);
    }
    return std::vector<int64_t>(static_cast<size_t>(world), rows / world * row);
  }
  int64_t sum = 0;
  bool negative = false, wrapped = false;
  for (int64_t split : splits) {
    int64_t elements = 0;
    negative = negative || split < 0;
    wrapped = wrapped || __builtin_add_overflow(sum, split, &sum) || __builtin_mul_overflow(split, row, &elements);
    result.push_back(elements);
  }
  if (static_cast<int>(splits.size()) != world || sum != rows || negative || wrapped) {
    problem = std::string(which) + "_split_sizes do not fit; got " + std::to_string(splits.size()) +
              (wrapped ? " sizes beyond what 64 bits hold" : " sizes with sum " + std::to_string(sum)) +
              (negative ? " and a negative one" : "") + " for " + shape(t) + ", expected " + std::to_string(world) +
              " sizes with sum " + std::to_string(rows) + "; correct them";
    return std::vector<int64_t>(static_cast<size_t>(world), 0);
  }
  return result;
}

}  // namespace

c10::intrusive_ptr<c10d::Work> TideBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                          std::vector<int64_t>& out_splits,
                                                          std::vector<int64_t>& in_splits,
                                                          const c10d::AllToAllOptions& opts) {
  CudaSide* side = nullptr;
  if (!output.is_cpu() || !input.is_cpu()) {
    side = output.is_cuda() && input.is_cuda() ? plain_side(output.device()) : nullptr;
    if (!side) return inner(output.device().type())->alltoall_base(output, input, out_splits, in_splits, opts);
  }
  Issue issue;
  issue.op = c10d::OpType::ALLTOALL_BASE;
  issue.async = opts.asyncOp;
  issue.timeout = opts.timeout;
  issue.outputs = {output};
  issue.bytes = static_cast<int64_t>(input.nbytes());
  Request& q = issue.call.request;
  q = request(Channel::all_to_all, input, output);
  q.numel = input.numel();
  std::string& problem = issue.call.problem;
  q.in_splits = element_splits(input, in_splits, getSize(), "input", problem);
  q.out_splits = element_splits(output, out_splits, getSize(), "output", problem);
  if (problem.empty() && input.scalar_type() != output.scalar_type()) {
    problem = "input and output differ in dtype; got " + shape(input) + " and " + shape(output) +
              ", expected the same; convert one of them";
  }
  if (problem.empty()) {
    at::Tensor out = repaired_output(output, issue);
    // Peers write the output while the input is still being sent.
    const at::Tensor in = apart(repaired(input, issue), out, nullptr, issue);
    issue.call.buffers.inputs = {static_cast<const std::byte*>(in.const_data_ptr())};
    q.output_in_arena = in_arena(out);
    issue.call.buffers.output = static_cast<std::byte*>(out.mutable_data_ptr());
    issue.call.output_bytes = static_cast<int64_t>(out.nbytes());
  }
  issue.inner = [this, output, input, out_splits, in_splits, opts]() mutable {
    return inner(output.device().type())->alltoall_base(output, input, out_splits, in_splits, opts);
  };
  if (side) return issue_cuda(*side, std::move(issue));
  return noted(c10::DeviceType::CPU, this->issue(std::move(issue)));
}

}  // namespace tide
