"""Differentiable head exchange of a plan over `torch.distributed.all_to_all_single`, on any backend.

`enter` takes a rank's own rows with all heads to all rows of the parent with the rank's own heads, `exit`
takes them back. As a linear map enter copies elements, so its backward is the exit of the same plan
(gradients of replicated KV heads are added), and the backward of exit is enter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .agreement import agree, plan_facts, resolve_group
from .errors import RepackError, bad
from .heads import HeadMap
from .packing import Item, Packer
from .plan import Plan

Verify = Literal["first", "always", "never"]


def bind(
    plan: Plan,
    group: dist.ProcessGroup | None = None,
    *,
    q_heads: int,
    kv_heads: int | None = None,
    heads: HeadMap | None = None,
    verify: Verify = "first",
    deadline_s: float = 60.0,
) -> BoundPlan:
    """Collective over `group`: compare the plan and the heads on all ranks and return the plan ready for use.

    Args:
        group: the parent's process group (default group if None); its global ranks must be `plan.ranks`.
        q_heads, kv_heads: heads of the model's queries, and of keys and values (equal if None).
        heads: which rank computes which head; `HeadMap.choose` if None.
        verify: `"first"` compares each kind of call (operation, dtype, shape but for rows) on all ranks
            once per bound plan, `"always"` every call, `"never"` none and not the plan either (it was
            compared before). A call that was compared fails on every rank when one rank's tensors do not
            match.
        deadline_s: seconds to wait for the slowest rank in a comparison.

    Raises:
        RepackError: the plan is for other ranks, or the heads do not fit.
        AgreementError: another rank holds another plan or other heads, failed, or did not call.
    """
    group = resolve_group(group)
    where = _where(group, "bind")
    kv_heads = q_heads if kv_heads is None else kv_heads
    facts = plan_facts(plan)
    try:
        ranks = dist.get_process_group_ranks(group)
        if ranks != list(plan.ranks):
            raise bad(
                where,
                "the plan is for another group",
                got=f"global ranks {ranks}",
                expected=list(plan.ranks),
                do="use the plan of the parent that holds this rank",
            )
        heads = heads or HeadMap.choose(q_heads, kv_heads, plan.width)
        if (heads.q_heads, heads.kv_heads, heads.width) != (q_heads, kv_heads, plan.width):
            raise bad(
                where,
                "head map of another model or width",
                got=f"{heads.describe} over {heads.width} ranks",
                expected=f"{q_heads} query and {kv_heads} KV heads over {plan.width} ranks",
            )
        if verify not in ("first", "always", "never"):
            raise bad(where, "unknown verify", got=repr(verify), expected="first, always or never")
    except RepackError as error:
        if verify != "never":
            agree(group, "plan", facts, failure=str(error))
        raise
    if verify != "never":
        agree(group, "plan", {**facts, "heads": heads.describe}, deadline_s=deadline_s)
    return BoundPlan._of(plan, group, heads, verify, deadline_s)


class BoundPlan(Plan):
    """A plan on its process group: everything `Plan` has for this rank by default, and the exchanges.

    Attributes:
        group: the parent's process group; kept alive by the plan, and the plan by the autograd graph.
        rank: this process's rank in it.
        heads: the head map.
    """

    group: dist.ProcessGroup
    rank: int
    heads: HeadMap

    @classmethod
    def _of(
        cls, plan: Plan, group: dist.ProcessGroup, heads: HeadMap, verify: Verify, deadline_s: float
    ) -> BoundPlan:
        bound = cls.__new__(cls)  # checked when `plan` was made; tables already computed are shared
        bound.__dict__.update({name: value for name, value in plan.__dict__.items() if name != "envelope"})
        state = {"group": group, "rank": group.rank(), "heads": heads, "_verify": verify}
        bound.__dict__.update(state, _deadline_s=deadline_s, _verified=set(), _packers={})
        return bound

    def _rank(self, rank: int | None) -> int:
        return super()._rank(self.rank if rank is None else rank)

    @torch.compiler.disable
    def enter(self, x: torch.Tensor, *, padded: bool = False) -> torch.Tensor:
        """Own rows, all heads -> all rows of the parent, own heads.

        Args:
            x: `[rows[rank], q_heads or kv_heads, *tail]`, any dtype; a tensor with `kv_heads` heads is
                given to the ranks as keys are.
            padded: x has `row_cap` rows, those behind `rows[rank]` are pads and do not travel.

        Returns:
            `[tokens, own heads, *tail]` in the plan's row order.
        """
        (out,) = self._call("enter", (x,), padded)
        return out

    @torch.compiler.disable
    def enter_qkv(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, padded: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`enter` of queries, keys and values as one message per rank.

        Args:
            q: `[rows[rank], q_heads, *tail]`; k, v: `[rows[rank], kv_heads, *tail]`, each with a tail of
                its own (v may have another head dimension). One dtype and device.
            padded: as in `enter`.

        Returns:
            q, k and v as `[tokens, own heads, *tail]`.
        """
        q, k, v = self._call("enter_qkv", (q, k, v), padded)
        return q, k, v

    @torch.compiler.disable
    def exit(self, o: torch.Tensor, *, padded: bool = False) -> torch.Tensor:
        """All rows of the parent, own query heads -> own rows, all query heads.

        Args:
            o: `[tokens, own query heads, *tail]` in the plan's row order.
            padded: return `row_cap` rows, zeros behind `rows[rank]`.

        Returns:
            `[rows[rank], q_heads, *tail]`.
        """
        (out,) = self._call("exit", (o,), padded)
        return out

    def _call(
        self, operation: str, tensors: tuple[torch.Tensor, ...], padded: bool
    ) -> Sequence[torch.Tensor]:
        entering = operation != "exit"
        rows = self.row_cap if padded and entering else self.rows[self.rank] if entering else self.tokens
        try:
            items = self._items(operation, tensors, rows)
        except RepackError as error:
            if self._verify != "never":
                agree(self.group, "call", {}, failure=str(error), deadline_s=self._deadline_s)
            raise
        kind = (operation, str(tensors[0].dtype), tensors[0].device.type, items)
        if self._verify == "always" or (self._verify == "first" and kind not in self._verified):
            facts = {"operation": operation, "dtype": kind[1], "device": kind[2], "plan": self.hash}
            facts["shape"] = " ".join(f"{item.heads}x{list(item.tail)}" for item in items)
            agree(self.group, "call", facts, deadline_s=self._deadline_s)
            self._verified.add(kind)
        packer = self._packers.get(items)
        if packer is None:
            packer = self._packers[items] = Packer(self, self.rank, items)
        if padded and entering:
            tensors = tuple(t[: self.rows[self.rank]] for t in tensors)
        out = _Exchange.apply(self, packer, entering, *tensors)
        if padded and not entering:
            pads = self.row_cap - self.rows[self.rank]
            out = tuple(F.pad(t, (0, 0) * (t.dim() - 1) + (0, pads)) for t in out)
        return out

    def _items(self, operation: str, tensors: tuple[torch.Tensor, ...], rows: int) -> tuple[Item, ...]:
        """What each tensor contributes to a message; raises when a tensor does not match the plan."""
        names = {"enter": ("x",), "enter_qkv": ("q", "k", "v"), "exit": ("o",)}[operation]
        where = _where(self.group, operation)
        ranges = {"q": self.heads.q_ranges, "k": self.heads.kv_ranges}
        items: list[Item] = []
        for name, t in zip(names, tensors, strict=True):
            if t.dim() < 2:
                raise bad(where, f"{name} is no [rows, heads, ...] tensor", got=f"shape {list(t.shape)}")
            if t.shape[0] != rows:
                raise bad(
                    where,
                    f"{name} has another number of rows than the plan",
                    got=t.shape[0],
                    expected=rows,
                    do=f"plan {self.hash[:12]} has {self.rows[self.rank]} own rows here (padded=True: "
                    f"{self.row_cap}) and {self.tokens} in the parent",
                )
            if t.dtype != tensors[0].dtype or t.device != tensors[0].device:
                raise bad(
                    where,
                    f"{name} differs from {names[0]} in dtype or device",
                    got=f"{t.dtype} on {t.device}",
                    expected=f"{tensors[0].dtype} on {tensors[0].device}",
                )
            if operation == "exit":
                first, end = self.heads.q_ranges[self.rank]
                allowed, total, cut = [end - first], self.heads.q_heads, ranges["q"]
            else:
                role = "k" if name in "kv" or (name == "x" and t.shape[1] != self.heads.q_heads) else "q"
                total = self.heads.q_heads if role == "q" else self.heads.kv_heads
                allowed, cut = [total], ranges[role]
                if name == "x":
                    allowed = sorted({self.heads.q_heads, self.heads.kv_heads})
            if t.shape[1] not in allowed:
                raise bad(
                    where,
                    f"{name} has another number of heads than the plan was bound with",
                    got=t.shape[1],
                    expected=" or ".join(map(str, allowed)),
                    do=f"heads are {self.heads.describe}",
                )
            items.append(Item(total, cut, tuple(t.shape[2:])))
        return tuple(items)


class _Exchange(torch.autograd.Function):
    """One all-to-all: `entering` from child to parent side, else back; keeps the plan alive."""

    @staticmethod
    def forward(ctx: Any, plan: BoundPlan, packer: Packer, entering: bool, *tensors: torch.Tensor) -> Any:
        ctx.plan, ctx.packer, ctx.entering = plan, packer, entering
        return tuple(_run(plan, packer, entering, tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (None, None, None, *_run(ctx.plan, ctx.packer, not ctx.entering, grads))


def _run(
    plan: BoundPlan, packer: Packer, to_parent: bool, tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    child, parent = packer.child_counts, packer.parent_counts
    if to_parent:
        send = packer.pack_child(tensors)
        received = send.new_empty(packer.parent_shape)
        dist.all_to_all_single(received.view(-1), send, parent, child, group=plan.group)
        return packer.unpack_parent(received)
    send = packer.pack_parent(tensors)
    received = send.new_empty(sum(child))
    dist.all_to_all_single(received, send, child, parent, group=plan.group)
    return packer.unpack_child(received)


def _where(group: dist.ProcessGroup, operation: str) -> str:
    return f'rank {group.rank()}/{group.size()}, group "{group.group_name}", {operation}'
