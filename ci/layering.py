"""Keeps knowledge pointing one way: ``python ci/layering.py [root]`` lists what points the other way.

C++ (csrc/):  bindings -> backend -> executor -> (plan, transport) -> kernels, with the vocabulary below all
of them. A file may include its own layer and lower ones; plan and transport lie side by side and do not know
each other. Torch headers only in the files that speak torch. A file that is in no layer is reported too.
Python:       only tide_backend/fsdp2* imports torch.distributed.fsdp; bench/fsdp2.py may know what it publishes.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path


@dataclass(frozen=True)
class Layer:
    name: str
    level: int
    patterns: tuple[str, ...]  # of paths in csrc/, without ending; the first layer that fits counts
    torch: bool = False  # may include torch, c10 and ATen


LAYERS = (
    # What everything may know: words, errors, descriptors, the environment.
    Layer(
        "vocabulary",
        0,
        ("backend/types", "backend/error", "backend/env", "backend/fd", "backend/layout", "backend/request"),
    ),
    Layer("vocabulary", 0, ("backend/select", "backend/fork_guard", "backend/futex", "backend/memory_limit")),
    Layer("vocabulary", 0, ("backend/range_allocator", "backend/bootstrap", "backend/strided")),
    Layer("bindings", 6, ("backend/bindings", "backend/*_bindings", "backend/*/bindings"), torch=True),
    Layer("kernels", 1, ("kernels/*",)),
    Layer("plan", 2, ("backend/plan", "backend/plan_*")),
    Layer("transport", 2, ("backend/transport", "backend/shm_*", "backend/net_*", "backend/cuda/*")),
    Layer("repack", 2, ("backend/repack/*",)),
    Layer("executor", 3, ("backend/executor", "backend/executor_*")),
    Layer("engine", 4, ("backend/engine", "backend/lane", "backend/agreement", "backend/meeting", "backend/recorder")),
    Layer("backend", 5, ("backend/backend", "backend/backend_*", "backend/work", "backend/inner_call"), torch=True),
    Layer("backend", 5, ("backend/options", "backend/layout_table", "backend/layout_fallback"), torch=True),
    Layer("backend", 5, ("backend/slot", "backend/slot_*", "backend/store_bootstrap"), torch=True),
)
TORCH = re.compile(r"(torch|ATen|c10|pybind11)/")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
SOURCES = {".h", ".hpp", ".cpp", ".cu", ".cuh"}


def layer_of(path: str) -> Layer | None:
    """The layer of a path in csrc/, such as "backend/plan.h"."""
    stem = path.rsplit(".", 1)[0]
    return next((layer for layer in LAYERS if any(fnmatch(stem, p) for p in layer.patterns)), None)


def check_cpp(root: Path) -> list[str]:
    found = []
    csrc = root / "csrc"
    files = sorted(p for p in csrc.rglob("*") if p.suffix in SOURCES)
    for file in files:
        name = file.relative_to(csrc).as_posix()
        layer = layer_of(name)
        if layer is None:
            found.append(f"csrc/{name}: is in no layer; name one in ci/layering.py")
            continue
        text = file.read_text()
        for match in INCLUDE.finditer(text):
            where = f"csrc/{name}:{text.count(chr(10), 0, match.start(2)) + 1}"
            found += check_include(csrc, file, where, layer, match[2])
    return found


def check_include(csrc: Path, file: Path, where: str, layer: Layer, included: str) -> list[str]:
    if TORCH.match(included):
        if layer.torch:
            return []
        return [f"{where}: {layer.name} includes {included}; only backend and bindings may include torch headers"]
    target = next((p for p in ((file.parent / included).resolve(), (csrc / included).resolve()) if p.exists()), None)
    if target is None or not target.is_relative_to(csrc.resolve()):
        return []  # a system header
    other_name = target.relative_to(csrc.resolve()).as_posix()
    other = layer_of(other_name)
    if other is None or other.name == layer.name or other.level < layer.level:
        return []
    return [f"{where}: {layer.name} includes csrc/{other_name} ({other.name}); knowledge points the other way"]


def check_python(root: Path) -> list[str]:
    found = []
    package = root / "tide_backend"
    for file in sorted(package.rglob("*.py")):
        name = file.relative_to(package).as_posix()
        if name.startswith("fsdp2"):
            continue
        public = name == "bench/fsdp2.py"  # trains as any user does
        for line, module in imports(ast.parse(file.read_text())):
            if public and "._" not in module:
                continue
            if module == "torch.distributed.fsdp" or module.startswith("torch.distributed.fsdp."):
                found.append(f"tide_backend/{name}:{line}: imports {module}; only tide_backend/fsdp2 may know FSDP2")
    return found


def imports(tree: ast.AST) -> list[tuple[int, str]]:
    """Line and full name of everything imported, also inside functions."""
    result = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            result += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            result += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return result


def check(root: Path) -> list[str]:
    """Every violation under `root`, as "file:line: what"."""
    return check_cpp(root) + check_python(root)


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    violations = check(root)
    for violation in violations:
        print(violation)
    print(f"layering: {len(violations)} violations" if violations else "layering: fine")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
