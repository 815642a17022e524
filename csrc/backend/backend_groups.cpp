// Groups made from this one, calls issued as one, memory for callers, hooks.
#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "backend.h"
#include "backend_strided.h"
#include "work.h"

namespace tide {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

c10::intrusive_ptr<c10d::Backend> TideBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                     const std::vector<int>& ranks,
                                                     const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  check_process("split");
  const auto given = c10::dynamic_intrusive_pointer_cast<BackendOptions>(opts);
  if (!given) {
    fail(ErrorKind::usage, engine_->speaker(), "split",
         "got options of backend \"" + (opts ? opts->backend : std::string("none")) +
             "\", expected tide_backend.Options; pass that, or none");
  }
  const uint64_t number = splits_++;
  const auto place = std::find(ranks.begin(), ranks.end(), getRank());
  if (place == ranks.end()) return nullptr;
  if (const auto child = children_.find(given->group_name); child != children_.end()) {
    if (auto alive = child->second.lock(); alive.defined()) return alive;
  }

  auto options = c10::make_intrusive<BackendOptions>(*given);
  options->global_ranks_in_group.clear();
  for (const int r : ranks) {
    const auto& global = options_->global_ranks_in_group;  // empty: the default group
    options->global_ranks_in_group.push_back(global.empty() ? static_cast<uint64_t>(r)
                                                            : global.at(static_cast<size_t>(r)));
  }
  // PyTorch may give a later split the name of one that is gone; the number keeps their keys apart. This group's own
  // store also keeps them apart from what an earlier attempt of the job left in `store`.
  auto own = c10::make_intrusive<c10d::PrefixStore>(
      "tide-split-" + std::to_string(number) + "-" + std::to_string(ranks.front()) + "/", store_);
  auto made = c10::make_intrusive<TideBackend>(own, static_cast<int>(place - ranks.begin()),
                                               static_cast<int>(ranks.size()), options, make_inner_, interrupted_);
  made->inner(c10::DeviceType::CPU);  // gloo connects all pairs when it is made: here, where every member is
  children_.insert_or_assign(given->group_name, c10::weak_intrusive_ptr<c10d::Backend>(made));
  return made;
}

WorkPtr TideBackend::noted(c10::DeviceType device, WorkPtr work) {
  std::lock_guard<std::mutex> lock(inner_mutex_);
  if (coalescing_ && work && device == c10::DeviceType::CPU) coalesced_.push_back(work);
  return work;
}

void TideBackend::startCoalescing() {
  check_process("startCoalescing");
  std::vector<WorkPtr> left;  // by calls that an error cut off from their end; not of these
  std::lock_guard<std::mutex> lock(inner_mutex_);
  coalesced_.swap(left);
  coalescing_ = true;
}

WorkPtr TideBackend::endCoalescing() {
  std::vector<WorkPtr> works;
  std::vector<InnerPtr> inner;
  {
    std::lock_guard<std::mutex> lock(inner_mutex_);
    coalescing_ = false;
    works.swap(coalesced_);
    inner.swap(coalescing_inner_);
  }
  for (const auto& backend : inner) {
    if (auto work = backend->endCoalescing()) works.push_back(std::move(work));
  }
  if (works.empty()) return nullptr;
  if (works.size() == 1) return works.front();
  return c10::make_intrusive<GroupWork>(getRank(), std::move(works), std::vector<at::Tensor>{});
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
       "a layout, bfloat16 into float32 or a strided output among calls issued as one, in a group whose CUDA calls are "
       "left to nccl; got a call that is unpacked before they end, expected none; issue it outside of the coalescing "
       "manager");
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
  if (!options_->cuda) return {false, kCudaOff};
  std::lock_guard<std::mutex> lock(cuda_mutex_);
  return cuda_ ? cuda_->engine().shared_memory()
               : std::pair<bool, std::string>{false, "not connected yet: that happens at the first collective"};
}

std::vector<std::pair<std::string, std::shared_ptr<Engine>>> TideBackend::engines() {
  std::vector<std::pair<std::string, std::shared_ptr<Engine>>> result{{"cpu", engine_}};
  std::lock_guard<std::mutex> lock(cuda_mutex_);
  if (cuda_) result.emplace_back("cuda", cuda_->shared_engine());
  if (cuda_off_) result.emplace_back("cuda", cuda_off_);
  return result;
}

std::optional<at::Tensor> TideBackend::slot(int64_t bytes, at::Device device, void* current_stream,
                                            cuda::ParameterGroup group, std::string* reason) {
  check_process("slot");
  if (!device.is_cpu()) {
    CudaSide* side = device.is_cuda() ? cuda_side(device) : nullptr;
    if (side) return side->slot(bytes, current_stream, group, options_->timeout, interrupted_, reason);
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
  return arena && tensor.numel() > 0 && arena->offset_of(tensor.const_data_ptr(), reach_bytes(tensor)).has_value();
}

// PyTorch passes the index alone; a CPU device has none.
bool TideBackend::supportsTensorAlloc(c10::DeviceIndex index) {
  if (index < 0 || !at::hasCUDA()) return getSize() > 1 && options_->shared_memory;
  return (getSize() > 1 && options_->cuda) || inner(c10::DeviceType::CUDA)->supportsTensorAlloc(index);
}

at::Tensor TideBackend::allocateTensor(long size, at::TensorOptions options) {
  TORCH_CHECK(size >= 0, "tide: allocate_tensor: got ", size, " elements, expected 0 or more");
  at::Device device = options.device();
  void* stream = nullptr;
  if (!device.is_cpu()) {
    if (device.is_cuda() && !device.has_index()) device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
    CudaSide* side = device.is_cuda() ? cuda_side(device, /*nccl_has_it=*/true) : nullptr;
    if (!side) return inner(device.type())->allocateTensor(size, options);
    if (side->capturing()) return at::empty({size}, options);
    stream = side->current_handle();
  }
  const auto type = c10::typeMetaToScalarType(options.dtype());
  const int64_t bytes = size * static_cast<int64_t>(c10::elementSize(type));
  std::string reason;
  const auto memory = slot(bytes, device, stream, cuda::kNoParameters, &reason);
  if (memory) return memory->narrow(0, 0, bytes).view(type);
  TORCH_WARN_ONCE("tide: allocate_tensor returns ordinary memory: ", reason);
  return at::empty({size}, options);
}

#ifdef C10D_BACKEND_HAS_HOOKS
void TideBackend::registerAbortHook(int64_t id, c10d::AbortHook hook) {
  std::lock_guard<std::mutex> lock(hooks_mutex_);
  abort_hooks_[id] = std::move(hook);
}

void TideBackend::unregisterAbortHook(int64_t id) {
  std::lock_guard<std::mutex> lock(hooks_mutex_);
  abort_hooks_.erase(id);
}
#endif

void TideBackend::run_abort_hooks() {
#ifdef C10D_BACKEND_HAS_HOOKS
  std::map<int64_t, c10d::AbortHook> hooks;
  {
    std::lock_guard<std::mutex> lock(hooks_mutex_);
    hooks = abort_hooks_;
  }
  for (const auto& [id, hook] : hooks) {
    try {
      hook();
    } catch (const std::exception& error) {  // what it wanted to save is lost, the abort goes on
      TORCH_WARN("tide: abort hook ", id, " failed: ", error.what());
    }
  }
#endif
}

}  // namespace tide
