#!/usr/bin/env bash
# Build, tests and benchmarks on a machine with GPUs, in the Python that is active: `bash ci/gpu.sh [OUT]`. Every step
# has a deadline and all of them together have TOTAL seconds, of which benchmarks get what the tests have left; results
# go to OUT (default: out/). Ranks share GPUs where there are fewer of them than ranks; NCCL allows that from 2.30.3 on,
# so torch's own is replaced by TIDE_NCCL_LIBRARY for those tests. GPU_STRESS_SECONDS makes the stress tests longer than
# their 10 seconds, and everything else with them.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-out}
mkdir -p "$out"
stress=$((${GPU_STRESS_SECONDS:-10} - 10))
longer=$((stress > 0 ? 2 * stress : 0))
TOTAL=$((470 + longer))
# Multicast stays off: on shared servers it can put GPUs out of service.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
failed=() left_out=()
gpus=$(python -c "import torch; print(torch.cuda.device_count())")
[[ $gpus -gt 0 ]] || { echo "no GPU"; exit 2; }
step() {
    local name=$1 seconds=$2 start=$SECONDS
    shift 2
    if ((TOTAL - SECONDS < 10)); then
        echo "== $name: left out, $TOTAL s are over"
        left_out+=("$name")
        return
    fi
    ((seconds > TOTAL - SECONDS)) && seconds=$((TOTAL - SECONDS))
    echo "== $name: $*"
    timeout -k 5 "$seconds" "$@" 2>&1 | grep -v GDRCopy | tee "$out/$name.txt" | tail -n "${LINES_SHOWN:-25}"
    local status=${PIPESTATUS[0]}
    echo "== $name: status $status, $((SECONDS - start)) s"
    [[ $status -eq 0 ]] || failed+=("$name")
}
tests() {
    local -a env=(GPU_TEST_BUDGET_S=285)
    [[ -n ${TIDE_NCCL_LIBRARY:-} ]] && env+=("LD_PRELOAD=$TIDE_NCCL_LIBRARY" NCCL_MULTI_RANK_GPU_ENABLE=1)
    step tests $((300 + longer)) env "${env[@]}" python -m pytest -m gpu tests/gpu --maxfail 4 --durations 12 \
        -p no:cacheprovider
}
benchmarks() {
    local bench="python -m tide_backend.bench" sizes=1M,16M,64M,256M,1G
    # Ranks that share a GPU would measure each other.
    ((gpus > 1)) || { echo "== one GPU: no benchmarks"; return; }
    step fsdp2 90 $bench fsdp2 --ranks "$gpus" --vs nccl,nccl-symm,compute --tokens 2048 --json "$out/fsdp2.json"
    step all_gather 40 $bench all_gather --ranks "$gpus" --vs nccl --sizes $sizes --json "$out/all_gather.json"
    step reduce_scatter 40 $bench reduce_scatter --ranks "$gpus" --vs nccl --sizes $sizes \
        --json "$out/reduce_scatter.json"
    step overlap 60 $bench overlap --ranks "$gpus" --vs nccl --sizes 64M --repetitions 5 --json "$out/overlap.json"
    step all_to_all 30 env TIDE_CUDA_PLAIN_BYTES=0 $bench all_to_all --ranks "$gpus" --vs nccl --sizes 8M,64M,512M \
        --json "$out/all_to_all.json"
}

step build 150 env TIDE_CUDA=1 MAX_JOBS="$(nproc)" python setup.py build_ext --inplace
step check 20 python -m tide_backend.check
step kernels 60 python tests/gpu/kernels_alone.py
tests
benchmarks
((${#left_out[@]})) && echo "left out: ${left_out[*]}"
if ((${#failed[@]})); then
    echo "failed: ${failed[*]}"
    exit 1
fi
echo "everything that ran passed, in $SECONDS s"
