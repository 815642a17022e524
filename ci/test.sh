#!/usr/bin/env bash
# Makes the same environment as quickstart.sh, then runs the checks and the tests. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

prepare
cd "$root"
failed=()
"$VENV/bin/python" -m ruff check . || failed+=("ruff")
if [[ -f ci/layering.py ]]; then
    "$VENV/bin/python" ci/layering.py || failed+=("layering")
fi
"$VENV/bin/python" -m pytest "$@" || failed+=("pytest")
if ((${#failed[@]})); then
    die "failed: ${failed[*]}"
fi
say "all checks and tests passed"
