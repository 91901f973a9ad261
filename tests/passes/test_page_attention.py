"""page_attention: attention reads keys from a paged pool, which it is the only one to write."""

from __future__ import annotations

from typing import Any

import pytest

from graphsrt import ops
from graphsrt.errors import CompileError
from graphsrt.passes.page_attention import page_attention
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


def test_layers_differ() -> None:
    """One pool cannot hold layers of different heads."""

    def block(q: Any, k: Any, v: Any) -> Any:
        first = ops.attention(q, k, v, layer_id=0, scale=0.5)
        return ops.attention(first, k[:, :1], v[:, :1], layer_id=1, scale=0.5)

    shapes: dict[str, Any] = {"q": ("T", 2, 4), "k": ("T", 2, 4), "v": ("T", 2, 4)}
    with pytest.raises(CompileError, match="layers differ in KV heads or head size") as caught:
        page_attention(trace(block, inputs=shapes))
    assert "k ['T', 1, 4]" in str(caught.value) or "k [1, 4]" in str(caught.value)


def test_no_attention() -> None:
    check(page_attention, hand.mlp(tp=1), fires=0)
