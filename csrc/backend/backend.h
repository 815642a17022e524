// The torch.distributed backend: turns tensors into requests for the engine and hands everything that tide does not
// do itself to an inner backend of the tensors' device (gloo, nccl).
//
// Only the old virtual names are overridden: newer PyTorch forwards its new names to them, so one source serves
// every supported version.
#pragma once

#include <c10/util/FunctionRef.h>

#include <functional>
#include <map>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "backend_cuda.h"
#include "engine.h"
#include "fork_guard.h"
#include "layout_table.h"
#include "options.h"

namespace tide {

class TideBackend : public c10d::Backend {
 public:
  using InnerPtr = c10::intrusive_ptr<c10d::Backend>;
  using InnerFactory =
      std::function<InnerPtr(const std::string& device_type, const c10::intrusive_ptr<c10d::Store>& store, int rank,
                             int size, std::chrono::milliseconds timeout)>;
  using Interrupted = std::function<void()>;

  TideBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size, c10::intrusive_ptr<BackendOptions> options,
              InnerFactory make_inner, Interrupted interrupted);
  ~TideBackend() override;

  const std::string getBackendName() const override { return "tide"; }
  // A copy: PyTorch before 2.14 writes a split group's name and timeout into what it gets here.
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions();

  // The three collectives that tide carries, in backend_collectives.cpp.
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& out_splits,
                                               std::vector<int64_t>& in_splits,
                                               const c10d::AllToAllOptions& opts) override;
  // Built from them, in backend_inner.cpp.
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                                 std::vector<at::Tensor>& inputs,
                                                                 const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                                 std::vector<at::Tensor>& inputs,
                                                                 const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                          const c10d::AllToAllOptions& opts) override;

  // Everything else, in backend_inner.cpp.
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& o) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& o) override;
  c10::intrusive_ptr<c10d::Work> allreduce_sparse(std::vector<at::Tensor>& tensors,
                                                  const c10d::AllreduceOptions& o) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                                     const c10d::AllreduceCoalescedOptions& o) override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& o) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions& o) override;
  c10::intrusive_ptr<c10d::Work> allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs,
                                                     std::vector<at::Tensor>& inputs,
                                                     const c10d::AllgatherOptions& o) override;
  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                                        const c10d::GatherOptions& o) override;
  c10::intrusive_ptr<c10d::Work> scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                                         const c10d::ScatterOptions& o) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<at::Tensor>& outputs,
                                                std::vector<std::vector<at::Tensor>>& inputs,
                                                const c10d::ReduceScatterOptions& o) override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override;
  c10::intrusive_ptr<c10d::Work> recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& o) override;
  void monitoredBarrier(const c10d::BarrierOptions& o, bool wait_all_ranks) override;
#ifdef C10D_BACKEND_HAS_HOOKS
  c10::intrusive_ptr<c10d::Work> gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                                    const c10d::GatherOptions& o) override;
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override;
  void unregisterAbortHook(int64_t id) override;
#endif

  // Groups, coalescing and memory, in backend_groups.cpp.
  bool supportsSplitting() const override { return true; }
  // The group of `ranks` (of this group); null on ranks that are not among them. Every rank of this group calls it.
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;
  // Calls between the two start at once, as outside; endCoalescing returns one handle for those on CPU tensors, for
  // tide's own on CUDA tensors and for what the inner backend coalesced, null when there was none.
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;
  // A slot of the arena; without one, ordinary memory and a warning. Collective: on CPU at a group's first call, on
  // CUDA at every call, with the same size on every rank.
  bool supportsTensorAlloc(c10::DeviceIndex index) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return calls_; }
  void setTimeout(std::chrono::milliseconds timeout);
  void abort();
  void shutdown();
  // The process ends without having destroyed the group: the threads of its CPU calls end before the interpreter does.
  void leave();

  // The arena, for the FSDP2 seam and for callers that want zero-copy outputs. slot() connects the group
  // (collective at the first call); nothing when there is no shared memory or no memory (`reason` says which).
  // CUDA: collective at every call, with the same size on every rank; `current_stream` is the caller's, `group` says
  // whose parameters the slot is for.
  std::optional<at::Tensor> slot(int64_t bytes, at::Device device, void* current_stream, cuda::ParameterGroup group,
                                 std::string* reason);
  bool in_arena(const at::Tensor& tensor);
  // (whether tide carries this device's calls, why not); connect() makes the group's shared memory first.
  std::pair<bool, std::string> connect(at::Device device);
  std::pair<bool, std::string> shared_memory(at::Device device);
  // CPU and CUDA engines that exist so far.
  std::vector<std::pair<std::string, std::shared_ptr<Engine>>> engines();

  Engine& engine() { return *engine_; }
  const InnerPtr& inner(c10::DeviceType device);

 private:
  // What one call needs beyond its plan.
  struct Issue {
    CollectiveCall call;
    std::vector<at::Tensor> hold;      // everything the call reads or writes
    std::vector<c10::Storage> memory;  // of an asynchronous call: what these have while it is made
    std::vector<at::Tensor> outputs;   // result of the Work
    std::function<void()> after;       // once the data is there (copy back of a repaired output)
    c10d::OpType op = c10d::OpType::UNKNOWN;
    bool async = false;
    std::chrono::milliseconds timeout{0};
    std::string label;
    int64_t bytes = 0, repair_copies = 0;
    int64_t inner_copies = 0;  // more of them, if the inner backend gets the call
    std::string repair_reason;

    // `which` tensor was copied, and why.
    void copied(const std::string& which, const std::string& why) {
      repair_copies += 1;
      const std::string text = which + ": " + why;
      if (repair_reason.find(text) == std::string::npos) repair_reason += (repair_reason.empty() ? "" : "; ") + text;
    }
  };
  // What an all-to-all reads and writes in the place of the caller's tensors: those, or copies.
  struct Exchanged {
    at::Tensor input, output;
  };
  // The same call on the inner backend. It is made before the collective's own method returns, or never.
  using InnerCall = c10::function_ref<c10::intrusive_ptr<c10d::Work>()>;
  // A call is the inner backend's: who records it, and why.
  struct Left {
    Engine* engine;
    std::string why;
  };
  c10::intrusive_ptr<c10d::Work> issue(Issue issue, InnerCall inner);
  c10::intrusive_ptr<c10d::Work> issue_cuda(CudaSide& side, Issue issue, InnerCall inner);
  // Why a call without a layout has to be nccl's, for reasons that a right program gives all ranks alike; "" when none.
  std::string inner_only_reason(CudaSide& side, const Request& q);
  void refuse_coalesced_packing(Channel op);
  // Whether a call on tensors that are not all CPU tensors is the inner backend's before anything is done about them:
  // it has no CudaSide, or it has no layout and is one that nccl should have.
  std::optional<Left> left_to_inner(CudaSide* side, const Request& q, const at::Tensor& input,
                                    const at::Tensor& output);
  Left without_side(const at::Tensor& input, const at::Tensor& output);
  // Records such a call, and makes it.
  c10::intrusive_ptr<c10d::Work> leave_to_inner(const Left& left, Issue& issue, InnerCall inner);
  // The recorded call on the inner backend. Its errors say whose they are.
  static c10::intrusive_ptr<c10d::Work> call_inner(const Left& left, const Issue& issue, uint64_t ticket,
                                                   InnerCall inner);
  // `why_inner`: of a call that is known to be the inner backend's.
  uint64_t begin_record(Engine& engine, const Issue& issue, uint64_t ticket, const std::string* why_inner = nullptr);
  // The CUDA half for tensors on `device`; null when tide does not carry its calls in this group. On another GPU than
  // the group's: null for a call that nccl takes as well, an error otherwise.
  CudaSide* cuda_side(at::Device device, bool nccl_has_it = false);
  Request request(Channel op, const at::Tensor& input, const at::Tensor& output) const;
  at::Tensor repaired(const at::Tensor& tensor, Issue& issue, const std::string& why = "not contiguous") const;
  at::Tensor repaired_output(at::Tensor& output, Issue& issue, const std::string& why = "not contiguous") const;
  // Whether an all-to-all by the inner backend takes both as they lie. In backend_strided.cpp, as the next three.
  static bool nothing_to_copy(const at::Tensor& input, const at::Tensor& output);
  // Fills in buffers, forms and holds of an all-to-all.
  Exchanged lay_out(const at::Tensor& input, at::Tensor& output, Device device, Issue& issue);
  static void note_inner_copies(Engine& engine, const Issue& issue);
  // The all-to-all by the inner backend, with copies of what is not contiguous. Over when it returns where the output
  // is a copy.
  c10::intrusive_ptr<c10d::Work> exchange_inside(const Exchanged& tensors, at::Tensor output,
                                                 std::vector<int64_t> out_splits, std::vector<int64_t> in_splits,
                                                 const c10d::AllToAllOptions& opts);
  // `input`, or a copy of it where it overlaps the output and does not lie at `place`, where that does no harm.
  at::Tensor apart(at::Tensor input, const at::Tensor& output, const void* place, Issue& issue) const;
  // `work` once more, remembered while calls are coalesced.
  c10::intrusive_ptr<c10d::Work> noted(c10::DeviceType device, c10::intrusive_ptr<c10d::Work> work);
  std::chrono::milliseconds timeout_or_default(std::chrono::milliseconds given) const;
  void check_process(const char* what) const;
  // Also raises once the group is poisoned: calls that the inner backend would still carry end with it.
  void check_usable(const char* call);
  void run_abort_hooks();

  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<BackendOptions> options_;
  InnerFactory make_inner_;
  Interrupted interrupted_;
  std::mutex inner_mutex_;
  std::map<c10::DeviceType, InnerPtr> inner_;
  bool coalescing_ = false;                 // with inner_mutex_, as the next two
  std::vector<InnerPtr> coalescing_inner_;  // inner backends that coalesce until endCoalescing
  std::vector<c10::intrusive_ptr<c10d::Work>> coalesced_;
  // PyTorch splits once per device type; both get the same child. By group name.
  std::map<std::string, c10::weak_intrusive_ptr<c10d::Backend>> children_;
  uint64_t splits_ = 0;
#ifdef C10D_BACKEND_HAS_HOOKS
  std::mutex hooks_mutex_;
  std::map<int64_t, c10d::AbortHook> abort_hooks_;
#endif
  std::shared_ptr<Bootstrap> cuda_bootstrap_;
  std::shared_ptr<Engine> engine_;
  std::mutex cuda_mutex_;
  std::unique_ptr<CudaSide> cuda_;
  std::shared_ptr<Engine> cuda_off_;  // records CUDA calls in groups whose calls tide never carries; else null
  std::atomic<uint64_t> calls_{0};
  const ForkGuard guard_;
  const pid_t owner_;
};

// The calls with a layout, done by the inner backend with packing and unpacking around it, for groups that cannot
// share memory. Slow and always right. In layout_fallback.cpp.
c10::intrusive_ptr<c10d::Work> gather_by_packing(c10d::Backend& inner, at::Tensor& output, at::Tensor& input,
                                                 const AppliedLayout& applied, const c10d::AllgatherOptions& opts);
c10::intrusive_ptr<c10d::Work> scatter_by_packing(c10d::Backend& inner, at::Tensor& output, at::Tensor& input,
                                                  const std::optional<AppliedLayout>& applied, double scale,
                                                  const c10d::ReduceScatterOptions& opts);

}  // namespace tide
