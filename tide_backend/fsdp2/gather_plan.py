"""Where the shards of one parameter group lie in its slot, and where the gathered parameters do.

Every parameter (of an extension: every tensor that it gathers) starts at a multiple of 512 bytes and takes
``world * shard`` elements:

``Shard(0)``       one row: rank r's shard follows rank r - 1's. Dim 0 is padded, as FSDP2 pads it; an unevenly
                   sharded parameter is a prefix of its part.
``Shard(d > 0)``   as many rows as the dims before d have elements; in each, the ranks' parts lie side by side.
                   That is the parameter-contiguous layout of as many small parameters, so the collective itself
                   puts the parts where PyTorch needs a temporary and a ``cat``.

A group that gathers values of several dtypes is laid out in bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .. import _C, ParameterLayout
from .eligibility import refuse_all_gather, refuse_device, refuse_memory, refuse_outputs
from .journal import ALL_GATHER, Reason, Row
from .seams import WORLD_SIZE_1, GroupSeam

repoint = _C.repoint

SLOT_ALIGN = 512  # bytes: a 3-element shard must not misalign the parameters behind it


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor that each rank contributes: ``rows`` rows of ``row`` elements."""

    dtype: torch.dtype
    rows: int
    row: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.row * self.dtype.itemsize


@dataclass(slots=True)
class Plan:
    """How one parameter group is gathered over one process group.

    ``avoided``: bytes that FSDP2's own path writes per call and this one does not. Its path writes, for S
    shard elements of b bytes on W ranks, ``S*b`` (cast into a flat temporary, only with a ``param_dtype``),
    ``S*b`` (copy-in) and ``W*S*b`` (``split_with_sizes_copy``), and for ``Shard(d > 0)`` another ``W*S*b``
    (``cat``); this one writes ``S*b``. ``payload``: bytes of the gathered parameters, without gaps.
    """

    group: dist.ProcessGroup
    backend: Any
    parameter_group: int  # its number, by which slots take turns
    layout: Any
    dtype: torch.dtype  # of the collective
    device: torch.device
    device_text: str
    nbytes: int  # of the slot
    split: list[int]  # elements: gap, shard, gap, shard, ..., gap; this rank's places in the slot
    spots: list[tuple[torch.dtype, list[int], list[int], int]] | None  # if not one dtype and one row each
    places: list[list[tuple[int, int, int, torch.dtype]]]  # per parameter and output: byte offset, bytes, numel
    kernel: bool  # place by tide's own kernel
    ctas: int
    placeholder: torch.Tensor
    label: str
    input_dtypes: list[list[torch.dtype]]
    input_numels: list[list[int]]
    input_sizes: list[int]
    payload: int
    avoided: int
    row: Row
    # Views of this rank's places, made at the first call, and the tensor whose storage they share. That storage is
    # pointed into the slot while the shards are placed: one step, where new views would be one per parameter.
    base: torch.Tensor | None = None
    here: list[torch.Tensor] | None = None

    def place(self, slot: torch.Tensor, sources: list[torch.Tensor]) -> None:
        """Copy this rank's shards into the slot (uint8), casting on the way."""
        base = self.base
        if base is None:
            base = self._make_views(slot)
        else:
            repoint(base, slot, 0, self.nbytes)
        here = self.here
        if self.spots is not None:
            sources = [t.view(spot.shape) for t, spot in zip(sources, here, strict=True)]
        if not (self.kernel and _C.cast_into_slot(here, sources, self.ctas)):
            torch._foreach_copy_(here, sources)
        base.untyped_storage().resize_(0)  # the slot shall live as long as the parameters, not as the plan

    def _make_views(self, slot: torch.Tensor) -> torch.Tensor:
        # An inference tensor could not be written to later, outside of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            self.base = storage_in(slot, 0, self.nbytes, self.nbytes, torch.uint8)
            if self.spots is None:
                self.here = list(self.base.view(self.dtype).split_with_sizes(self.split)[1::2])
            else:
                self.here = [self.base.view(t).as_strided(size, stride, at) for t, size, stride, at in self.spots]
        return self.base


def storage_in(base: torch.Tensor, offset: int, nbytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A 1-D tensor in ``base``'s memory whose own storage can be freed and re-pointed; nothing is allocated."""
    tensor = torch.empty(0, dtype=dtype, device=base.device)
    repoint(tensor, base, offset, nbytes)
    # Not resize_: under deterministic algorithms it may fill what it takes for fresh memory.
    tensor.set_(tensor.untyped_storage(), 0, (numel,), (1,))
    return tensor


def make_plan(
    seam: GroupSeam,
    fsdp_params: list[Any],
    sources: list[list[torch.Tensor]],
    group: dist.ProcessGroup,
    device: torch.device,
    backend: Any,
) -> Plan | Reason:
    """The plan for these parameters, or why PyTorch's own path serves them. ``sources``: per parameter, the
    tensors that this rank contributes."""
    world, rank = group.size(), group.rank()
    if world == 1:
        return WORLD_SIZE_1
    reason = refuse_device(device) or refuse_memory(backend, device)
    reason = reason or refuse_all_gather(fsdp_params, sources, device)
    if reason is not None:
        return reason
    pieces = [_pieces(p, own) for p, own in zip(fsdp_params, sources, strict=True)]
    reason = refuse_outputs(fsdp_params, [[(x.rows * x.row * world, x.dtype) for x in own] for own in pieces])
    if reason is not None:
        return reason
    flat = [piece for own in pieces for piece in own]
    dtypes = {piece.dtype for piece in flat}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    unit = dtype.itemsize
    layout, starts = lay_out(flat, world, unit)
    plain = all(piece.rows == 1 and piece.dtype == dtype for piece in flat)
    total = layout.total_gathered_numel
    placed = iter(zip(starts, flat, strict=True))
    places = []
    for own in pieces:
        here = [next(placed) for _ in own]
        places.append([(start, world * x.nbytes, world * x.rows * x.row, x.dtype) for start, x in here])
    shard_bytes = sum(x.nbytes for x in flat)
    strided_bytes = sum(x.nbytes for x in flat if x.rows > 1)
    cast = any(p.param_dtype is not None for p in fsdp_params)
    numels = [[x.rows * x.row for x in own] for own in pieces]
    return Plan(
        group=group,
        backend=backend,
        parameter_group=seam.number,
        layout=layout,
        dtype=dtype,
        device=device,
        device_text=str(device),
        nbytes=total * unit,
        split=_split(starts, flat, rank, unit, total) if plain else [],
        spots=None if plain else [_spot(start, x, world, rank) for start, x in zip(starts, flat, strict=True)],
        places=places,
        kernel=device.type == "cuda" and _C.with_cuda_kernels and plain and casts_in_kernel(dtype, sources),
        ctas=backend.options.accumulate_ctas,
        placeholder=torch.zeros(1, dtype=dtype, device=device).expand(layout.total_shard_numel),
        label=seam.label,
        input_dtypes=[[x.dtype for x in own] for own in pieces],
        input_numels=numels,
        input_sizes=[n for own in numels for n in own],
        payload=world * shard_bytes,
        avoided=world * (shard_bytes + strided_bytes) + (shard_bytes if cast else 0),
        row=seam.row(group, ALL_GATHER),
    )


def casts_in_kernel(dtype: torch.dtype, sources: list[list[torch.Tensor]]) -> bool:
    """Whether cast_into_slot has a kernel from all sources' dtypes to `dtype`. It looks again at every call, as sources
    that lie otherwise than they did are left to PyTorch's copy."""
    return dtype == torch.bfloat16 and all(t.dtype == torch.float32 for own in sources for t in own)


def lay_out(pieces: list[Piece], world: int, unit: int) -> tuple[Any, list[int]]:
    """The layout, in elements of ``unit`` bytes, and the byte offset of every piece in the gathered buffer.

    Rows of one piece must touch, so where there are any the starts are aligned by fillers in place of gaps: a
    filler of g elements a rank takes ``world * g``, and the smallest g that aligns what follows is taken.
    """
    align = SLOT_ALIGN // unit
    if all(piece.rows == 1 for piece in pieces):
        layout = ParameterLayout(world, [x.row * x.dtype.itemsize // unit for x in pieces], None, align)
        return layout, [o * unit for o in list(layout.gathered_offsets)[: len(pieces)]]
    rows: list[int] = []
    starts, end = [], 0  # end: elements of one rank
    period = align // math.gcd(align, world)
    for piece in pieces:
        filler = -end % period
        rows += [filler] if filler else []
        end += filler
        starts.append(end * world * unit)
        rows += [piece.row * piece.dtype.itemsize // unit] * piece.rows
        end += piece.rows * piece.row * piece.dtype.itemsize // unit
    rows += [-end % period] if end % period else []
    return ParameterLayout(world, rows, None, 1), starts


def _pieces(p: Any, sources: list[torch.Tensor]) -> list[Piece]:
    if len(sources) != 1 or hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather"):
        return [Piece(t.dtype, 1, t.numel()) for t in sources]
    source = sources[0]
    dim = p.fsdp_placement.dim
    rows = math.prod(p._orig_size[:dim])
    return [Piece(p.param_dtype or source.dtype, rows, source.numel() // rows)]


def _split(starts: list[int], pieces: list[Piece], rank: int, unit: int, total: int) -> list[int]:
    split, end = [], 0
    for start, piece in zip(starts, pieces, strict=True):
        mine = start // unit + rank * piece.row
        split += [mine - end, piece.row]
        end = mine + piece.row
    split.append(total - end)
    return split


def _spot(start: int, piece: Piece, world: int, rank: int) -> tuple[torch.dtype, list[int], list[int], int]:
    """This rank's place: dtype, size, stride and offset of a view of the slot in that dtype."""
    first = start // piece.dtype.itemsize + rank * piece.row
    if piece.rows == 1:
        return piece.dtype, [piece.row], [1], first
    return piece.dtype, [piece.rows, piece.row], [world * piece.row, 1], first
