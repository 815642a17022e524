"""Which attention heads each rank of a sequence-parallel parent computes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from .errors import bad

Range = tuple[int, int]


@dataclass(frozen=True)
class HeadMap:
    """Query and KV heads of every rank of a parent of `width` ranks.

    Query heads are cut into consecutive ranges, one a rank (an empty range is legal: the rank then moves
    rows and computes no head). A rank gets every KV head that one of its query heads reads, so a KV head may
    live on several ranks: its replicas. `q_heads` must be a multiple of `kv_heads`.

    Attributes:
        q_ranges: (first, end) query head of each rank.
    """

    q_heads: int
    kv_heads: int
    q_ranges: tuple[Range, ...]

    def __post_init__(self) -> None:
        where = "head map"
        if self.kv_heads < 1 or self.q_heads < 1 or self.q_heads % self.kv_heads:
            raise bad(
                where,
                "query heads are not a multiple of KV heads",
                got=f"{self.q_heads} query and {self.kv_heads} KV heads",
                expected="q_heads = group size * kv_heads, both at least 1",
            )
        position = 0
        for rank, (first, end) in enumerate(self.q_ranges):
            if first != position or end < first:
                raise bad(
                    where,
                    f"query ranges are not consecutive at rank {rank}",
                    got=(first, end),
                    expected=f"a range that starts at {position}",
                )
            position = end
        if position != self.q_heads:
            raise bad(where, "query ranges do not cover all heads", got=position, expected=self.q_heads)

    @classmethod
    def balanced(cls, q_heads: int, kv_heads: int, width: int) -> HeadMap:
        """Cut at floor(q_heads * p / width); may tear a KV group between two ranks (see `uniform`)."""
        bounds = [q_heads * p // width for p in range(width + 1)]
        return cls(q_heads, kv_heads, tuple(pairwise(bounds)))

    @classmethod
    def grouped(cls, q_heads: int, kv_heads: int, width: int) -> HeadMap:
        """Never tears a KV group: whole groups per rank, or whole ranks per group if groups are fewer."""
        group = q_heads // kv_heads
        if kv_heads >= width:
            bounds = [group * (kv_heads * p // width) for p in range(width + 1)]
            return cls(q_heads, kv_heads, tuple(pairwise(bounds)))
        ranges: list[Range] = []
        for head in range(kv_heads):
            ranks = width * (head + 1) // kv_heads - width * head // kv_heads
            cut = [group * head + group * j // ranks for j in range(ranks + 1)]
            ranges.extend(pairwise(cut))
        return cls(q_heads, kv_heads, tuple(ranges))

    @classmethod
    def choose(cls, q_heads: int, kv_heads: int, width: int) -> HeadMap:
        """`balanced` where a grouped-query kernel may use it directly, else `grouped`.

        A kernel takes local query head i to local KV head i // (hq / hkv). With a torn group that is another
        head than the model means, without any error, so such a cut must be asked for explicitly.
        """
        if kv_heads < 1 or q_heads < 1 or q_heads % kv_heads:
            return cls(q_heads, kv_heads, ())  # raises, naming the counts
        even = cls.balanced(q_heads, kv_heads, width)
        return even if even.uniform else cls.grouped(q_heads, kv_heads, width)

    @property
    def width(self) -> int:
        return len(self.q_ranges)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    @cached_property
    def kv_ranges(self) -> tuple[Range, ...]:
        """(first, end) KV head of each rank; empty where the rank has no query head."""
        return tuple(
            (first // self.group, (end - 1) // self.group + 1) if end > first else (first // self.group,) * 2
            for first, end in self.q_ranges
        )

    def kv_index(self, rank: int) -> list[int]:
        """For each local query head of `rank` the local KV head it reads (to expand K and V by indexing)."""
        first, end = self.q_ranges[rank]
        return [head // self.group - self.kv_ranges[rank][0] for head in range(first, end)]

    @cached_property
    def uniform(self) -> bool:
        """True if on every rank local query head i reads local KV head i // (hq / hkv), as kernels assume."""
        for rank, ((first, end), (kv_first, kv_end)) in enumerate(
            zip(self.q_ranges, self.kv_ranges, strict=True)
        ):
            q, kv = end - first, kv_end - kv_first
            if q and (q % kv or self.kv_index(rank) != [i // (q // kv) for i in range(q)]):
                return False
        return True

    def replicas(self, kv_head: int) -> list[int]:
        """Ranks that hold `kv_head`, ascending: the order in which its gradients are summed."""
        return [rank for rank, (first, end) in enumerate(self.kv_ranges) if first <= kv_head < end]

    @property
    def describe(self) -> str:
        """One line, equal for equal maps: used when ranks compare what they will send."""
        cuts = ",".join(str(first) for first, _ in self.q_ranges)
        return f"{self.q_heads}q/{self.kv_heads}kv cut at {cuts}"
