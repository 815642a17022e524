#!/usr/bin/env bash
# Builds and tests tide under several versions of torch, each in an environment and a copy of the tree of its own, on
# the CPU, and prints what came of it:
#
#   bash ci/versions.sh [VERSION...]        default: 2.11.0 2.13.0 2.14.1 2.15.0
#
# What a caller may set, besides what common.sh names (VENV and TORCH_SPEC have no effect here):
#   WORK         where environments and copies lie    default: .versions in the repository; kept for the next run
#   PYTEST_ARGS  passed to pytest                     default: the whole suite
#   MINUTES      most time for one version's tests    default: 60
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

WORK="${WORK:-$root/.versions}"
[[ "$WORK" == /* ]] || WORK="$PWD/$WORK"
MINUTES="${MINUTES:-60}"
if (($#)); then versions=("$@"); else versions=(2.11.0 2.13.0 2.14.1 2.15.0); fi

copy_tree() {
    mkdir -p "$1"
    find "$1" -mindepth 1 -maxdepth 1 ! -name build -exec rm -rf {} +
    # What git knows or would add, so that no build of another torch comes along.
    (cd "$root" && git ls-files -z --cached --others --exclude-standard |
        tar --create --null --files-from - --ignore-failed-read 2>/dev/null) | tar --extract --directory "$1"
}

summary_of() { grep -E '[0-9]+ (passed|failed|error)' "$1" | tail -n 1 | sed 's/ in [0-9.]*s.*//' || true; }

# Prints the columns of one version: torch, build, tests.
try_version() {
    local version="$1" here="$WORK/$1" status=0
    mkdir -p "$here"
    VENV="$here/venv"
    make_venv
    if [[ "$(torch_version)" != "$version"* ]] && ! pip_install "torch==$version" >"$here/install.log" 2>&1; then
        printf 'cannot be had | |\n'
        return 1
    fi
    if ! copy_tree "$here/tree"; then
        printf 'copying failed | |\n'
        return 1
    fi
    say "torch $(torch_version): building, log in $here/build.log"
    if ! VENV="$VENV" TORCH_SPEC="" TIDE_CUDA=0 \
        bash -c "source \"$here/tree/ci/common.sh\" && prepare" >"$here/build.log" 2>&1; then
        printf '%s | no | not run\n' "$(torch_version)"
        return 1
    fi
    say "torch $(torch_version): testing, log in $here/test.log"
    # shellcheck disable=SC2086  # several arguments
    (cd "$here/tree" && timeout --kill-after 30 "${MINUTES}m" "$VENV/bin/python" -m pytest ${PYTEST_ARGS:-}) \
        >"$here/test.log" 2>&1 || status=$?
    if ((status == 124)); then
        printf '%s | yes | not over after %s min\n' "$(torch_version)" "$MINUTES"
    else
        printf '%s | yes | %s\n' "$(torch_version)" "$(summary_of "$here/test.log")"
    fi
    return "$status"
}

failed=0
rows=()
for version in "${versions[@]}"; do
    row="$(try_version "$version")" || failed=1
    rows+=("| $version | $row |")
done
printf '| asked for | torch | builds | tests |\n|---|---|---|---|\n'
printf '%s\n' "${rows[@]}"
exit "$failed"
