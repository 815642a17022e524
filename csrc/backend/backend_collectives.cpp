// The three collectives that tide carries: which side of the group a call is for, what is wrong with it, its request.
#include <algorithm>

#include "backend.h"

namespace tide {

namespace {

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

c10::intrusive_ptr<c10d::Work> TideBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                            const c10d::AllgatherOptions& opts) {
  auto applied = LayoutTable::global().take(output);
  const auto by_inner = [&] {
    if (applied && !output.is_cpu()) refuse_coalesced_packing(Channel::all_gather);
    c10d::Backend& backend = *inner(output.device().type());
    return applied ? gather_by_packing(backend, output, input, *applied, opts)
                   : backend._allgather_base(output, input, opts);
  };
  Issue issue{{request(Channel::all_gather, input, output)}};
  issue.bytes = static_cast<int64_t>(output.nbytes());
  Request& q = issue.call.request;
  q.numel = input.numel();
  int64_t expected = q.numel * q.world;
  if (applied) {
    q.layout = applied->layout;
    q.placed = applied->placed;
    issue.label = applied->label;
    expected = q.layout->total_gathered_numel();
  }
  CudaSide* side = nullptr;
  if (!output.is_cpu() || !input.is_cpu()) {
    if (output.is_cuda() && input.is_cuda()) side = cuda_side(output.device(), /*nccl_has_it=*/!applied);
    if (const auto left = left_to_inner(side, q, input, output)) return leave_to_inner(*left, issue, by_inner);
  }
  issue.op = c10d::OpType::_ALLGATHER_BASE;
  issue.async = opts.asyncOp;
  issue.timeout = opts.timeout;
  issue.outputs = {output};
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
  if (side) return issue_cuda(*side, std::move(issue), by_inner);
  return noted(c10::DeviceType::CPU, this->issue(std::move(issue), by_inner));
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
  const bool one_type = input.scalar_type() == output.scalar_type();
  std::string not_packed;  // packing goes with a sum
  if (applied && op != Reduction::sum) {
    not_packed = std::string("a layout with ") + to_string(op) + "; expected SUM, AVG or PREMUL_SUM; pack the input";
  }
  const auto by_inner = [&, op = op, scale = scale] {
    // gloo has no AVG and no PREMUL_SUM; nccl has.
    const bool scaled = scale != 1.0 && output.is_cpu();
    const bool packed = applied || (op == Reduction::sum && (scaled || !one_type));
    if (!not_packed.empty()) fail(ErrorKind::usage, engine_->speaker(), to_string(Channel::reduce_scatter), not_packed);
    if (packed && !output.is_cpu()) refuse_coalesced_packing(Channel::reduce_scatter);
    c10d::Backend& backend = *inner(output.device().type());
    return packed ? scatter_by_packing(backend, output, input, applied, scale, opts)
                  : backend._reduce_scatter_base(output, input, opts);
  };
  Issue issue{{request(Channel::reduce_scatter, sample, output)}};
  Request& q = issue.call.request;
  q.numel = output.numel();
  q.in_type = element_type(sample.scalar_type());
  q.out_type = element_type(output.scalar_type());
  q.reduction = op;
  q.scale = scale;
  issue.bytes = q.numel * q.world * q.itemsize;
  int64_t expected = q.numel * q.world;
  if (applied) {
    q.layout = applied->layout;
    q.separate_inputs = applied->separate;
    issue.label = applied->label;
    if (!applied->separate) expected = q.layout->total_gathered_numel();
    if (applied->separate) q.scalar_type = static_cast<int>(output.scalar_type());
  }
  CudaSide* side = nullptr;
  if (!output.is_cpu() || !input.is_cpu()) {
    if (output.is_cuda() && input.is_cuda()) side = cuda_side(output.device(), /*nccl_has_it=*/!applied && one_type);
    if (const auto left = left_to_inner(side, q, input, output)) return leave_to_inner(*left, issue, by_inner);
  }
  issue.op = c10d::OpType::_REDUCE_SCATTER_BASE;
  issue.async = opts.asyncOp;
  issue.timeout = opts.timeout;
  issue.outputs = {output};
  std::string& problem = issue.call.problem;
  const bool widening = widens(sample, output);
  if (sample.scalar_type() != output.scalar_type() && !widening) {
    problem = "input and output differ in dtype; got " + shape(sample) + " and " + shape(output) +
              ", expected the same, or bfloat16 into float32; convert one of them";
  } else if (widening && op != Reduction::sum) {
    problem = std::string("bfloat16 into float32 with ") + to_string(op) +
              "; expected SUM, AVG or PREMUL_SUM; convert the input to float32 first";
  } else if (!not_packed.empty()) {
    problem = not_packed;
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
    }
    at::Tensor out = repaired_output(output, issue);
    if (!q.separate_inputs) {
      // Where the output is this rank's part of the input, a sum goes to where its own summand was read.
      const auto* place = static_cast<const std::byte*>(out.const_data_ptr()) - q.rank * out.nbytes();
      const at::Tensor in = apart(repaired(input, issue), out, q.layout || widening ? nullptr : place, issue);
      issue.call.buffers.inputs = {static_cast<const std::byte*>(in.const_data_ptr())};
    }
    issue.call.buffers.output = static_cast<std::byte*>(out.mutable_data_ptr());
    issue.call.output_bytes = static_cast<int64_t>(out.nbytes());
  }
  if (side) return issue_cuda(*side, std::move(issue), by_inner);
  return noted(c10::DeviceType::CPU, this->issue(std::move(issue), by_inner));
}

namespace {

// Rows per peer -> elements per peer. Empty: equal parts. Says what is wrong in `problem`.
std::vector<int64_t> element_splits(const at::Tensor& t, const std::vector<int64_t>& splits, int world,
                                    const char* which, std::string& problem) {
  if (t.dim() == 0) {
    problem = std::string("the ") + which + " tensor has no dim 0, by which it is cut; got " + shape(t) +
              ", expected one dimension or more; pass a view, such as tensor.view(1)";
    return std::vector<int64_t>(static_cast<size_t>(world), 0);
  }
  const int64_t rows = t.size(0);
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
  Exchanged used{input, output};
  const auto by_inner = [&] { return exchange_inside(used, output, out_splits, in_splits, opts); };
  Issue issue{{request(Channel::all_to_all, input, output)}};
  issue.bytes = static_cast<int64_t>(input.nbytes());
  Request& q = issue.call.request;
  q.numel = input.numel();
  CudaSide* side = nullptr;
  std::optional<Left> left;
  if (!output.is_cpu() || !input.is_cpu()) {
    if (output.is_cuda() && input.is_cuda()) side = cuda_side(output.device(), /*nccl_has_it=*/true);
    left = left_to_inner(side, q, input, output);
    if (left && (!side || nothing_to_copy(input, output))) return leave_to_inner(*left, issue, by_inner);
  }
  issue.op = c10d::OpType::ALLTOALL_BASE;
  issue.async = opts.asyncOp;
  issue.timeout = opts.timeout;
  issue.outputs = {output};
  std::string& problem = issue.call.problem;
  q.in_splits = element_splits(input, in_splits, getSize(), "input", problem);
  q.out_splits = element_splits(output, out_splits, getSize(), "output", problem);
  if (problem.empty() && input.scalar_type() != output.scalar_type()) {
    problem = "input and output differ in dtype; got " + shape(input) + " and " + shape(output) +
              ", expected the same; convert one of them";
  }
  if (problem.empty()) used = lay_out(input, output, side ? Device::cuda : Device::cpu, issue);
  if (left) return leave_to_inner(*left, issue, by_inner);
  if (side) return issue_cuda(*side, std::move(issue), by_inner);
  return noted(c10::DeviceType::CPU, this->issue(std::move(issue), by_inner));
}

}  // namespace tide
