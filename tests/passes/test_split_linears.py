"""split_linears: every way in which models fuse projections, by addresses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from graphsrt import ops
from graphsrt.passes.normalize import normalize
from graphsrt.passes.shard_tensor_parallel import shard_tensor_parallel
from graphsrt.passes.split_linears import split_linears
from graphsrt.program import Program, aten
from graphsrt.recipes import Take
from graphsrt.testing import check, trace


def fused(block: Any, rows: int, *, bias: bool = True, tp: int = 1, width: int = 5, out: int = 12) -> Program:
    weights = {"w": (rows, width), "o": (6, out)} | ({"b": (rows,)} if bias else {})

    def run(x: Any, w: Any, o: Any) -> Any:
        return F.linear(block(F.linear(x, w)), o)

    def run_with_bias(x: Any, w: Any, o: Any, b: Any) -> Any:
        return F.linear(block(F.linear(x, w, b)), o)

    function = run_with_bias if bias else run
    return trace(function, inputs={"x": ("T", width)}, weights=weights, tp=tp, passes=[normalize])


def attend(q: Any, k: Any, v: Any) -> Any:
    return ops.attention(q, k, v, layer_id=0, scale=0.5).reshape(-1, q.shape[1] * q.shape[2])


def segments(y: Any) -> Any:
    """Phi-3: q, then k, then v; 4 heads over 2."""
    return attend(y[:, :12].view(-1, 4, 3), y[:, 12:18].view(-1, 2, 3), y[:, 18:24].view(-1, 2, 3))


def by_head(y: Any) -> Any:
    """GPT-NeoX: q, k and v of each of 4 heads."""
    return attend(*y.view(-1, 4, 9).chunk(3, -1))


def selected(y: Any) -> Any:
    """BLOOM: the same with a dimension for the three."""
    y = y.view(-1, 4, 3, 3)
    return attend(y[:, :, 0], y[:, :, 1], y[:, :, 2])


def one_key_head(y: Any) -> Any:
    """GPT-BigCode: 4 query heads, one key and value."""
    return attend(y[:, :12].view(-1, 4, 3), *y[:, 12:18].unsqueeze(1).chunk(2, -1))


def by_group(y: Any) -> Any:
    """Falcon: in each of 2 groups two query heads, a key and a value."""
    y = y.view(-1, 2, 4, 3)
    return attend(y[:, :, :2].reshape(-1, 4, 3), y[:, :, 2], y[:, :, 3])


LAYOUTS = {segments: 24, by_head: 36, selected: 36, one_key_head: 18, by_group: 24}


@pytest.mark.parametrize("block", LAYOUTS, ids=lambda block: block.__name__)
@pytest.mark.parametrize("bias", [False, True])
def test_every_layout(block: Any, bias: bool) -> None:
    """Three linears, whose rows together are the fused weight's, and the same numbers; nothing is left to do."""
    rows = LAYOUTS[block]
    done = check(split_linears, fused(block, rows, bias=bias), fires=1)
    assert len(done.program.calls(aten.linear.default)) == 4 and not done.near_misses
    taken = [w.recipe for w in done.program.weights.values() if isinstance(w.recipe, Take)]
    assert len(taken) == (6 if bias else 3)
    spans = [tuple(map(int, text.split(":"))) for recipe in taken for text in recipe.addresses]
    assert sum(end - start for start, end in spans) == rows * (2 if bias else 1)
    check(split_linears, done.program, fires=0)


@pytest.mark.parametrize("block", LAYOUTS, ids=lambda block: block.__name__)
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_every_layout_divides(block: Any, tp: int) -> None:
    """One sum over ranks, no gather, and numbers, at ranks that divide the heads and that do not."""
    program = check(split_linears, fused(block, LAYOUTS[block], tp=tp)).program
    done = check(shard_tensor_parallel, program)
    assert done.program.count("graphsrt::all_reduce") == 1 and done.program.count("graphsrt::all_gather") == 0
    assert not done.near_misses


def test_text() -> None:
    done = check(split_linears, fused(by_head, 36, bias=False), fires=1)
    assert "aten.linear(x, w)" in done.before and "aten.linear(x, w)" not in done.after
    recipe = next(w.recipe for name, w in done.program.weights.items() if "from_3" in name)
    assert isinstance(recipe, Take) and recipe.addresses == ("3:6", "12:15", "21:24", "30:33")


def test_parts_that_are_joined_again_are_one() -> None:
    """The halves of a rotation, and the rotated and the other channels of a head."""

    def half_rotated(y: Any) -> Any:
        y = y.view(-1, 4, 3)
        return torch.cat([y[..., :2].tanh(), y[..., 2:]], -1).view(-1, 12)

    check(split_linears, fused(half_rotated, 12), fires=0)


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (lambda y: y[:, :12] * y[:, 12:24], "the parts read 24 of 30 channels"),
        (lambda y: y[:, :12] * y[:, 3:15], "two parts read the same channels"),
    ],
)
def test_left_alone(block: Any, reason: str) -> None:
    check(split_linears, fused(block, 30), fires=0, near_miss=reason)


def test_used_whole() -> None:
    check(split_linears, fused(lambda y: y.sum(-1, keepdim=True) + y[:, :12] * y[:, 12:24], 24), fires=0)
