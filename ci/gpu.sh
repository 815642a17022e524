#!/usr/bin/env bash
# Build, tests and benchmarks on a machine with GPUs, in the Python that is active: `bash ci/gpu.sh [OUT]`. Every step
# has a deadline and all of them together have TOTAL seconds, of which benchmarks get what the tests have left. OUT
# (default: out/) gets the logs build.txt, tests.txt and benchmarks.txt, and a JSON file of each benchmark. Ranks share
# GPUs where there are fewer of them than ranks; NCCL allows that from 2.30.3 on, so torch's own is replaced by
# TIDE_NCCL_LIBRARY for those tests. GPU_STRESS_SECONDS makes the stress tests longer than their 10 seconds, and
# everything else with them.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-out}
mkdir -p "$out"
rm -f "$out"/{build,tests,tests_?,benchmarks}.txt "$out"/{all_to_all,reduce_scatter,all_gather,fsdp2,overlap}.json
stress=$((${GPU_STRESS_SECONDS:-10} - 10))
longer=$((stress > 0 ? 2 * stress : 0))
TOTAL=$((470 + longer))
# Multicast stays off: on shared servers it can put GPUs out of service.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
failed=() left_out=()
gpus=$(python -c "import torch; print(torch.cuda.device_count())")
[[ $gpus -gt 0 ]] || { echo "no GPU"; exit 2; }
log=build # of the steps that follow
step() {
    local name=$1 seconds=$2 start=$SECONDS
    shift 2
    if ((TOTAL - SECONDS < 10)); then
        echo "== $name: left out, $TOTAL s are over"
        left_out+=("$name")
        return
    fi
    ((seconds > TOTAL - SECONDS)) && seconds=$((TOTAL - SECONDS))
    echo "== $name: $*" | tee -a "$out/$log.txt"
    timeout -k 5 "$seconds" "$@" 2>&1 | grep -v GDRCopy | tee -a "$out/$log.txt" | tail -n "${LINES_SHOWN:-25}"
    local status=${PIPESTATUS[0]}
    echo "== $name: status $status, $((SECONDS - start)) s" | tee -a "$out/$log.txt"
    [[ $status -eq 0 ]] || failed+=("$name")
}
tests() {
    # Ranks that share one GPU are slow enough by themselves.
    local processes=3 seconds=240
    ((gpus > 1)) || processes=1 seconds=300
    step tests $((seconds + longer)) bash ci/gpu_tests.sh "$out" $processes $seconds
}
benchmarks() {
    local bench="python -m tide_backend.bench" sizes=1M,16M,64M,256M
    # Ranks that share a GPU would measure each other.
    ((gpus > 1)) || { echo "== one GPU: no benchmarks"; return; }
    step all_to_all 30 env TIDE_CUDA_PLAIN_BYTES=0 $bench all_to_all --ranks "$gpus" --vs nccl --sizes 8M,64M,512M \
        --json "$out/all_to_all.json"
    step reduce_scatter 40 $bench reduce_scatter --ranks "$gpus" --vs nccl --sizes $sizes \
        --json "$out/reduce_scatter.json"
    step all_gather 40 $bench all_gather --ranks "$gpus" --vs nccl --sizes $sizes --json "$out/all_gather.json"
    step fsdp2 90 $bench fsdp2 --ranks "$gpus" --vs nccl,nccl-symm,compute --tokens 2048 --json "$out/fsdp2.json"
    step overlap 60 $bench overlap --ranks "$gpus" --vs nccl --sizes 64M --repetitions 5 --json "$out/overlap.json"
}

step build 150 env TIDE_CUDA=1 MAX_JOBS="$(nproc)" python setup.py build_ext --inplace
step check 20 python -m tide_backend.check
step kernels 60 python tests/gpu/kernels_alone.py
log=tests
tests
log=benchmarks
benchmarks
((${#left_out[@]})) && echo "left out: ${left_out[*]}"
if ((${#failed[@]})); then
    echo "failed: ${failed[*]}"
    exit 1
fi
echo "everything that ran passed, in $SECONDS s"
