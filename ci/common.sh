# Sourced by quickstart.sh and test.sh: makes the virtual environment and builds tide in place.
#
# What a caller may set (all optional):
#   PYTHON      interpreter for the environment      default: python3, else the newest python3.x >= 3.10 found
#   VENV        where the environment lies           default: .venv in the repository
#   TORCH_SPEC  what pip is asked for                default: keep a torch >= 2.11 that is there, else the pin below
#   CXX         C++ compiler                         default: c++, g++ or clang++, whichever is found first
#   MAX_JOBS    parallel compilations                default: one per core, at most one per 2 GiB of memory

default_torch="torch==2.14.1"
oldest_torch="2.11"

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VENV:-$root/.venv}"
[[ "$VENV" == /* ]] || VENV="$PWD/$VENV"

say() { printf '== %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

find_python() {
    local name version
    if [[ -n "${PYTHON:-}" ]]; then
        command -v "$PYTHON" >/dev/null || die "PYTHON=$PYTHON is no program; set it to a Python 3.10 or newer"
        is_new_enough "$PYTHON" && { printf '%s\n' "$PYTHON"; return; }
        version="$("$PYTHON" -c 'import platform; print(platform.python_version())' 2>/dev/null || true)"
        die "PYTHON=$PYTHON is ${version:+Python }${version:-no Python}; set it to a Python 3.10 or newer"
    fi
    for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
        if command -v "$name" >/dev/null && is_new_enough "$name"; then
            printf '%s\n' "$name"
            return
        fi
    done
    version="$(python3 --version 2>/dev/null || true)"
    die "found ${version:-no python3}, need Python 3.10 or newer; install one, or set PYTHON to one"
}

find_compiler() {
    local name probe
    probe='template <class T> concept Any = true; int main() { Any auto zero = 0; return zero; }'
    for name in ${CXX:+"$CXX"} c++ g++ clang++; do
        command -v "$name" >/dev/null || continue
        if printf '%s\n' "$probe" | "$name" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null; then
            printf '%s\n' "$name"
            return
        fi
        say "$name cannot compile C++20; looking further"
    done
    die "found no C++20 compiler (tried ${CXX:+$CXX, }c++, g++, clang++); install g++ 10 or newer, or set CXX to one"
}

check_headers() {
    local header
    header="$("$1" -c 'import sysconfig; print(sysconfig.get_path("include") + "/Python.h")')"
    [[ -f "$header" ]] && return
    die "$header is missing, which a Python extension needs; install Python's development package (python3-dev)"
}

make_venv() {
    if [[ -x "$VENV/bin/python" ]] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        is_new_enough "$VENV/bin/python" || die "$VENV holds a Python before 3.10; remove it or set VENV to another"
        return
    fi
    if [[ -e "$VENV" && ! -f "$VENV/pyvenv.cfg" && -n "$(ls -A "$VENV")" ]]; then
        die "$VENV is no virtual environment and not empty; set VENV to a folder that may be written"
    fi
    local python
    python="$(find_python)"
    say "making $VENV with $("$python" --version)"
    "$python" -m venv --clear "$VENV" ||
        die "$python cannot make an environment; install its venv and pip packages (python3-venv), or set PYTHON"
}

pip_install() {
    "$VENV/bin/python" -m pip --disable-pip-version-check install --quiet "$@"
}

torch_version() {
    "$VENV/bin/python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true
}

install_torch() {
    local present
    present="$(torch_version)"
    if [[ -n "$present" && -z "${TORCH_SPEC:-}" ]] &&
        [[ "$(printf '%s\n' "$oldest_torch" "$present" | sort -V | head -n 1)" == "$oldest_torch" ]]; then
        return
    fi
    say "installing ${TORCH_SPEC:-$default_torch}"
    pip_install "${TORCH_SPEC:-$default_torch}"
}

# Everything that the built extension and the installed packages depend on.
fingerprint() {
    "$VENV/bin/python" - "$root" "$(torch_version)" "${TIDE_CUDA:-}" <<'PYTHON_END'
import hashlib, pathlib, sys

root = pathlib.Path(sys.argv[1])
digest = hashlib.sha256("\0".join([sys.version, *sys.argv[1:]]).encode())
files = [root / "setup.py", root / "pyproject.toml", root / "ci/common.sh"]
files += sorted(p for p in (root / "csrc").rglob("*") if p.is_file())
for file in files:
    digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
print(digest.hexdigest())
PYTHON_END
}

limit_jobs() {
    [[ -n "${MAX_JOBS:-}" ]] && return
    local cores gib
    cores="$(getconf _NPROCESSORS_ONLN)"
    gib="$(awk '/MemAvailable/ {print int($2 / 1048576)}' /proc/meminfo)"
    MAX_JOBS=$((gib / 2 < cores ? gib / 2 : cores))
    export MAX_JOBS=$((MAX_JOBS < 1 ? 1 : MAX_JOBS))
}

# The environment with torch, tide built in place and the extras; nothing to do when nothing changed.
prepare() {
    make_venv
    local stamp="$VENV/.tide-built" built
    built="$(compgen -G "$root/tide_backend/_C*.so" || true)"
    if [[ -n "$built" && -f "$stamp" && -z "${TORCH_SPEC:-}" && "$(<"$stamp")" == "$(fingerprint)" ]]; then
        return
    fi
    CXX="$(find_compiler)"
    export CXX
    check_headers "$VENV/bin/python"
    limit_jobs
    say "installing build tools"
    pip_install "setuptools>=70" wheel ninja
    install_torch
    say "building tide with $CXX, $MAX_JOBS at a time, against torch $(torch_version)"
    # The build calls ninja by name.
    (cd "$root" && PATH="$VENV/bin:$PATH" pip_install --no-build-isolation -e ".[test,examples]")
    fingerprint >"$stamp"
}
