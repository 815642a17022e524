#!/usr/bin/env bash
# From a bare machine (Python >= 3.10 with pip, a C++ compiler) to the main job: the same FSDP2 training under
# tide and under the stock backend, compared. Arguments go to examples/ab_fsdp2.py; common.sh says what may be set.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

prepare
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    say "training on GPUs under tide and nccl"
else
    say "no GPU found: training on the CPU under tide and gloo"
fi
exec "$VENV/bin/python" "$root/examples/ab_fsdp2.py" "$@"
