// What tide leaves to the inner backend of the tensors' device, and the calls built from the three it carries.
#include <torch/version.h>

#include "backend.h"
#include "work.h"

namespace tide {

namespace {

c10::DeviceType device_of(const std::vector<at::Tensor>& tensors) {
  return tensors.empty() ? c10::DeviceType::CPU : tensors.front().device().type();
}

c10::DeviceType device_of(const std::vector<std::vector<at::Tensor>>& lists, const std::vector<at::Tensor>& tensors) {
  if (!tensors.empty()) return device_of(tensors);
  return lists.empty() ? c10::DeviceType::CPU : device_of(lists.front());
}

}  // namespace

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

WorkPtr TideBackend::allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                                     const c10d::AllgatherOptions& opts) {
  TORCH_CHECK(outputs.size() == inputs.size(), "tide: all_gather_into_tensor_coalesced: got ", outputs.size(),
              " outputs and ", inputs.size(), " inputs; expected as many of each");
  std::vector<WorkPtr> works;
  for (size_t i = 0; i < outputs.size(); ++i) works.push_back(_allgather_base(outputs[i], inputs[i], opts));
  return c10::make_intrusive<GroupWork>(getRank(), std::move(works), outputs);
}

WorkPtr TideBackend::reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                                     const c10d::ReduceScatterOptions& opts) {
  TORCH_CHECK(outputs.size() == inputs.size(), "tide: reduce_scatter_tensor_coalesced: got ", outputs.size(),
              " outputs and ", inputs.size(), " inputs; expected as many of each");
  std::vector<WorkPtr> works;
  for (size_t i = 0; i < outputs.size(); ++i) works.push_back(_reduce_scatter_base(outputs[i], inputs[i], opts));
  return c10::make_intrusive<GroupWork>(getRank(), std::move(works), outputs);
}

// Lists of tensors as one exchange of flat pieces; gloo has no list form of its own.
WorkPtr TideBackend::alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                              const c10d::AllToAllOptions& opts) {
  if (device_of(outputs) != c10::DeviceType::CPU) return inner(device_of(outputs))->alltoall(outputs, inputs, opts);
  const auto world = static_cast<size_t>(getSize());
  TORCH_CHECK(outputs.size() == world && inputs.size() == world, "tide: all_to_all: got ", outputs.size(),
              " output and ", inputs.size(), " input tensors; expected ", world, " of each, one per rank");
  std::vector<int64_t> out_splits, in_splits;
  std::vector<at::Tensor> flat;
  int64_t received = 0;
  for (size_t r = 0; r < world; ++r) {
    flat.push_back(inputs[r].reshape({-1}));
    in_splits.push_back(inputs[r].numel());
    out_splits.push_back(outputs[r].numel());
    received += outputs[r].numel();
  }
  at::Tensor packed = at::cat(flat), unpacked = at::empty({received}, outputs[0].options());
  auto done = alltoall_base(unpacked, packed, out_splits, in_splits, opts);
  // Unpacking needs the data, so the call is over when it returns, also when it was asked to be asynchronous.
  done->wait();
  int64_t at = 0;
  for (size_t r = 0; r < world; ++r) {
    outputs[r].copy_(unpacked.narrow(0, at, out_splits[r]).view(outputs[r].sizes()));
    at += out_splits[r];
  }
  return c10::make_intrusive<GroupWork>(getRank(), std::vector<WorkPtr>{done}, outputs);
}

WorkPtr TideBackend::broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& o) {
  check_usable("broadcast");
  const auto device = device_of(tensors);
  return noted(device, inner(device)->broadcast(tensors, o));
}

WorkPtr TideBackend::allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& o) {
  check_usable("all_reduce");
  const auto device = device_of(tensors);
  return noted(device, inner(device)->allreduce(tensors, o));
}

WorkPtr TideBackend::allreduce_sparse(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& o) {
  check_usable("all_reduce");
  const auto device = device_of(tensors);
  return noted(device, inner(device)->allreduce_sparse(tensors, o));
}

WorkPtr TideBackend::allreduce_coalesced(std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& o) {
  check_usable("all_reduce");
  const auto device = device_of(tensors);
  return noted(device, inner(device)->allreduce_coalesced(tensors, o));
}

WorkPtr TideBackend::reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& o) {
  check_usable("reduce");
  const auto device = device_of(tensors);
  return noted(device, inner(device)->reduce(tensors, o));
}

WorkPtr TideBackend::allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                               const c10d::AllgatherOptions& o) {
  check_usable("all_gather");
  const auto device = device_of(outputs, inputs);
  return noted(device, inner(device)->allgather(outputs, inputs, o));
}

WorkPtr TideBackend::allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                                         const c10d::AllgatherOptions& o) {
  check_usable("all_gather");
  const auto device = device_of(outputs, inputs);
  return noted(device, inner(device)->allgather_coalesced(outputs, inputs, o));
}

WorkPtr TideBackend::gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                            const c10d::GatherOptions& o) {
  check_usable("gather");
  const auto device = device_of(outputs, inputs);
  return noted(device, inner(device)->gather(outputs, inputs, o));
}

WorkPtr TideBackend::scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                             const c10d::ScatterOptions& o) {
  check_usable("scatter");
  const auto device = device_of(inputs, outputs);
  return noted(device, inner(device)->scatter(outputs, inputs, o));
}

WorkPtr TideBackend::reduce_scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                                    const c10d::ReduceScatterOptions& o) {
  check_usable("reduce_scatter");
  const auto device = device_of(inputs, outputs);
  return noted(device, inner(device)->reduce_scatter(outputs, inputs, o));
}

WorkPtr TideBackend::send(std::vector<at::Tensor>& tensors, int to, int tag) {
  check_usable("send");
  const auto device = device_of(tensors);
  return noted(device, inner(device)->send(tensors, to, tag));
}

WorkPtr TideBackend::recv(std::vector<at::Tensor>& tensors, int from, int tag) {
  check_usable("recv");
  const auto device = device_of(tensors);
  return noted(device, inner(device)->recv(tensors, from, tag));
}

WorkPtr TideBackend::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  check_usable("recv");
  const auto device = device_of(tensors);
  return noted(device, inner(device)->recvAnysource(tensors, tag));
}

WorkPtr TideBackend::barrier(const c10d::BarrierOptions& o) {
  check_usable("barrier");
  auto device = o.device ? o.device->type() : c10::DeviceType::CPU;
  if (!o.device_ids.empty()) device = c10::DeviceType::CUDA;
  return noted(device, inner(device)->barrier(o));
}

#ifdef C10D_BACKEND_HAS_HOOKS
WorkPtr TideBackend::gather_into_tensor(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& o) {
  check_usable("gather_into_tensor");
  std::vector<std::vector<at::Tensor>> outputs;
  if (getRank() == o.rootRank) {
    TORCH_CHECK(output.is_contiguous() && output.numel() == input.numel() * getSize() &&
                    output.scalar_type() == input.scalar_type(),
                "tide: gather_into_tensor: got an output of ", output.numel(), " elements of ", output.scalar_type(),
                output.is_contiguous() ? "" : ", not contiguous", "; expected ", input.numel() * getSize(),
                " contiguous elements of ", input.scalar_type(), " (input times ", getSize(), " ranks)");
    outputs.emplace_back();
    const at::Tensor flat = output.view({-1});
    for (int r = 0; r < getSize(); ++r) {
      outputs[0].push_back(flat.narrow(0, r * input.numel(), input.numel()).view(input.sizes()));
    }
  }
  std::vector<at::Tensor> inputs{input};
  return gather(outputs, inputs, o);
}
#endif

void TideBackend::monitoredBarrier(const c10d::BarrierOptions& o, bool wait_all_ranks) {
  inner(c10::DeviceType::CPU)->monitoredBarrier(o, wait_all_ranks);
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
  std::lock_guard<std::mutex> lock(inner_mutex_);
  for (auto& [device, backend] : inner_) backend->abort();
}

void TideBackend::shutdown() {
  if (owner_ != getpid()) return;
  engine_->shutdown();
  {
    std::lock_guard<std::mutex> lock(cuda_mutex_);
    if (cuda_) cuda_->shutdown();
  }
  std::lock_guard<std::mutex> lock(inner_mutex_);
  for (auto& [device, backend] : inner_) backend->shutdown();
  inner_.clear();
}

std::pair<bool, std::string> TideBackend::connect(at::Device device) {
  check_process("connect");
  if (device.is_cpu()) {
    engine_->connect();
  } else if (CudaSide* side = device.is_cuda() ? cuda_side(device) : nullptr) {
    side->connect();
  }
  return shared_memory(device);
}

std::pair<bool, std::string> TideBackend::shared_memory(at::Device device) {
  if (device.is_cpu()) return engine_->shared_memory();
  if (!device.is_cuda()) return {false, "tide has no transport for " + device.str()};
  if (getSize() == 1) return {false, "one rank"};
  if (!options_->cuda) return {false, "CUDA calls are left to nccl (TIDE_CUDA_TRANSPORT=0 or Options.cuda)"};
  std::lock_guard<std::mutex> lock(cuda_mutex_);
  return cuda_ ? cuda_->engine().shared_memory()
               : std::pair<bool, std::string>{false, "not connected yet: that happens at the first collective"};
}

std::vector<std::pair<std::string, std::shared_ptr<Engine>>> TideBackend::engines() {
  std::vector<std::pair<std::string, std::shared_ptr<Engine>>> result{{"cpu", engine_}};
  std::lock_guard<std::mutex> lock(cuda_mutex_);
  if (cuda_) result.emplace_back("cuda", cuda_->shared_engine());
  return result;
}

std::optional<at::Tensor> TideBackend::slot(int64_t bytes, at::Device device, void* current_stream, SlotUse use,
                                            std::string* reason) {
  check_process("slot");
  if (!device.is_cpu()) {
    CudaSide* side = device.is_cuda() ? cuda_side(device) : nullptr;
    if (side) return side->slot(bytes, current_stream, use, options_->timeout, interrupted_, reason);
    *reason = shared_memory(device).second;
    return std::nullopt;
  }
  auto arena = engine_->arena(reason);
  if (!arena) return std::nullopt;
  // Slots may not take the room that the channels need for staging: without a slot a call goes staged, without
  // staging it fails.
  const int64_t reserved = 3 * options_->staging_bytes, free = arena->bytes_limit() - arena->bytes_in_use();
  if (bytes > free - reserved) {
    *reason = "a slot of " + std::to_string(bytes) + " bytes does not fit: " + std::to_string(free) + " of " +
              std::to_string(arena->bytes_limit()) + " bytes are free, of which " + std::to_string(reserved) +
              " are kept for staging";
    return std::nullopt;
  }
  const auto window = arena->acquire(std::max<int64_t>(bytes, 1), reason);
  if (!window) return std::nullopt;
  // The arena lives at least as long as the last tensor in it, whatever becomes of the group.
  return at::from_blob(
      arena->address(*window), {bytes}, [arena, window = *window](void*) { arena->release(window); },
      at::TensorOptions().dtype(at::kByte));
}

bool TideBackend::in_arena(const at::Tensor& tensor) {
  std::shared_ptr<Arena> arena;
  if (tensor.is_cpu()) {
    arena = engine_->arena_if_connected();
  } else if (tensor.is_cuda()) {
    std::lock_guard<std::mutex> lock(cuda_mutex_);
    if (cuda_) arena = cuda_->engine().arena_if_connected();
  }
  return arena && tensor.numel() > 0 &&
         arena->offset_of(tensor.const_data_ptr(), static_cast<int64_t>(tensor.nbytes())).has_value();
}

}  // namespace tide
