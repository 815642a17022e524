"""Right values while the device is busy: a kernel once gave wrong ones in a few places beside GEMMs only.

GPU_STRESS_SECONDS (default 10) sets how long each stress test runs: for ten minutes of two ranks,
`GPU_STRESS_SECONDS=600 python -m pytest -m gpu tests/gpu/test_gpu_load.py -k "stress and 2"`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import ranks
import tasks_load as tasks
from test_gpu_collectives import needs_kernels
from test_gpu_fsdp2 import OWN

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("world", [2, 8])
def test_stress(run: Callable, stress_seconds: float, world: int) -> None:
    needs_kernels()
    answers = run(world, tasks.stress, stress_seconds, seconds=stress_seconds + 50)
    print(f"{world} ranks: {answers[0]['calls']} calls of each kind, arena {answers[0]['arena']}")
    assert all(a["gathered"] == 0 and a["reduced"] == 0 for a in answers), answers
    assert answers[0]["calls"] >= 40
    assert all(a["bursts"] >= 20 for a in answers), answers


def test_gradients_beside_gemms_are_nccls_bit_for_bit(run: Callable) -> None:
    """Two blocks of Llama 3.1 70B, 2,048 tokens, six steps of two microbatches; up to some 45 GiB a rank."""
    needs_kernels()
    ranks.close_pools()  # what other ranks on this GPU hold is needed here
    steps = 6
    for answer in run(2, tasks.gradients_beside_gemms, "llama70b", 2, steps, 2, 2048, seconds=90):
        print(f"peak {answer['peak'] / 2**30:.1f} GiB, {answer['bursts']} bursts beside")
        assert answer["control"] == [[]] * steps, "nccl's own gradients differ from run to run: this shows nothing"
        assert answer["zero"] == [] and answer["bursts"] >= 20
        assert answer["tide"] == [[]] * steps
        assert answer["losses"][0] == answer["losses"][1]
        assert answer["fallbacks"] == [] and answer["paths"] == OWN
