#!/usr/bin/env bash
# Build, benchmark and tests on a machine with GPUs, in the Python that is active: `bash ci/gpu.sh [OUT]`. Every step
# has a deadline, some 11 minutes in all; results go to OUT (default: out/). Ranks share GPUs where there are fewer of
# them than ranks; NCCL allows that from 2.30.3 on, so torch's own is replaced by TIDE_NCCL_LIBRARY for those tests.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-out}
mkdir -p "$out"
# Multicast stays off: on shared servers it can put GPUs out of service.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
failed=()
gpus=$(python -c "import torch; print(torch.cuda.device_count())")
[[ $gpus -gt 0 ]] || { echo "no GPU"; exit 2; }
step() {
    local name=$1 seconds=$2 start=$SECONDS
    shift 2
    echo "== $name: $*"
    timeout -k 5 "$seconds" "$@" 2>&1 | grep -v GDRCopy | tee "$out/$name.txt" | tail -n "${LINES_SHOWN:-25}"
    local status=${PIPESTATUS[0]}
    echo "== $name: status $status, $((SECONDS - start)) s"
    [[ $status -eq 0 ]] || failed+=("$name")
}

step build 150 env TIDE_CUDA=1 MAX_JOBS="$(nproc)" python setup.py build_ext --inplace
step check 40 python -m tide_backend.check
bench="python -m tide_backend.bench"
step all_gather 50 $bench all_gather --ranks "$gpus" --vs nccl --sizes 1M,16M,64M,256M,1G --json "$out/all_gather.json"
step reduce_scatter 50 $bench reduce_scatter --ranks "$gpus" --vs nccl --sizes 1M,16M,64M,256M,1G \
    --json "$out/reduce_scatter.json"
step all_to_all 30 env TIDE_CUDA_PLAIN_BYTES=0 $bench all_to_all --ranks "$gpus" --vs nccl --sizes 8M,64M,512M \
    --json "$out/all_to_all.json"
step fsdp2 90 $bench fsdp2 --ranks "$gpus" --vs nccl,nccl-symm,compute --tokens 2048 --json "$out/fsdp2.json"
if [[ -n ${TIDE_NCCL_LIBRARY:-} ]]; then
    export LD_PRELOAD=$TIDE_NCCL_LIBRARY NCCL_MULTI_RANK_GPU_ENABLE=1
fi
step tests 260 python -m pytest -m gpu tests/gpu -x --durations 8 -p no:cacheprovider
if ((${#failed[@]})); then
    echo "failed: ${failed[*]}"
    exit 1
fi
echo "everything passed in $SECONDS s"
