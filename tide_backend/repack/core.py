"""The compiled solver, imported in one place."""

from __future__ import annotations

from types import ModuleType


def load() -> ModuleType:
    """The extension's ``repack`` submodule; ``ImportError`` with the way out when it is not built."""
    try:
        from tide_backend._C import repack
    except ImportError as error:
        raise ImportError(
            f"the compiled part of tide_backend is missing or does not load ({error}); build it with "
            "`pip install --no-build-isolation -e .`"
        ) from error
    return repack
