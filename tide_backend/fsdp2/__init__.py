"""The FSDP2 seam: unmodified ``fully_shard`` models get tide's collectives without FSDP2's layout copies.

This package is the only part of tide that touches FSDP2's internals. It replaces four names, all of them
looked up by FSDP2 at call time:

``_fsdp_param_group.foreach_all_gather``
    casts and places the local shards straight into a slot in parameter-contiguous layout, then gathers there
``_fsdp_param_group.foreach_all_gather_copy_out``
    re-points the parameters' storages into that slot
``_fsdp_collectives.foreach_reduce_scatter_copy_in``
    hands over the list of gradients instead of packing it
``FSDPParamGroup.lazy_init``
    gives the group a ``DefaultReduceScatter`` subclass that reduces from that list

What the seam does not serve takes PyTorch's own function, with the reason in ``tide_backend.report()`` and
one warning per kind of reason. Groups of other backends pass through untouched.
"""

from __future__ import annotations

from .install import install, problems, state, uninstall

__all__ = ["install", "problems", "state", "uninstall"]
