"""What one A/B job is: the choices shared by every rank of every backend."""

from __future__ import annotations

import argparse
import dataclasses
import math
from dataclasses import dataclass

MEASUREMENT_NOTES = """\
what is measured, alike for every backend:
  loss         mean over ranks of the loss each rank computed; every rank has its own part of the text
  gradients    every rank saves its shards at the compared steps, right after backward; the parent
               compares them element by element
  parameters   the full state dict after the last step, compared element by element
  step time    forward, backward, clipping and optimizer; mean over ranks, median over the steps after
               warm-up (repeats are pooled)
  collectives  FSDP2's own functions foreach_all_gather, foreach_all_gather_copy_out and foreach_reduce
               are timed from outside, whatever object stands there after warm-up: the collective, its
               layout copies and the wait for the other ranks. CPU: wall time, and the CPU time the whole
               process used meanwhile. GPU: events on the streams FSDP2 passes; the copy-out interval is
               the time the compute stream waits for the all-gather
  copies       counted by a dispatch mode in one extra, untimed step
  memory       one extra, untimed step; at each point (after the forward and the backward of every block,
               after backward, after the optimizer) the ranks stop at a barrier and each reads its
               proportional set size (PSS, /proc/self/smaps_rollup), which counts a page shared by k
               processes as 1/k in each. Summed over ranks; the table shows the highest point. GPU: besides,
               device memory in use (driver) and the peak of the caching allocator
exit status: 0 within tolerance, 1 numbers differ, 2 a backend failed or the arguments are wrong
"""


@dataclass(frozen=True)
class Settings:
    """Validated choices; `device` is "cpu" or "cuda"."""

    model: str
    ranks: int
    steps: int
    seq: int
    batch: int
    hidden: int
    layers: int
    experts: int
    seed: int
    dtype: str
    lr: float
    clip: float
    warmup: int
    reshard_after_forward: bool
    device: str
    timeout: int

    def compared_steps(self) -> list[int]:
        """Steps (from 0) whose gradients are compared: the first and the last."""
        return sorted({0, self.steps - 1})

    def as_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text}")
    return value


def make_parser(gpus: int) -> argparse.ArgumentParser:
    """The command line; the defaults depend on the number of GPUs."""
    parser = argparse.ArgumentParser(
        description="Train one FSDP2 model under two torch.distributed backends and compare them.",
        epilog=MEASUREMENT_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    big = gpus > 0
    add = parser.add_argument
    add("--model", choices=("llama", "qwen3-moe"), default="llama")
    add(
        "--backends",
        default="tide,nccl" if big else "tide,gloo",
        help="comma-separated (default: %(default)s)",
    )
    add("--ranks", type=_positive, default=gpus or 4, help="processes (default: the GPUs, else 4)")
    add("--steps", type=_positive, default=20)
    add("--warmup", type=int, default=3, help="first steps left out of the times (default: %(default)s)")
    add("--seq", type=_positive, default=1024 if big else 128, help="bytes a sequence (default: %(default)s)")
    add("--batch", type=_positive, default=2 if big else 1, help="sequences a rank (default: %(default)s)")
    add(
        "--hidden",
        type=_positive,
        default=4096 if big else 768,
        help="a multiple of 128 (default: %(default)s)",
    )
    add("--layers", type=_positive, default=6, help="decoder blocks (default: %(default)s)")
    add("--experts", type=_positive, default=8, help="experts a block, qwen3-moe (default: %(default)s)")
    add("--dtype", choices=("bf16", "fp32"), default="bf16", help="bf16: bf16 parameters, fp32 reduction")
    add("--lr", type=float, default=3e-4)
    add("--clip", type=float, default=1.0, help="gradient norm limit; 0 leaves clipping out")
    add("--seed", type=int, default=0)
    add(
        "--reshard-after-forward",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="free the gathered parameters of a block after its forward",
    )
    add("--repeat", type=_positive, default=1, help="runs of each backend, alternating (default: %(default)s)")
    add("--timeout", type=_positive, default=300, help="seconds a collective may take (default: %(default)s)")
    add("--device", choices=("cpu", "cuda"), default="cuda" if big else "cpu")
    add("--json", metavar="FILE", help="write everything measured")
    add("--png", metavar="FILE", help="draw losses and step times (needs matplotlib)")
    add("--keep", metavar="DIR", help="keep the raw results (gradients, parameters, numbers) here")
    add("--reuse", metavar="DIR", help="compare the raw results kept there instead of training")
    return parser


def settings_from(args: argparse.Namespace) -> Settings:
    """Checks the combination; raises ValueError with the way out."""
    names = [field.name for field in dataclasses.fields(Settings)]
    settings = Settings(**{name: getattr(args, name) for name in names})
    if settings.hidden % 128:
        raise ValueError(f"--hidden {settings.hidden}: expected a multiple of 128 (the heads have 64 channels)")
    if not 0 <= settings.warmup < settings.steps:
        raise ValueError(f"--warmup {settings.warmup}: expected at least 0 and less than --steps {settings.steps}")
    if settings.lr <= 0 or not math.isfinite(settings.lr):
        raise ValueError(f"--lr {settings.lr}: expected a positive number")
    return settings
