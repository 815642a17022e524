"""The collectives under the names that this torch prefers: 2.14 renamed them, and warns of the old names."""

from __future__ import annotations

import torch.distributed as dist

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
