"""What the plans of small calls look like. After a wanted change, EXPECTTEST_ACCEPT=1 rewrites them."""

from __future__ import annotations

from expecttest import TestCase

from tide_backend import _C

# Chunks of 64 bytes (16 float32), so that a few elements make several.
SMALL = {"budget": 1, "smallest_chunk": 64}
SUM = {"in_type": "float32", "out_type": "float32"}


def show(op: str, rank: int, world: int, numel: int, **more) -> str:
    return _C.plan(op, rank, world, 4, numel, **{**SMALL, **more}).print()


class PlansOfAllGather(TestCase):
    def test_zero_copy(self) -> None:
        self.assertExpectedInline(
            show("all_gather", 0, 2, 10, in_arena=True),
            """\
all_gather zero_copy rank 0/2 window 0B
  copy in0+0 -> win0+0 40B
  signal ready -> 1 #1
  wait ready <- 1 #1
  copy win0+0 -> win1+0 40B
  signal data -> 1 #1
  wait data <- 1 #1
""",
        )

    def test_zero_copy_three_ranks_write_in_rotation(self) -> None:
        self.assertExpectedInline(
            show("all_gather", 1, 3, 10, in_arena=True),
            """\
all_gather zero_copy rank 1/3 window 0B
  copy in0+0 -> win1+40 40B
  signal ready -> 2 #1
  signal ready -> 0 #1
  wait ready <- 2 #1
  wait ready <- 0 #1
  copy win1+40 -> win2+40 40B
  signal data -> 2 #1
  copy win1+40 -> win0+40 40B
  signal data -> 0 #1
  wait data <- 2 #1
  wait data <- 0 #1
""",
        )

    def test_zero_copy_with_a_layout_copies_each_parameter(self) -> None:
        layout = _C.ParameterLayout(2, [4, 3, 2], align=8)
        self.assertExpectedInline(
            show("all_gather", 1, 2, 9, layout=layout, in_arena=True),
            """\
all_gather zero_copy rank 1/2 window 0B
  copy in0+0 -> win1+16 16B
  copy in0+16 -> win1+44 12B
  copy in0+28 -> win1+72 8B
  signal ready -> 0 #1
  wait ready <- 0 #1
  copy win1+16 -> win0+16 16B
  copy win1+44 -> win0+44 12B
  copy win1+72 -> win0+72 8B
  signal data -> 0 #1
  wait data <- 0 #1
""",
        )

    def test_zero_copy_of_a_placed_shard_reads_no_input(self) -> None:
        layout = _C.ParameterLayout(3, [4, 3])
        text = show("all_gather", 2, 3, 7, layout=layout, in_arena=True, placed=True)
        self.assertExpectedInline(
            text,
            """\
all_gather zero_copy rank 2/3 window 0B
  signal ready -> 0 #1
  signal ready -> 1 #1
  wait ready <- 0 #1
  wait ready <- 1 #1
  copy win2+32 -> win0+32 16B
  copy win2+72 -> win0+72 12B
  signal data -> 0 #1
  copy win2+32 -> win1+32 16B
  copy win2+72 -> win1+72 12B
  signal data -> 1 #1
  wait data <- 0 #1
  wait data <- 1 #1
""",
        )

    def test_multicast_sends_a_piece_once(self) -> None:
        layout = _C.ParameterLayout(3, [4, 3])
        more = {"layout": layout, "in_arena": True, "multicast": True}
        self.assertExpectedInline(
            show("all_gather", 1, 3, 7, **more),
            """\
all_gather zero_copy rank 1/3 window 0B
  copy in0+0 -> win1+16 16B
  copy in0+16 -> win1+60 12B
  signal ready -> 2 #1
  signal ready -> 0 #1
  wait ready <- 2 #1
  wait ready <- 0 #1
  copy in0+0 -> all+16 16B
  copy in0+16 -> all+60 12B
  signal data -> 2 #1
  signal data -> 0 #1
  wait data <- 2 #1
  wait data <- 0 #1
""",
        )
        self.assertExpectedInline(
            show("all_gather", 2, 3, 7, placed=True, **more),
            """\
all_gather zero_copy rank 2/3 window 0B
  signal ready -> 0 #1
  signal ready -> 1 #1
  wait ready <- 0 #1
  wait ready <- 1 #1
  copy win2+32 -> all+32 16B
  copy win2+72 -> all+72 12B
  signal data -> 0 #1
  signal data -> 1 #1
  wait data <- 0 #1
  wait data <- 1 #1
""",
        )

    def test_two_ranks_have_no_use_for_multicast(self) -> None:
        plain = show("all_gather", 0, 2, 10, in_arena=True)
        self.assertEqual(show("all_gather", 0, 2, 10, in_arena=True, multicast=True), plain)

    def test_staged(self) -> None:
        self.assertExpectedInline(
            show("all_gather", 0, 2, 40),
            """\
all_gather staged rank 0/2 window 128B
  signal ready -> 1 #1
  wait ready <- 1 #1
  copy in0+0 -> win0+0 64B
  signal data -> 1 #1
  copy in0+0 -> out+0 64B
  copy in0+64 -> win0+64 64B
  signal data -> 1 #2
  copy in0+64 -> out+64 64B
  wait data <- 1 #1
  copy win1+0 -> out+160 64B
  signal credit -> 1 #1
  wait credit <- 1 #1
  copy in0+128 -> win0+0 32B
  signal data -> 1 #3
  copy in0+128 -> out+128 32B
  wait data <- 1 #2
  copy win1+64 -> out+224 64B
  signal credit -> 1 #2
  wait data <- 1 #3
  copy win1+0 -> out+288 32B
  signal credit -> 1 #3
  wait credit <- 1 #3
""",
        )

    def test_staged_three_ranks_one_chunk(self) -> None:
        self.assertExpectedInline(
            show("all_gather", 1, 3, 4),
            """\
all_gather staged rank 1/3 window 64B
  signal ready -> 2 #1
  signal ready -> 0 #1
  wait ready <- 2 #1
  wait ready <- 0 #1
  copy in0+0 -> win1+0 16B
  signal data -> 2 #1
  signal data -> 0 #1
  copy in0+0 -> out+16 16B
  wait data <- 2 #1
  copy win2+0 -> out+32 16B
  signal credit -> 2 #1
  wait data <- 0 #1
  copy win0+0 -> out+0 16B
  signal credit -> 0 #1
  wait credit <- 2 #1
  wait credit <- 0 #1
""",
        )

    def test_staged_with_a_layout_cuts_parameters_at_chunks(self) -> None:
        layout = _C.ParameterLayout(2, [12, 8])
        self.assertExpectedInline(
            show("all_gather", 0, 2, 20, layout=layout),
            """\
all_gather staged rank 0/2 window 128B
  signal ready -> 1 #1
  wait ready <- 1 #1
  copy in0+0 -> win0+0 48B
  copy in0+48 -> win0+48 16B
  signal data -> 1 #1
  copy in0+0 -> out+0 48B
  copy in0+48 -> out+96 16B
  copy in0+64 -> win0+64 16B
  signal data -> 1 #2
  copy in0+64 -> out+112 16B
  wait data <- 1 #1
  copy win1+0 -> out+48 48B
  copy win1+48 -> out+128 16B
  signal credit -> 1 #1
  wait data <- 1 #2
  copy win1+64 -> out+144 16B
  signal credit -> 1 #2
  wait credit <- 1 #2
""",
        )

    def test_one_rank_copies(self) -> None:
        layout = _C.ParameterLayout(1, [4, 3], align=8)
        self.assertExpectedInline(
            show("all_gather", 0, 1, 7, layout=layout),
            """\
all_gather local rank 0/1 window 0B
  copy in0+0 -> out+0 16B
  copy in0+16 -> out+32 12B
""",
        )


class PlansOfReduceScatter(TestCase):
    def test_packed(self) -> None:
        self.assertExpectedInline(
            show("reduce_scatter", 0, 2, 20, **SUM),
            """\
reduce_scatter staged rank 0/2 window 128B
  signal ready -> 1 #1
  wait ready <- 1 #1
  copy in0+80 -> win1+0 64B
  signal data -> 1 #1
  copy in0+144 -> win1+64 16B
  signal data -> 1 #2
  wait data <- 1 #1
  accumulate in0+0, staged+0 stride 128 -> out+0 64B
  wait data <- 1 #2
  accumulate in0+64, staged+64 stride 128 -> out+64 16B
""",
        )

    def test_credits_return_only_for_chunks_to_come(self) -> None:
        self.assertExpectedInline(
            show("reduce_scatter", 0, 2, 40, **SUM),
            """\
reduce_scatter staged rank 0/2 window 128B
  signal ready -> 1 #1
  wait ready <- 1 #1
  copy in0+160 -> win1+0 64B
  signal data -> 1 #1
  copy in0+224 -> win1+64 64B
  signal data -> 1 #2
  wait data <- 1 #1
  accumulate in0+0, staged+0 stride 128 -> out+0 64B
  signal credit -> 1 #1
  wait credit <- 1 #1
  copy in0+288 -> win1+0 32B
  signal data -> 1 #3
  wait data <- 1 #2
  accumulate in0+64, staged+64 stride 128 -> out+64 64B
  wait data <- 1 #3
  accumulate in0+128, staged+0 stride 128 -> out+128 32B
""",
        )

    def test_separate_uneven_inputs_send_no_padding(self) -> None:
        """Parameter 0 has 5 of 8 elements and parameter 1 has 4 of 6: rank 1's shard ends in zeros."""
        layout = _C.ParameterLayout(2, [4, 3], [5, 4])
        more = {"layout": layout, "separate_inputs": True, **SUM}
        self.assertExpectedInline(
            show("reduce_scatter", 0, 2, 7, **more),
            """\
reduce_scatter staged rank 0/2 window 128B
  signal ready -> 1 #1
  wait ready <- 1 #1
  copy in0+16 -> win1+0 4B
  copy in1+12 -> win1+16 4B
  signal data -> 1 #1
  wait data <- 1 #1
  accumulate in0+0, staged+0 stride 128 -> out+0 16B
  accumulate in1+0, staged+16 stride 128 -> out+16 12B
""",
        )
        self.assertExpectedInline(
            show("reduce_scatter", 1, 2, 7, **more),
            """\
reduce_scatter staged rank 1/2 window 128B
  signal ready -> 0 #1
  wait ready <- 0 #1
  copy in0+0 -> win0+0 16B
  copy in1+0 -> win0+16 12B
  signal data -> 0 #1
  wait data <- 0 #1
  accumulate in0+16, staged+0 stride 128 -> out+0 4B
  fill out+4 12B
  accumulate in1+12, staged+16 stride 128 -> out+16 4B
  fill out+20 8B
""",
        )

    def test_bf16_into_float32_at_three_ranks(self) -> None:
        text = _C.plan("reduce_scatter", 1, 3, 2, 6, in_type="bfloat16", out_type="float32", **SMALL).print()
        self.assertExpectedInline(
            text,
            """\
reduce_scatter staged rank 1/3 window 256B
  signal ready -> 2 #1
  signal ready -> 0 #1
  wait ready <- 2 #1
  wait ready <- 0 #1
  copy in0+24 -> win2+128 12B
  signal data -> 2 #1
  copy in0+0 -> win0+0 12B
  signal data -> 0 #1
  wait data <- 2 #1
  wait data <- 0 #1
  accumulate in0+12, staged+0 stride 128 -> out+0 12B
""",
        )


class PlansOfAllToAll(TestCase):
    def test_uneven_with_zero_rows(self) -> None:
        """Rank 0 of 3 sends nothing to rank 1 and gets 20 elements, two chunks, from it."""
        text = show("all_to_all", 0, 3, 6, in_splits=[2, 0, 4], out_splits=[2, 20, 0])
        self.assertExpectedInline(
            text,
            """\
all_to_all staged rank 0/3 window 256B
  signal ready -> 1 #1
  signal ready -> 2 #1
  wait ready <- 1 #1
  wait ready <- 2 #1
  copy in0+8 -> win2+0 16B
  signal data -> 2 #1
  copy in0+0 -> out+0 8B
  wait data <- 1 #1
  copy win0+0 -> out+8 64B
  wait data <- 1 #2
  copy win0+64 -> out+72 16B
""",
        )

    def test_zero_copy_writes_where_the_peers_splits_say(self) -> None:
        """Rank 1 of 3: nothing from rank 2, nothing to rank 0, where others' parts lie before its own."""
        more = {"in_splits": [0, 5, 4], "out_splits": [3, 5, 0], "peer_offsets": [7, 3, 6]}
        self.assertExpectedInline(
            show("all_to_all", 1, 3, 9, in_arena=True, **more),
            """\
all_to_all zero_copy rank 1/3 window 0B
  signal ready -> 2 #1
  signal ready -> 0 #1
  wait ready <- 2 #1
  wait ready <- 0 #1
  copy in0+20 -> win2+24 16B
  signal data -> 2 #1
  copy in0+0 -> out+12 20B
  wait data <- 0 #1
""",
        )

    def test_strided_ends_are_cut_at_chunks(self) -> None:
        """Rows of 24 bytes at 48 in, of 40 at 56 out; chunks of 64 bytes, which end within rows of both."""
        more = {"in_splits": [0, 30], "out_splits": [0, 20]}
        forms = {"in_form": _C.Strided(360, 5, 24, 48), "out_form": _C.Strided(56, 1, 40, 40)}
        self.assertExpectedInline(
            show("all_to_all", 0, 2, 30, **more, **forms),
            """\
all_to_all staged rank 0/2 window 128B
  signal ready -> 1 #1
  wait ready <- 1 #1
  copy in0+0 -> win1+0 24B x 2 pitch 48 -> 24
  copy in0+96 -> win1+48 16B
  signal data -> 1 #1
  copy in0+112 -> win1+64 8B
  copy in0+144 -> win1+72 24B x 2 pitch 48 -> 24
  signal data -> 1 #2
  wait data <- 1 #1
  copy win0+0 -> out+0 40B
  copy win0+40 -> out+56 24B
  wait data <- 1 #2
  copy win0+64 -> out+80 16B
""",
        )

    def test_zero_copy_into_a_peers_gaps(self) -> None:
        """Two elements of two rows each for rank 1, whose output has rows of the same length at another pitch."""
        out = _C.Strided(64, 1, 24, 24)
        more = {"in_splits": [12, 24], "out_splits": [12, 12], "peer_offsets": [0, 0]}
        forms = {"in_form": _C.Strided(24, 2, 24, 72), "out_form": out, "peer_forms": [out, _C.Strided(32, 1, 24, 24)]}
        self.assertExpectedInline(
            show("all_to_all", 0, 2, 36, in_arena=True, **more, **forms),
            """\
all_to_all zero_copy rank 0/2 window 0B
  signal ready -> 1 #1
  wait ready <- 1 #1
  copy in0+24 -> win1+0 24B x 2 pitch 72 -> 32
  copy in0+48 -> win1+64 24B x 2 pitch 72 -> 32
  signal data -> 1 #1
  copy in0+0 -> out+0 24B x 2 pitch 72 -> 64
  wait data <- 1 #1
""",
        )

    def test_nothing_received_needs_no_window(self) -> None:
        text = show("all_to_all", 0, 2, 3, in_splits=[0, 3], out_splits=[0, 0])
        self.assertExpectedInline(
            text,
            """\
all_to_all staged rank 0/2 window 0B
  signal ready -> 1 #1
  wait ready <- 1 #1
  copy in0+0 -> win1+0 12B
  signal data -> 1 #1
""",
        )


class PlansThatCannotBe(TestCase):
    def test_unknown_op(self) -> None:
        with self.assertRaisesRegex(RuntimeError, "expected all_gather, reduce_scatter or all_to_all"):
            show("gather", 0, 2, 3)

    def test_all_to_all_into_the_arena_without_places(self) -> None:
        with self.assertRaisesRegex(RuntimeError, "an all_to_all into the arena needs peer_offsets, one per rank"):
            show("all_to_all", 0, 2, 3, in_splits=[0, 3], out_splits=[0, 0], in_arena=True)

    def test_multicast_of_what_peers_do_not_write(self) -> None:
        for op, more in (("all_gather", {}), ("reduce_scatter", SUM)):
            with self.assertRaisesRegex(RuntimeError, "multicast is for an all_gather into the arena"):
                show(op, 0, 3, 3, multicast=True, **more)

    def test_reduction_without_types(self) -> None:
        with self.assertRaisesRegex(RuntimeError, "reduce_scatter needs in_type and out_type"):
            show("reduce_scatter", 0, 2, 3)
