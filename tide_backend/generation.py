"""Keeps the keys of a process group apart from those of an earlier group of the same name in the same store.

torchrun keeps one store over its restarts, and a program may destroy its default group and make it again. Both give
the new group the old one's keys: ranks would meet addresses of processes that are gone.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from datetime import timedelta

import torch.distributed as dist

from .errors import CollectiveTimeoutError

SHORTEST_PAUSE_S = 0.0005
LONGEST_PAUSE_S = 0.02


def agree(store: dist.Store, rank: int, size: int, timeout: timedelta, group: str) -> str:
    """A word that exactly the `size` ranks calling now know, and that was never used before.

    Every rank writes a word of its own, rank 0 lists those that it sees, and a rank accepts a list only if its word
    is in it. What an earlier group left in the store is overwritten, or is not accepted by somebody.

    Args:
        store: the group's own, the same for all its ranks.
        timeout: how long ranks wait for each other.
        group: its name, for the message.

    Raises:
        CollectiveTimeoutError: a rank did not come in time.
    """
    own = secrets.token_hex(8)
    if size == 1:
        return own
    end = time.monotonic() + timeout.total_seconds()
    pause = SHORTEST_PAUSE_S
    side = _First(store, size, own) if rank == 0 else _Other(store, rank, size, own)
    while (word := side.step()) is None:
        if time.monotonic() > end:
            raise CollectiveTimeoutError(
                f'tide[rank {rank}/{size}, group "{group}"]: waited {timeout.total_seconds():g} s for {side.missing()} '
                "to make the group; expected every rank of the group to make it; look at what that rank does"
            )
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST_PAUSE_S)
    return word


class _First:
    """Rank 0: lists the words until every other rank has accepted one list."""

    def __init__(self, store: dist.Store, size: int, own: str) -> None:
        self.store = store
        self.words = [own] + [""] * (size - 1)
        self.listed = ""

    def step(self) -> str | None:
        """One look at the store; the word once it is agreed."""
        for rank in range(1, len(self.words)):
            self.words[rank] = _read(self.store, f"here/{rank}")
        if not all(self.words):
            return None
        listed = " ".join(self.words)
        word = _digest(listed)
        if listed != self.listed:
            self.store.set("list", listed)
            self.listed = listed
        if not self.store.check([f"{word}/accepted/{rank}" for rank in range(1, len(self.words))]):
            return None
        self.store.set(f"{word}/agreed", "1")
        return word

    def missing(self) -> str:
        if not self.listed:  # words of an earlier group count as present here
            return ", ".join(f"rank {r}" for r, word in enumerate(self.words) if not word)
        word = _digest(self.listed)
        ranks = range(1, len(self.words))
        return ", ".join(f"rank {r}" for r in ranks if not self.store.check([f"{word}/accepted/{r}"]))


class _Other:
    """Any other rank: accepts a list that has its word, and waits until all have accepted the same."""

    def __init__(self, store: dist.Store, rank: int, size: int, own: str) -> None:
        self.store, self.rank, self.size, self.own = store, rank, size, own
        self.accepted = ""
        store.set(f"here/{rank}", own)

    def step(self) -> str | None:
        """One look at the store; the word once it is agreed."""
        listed = _read(self.store, "list")
        words = listed.split()
        if len(words) != self.size or words[self.rank] != self.own:
            return None
        word = _digest(listed)
        if word != self.accepted:
            self.store.set(f"{word}/accepted/{self.rank}", "1")
            self.accepted = word
        return word if self.store.check([f"{word}/agreed"]) else None

    def missing(self) -> str:
        return "another rank" if self.accepted else "rank 0, or one that it waits for,"


def _read(store: dist.Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
