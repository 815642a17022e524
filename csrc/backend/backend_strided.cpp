// What an all-to-all does about tensors that are not contiguous: nothing where their rows can be copied as they lie,
// a counted copy otherwise, and for the inner backend, which takes contiguous tensors, in any case.
#include "backend_strided.h"

#include "backend.h"
#include "work.h"

namespace tide {

namespace {

std::optional<Strided> form_of(const at::Tensor& t, int world, const StridedLimits& limits, std::string* why) {
  const auto form = strided_form(t.sizes().vec(), t.strides().vec(), static_cast<int64_t>(t.element_size()), why);
  if (!form) return std::nullopt;
  *why = not_worth_it(*form, t.size(0), world, limits);
  return why->empty() ? form : std::nullopt;
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto* first = static_cast<const std::byte*>(a.const_data_ptr());
  const auto* second = static_cast<const std::byte*>(b.const_data_ptr());
  return first < second + reach_bytes(b) && second < first + reach_bytes(a);
}

}  // namespace

int64_t reach_bytes(const at::Tensor& t) {
  if (t.numel() == 0) return 0;
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return (last + 1) * static_cast<int64_t>(t.element_size());
}

bool TideBackend::nothing_to_copy(const at::Tensor& input, const at::Tensor& output) {
  return input.is_contiguous() && output.is_contiguous() && !overlap(input, output);
}

TideBackend::Exchanged TideBackend::lay_out(const at::Tensor& input, at::Tensor& output, Device device, Issue& issue) {
  Request& q = issue.call.request;
  const StridedLimits limits = strided_limits(device);
  std::string why;
  at::Tensor out = output, in = input;
  if (!output.is_contiguous()) {
    q.out_form = form_of(output, q.world, limits, &why);
    if (q.out_form && !disjoint(*q.out_form, output.size(0))) {
      why = "elements may overlap";
      q.out_form.reset();
    }
    if (!q.out_form) out = repaired_output(output, issue, why);
  }
  if (!input.is_contiguous()) {
    q.in_form = form_of(input, q.world, limits, &why);
    if (q.in_form) why = do_not_fit(q.in_form, q.out_form, limits);
    if (!why.empty()) {
      q.in_form.reset();
      in = repaired(input, issue, why);
    }
  }
  // Peers write the output while the input is still being sent.
  if (overlap(in, out)) {
    q.in_form.reset();
    issue.copied("input", "overlaps the output");
    in = in.clone(at::MemoryFormat::Contiguous);
  }
  issue.hold.push_back(in);
  issue.hold.push_back(out);
  issue.inner_copies = (q.in_form ? 1 : 0) + (q.out_form ? 1 : 0);
  q.output_in_arena = in_arena(out);
  issue.call.buffers.inputs = {static_cast<const std::byte*>(in.const_data_ptr())};
  issue.call.buffers.output = static_cast<std::byte*>(out.mutable_data_ptr());
  issue.call.output_bytes = reach_bytes(out);
  return {in, out};
}

void TideBackend::note_inner_copies(Engine& engine, const Issue& issue) {
  if (issue.inner_copies == 0) return;
  engine.recorder().note_copies(issue.call.record_id, issue.inner_copies, "the inner backend takes contiguous tensors");
}

c10::intrusive_ptr<c10d::Work> TideBackend::exchange_inside(const Exchanged& tensors, at::Tensor output,
                                                            std::vector<int64_t> out_splits,
                                                            std::vector<int64_t> in_splits,
                                                            const c10d::AllToAllOptions& opts) {
  c10d::Backend& backend = *inner(output.device().type());
  at::Tensor in = tensors.input.contiguous(), out = tensors.output;
  if (!out.is_contiguous()) out = at::empty_like(out, at::MemoryFormat::Contiguous);
  if (out.is_same(output)) return backend.alltoall_base(out, in, out_splits, in_splits, opts);
  if (output.is_cuda()) refuse_coalesced_packing(Channel::all_to_all);
  wait_for(backend.alltoall_base(out, in, out_splits, in_splits, opts));
  output.copy_(out);
  return finished(getRank(), c10d::OpType::ALLTOALL_BASE, output, opts.asyncOp);
}

}  // namespace tide
