"""Layouts: which rank holds which address, in what order, and who owns it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphsrt.placement import Heads, Layout, Partial, R, Run, Shard, global_shape
from tests.support.tiny import HEADS


def owners(layout: Layout) -> list[int]:
    return sorted(a for rank in layout.runs for r in rank if r.owned for a in range(r.start, r.start + r.length))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 4))
def test_blocks(units: int, ranks: int, unit: int) -> None:
    layout = Layout.blocks(units * unit, ranks, unit)
    assert owners(layout) == list(range(units * unit))
    assert layout.local_size == math.ceil(units / ranks) * unit
    assert layout.granularity % unit == 0
    assert Layout.parse(str(layout)) == layout
    assert layout.scale(3).divide(3) == layout
    for rank in range(ranks):
        assert len(layout.addresses(rank)) == layout.local_size


def test_text() -> None:
    assert str(Layout.blocks(8, 4)) == "8/4"
    assert str(Layout.blocks(67, 2)) == "67/2{0:34|34:67,~66:67}"
    assert Layout.blocks(67, 2).label() == "68(67)/2"
    assert Heads.choose(8, 2, 8).kv.label() == "2×4/8"
    assert [str(p) for p in (R, Shard(1, Layout.blocks(4, 2)), Partial(), Partial("max"))] == [
        "R", "S(1)", "P(sum)", "P(max)",
    ]  # fmt: skip
    assert global_shape([3, 4], Shard(1, Layout.blocks(8, 2))) == [3, 8]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="owned twice"):
        Layout.of([[Run(0, 2)], [Run(1, 2)]])
    with pytest.raises(ValueError, match="by no rank"):
        Layout.of([[Run(0, 2)], [Run(3, 2)]])
    with pytest.raises(ValueError, match="same number"):
        Layout.of([[Run(0, 2)], [Run(2, 1)]])
    with pytest.raises(ValueError, match="whole units"):
        Layout.blocks(7, 2, 2)
    with pytest.raises(ValueError, match="whole units of 4"):
        Layout.blocks(6, 2).divide(4)
    with pytest.raises(ValueError, match="multiple"):
        Heads.choose(9, 2, 2)


def test_segments() -> None:
    """A fused projection: each rank holds its part of q, then of k; slices of it come out equal on all ranks."""
    fused = Layout.concat([Layout.blocks(8, 2), Layout.blocks(4, 2)])
    assert str(fused) == "12/2{0:4,8:10|4:8,10:12}"
    assert fused.window(0, 8) == (0, 4, Layout.blocks(8, 2))
    assert fused.window(8, 12) == (4, 6, Layout.blocks(4, 2))
    with pytest.raises(ValueError, match=r"contiguous|different local positions"):
        fused.window(2, 10)


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [*HEADS, (52, 4, 3), (40, 8, 6), (1, 1, 4), (7, 7, 2)])
def test_heads(heads: int, kv_heads: int, ranks: int) -> None:
    chosen = Heads.choose(heads, kv_heads, ranks)
    assert owners(chosen.query) == list(range(heads)) and owners(chosen.kv) == list(range(kv_heads))
    group = chosen.query.local_size // chosen.kv.local_size
    assert chosen.query.local_size == group * chosen.kv.local_size
    owned = [[r.owned for r in rank for _ in range(r.length)] for rank in chosen.query.runs]
    for rank in range(ranks):
        query, kv = chosen.query.addresses(rank), chosen.kv.addresses(rank)
        for local, head in enumerate(query):
            if owned[rank][local]:  # a pad's result is multiplied by zeros, so it may attend to anything
                assert kv[local // group] == head // (heads // kv_heads), (rank, local)


def test_heads_are_few() -> None:
    assert (Heads.choose(8, 2, 8).query.local_size, Heads.choose(8, 2, 8).kv.local_size) == (1, 1)
    assert (Heads.choose(28, 4, 8).query.local_size, Heads.choose(28, 4, 8).kv.local_size) == (4, 1)
    assert (Heads.choose(9, 3, 2).query.local_size, Heads.choose(9, 3, 2).kv.local_size) == (6, 2)
