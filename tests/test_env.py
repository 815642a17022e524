"""The environment: one table, checked against README; unknown and bad values are refused in words."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tide_backend import _C

ROOT = Path(__file__).resolve().parent.parent
BUILD_VARIABLES = {"TIDE_CUDA"}


def readme_rows() -> dict[str, str]:
    """Variable -> default, from README's table of environment variables."""
    rows = re.findall(r"^\| `(TIDE_\w+)` \|.*\| `?([^|`]*)`? \|$", (ROOT / "README.md").read_text(), flags=re.M)
    return {name: default.strip() for name, default in rows}


def test_readme_table_is_the_real_one() -> None:
    table = {name: default for name, _, _, default in _C.env_table()}
    rows = readme_rows()
    assert set(rows) - BUILD_VARIABLES == set(table)
    assert {name: rows[name] for name in table} == table


def test_at_most_fifteen_variables() -> None:
    assert len(_C.env_table()) + len(BUILD_VARIABLES) <= 15


def test_nothing_else_reads_the_environment() -> None:
    allowed = {"csrc/backend/env.cpp", "setup.py"}
    readers = set()
    for path in [*ROOT.glob("csrc/**/*.*"), *ROOT.glob("tide_backend/**/*.py"), ROOT / "setup.py"]:
        if path.suffix in {".py", ".cpp", ".h", ".cu", ".cuh"}:
            text = path.read_text()
            if re.search(r"\bgetenv\(|environ\b.*TIDE_|TIDE_.*\benviron\b", text):
                readers.add(str(path.relative_to(ROOT)))
    assert readers <= allowed


def read_env_in_child(**variables: str) -> str:
    code = (
        "import tide_backend\n"
        "from tide_backend import _C\n"
        "try:\n    print(_C.env())\n"
        "except tide_backend.UsageError as e:\n    print('refused:', e)"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("TIDE_")} | variables
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {"TIDE_STAGING_BYTE": "1"},
            "refused: tide: environment variable TIDE_STAGING_BYTE does not exist; expected one of ",
        ),
        (
            {"TIDE_STAGING_BYTES": "12"},
            "refused: tide: environment variable TIDE_STAGING_BYTES=12 is not allowed; expected 65536 or more; "
            "it sets budget of one rank's staging window, whatever the number of ranks",
        ),
        ({"TIDE_FSDP2": "yes"}, "refused: tide: environment variable TIDE_FSDP2=yes is not allowed; expected 0 or 1; "),
        ({"TIDE_ARENA_BYTES": "65536"}, "{'arena_bytes': 65536"),
    ],
)
def test_values(variables: dict[str, str], expected: str) -> None:
    assert read_env_in_child(**variables).startswith(expected)
