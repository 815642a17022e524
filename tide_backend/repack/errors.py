"""Errors of the repack package: who, what was got, what was expected, what to do."""

from __future__ import annotations

from collections.abc import Sequence


class RepackError(ValueError):
    """A plan, a tensor or a group that does not fit; raised before any communication."""


class AgreementError(RuntimeError):
    """Ranks of a group do not hold the same plan, call differently, or did not answer in time.

    Attributes:
        ranks: ranks of the group that differ, failed or are missing, ascending.
    """

    def __init__(self, text: str, ranks: Sequence[int]):
        super().__init__(text)
        self.ranks = tuple(sorted(ranks))


def message(where: str, what: str, *, got: object = None, expected: object = None, do: str = "") -> str:
    """`tide[where]: what; got ..., expected ...; do`, leaving out what is not given."""
    text = f"tide[{where}]: {what}"
    facts = [f"{name} {value}" for name, value in (("got", got), ("expected", expected)) if value is not None]
    if facts:
        text += "; " + ", ".join(facts)
    return f"{text}; {do}" if do else text


def bad(where: str, what: str, *, got: object = None, expected: object = None, do: str = "") -> RepackError:
    """A `RepackError` with that message, to be raised."""
    return RepackError(message(where, what, got=got, expected=expected, do=do))


def rank_list(ranks: Sequence[int]) -> str:
    """`rank 3` or `ranks 0, 1, 5`."""
    ranks = sorted(ranks)
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
