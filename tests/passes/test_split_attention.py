"""split_attention: halves of the heads of one attention, as differential attention subtracts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from graphsrt import ops
from graphsrt.passes.merge_qkv import merge_qkv
from graphsrt.passes.normalize import normalize
from graphsrt.passes.shard_tensor_parallel import shard_tensor_parallel
from graphsrt.passes.split_attention import split_attention
from graphsrt.passes.split_linears import split_linears
from graphsrt.program import Program, arguments
from graphsrt.testing import check, trace

HEADS, KV_HEADS, D, WIDTH = 12, 6, 4, 10


def differential(x: Any, wq: Any, wk: Any, wv: Any, wo: Any) -> Any:
    """Two attentions over halves of the values, put side by side; half of the heads minus the other half."""
    q, k = F.linear(x, wq).view(-1, HEADS, D), F.linear(x, wk).view(-1, KV_HEADS, D)
    v = F.linear(x, wv).view(-1, KV_HEADS, D).transpose(0, 1)
    sides = []
    for layer_id, half in enumerate(v.chunk(2, 0)):
        values = half.repeat(2, 1, 1).transpose(0, 1)
        sides.append(ops.attention(q, k, values, layer_id=layer_id, scale=0.3))
    one, other = torch.cat(sides, -1).chunk(2, 1)
    return F.linear((one - 0.4 * other).reshape(-1, HEADS * D), wo)


def made(function: Any = differential, tp: int = 1, **extra: Any) -> Program:
    weights = {"wq": (HEADS * D, WIDTH), "wk": (KV_HEADS * D, WIDTH), "wv": (KV_HEADS * D, WIDTH),
               "wo": (7, HEADS * D)}  # fmt: skip
    return trace(function, inputs={"x": ("T", WIDTH)}, weights=weights | extra, tp=tp, passes=[normalize])


def test_text() -> None:
    done = check(split_attention, made(), fires=2, tolerance=0)
    assert "aten.slice.Tensor(cat" in done.before and "aten.slice.Tensor(cat" not in done.after
    for label in ("attention", "attention_1"):
        assert f"{label}: f64[T, 12, 4] = graphsrt.attention(view, view_1," in done.before
        assert f"{label}.part: f64[T, 6, 4] = graphsrt.attention(view.part, view_1.part," in done.after
        assert f"{label}.part_1: f64[T, 6, 4] = graphsrt.attention(view.part_1, view_1.part_1," in done.after
    program = made()
    split_attention(program)
    assert sorted(arguments(node)["layer_id"] for node in program.calls(ops.attention)) == [0, 1, 2, 3]


@pytest.mark.parametrize("tp", [2, 4, 5])
def test_divided(tp: int) -> None:
    """What is subtracted lies on one rank, whatever the number of ranks: nothing is refused, and one sum completes it.
    The numbers of all ranks are compared by ``check``."""
    program = made(tp=tp)
    for step in (split_attention, split_linears):
        step(program)
    done = check(shard_tensor_parallel, program, fires=7, tolerance=1e-13)
    assert done.after.count("graphsrt.all_reduce") == 1 and "all_gather" not in done.after
    shard_tensor_parallel(program)
    merged = check(merge_qkv, program, fires=1, tolerance=1e-13)  # four attentions of three projections, in halves
    assert merged.after.count("aten.linear(x,") == 1


@pytest.mark.parametrize(
    ("end", "sinks", "reason"),
    [(3, False, "heads 0 to 3 are no whole groups of 2"), (6, True, "heads have sinks or slopes of their own")],
)
def test_near_miss(end: int, sinks: bool, reason: str) -> None:
    def function(x: Any, wq: Any, wk: Any, wv: Any, wo: Any, s: Any) -> Any:
        q, k = F.linear(x, wq).view(-1, HEADS, D), F.linear(x, wk).view(-1, KV_HEADS, D)
        v = F.linear(x, wv).view(-1, KV_HEADS, D)
        return ops.attention(q, k, v, layer_id=0, scale=0.3, sinks=s if sinks else None)[:, :end]

    check(split_attention, made(function, s=(HEADS,)), fires=0, near_miss=reason)
