"""tide: a ``torch.distributed`` backend with zero-copy collectives for sharded training.

``import tide_backend`` registers the backend (torch 2.14 and newer find it without the import)::

    import torch.distributed as dist
    import tide_backend

    dist.init_process_group(backend="tide")

Importing starts no process group, opens no CUDA context and loads no NCCL.
"""

from __future__ import annotations

from .errors import CollectiveTimeoutError, DriverError, PeerError, TideError, UsageError
from .registration import load_extension, register

_C = load_extension()

Options = _C.Options
ParameterLayout = _C.ParameterLayout
apply_layout = _C.apply_layout

from .report import report  # noqa: E402  (needs _C)

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
