"""``python -m tide_backend.bench WHAT``, WHAT as `--help` lists it; exit 1 when one is wrong."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from . import fsdp2, gemm, init, launch, overlap, overlap_table, seam, table
from .layouts import PARAMETERS
from .llama import SHAPES
from .measure import run_rank
from .settings import COLLECTIVES, Settings, parse_size

DEFAULT_SIZES = "4K,64K,1M,16M,64M"
OVERLAP_SIZES = {"cuda": "64M,512M", "cpu": "4M,64M"}


def parse(arguments: Sequence[str] | None) -> tuple[Settings, Path | None]:
    parser = argparse.ArgumentParser(
        prog="python -m tide_backend.bench", description="tide beside the stock backend, in one run"
    )
    parser.add_argument("collective", choices=[*COLLECTIVES, "overlap", "fsdp2", "init", "seam"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--sizes",
        help=f"bytes of the whole buffer (default {DEFAULT_SIZES}; overlap: {OVERLAP_SIZES['cuda']} on GPUs, "
        f"{OVERLAP_SIZES['cpu']} on CPU ranks)",
    )
    parser.add_argument(
        "--vs", default="gloo", help="gloo, or nccl on GPUs; fsdp2: also nccl-symm and compute, and several, as in a,b"
    )
    parser.add_argument(
        "--layout",
        choices=[*PARAMETERS, "ulysses"],
        default="llama",
        help="proportions of the parameters; all_to_all: ulysses, of permuted views there and back",
    )
    parser.add_argument("--repetitions", type=int, help="default 15; fsdp2, overlap: 7; init: 5; seam: 300")
    parser.add_argument("--parameters", type=int, default=12, help="seam: of one parameter group (default 12)")
    parser.add_argument("--numel", type=int, default=128, help="seam: elements of each parameter (default 128)")
    parser.add_argument("--model", choices=list(SHAPES), help="fsdp2: default llama70b on GPUs, tiny on CPU ranks")
    parser.add_argument("--layers", type=int, default=6, help="fsdp2: blocks (default 6)")
    parser.add_argument("--tokens", default="2048", help="fsdp2: per rank, as in 1024,2048 (default 2048)")
    parser.add_argument("--rounds", type=int, default=1, help="fsdp2: how often each side has its turn")
    parser.add_argument("--profile", action="store_true", help="fsdp2: GPU time by kernel, of one step on rank 0")
    parser.add_argument(
        "--gemm", metavar="MxNxK", help="overlap: [M, K] @ [K, N] (default: a Llama 70B MLP's at 2048 tokens on GPUs)"
    )
    parser.add_argument("--collectives", default=",".join(COLLECTIVES), help="overlap: some of them (default all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    given = parser.parse_args(arguments)
    device = "cuda" if "nccl" in given.vs else "cpu"
    default = OVERLAP_SIZES[device] if given.collective == "overlap" else DEFAULT_SIZES
    try:
        sizes = tuple(parse_size(s) for s in (given.sizes or default).split(","))
        shape = gemm.parse(given.gemm) if given.gemm else gemm.DEFAULT[device]
        tokens = tuple(parse_size(s) for s in given.tokens.split(","))
    except ValueError as error:
        parser.error(str(error))
    repetitions = given.repetitions or {"fsdp2": 7, "overlap": 7, "init": 5, "seam": 300}.get(given.collective, 15)
    if given.ranks < 2 or repetitions < 1:
        parser.error(f"got --ranks {given.ranks} and --repetitions {repetitions}; expected 2 or more and 1 or more")
    if given.parameters < 1 or given.numel < 1:
        parser.error(f"got --parameters {given.parameters} and --numel {given.numel}; expected 1 or more")
    sides = given.vs.split(",")
    allowed = [x for x in fsdp2.SIDES if x != "tide"] if given.collective == "fsdp2" else ["gloo", "nccl"]
    if not set(sides) <= set(allowed) or (given.collective != "fsdp2" and len(sides) > 1):
        parser.error(f"got --vs {given.vs}; expected {'some' if given.collective == 'fsdp2' else 'one'} of {allowed}")
    collectives = tuple(given.collectives.split(","))
    if not set(collectives) <= set(COLLECTIVES):
        parser.error(f"got --collectives {given.collectives}; expected some of {', '.join(COLLECTIVES)}")
    if given.layout == "ulysses" and given.collective != "all_to_all":
        parser.error(f"--layout ulysses is for all_to_all; expected one of {', '.join(PARAMETERS)}")
    if given.layers < 1 or given.rounds < 1:
        parser.error(f"got --layers {given.layers} and --rounds {given.rounds}; expected 1 or more")
    if "nccl" in given.vs and "gloo" in sides:
        parser.error(f"got --vs {given.vs}; nccl runs on GPUs and gloo on CPU ranks, name one of them")
    if "nccl" in given.vs and not torch.cuda.is_available():
        parser.error(f"--vs {given.vs} needs a GPU, and this torch sees none; use --vs gloo")
    settings = Settings(
        given.collective,
        given.ranks,
        sizes,
        given.vs,
        given.layout,
        repetitions,
        parameters=given.parameters,
        numel=given.numel,
        model=given.model or ("llama70b" if "nccl" in given.vs else "tiny"),
        layers=given.layers,
        tokens=tokens,
        rounds=given.rounds,
        profile=given.profile,
        gemm=shape,
        collectives=collectives,
    )
    return settings, given.json


def main(arguments: Sequence[str] | None = None) -> int:
    settings, output = parse(arguments)
    launch.prepare()
    machine = f"{len(os.sched_getaffinity(0))} cores ({platform.machine()}), torch {torch.__version__}"
    wrong = 0
    if settings.collective == "init":
        print(f"# init, {settings.ranks} ranks, {machine}, {settings.repetitions} sets of processes (medians)")
        rows = init.run(settings)
        print(table.init_table(rows))
    elif settings.collective == "seam":
        print(f"# seam, {settings.ranks} ranks, {machine}, {settings.repetitions} repetitions", flush=True)
        rows = seam.run(settings)
        print(seam.table(rows, settings))
    elif settings.collective == "overlap":
        print(overlap_table.header(settings, machine), flush=True)
        rows = []
        for row in overlap.run(settings):
            rows.append(row)
            print(overlap_table.lines(row, settings), flush=True)
        wrong = sum(row[side]["wrong"] for row in rows for side in ("tide", "stock"))
        print(f"# wrong elements: {wrong}")
    elif settings.collective == "fsdp2":
        print(fsdp2.header(settings, machine), flush=True)
        rows = []
        for row in fsdp2.run(settings):
            rows.append(row)
            print(fsdp2.line(row), flush=True)
        print(fsdp2.summary(rows))
        differences = fsdp2.differing(rows)
        wrong = len(differences)
        print("\n".join(["# losses and gradient norms that differ: " + str(wrong), *differences]))
    else:
        print(table.header(settings, machine), flush=True)
        rows = []
        for samples in launch.launch(run_rank, settings.ranks, settings):
            rows.append(table.merge(samples))
            print(table.line(rows[-1]), flush=True)
        wrong = sum(row[side]["wrong"] for row in rows for side in ("tide", "stock"))
        print(f"# wrong elements: {wrong}")
    if output:
        command = "python -m tide_backend.bench " + shlex.join(arguments if arguments is not None else sys.argv[1:])
        result = {"command": command, "machine": machine, "settings": asdict(settings), "rows": rows}
        output.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
