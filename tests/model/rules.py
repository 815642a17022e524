"""The protocol's rules outside the plans, each of which a mutation can break."""

from __future__ import annotations

from dataclasses import dataclass

from model.ops import CHUNK_BITS


@dataclass(frozen=True)
class Rules:
    # Flag words belong to a channel; values carry the call's sequence number and never fall.
    words_per_channel: bool = True
    values_carry_sequence: bool = True
    # A rank's record of exchange s, and the word that says it is there, lie in buffer s % record_buffers.
    record_buffers: int = 2
    record_words: int = 2
    # Records are awaited by equality of the sequence and compared by contract; otherwise any later one does.
    records_by_equality: bool = True
    records_awaited: bool = True
    # Ready flags are counters like the others; by equality, a value may be overwritten before it is seen.
    ready_by_equality: bool = False
    # Peers address the window of this call, published by its owner.
    window_of_this_call: bool = True
    window_of_its_owner: bool = True
    # Multicast writes at this rank's own place in every segment: only where all windows lie there. Elsewhere each peer
    # gets a copy of its own, at its own window, and the flags are set as late as with multicast.
    multicast_at_equal_offsets: bool = True

    def word(self, flag: str, channel: str, source: int, at: int) -> tuple:
        """The word that rank `source` sets at rank `at`."""
        return (flag, channel if self.words_per_channel else "any", f"{source}->{at}")

    def record_word(self, channel: str, source: int, sequence: int) -> tuple:
        return ("record word", channel, source, sequence % self.record_words)

    def fleeting(self, word: tuple) -> bool:
        """Whether a waiter must see the very value it waits for."""
        return word[0] == "record word" or (word[0] == "ready" and self.ready_by_equality)

    def value(self, sequence: int, chunk: int) -> int:
        return (sequence << CHUNK_BITS) + chunk if self.values_carry_sequence else chunk
