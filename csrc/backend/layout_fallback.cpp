#include "backend.h"
#include "work.h"

namespace tide {

namespace {

at::Tensor flat(const at::Tensor& t) { return t.contiguous().view({-1}); }

}  // namespace

c10::intrusive_ptr<c10d::Work> gather_by_packing(c10d::Backend& inner, at::Tensor& output, at::Tensor& input,
                                                 const AppliedLayout& applied, const c10d::AllgatherOptions& opts) {
  const ParameterLayout& layout = *applied.layout;
  const int64_t world = inner.getSize(), rank = inner.getRank(), shard = layout.total_shard_numel();
  at::Tensor out = output.view({-1});
  auto place = [&](size_t i) { return out.narrow(0, layout.gathered_offset(i), world * layout.shard_numel(i)); };
  at::Tensor packed = input;
  if (applied.placed) {
    packed = at::empty({shard}, output.options());
    for (size_t i = 0; i < layout.parameters(); ++i) {
      const int64_t n = layout.shard_numel(i);
      packed.narrow(0, layout.shard_offset(i), n).copy_(place(i).narrow(0, rank * n, n));
    }
  }
  packed = flat(packed);
  at::Tensor gathered = at::empty({world * shard}, output.options());
  wait_for(inner._allgather_base(gathered, packed, opts));
  at::Tensor rows = gathered.view({world, shard});
  for (size_t i = 0; i < layout.parameters(); ++i) {
    const int64_t n = layout.shard_numel(i);
    place(i).view({world, n}).copy_(rows.narrow(1, layout.shard_offset(i), n));
  }
  return finished(inner.getRank(), c10d::OpType::_ALLGATHER_BASE, output, opts.asyncOp);
}

c10::intrusive_ptr<c10d::Work> scatter_by_packing(c10d::Backend& inner, at::Tensor& output, at::Tensor& input,
                                                  const std::optional<AppliedLayout>& applied, double scale,
                                                  const c10d::ReduceScatterOptions& opts) {
  at::Tensor packed;
  if (applied) {
    const ParameterLayout& layout = *applied->layout;
    const int64_t world = inner.getSize(), shard = layout.total_shard_numel();
    packed = at::zeros({world, shard}, output.options());
    for (size_t i = 0; i < layout.parameters(); ++i) {
      const int64_t n = layout.shard_numel(i);
      at::Tensor column = packed.narrow(1, layout.shard_offset(i), n);
      at::Tensor whole =
          applied->separate ? flat(applied->tensors[i]) : flat(input).narrow(0, layout.gathered_offset(i), world * n);
      for (int64_t r = 0; r < world; ++r) {
        const int64_t valid = layout.valid_numel(i, static_cast<int>(r));
        if (valid > 0) column.select(0, r).narrow(0, 0, valid).copy_(whole.narrow(0, r * n, valid));
      }
    }
    packed = packed.view({-1});
  } else {
    packed = flat(input.to(output.scalar_type()));
  }
  c10d::ReduceScatterOptions sum = opts;
  sum.reduceOp = c10d::ReduceOp::SUM;
  at::Tensor out = output.is_contiguous() ? output : at::empty_like(output, at::MemoryFormat::Contiguous);
  at::Tensor shard = out.view({-1});  // gloo wants shapes that fit each other's
  wait_for(inner._reduce_scatter_base(shard, packed, sum));
  if (scale != 1.0) out.mul_(scale);
  if (!out.is_same(output)) output.copy_(out);
  // Not gloo's own handle: that copies its own result into the output at every wait().
  return finished(inner.getRank(), c10d::OpType::_REDUCE_SCATTER_BASE, output, opts.asyncOp);
}

}  // namespace tide
