"""How sequence-parallel code calls all-to-all: small layers with the call shapes of real frameworks.

Each caller is a class with `enter(x)` (`[t, H, d]` own rows -> `[W * t, h, d]`) and `exit(o)` (back), written for
equal splits and knowing nothing of plans. What differs is what reaches the backend: row order, rank of the tensor,
list or single call, split sizes. The autograd functions keep the group from forward and reuse it in backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol


class _Exchange(torch.autograd.Function):
    """`transfer(x, entering, group)` forward, the other direction backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, transfer: Any, entering: bool, group: Any) -> torch.Tensor:
        ctx.transfer, ctx.entering, ctx.group = transfer, entering, group
        return transfer(x, entering, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.transfer(grad, not ctx.entering, ctx.group), None, None, None


class Caller:
    """Base: differentiable enter and exit around a subclass's `transfer`."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.world = group, group.size()

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return _Exchange.apply(x, self.transfer, True, self.group)

    def exit(self, o: torch.Tensor) -> torch.Tensor:
        return _Exchange.apply(o, self.transfer, False, self.group)

    def transfer(self, x: torch.Tensor, entering: bool, group: dist.ProcessGroup) -> torch.Tensor:
        raise NotImplementedError

    def single(self, x: torch.Tensor) -> torch.Tensor:
        """Equal-split all-to-all over dimension 0."""
        x = x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=self.group)
        return out


class BatchFirstFiveDims(Caller):
    """DeepSpeed and ms-swift, batch first: `[W, b, t, h, d]` both ways."""

    def transfer(self, x, entering, group):
        w, d = self.world, x.shape[-1]
        if entering:
            x = x.unsqueeze(0)
            b, t, heads, _ = x.shape
            out = self.single(x.reshape(b, t, w, heads // w, d).permute(2, 0, 1, 3, 4))
            return out.permute(1, 0, 2, 3, 4).reshape(b, w * t, heads // w, d)[0]
        x = x.unsqueeze(0)
        b, rows, h, _ = x.shape
        out = self.single(x.reshape(b, w, rows // w, h, d).permute(1, 0, 2, 3, 4))
        return out.permute(1, 2, 0, 3, 4).reshape(b, rows // w, w * h, d)[0]


class SequenceFirstFiveDims(Caller):
    """DeepSpeed sequence first and ALST: `[W, t, b, h, d]` in, and out without a permute before the call."""

    def transfer(self, x, entering, group):
        w, d = self.world, x.shape[-1]
        if entering:
            t, heads, _ = x.shape
            out = self.single(x.reshape(t, 1, w, heads // w, d).permute(2, 0, 1, 3, 4))
            return out.reshape(w * t, heads // w, d)
        rows, h, _ = x.shape
        out = self.single(x.reshape(w, rows // w, 1, h, d))
        return out.permute(1, 2, 0, 3, 4).reshape(rows // w, w * h, d)


class FlatContext(SequenceFirstFiveDims):
    """ALST's way back: the context is `[W, t, b, h * d]`, four dimensions."""

    def transfer(self, x, entering, group):
        if entering:
            return super().transfer(x, True, group)
        w = self.world
        rows, h, d = x.shape
        out = self.single(x.reshape(w, rows // w, 1, h * d))
        return out.permute(1, 2, 0, 3).reshape(rows // w, w * h, d)


class TensorList(Caller):
    """verl: `dist.all_to_all` on lists, cut and joined along tensor dimensions."""

    def transfer(self, x, entering, group):
        scatter, gather = (1, 0) if entering else (0, 1)
        ins = [piece.contiguous() for piece in x.tensor_split(self.world, scatter)]
        outs = [torch.empty_like(ins[0]) for _ in range(self.world)]
        work = dist.all_to_all(outs, ins, group=self.group, async_op=True)
        work.wait()
        return torch.cat(outs, dim=gather)


class RowsOnly(Caller):
    """VeOmni: batch of one squeezed away, rows `[W * t, h, d]` in one call; back by split and cat."""

    def transfer(self, x, entering, group):
        w, d = self.world, x.shape[-1]
        if entering:
            t, heads, _ = x.shape
            rows = x.reshape(t, w, heads // w, d).transpose(0, 1).reshape(w * t, heads // w, d)
            return self.single(rows)
        out = self.single(x)
        return torch.cat(out.split(x.shape[0] // w), dim=1)


class HeadsBeforeTokens(Caller):
    """yunchang: `[W, t, b, h, d]` in, `[W, h, t, b, d]` out: heads lie before tokens on the way back."""

    def transfer(self, x, entering, group):
        w, d = self.world, x.shape[-1]
        x = x.unsqueeze(0)
        if entering:
            b, t, heads, _ = x.shape
            out = self.single(x.reshape(b, t, w, heads // w, d).transpose(0, 2))
            return out.reshape(w * t, b, heads // w, d).transpose(0, 1)[0]
        b, rows, h, _ = x.shape
        t = rows // w
        out = self.single(x.reshape(b, w, t, h, d).permute(1, 3, 2, 0, 4))
        return out.reshape(w * h, t, b, d).transpose(0, 2)[0]


class ColumnSplits(Caller):
    """Megatron's mappings: two dimensions, `[W * t, hidden / W]`, columns cut and joined."""

    def transfer(self, x, entering, group):
        w, d = self.world, x.shape[-1]
        if entering:
            hidden = x.reshape(x.shape[0], -1)
            columns = hidden.split(hidden.shape[1] // w, dim=1)
            return self.single(torch.cat(columns)).reshape(w * x.shape[0], -1, d)
        out = self.single(x.reshape(x.shape[0], -1))
        return torch.cat(out.split(x.shape[0] // w), dim=1).reshape(x.shape[0] // w, -1, d)


class Functional(Caller):
    """torch's functional collectives (xtuner): `all_to_all_single_autograd`, its own backward, splits optional."""

    explicit = False

    def _call(self, x: torch.Tensor) -> torch.Tensor:
        splits = [x.shape[0] // self.world] * self.world if self.explicit else None
        out = funcol.all_to_all_single_autograd(x.contiguous(), splits, splits, self.group)
        return funcol.wait_tensor(out)

    def enter(self, x):
        t, heads, d = x.shape
        w = self.world
        return self._call(x.reshape(t, w, heads // w, d).transpose(0, 1).reshape(w * t, heads // w, d))

    def exit(self, o):
        rows, h, d = o.shape
        w = self.world
        return self._call(o).reshape(w, rows // w, h, d).transpose(0, 1).reshape(rows // w, w * h, d)


class FunctionalWithSplits(Functional):
    """The same with all-equal explicit splits, as the traced form has them."""

    explicit = True


EQUAL_SPLIT = {
    "deepspeed_batch_first": BatchFirstFiveDims,
    "deepspeed_sequence_first": SequenceFirstFiveDims,
    "alst": FlatContext,
    "verl": TensorList,
    "veomni": RowsOnly,
    "ms_swift": BatchFirstFiveDims,
    "yunchang": HeadsBeforeTokens,
    "megatron": ColumnSplits,
    "functional": Functional,
    "functional_splits": FunctionalWithSplits,
}
