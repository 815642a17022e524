#!/usr/bin/env bash
# The GPU tests, for ci/gpu.sh, which ends them at their deadline: `bash ci/gpu_tests.sh OUT PROCESSES SECONDS`.
# PROCESSES: 1, all tests one after the other; 3, three parts of them side by side, and then the tests with the marker
# `alone`. SECONDS: of all of it, beside what GPU_STRESS_SECONDS adds. Prints the logs one behind the other.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$1 processes=$2 seconds=$3
# One after the other: tests that wait for deadlines, keep the GPUs busy or count memory. The rest in two parts of about
# the same length; a new file is in the third.
first=(tests/gpu/test_gpu_{failure,load,memory}.py)
second=(tests/gpu/test_gpu_{collectives,connections,strided}.py)
third=()
for file in tests/gpu/test_*.py; do
    [[ " ${first[*]} ${second[*]} " == *" $file "* ]] || third+=("$file")
done
preload=()
[[ -n ${TIDE_NCCL_LIBRARY:-} ]] && preload=("LD_PRELOAD=$TIDE_NCCL_LIBRARY" NCCL_MULTI_RANK_GPU_ENABLE=1)
declare -A pids=()
logs=() failed=0 stopped=0
start() {
    local log="$out/tests_$((${#logs[@]} + 1)).txt"
    logs+=("$log")
    echo "== pytest -m '$1' ${*:2}" >"$log"
    # A budget that ends before the deadline. Every test's name, unbuffered: where it hangs, it says so.
    env "${preload[@]}" GPU_TEST_BUDGET_S=$((seconds - SECONDS - 15)) PYTHONUNBUFFERED=1 \
        python -m pytest -vv -m "$1" "${@:2}" --maxfail 4 --durations 0 --durations-min 1 -p no:cacheprovider \
        >>"$log" 2>&1 &
    pids[$log]=$!
}
finish() {
    local log
    for log in "${!pids[@]}"; do
        wait "${pids[$log]}" || { echo "== status $?" >>"$log"; failed=1; }
    done
    pids=()
    wait # again: TERM ends a wait, and only while this script is there does KILL follow
}

# From the caller's `timeout`, which sends it to the tests too.
trap 'stopped=1 failed=1' TERM
if ((processes == 1)); then
    start gpu tests/gpu
    finish
else
    start "gpu and not alone" "${first[@]}"
    start "gpu and not alone" "${second[@]}"
    start "gpu and not alone" "${third[@]}"
    finish
    ((stopped)) || start "gpu and alone" tests/gpu
    finish
fi
cat "${logs[@]}"
((stopped)) && echo "== stopped at the deadline"
grep -hE '^(FAILED|ERROR) |^== |^=+ .* in [0-9.]+s.* =+$' "${logs[@]}"
rm "${logs[@]}"
exit "$failed"
