"""page_attention: attention reads keys from a paged pool, which it is the only one to write."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F

from graphsrt import ops
from graphsrt.errors import CompileError
from graphsrt.passes.page_attention import page_attention
from graphsrt.passes.runner import run
from graphsrt.passes.shard_tensor_parallel import shard_tensor_parallel
from graphsrt.program import Program
from graphsrt.testing import check, trace
from tests.support import captures, hand

BATCH = "req_to_token, req_pool_indices, seq_lens, query_start_loc, out_cache_loc"


def test_text() -> None:
    done = check(page_attention, hand.attention(heads=4, kv_heads=2, tp=1), fires=1)
    operators = "attention(view, view_1, view_2, layer_id=0, scale=0.5)"
    assert f"attention: f64[T, 4, 2] = graphsrt.{operators}" in done.before
    paged = f"radix_attention(view, view_1, view_2, kv_pool, {BATCH}, layer_id=0, scale=0.5)"
    assert f"attention: f64[T, 4, 2] = graphsrt.{paged}" in done.after
    assert '+  kv_pool: f64[1, 2, slots, 2, 2] = input("kv_pool")' in done.diff
    assert '+  seq_lens: i64[B] = input("forward_batch.seq_lens")' in done.diff
    assert done.program.constants["num_kv_heads"] == 2 and done.program.constants["head_size"] == 2


def test_sharded_windows_and_caps() -> None:
    """A rank's pool holds its own KV heads; Gemma-2's window and soft cap go along."""
    done = check(page_attention, captures.before("page_attention", "gemma2", layers=2), fires=2, tokens=(1, 2, 17))
    assert '+  kv_pool: f64[2, 2, slots, 2/2, 16] S(3) = input("kv_pool")' in done.diff
    first, second = (line for line in done.after.splitlines() if "radix_attention(" in line)
    assert "layer_id=0" in first and "sliding_window=5, softcap=3.0" in first
    assert "layer_id=1" in second and "softcap=3.0" in second and "sliding_window" not in second


def test_a_pool_for_each_shape() -> None:
    """Layers 0 and 2 have one shape, layer 1 another; its values are wider than its keys and lie beside them."""

    def block(q: Any, k: Any, v: Any, wide: Any) -> Any:
        first = ops.attention(q, k, v, layer_id=0, scale=0.5)
        second = ops.attention(first, k[:, :1], wide, layer_id=1, scale=0.25, sliding_window=3)
        return ops.attention(second[..., :4], v, k, layer_id=2, scale=0.125)

    shapes: dict[str, Any] = {"q": ("T", 6, 4), "k": ("T", 2, 4), "v": ("T", 2, 4), "wide": ("T", 1, 7)}
    done = check(page_attention, trace(block, inputs=shapes), fires=3)
    assert '+  kv_pool: f64[2, 2, slots, 2, 4] = input("kv_pool")' in done.diff
    assert '+  kv_pool_1: f64[1, 1, slots, 1, 11] = input("kv_pool")' in done.diff
    paged = [line.partition(" = ")[2] for line in done.after.splitlines() if "radix_attention(" in line]
    assert paged[0] == f"graphsrt.radix_attention(q, k, v, kv_pool, {BATCH}, layer_id=0, kv_layer=0, scale=0.5)"
    assert f", wide, kv_pool_1, {BATCH}, layer_id=1, kv_layer=0, scale=0.25, sliding_window=3)" in paged[1]
    assert f", v, k, kv_pool, {BATCH}, layer_id=2, kv_layer=1, scale=0.125)" in paged[2]
    assert "num_kv_heads" not in done.program.constants


def test_keys_that_an_earlier_layer_has_written() -> None:
    """Layer 2 attends to the keys of layer 0, through views of its own; other values make other memory."""

    def block(q: Any, k: Any, v: Any) -> Any:
        first = ops.attention(q, k.transpose(0, 1), v.transpose(0, 1), layer_id=0, scale=0.5)
        second = ops.attention(first, k.transpose(0, 1), (v + 1).transpose(0, 1), layer_id=1, scale=0.5)
        return ops.attention(second, k.transpose(0, 1), v.transpose(0, 1), layer_id=2, scale=0.5)

    shapes: dict[str, Any] = {"q": ("T", 6, 4), "k": (2, "T", 4), "v": (2, "T", 4)}
    done = check(page_attention, trace(block, inputs=shapes), fires=3)
    assert '+  kv_pool: f64[2, 2, slots, 2, 4] = input("kv_pool")' in done.diff
    last = next(line for line in done.after.splitlines() if "layer_id=2" in line)
    assert f"radix_attention(attention_1, None, None, kv_pool, {BATCH}, layer_id=2, kv_layer=0, scale=0.5)" in last


def test_kv_heads_on_all_ranks_and_divided() -> None:
    """Six query heads on three ranks: one layer's three KV heads are divided, another's single one is on each rank,
    where both pools have the same shape."""
    weights = {"q": (24, 10), "k": (12, 10), "v": (12, 10), "o": (10, 24), "k1": (4, 10), "v1": (4, 10)}

    def block(x: Any, q: Any, k: Any, v: Any, o: Any, k1: Any, v1: Any) -> Any:
        for layer, (key, value) in enumerate([(k, v), (k1, v1)]):
            parts = [F.linear(x, w).view(-1, n, 4) for w, n in ((q, 6), (key, len(key) // 4), (value, len(value) // 4))]
            x = x + F.linear(ops.attention(*parts, layer_id=layer, scale=0.5).view(-1, 24), o)
        return x

    program = trace(block, inputs={"x": ("T", 10)}, weights=weights, tp=3, passes=[shard_tensor_parallel])
    done = check(page_attention, program, fires=2)
    assert '+  kv_pool: f64[1, 2, slots, 3/3, 4] S(3) = input("kv_pool")' in done.diff
    assert '+  kv_pool_1: f64[1, 2, slots, 1, 4] R = input("kv_pool")' in done.diff


def test_nobody_writes_the_same_memory_twice() -> None:
    def wrong(program: Program) -> int:
        program.calls(ops.radix_attention)[1].update_kwarg("kv_layer", 0)
        return 1

    def block(q: Any, k: Any, v: Any) -> Any:
        first = ops.attention(q, k, v, layer_id=0, scale=0.5)
        second = ops.attention(first, v, k, layer_id=1, scale=0.5)
        return ops.attention(second, k[:, :1], v[:, :1], layer_id=2, scale=0.5)

    shapes: dict[str, Any] = {"q": ("T", 6, 4), "k": ("T", 2, 4), "v": ("T", 2, 4)}
    program = trace(block, inputs=shapes, passes=[page_attention])
    with pytest.raises(CompileError, match=r"keys of layer 0 are written twice(?s:.*)a kv_layer of kv_pool of its own"):
        run(program, [wrong])


def test_no_attention() -> None:
    check(page_attention, hand.mlp(tp=1), fires=0)
