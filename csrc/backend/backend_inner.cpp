// What tide leaves to the inner backend of the tensors' device, and the calls built from the three it carries.
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
  wait_for(done);
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

}  // namespace tide
