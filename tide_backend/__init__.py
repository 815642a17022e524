"""tide: a ``torch.distributed`` backend with zero-copy collectives for sharded training.

``import tide_backend`` registers the backend (torch 2.14 and newer find it without the import)::

    import torch.distributed as dist
    import tide_backend

    dist.init_process_group(backend="tide")

Importing starts no process group, opens no CUDA context and loads no NCCL.
"""

from __future__ import annotations

import sys

from .errors import CollectiveTimeoutError, DriverError, PeerError, TideError, UsageError
from .registration import load_extension, register


def _is_check() -> bool:
    """Whether this is ``python -m tide_backend.check``, which has to say what is wrong with a build."""
    arguments = sys.orig_argv
    return "-m" in arguments[:-1] and arguments[arguments.index("-m") + 1] == "tide_backend.check"


try:
    _C = load_extension()
except ImportError:
    if not _is_check():
        raise
else:
    Options = _C.Options
    ParameterLayout = _C.ParameterLayout
    apply_layout = _C.apply_layout

    from .report import report

    register()

__all__ = [
    "CollectiveTimeoutError",
    "DriverError",
    "Options",
    "ParameterLayout",
    "PeerError",
    "TideError",
    "UsageError",
    "apply_layout",
    "register",
    "report",
]
