"""PyTorch's own DistributedTest, which ships in the wheel, on tide with four CPU ranks."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from upstream_lists import RUN, SKIPPED

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DEADLINE_S = 120
LISTED_FOR = "2.14."

pytestmark = pytest.mark.slow


class Runner:
    """The process that runs the tests by name; a new one after a test that does not end."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "upstream_runner.py")],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            self.names = json.loads(self.read() or "[]")

    def read(self) -> str:
        """One line; "" when none comes in time."""
        ready = select.select([self.process.stdout], [], [], DEADLINE_S)[0]
        line = self.process.stdout.readline() if ready else ""
        if not line:
            self.close()
        return line

    def run(self, name: str) -> dict[str, Any]:
        self.start()
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        answer = self.read()
        return json.loads(answer) if answer else {"outcome": "failed", "why": f"no answer in {DEADLINE_S} s"}

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    runner = Runner()
    runner.start()
    yield runner
    runner.close()


def test_every_test_is_listed_once(runner: Runner) -> None:
    listed = RUN + [name for names in SKIPPED.values() for name in names]
    assert len(listed) == len(set(listed))
    assert runner.names, "the runner does not start"
    if torch.__version__.startswith(LISTED_FOR):
        assert set(listed) == set(runner.names)
    else:  # others may lack some, or have more
        assert set(listed) & set(runner.names)


@pytest.mark.parametrize("name", RUN)
def test_upstream(runner: Runner, name: str) -> None:
    runner.start()
    if name not in runner.names:
        pytest.skip("this torch does not have it")
    answer = runner.run(name)
    assert answer["outcome"] == "passed", f"{answer['outcome']}: {answer['why']}"
