"""Data of test calls: the same on every rank for the same arguments, so that each can tell what to expect."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

# numpy has no bfloat16, nor the 8-bit floats: such data are bit patterns.
BITS = {
    torch.bfloat16: np.uint16,
    torch.float8_e4m3fn: np.uint8,
    torch.float8_e5m2: np.uint8,
    torch.float16: np.uint16,
    torch.bool: np.bool_,
    torch.complex64: np.complex64,
}
REDUCED = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
}


def numpy_type(dtype: torch.dtype) -> Any:
    return BITS.get(dtype) or getattr(np, str(dtype).removeprefix("torch."))


def random_bytes(seed: int, rank: int, numel: int, dtype: torch.dtype) -> np.ndarray:
    """Any bit pattern (bool: any truth value), for calls that only move data."""
    generator = np.random.default_rng([seed, rank])
    kind = np.dtype(numpy_type(dtype))
    if dtype == torch.bool:
        return generator.integers(0, 2, numel).astype(bool)
    return np.frombuffer(generator.bytes(numel * kind.itemsize), dtype=kind).copy()


def random_values(seed: int, rank: int, numel: int, kind: str) -> np.ndarray:
    """Numbers for a reduction: floats of many magnitudes, so that the order of additions shows; all of the
    integers, so that sums wrap around. bfloat16 as bit patterns in uint16."""
    generator = np.random.default_rng([seed, rank])
    if kind in ("int32", "int64"):
        info = np.iinfo(kind)
        return generator.integers(info.min, info.max, numel, dtype=kind, endpoint=True)
    if kind == "float64":
        return generator.standard_normal(numel) * np.exp2(generator.integers(-12, 13, numel))
    # Sign and mantissa as drawn, exponents from -12 to 12. A bfloat16 is the upper half of a float32.
    drawn = generator.integers(0, 2**32, numel, dtype=np.uint32)
    drawn = (drawn & np.uint32(0x807FFFFF)) | (((drawn >> 23 & 0xFF) % 25 + 115).astype(np.uint32) << 23)
    return drawn.view(np.float32) if kind == "float32" else (drawn >> 16).astype(np.uint16)


def tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of its own with these bits."""
    raw = torch.from_numpy(np.ascontiguousarray(array).view(np.uint8).copy())
    return raw.view(dtype) if array.size else torch.empty(0, dtype=dtype)


def bits(value: torch.Tensor | np.ndarray) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    flat = value.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


def check_bits(got: torch.Tensor | np.ndarray, want: np.ndarray, what: str = "") -> None:
    """Raise AssertionError at the first byte that differs."""
    mine, theirs = bits(got), bits(want)
    if mine.size != theirs.size:
        raise AssertionError(f"{what}: got {mine.size} bytes, expected {theirs.size}")
    wrong = np.flatnonzero(mine != theirs)
    if wrong.size:
        itemsize = want.dtype.itemsize
        at = int(wrong[0]) // itemsize
        raise AssertionError(
            f"{what}: {wrong.size} of {mine.size} bytes differ, first in element {at}: "
            f"got {mine[at * itemsize : (at + 1) * itemsize].tobytes().hex()}, "
            f"expected {theirs[at * itemsize : (at + 1) * itemsize].tobytes().hex()}"
        )


def backend(group: Any = None) -> Any:
    """The TideBackend of a group (default: the default group)."""
    import torch.distributed as dist

    group = group or dist.distributed_c10d._get_default_group()
    return group._get_backend(torch.device("cpu"))


def small_staging() -> None:
    """Make a tide group whose staging window is as small as allowed, for a job without a group."""
    import rank_process

    import tide_backend

    options = tide_backend.Options()
    options.staging_bytes = 65536
    rank_process.init("tide", pg_options=options)


def last_call(group: Any = None) -> dict[str, Any]:
    return backend(group).records()[-1]


def expect_path(path: str, what: str = "", group: Any = None) -> dict[str, Any]:
    call = last_call(group)
    if call["path"] != path or call["state"] != "done":
        raise AssertionError(f"{what}: expected path {path}, got {call}")
    return call


def error_of(call: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """Name and text of what the call raises; ("", "") when it does not."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""
