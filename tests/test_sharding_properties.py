"""Any head counts, widths, vocabulary and number of ranks: sharded equals unsharded, and nothing large stays whole."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from graphsrt import ops
from graphsrt.passes.merge_gate_up import merge_gate_up
from graphsrt.passes.merge_qkv import merge_qkv
from graphsrt.passes.normalize import normalize
from graphsrt.passes.runner import run
from graphsrt.passes.shard_tensor_parallel import shard_tensor_parallel
from graphsrt.passes.split_linears import split_linears
from graphsrt.placement import Replicate
from graphsrt.program import Program
from graphsrt.testing import check_ranks, trace

LAYOUTS = ("apart", "segments", "by group", "full-width norms")


def block(heads: int, group: int, size: int, inner: int, vocab: int, layout: str, parallel: bool, tp: int) -> Program:
    """One layer of a decoder with an embedding and logits; ``heads`` KV heads of ``group`` query heads each."""
    width, queries, keys = 5, heads * group * size, heads * size
    eps = {"eps": 1e-6, "cast": "before_weight"}

    def project(x: Any, qkv: Any, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        if layout == "segments":
            return F.linear(x, qkv).split([queries, keys, keys], -1)
        if layout == "by group":
            y = F.linear(x, qkv).view(-1, heads, group + 2, size)
            return y[:, :, :group].reshape(-1, queries), y[:, :, group], y[:, :, group + 1]
        return F.linear(x, q), F.linear(x, k), F.linear(x, v)

    def step(
        tokens: Any, embed: Any, norm: Any, qkv: Any, q: Any, k: Any, v: Any, q_norm: Any, k_norm: Any, o: Any,
        o_bias: Any, gate_up: Any, down: Any,
    ) -> Any:  # fmt: skip
        h = F.embedding(tokens, embed)
        x = ops.rms_norm(h, norm, **eps)
        a, b, c = project(x, qkv, q, k, v)
        if layout == "full-width norms":
            a, b = ops.rms_norm(a, q_norm, **eps), ops.rms_norm(b, k_norm, **eps)
        a, b, c = a.view(-1, heads * group, size), b.view(-1, heads, size), c.view(-1, heads, size)
        attended = F.linear(ops.attention(a, b, c, layer_id=0, scale=0.5).view(-1, queries), o, o_bias)
        if not parallel:
            h = h + attended
            x = ops.rms_norm(h, norm, **eps)
        both = F.linear(x, gate_up)
        mlp = F.linear(F.silu(both[:, :inner]) * both[:, inner : 2 * inner], down)
        h = h + attended + mlp if parallel else mlp + h
        return F.linear(ops.rms_norm(h, norm, **eps), embed)

    weights = {
        "embed": (vocab, width), "norm": (width,), "qkv": (queries + 2 * keys, width), "q": (queries, width),
        "k": (keys, width), "v": (keys, width), "q_norm": (queries,), "k_norm": (keys,), "o": (width, queries),
        "o_bias": (width,), "gate_up": (2 * inner, width), "down": (width, inner),
    }  # fmt: skip
    return trace(step, inputs={"tokens": ("T",)}, weights=weights, tp=tp, passes=[normalize])


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    heads=st.integers(1, 9), group=st.integers(1, 4), size=st.integers(1, 4), inner=st.integers(2, 19),
    vocab=st.integers(6, 40), layout=st.sampled_from(LAYOUTS), parallel=st.booleans(), tp=st.integers(2, 16),
)  # fmt: skip
def test_sharded_equals_unsharded(
    heads: int, group: int, size: int, inner: int, vocab: int, layout: str, parallel: bool, tp: int
) -> None:
    assume(heads * group > 1)  # a single head is one unit
    program = block(heads, group, size, inner, vocab, layout, parallel, tp)
    passes = [split_linears, shard_tensor_parallel, merge_qkv, merge_gate_up]
    final = run(program.copy(), passes, strict=True, may_miss=("merge_qkv", "merge_gate_up")).final
    check_ranks(program, final, tokens=(1, 3))
    norms = 2 if layout == "full-width norms" and heads > 1 else 1 if layout == "full-width norms" and group > 1 else 0
    assert final.count("graphsrt::all_reduce") <= (2 if parallel else 3) + norms + (norms > 0)
    whole = [n for n, w in final.weights.items() if isinstance(w.placement, Replicate) and len(w.shape) > 1]
    assert not whole or heads == 1, whole  # one KV head is computed by every rank
