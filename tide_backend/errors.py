"""What tide raises. Every message names the rank, the group and the call, what was got and expected, and what to do."""

from __future__ import annotations


class TideError(RuntimeError):
    """Base of all errors of tide."""


class UsageError(TideError, ValueError):
    """The call cannot work as made; every rank hears of it and the group stays usable."""


class PeerError(TideError):
    """Another rank is gone, or gave up earlier; the group cannot be used any more."""


class CollectiveTimeoutError(TideError, TimeoutError):
    """The deadline passed; names the ranks waited for and what each did last."""


class DriverError(TideError):
    """The operating system or a driver refused; names the call and the code."""
