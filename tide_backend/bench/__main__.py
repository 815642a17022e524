"""``python -m tide_backend.bench all_gather|reduce_scatter|all_to_all|init|seam``; exit 1 when an one is wrong."""

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

from . import init, launch, seam, table
from .layouts import PARAMETERS
from .measure import run_rank
from .settings import COLLECTIVES, Settings, parse_size

DEFAULT_SIZES = "4K,64K,1M,16M,64M"


def parse(arguments: Sequence[str] | None) -> tuple[Settings, Path | None]:
    parser = argparse.ArgumentParser(
        prog="python -m tide_backend.bench", description="tide beside the stock backend, in one run"
    )
    parser.add_argument("collective", choices=[*COLLECTIVES, "init", "seam"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sizes", default=DEFAULT_SIZES, help=f"bytes of the whole buffer (default {DEFAULT_SIZES})")
    parser.add_argument("--vs", choices=["gloo", "nccl"], default="gloo", help="nccl: on GPUs")
    parser.add_argument("--layout", choices=list(PARAMETERS), default="llama", help="proportions of the parameters")
    parser.add_argument("--repetitions", type=int, help="default 15; init: 5; seam: 300")
    parser.add_argument("--parameters", type=int, default=12, help="seam: of one parameter group (default 12)")
    parser.add_argument("--numel", type=int, default=128, help="seam: elements of each parameter (default 128)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    given = parser.parse_args(arguments)
    try:
        sizes = tuple(parse_size(s) for s in given.sizes.split(","))
    except ValueError as error:
        parser.error(str(error))
    repetitions = given.repetitions or {"init": 5, "seam": 300}.get(given.collective, 15)
    if given.ranks < 2 or repetitions < 1:
        parser.error(f"got --ranks {given.ranks} and --repetitions {repetitions}; expected 2 or more and 1 or more")
    if given.parameters < 1 or given.numel < 1:
        parser.error(f"got --parameters {given.parameters} and --numel {given.numel}; expected 1 or more")
    if given.vs == "nccl" and given.collective == "seam":
        parser.error("seam measures CPU ranks; use --vs gloo")
    if given.vs == "nccl" and not torch.cuda.is_available():
        parser.error("--vs nccl needs a GPU, and this torch sees none; use --vs gloo")
    settings = Settings(
        given.collective,
        given.ranks,
        sizes,
        given.vs,
        given.layout,
        repetitions,
        parameters=given.parameters,
        numel=given.numel,
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
