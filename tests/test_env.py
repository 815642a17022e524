"""The environment: one table, checked against README; unknown and bad values are refused in words."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tide_backend
from tide_backend import _C

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BUILD_VARIABLES = {"TIDE_CUDA"}


def readme_rows() -> dict[str, str]:
    """Variable -> default, from README's table of environment variables."""
    rows = re.findall(r"^\| `(TIDE_\w+)` \|.*\| `?([^|`]*)`? \|$", README, flags=re.M)
    return {name: default.strip() for name, default in rows}


def test_readme_table_is_the_real_one() -> None:
    table = {name: default for name, _, _, default in _C.env_table()}
    rows = readme_rows()
    assert set(rows) - BUILD_VARIABLES == set(table)
    assert {name: rows[name] for name in table} == table


def option_ranges() -> dict[str, tuple[int, int]]:
    """Attribute of Options -> least and most that it may be, from README's table."""
    rows = re.findall(r"^\| `TIDE_(\w+)` \| .* \| (\d+) (or more|or 1|to \d+)[^|]*\| ", README, flags=re.M)
    most = {"or more": 2**63 - 1, "or 1": 1}
    ranges = {name.lower(): (int(least), most.get(rest) or int(rest[3:])) for name, least, rest in rows}
    del ranges["fsdp2"]
    ranges["cuda"] = ranges.pop("cuda_transport")
    return ranges


RANGES = option_ranges()


def test_options_are_the_variables() -> None:
    torchs = {"group_name", "global_ranks_in_group"}
    assert {n for n in vars(tide_backend.Options) if not n.startswith("_")} - torchs == set(RANGES)
    assert len(RANGES) == 12


@pytest.mark.parametrize("name", RANGES)
def test_options_are_held_to_their_range(name: str) -> None:
    least, most = RANGES[name]
    for value in (least, most):
        assert getattr(tide_backend.Options(**{name: value}), name) == value
    options = tide_backend.Options()
    before = getattr(options, name)
    for value in (least - 1, most + 1, str(least), float(least), None):
        text = rf"tide: Options\.{name}={re.escape(repr(value))} is not allowed; expected {least} (or|to) .*; it sets "
        with pytest.raises(tide_backend.UsageError, match=text):
            setattr(options, name, value)
        with pytest.raises(tide_backend.UsageError, match=text):
            tide_backend.Options(**{name: value})
    assert getattr(options, name) == before


def test_options_by_keyword() -> None:
    options = tide_backend.Options(staging_bytes=1 << 20, cuda=False)
    assert (options.staging_bytes, options.cuda, options.shared_memory) == (1 << 20, False, True)
    with pytest.raises(TypeError) as found:
        tide_backend.Options(staging_byte=1 << 20)
    text = str(found.value)
    assert text.startswith('tide: Options got "staging_byte", which does not exist; expected any of arena_bytes, ')
    assert all(name in text for name in RANGES)
    with pytest.raises(TypeError):
        tide_backend.Options(group_name="mine")  # PyTorch's to set


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
