"""Runs tests of PyTorch's own DistributedTest on tide: names in, one a line; a JSON line out for each.

    python upstream_runner.py [BACKEND]       default: tide

The first line out is the list of all names. Then, per name: {"name", "outcome": "passed", "skipped" or "failed", "why",
"seconds"}. The module is imported once, and every test forks its four ranks from here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
import traceback
import unittest

WORLD_SIZE = 4
TIMEOUT_S = 60


def prepare(directory: str) -> None:
    """What the module reads from the environment when it is imported, and later."""
    os.makedirs(os.path.join(directory, "barrier"))
    os.makedirs(os.path.join(directory, "init_dir"))
    os.environ.update(
        BACKEND="gloo",  # while it is imported: a backend for CPU tensors
        WORLD_SIZE=str(WORLD_SIZE),
        INIT_METHOD=f"file://{directory}/init_dir/shared",
        TEMP_DIR=directory,
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(TIMEOUT_S),
        OMP_NUM_THREADS="1",
    )


def make_case(backend: str) -> type[unittest.TestCase]:
    """DistributedTest on this backend, with forked ranks."""
    import torch
    from torch.testing._internal import common_utils

    # Skips by the backend's name; upstream_lists.py has the reasons that hold for tide. Those by hardware remain.
    common_utils.skip_but_pass_in_sandcastle_if = lambda condition, reason: lambda test: test
    from torch.testing._internal.distributed import distributed_test as upstream

    import tide_backend  # noqa: F401

    torch.set_num_threads(1)
    upstream.BACKEND = backend
    # From here on only skip_if_small_worldsize reads it: it skips below eight ranks, on all backends but this one.
    os.environ["BACKEND"] = "mpi"

    class Forked(upstream.TestDistBackend, upstream.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return Forked


def run(case: type[unittest.TestCase], name: str) -> dict[str, object]:
    start = time.monotonic()
    result = unittest.TestResult()
    try:
        case(name).run(result)
    except BaseException:
        return {"name": name, "outcome": "failed", "why": traceback.format_exc(), "seconds": 0.0}
    bad = [text for _, text in result.failures + result.errors]
    skipped = [why for _, why in result.skipped]
    outcome = "failed" if bad else "skipped" if skipped else "passed"
    seconds = round(time.monotonic() - start, 2)
    return {"name": name, "outcome": outcome, "why": "\n".join(bad or skipped), "seconds": seconds}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what tests print goes elsewhere
    logging.disable(logging.INFO)
    directory = tempfile.mkdtemp()
    try:
        prepare(directory)
        case = make_case(sys.argv[1] if len(sys.argv) > 1 else "tide")
        print(json.dumps([name for name in dir(case) if name.startswith("test_")]), file=answers, flush=True)
        for line in sys.stdin:
            with contextlib.redirect_stdout(sys.stderr):
                answer = run(case, line.strip())
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
