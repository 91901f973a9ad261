"""fuse_rope_kv_write: the rotations of q and k and the writing of k and v to the paged pool become one operator.

    q = rope(q, …); k = rope(k, …); radix_attention(q, k, v, kv_pool, …)
    → q = rope_kv_write(q, k, v, positions, table, kv_pool, …); radix_attention(q, None, None, kv_pool, …)

Keys then go from the projection straight to their slots. Where fuse_qk_norm_rope has joined the norms of heads with
the rotations, the norms come along.

Needs: page_attention; fuse_qk_norm_rope before it, where heads are normed.
Leaves: ``graphsrt::rope_kv_write`` before each attention whose queries and keys are rotated alike. Devices without a
kernel for it take it apart again (``lowering/decompose.py``): on CPUs the attention's own kernel writes the keys.
Numerics: exact.  Source: ours; vLLM's and SGLang's fused rope with the writing of their KV cache.
"""

from __future__ import annotations

import operator
from typing import Any

import torch.fx as fx

from graphsrt import ops
from graphsrt.passes.joining import fuse_each, join
from graphsrt.program import NearMiss, Program, arguments, target_name

_ROTATION = ("positions", "table", "interleaved")
_NORM = ("q_weight", "k_weight", "eps", "cast", "offset")
_PLACE = ("layer_id", "kv_layer", "k_scale", "v_scale", "kv_pool", "out_cache_loc")


def fuse_rope_kv_write(
    program: Program,
    *,
    limit: int | None = None,
    near_misses: list[NearMiss] | None = None,
    sites: list[fx.Node] | None = None,
) -> int:
    """Fuse for every attention over the pool that writes keys of which they or its queries are rotated."""
    places = [node for node in program.calls(ops.radix_attention) if _rotates(node)]
    return fuse_each(places, lambda node: _fuse(program, node), limit, near_misses, sites)


def _rotates(attention: fx.Node) -> bool:
    args = arguments(attention)
    return args["k"] is not None and any(_rotation(args[name]) is not None for name in "qk")


def _rotation(value: fx.Node) -> fx.Node | None:
    """The operator that a value is rotated by last."""
    if value.target is operator.getitem and value.args[0].target is ops.qk_norm_rope:  # type: ignore[union-attr]
        return value.args[0]  # type: ignore[return-value]
    return value if value.target is ops.rope else None


def _fuse(program: Program, attention: fx.Node) -> fx.Node | str:
    args = arguments(attention)
    q, k = args["q"], args["k"]
    rotations = {name: _rotation(value) for name, value in (("q", q), ("k", k))}
    for name, value in (("q", q), ("k", k)):
        if rotations[name] is None:
            return f"{name} is not rotated last, it comes from {_maker(value)}"
        others = [user.name for user in value.users if user is not attention]
        if others:
            return f"{others[0]} reads {value.name} too"
    of_q, of_k = rotations["q"], rotations["k"]
    assert of_q is not None and of_k is not None
    if of_q.target is not of_k.target:
        return f"q comes from {target_name(of_q.target)}, k from {target_name(of_k.target)}"
    one, other = arguments(of_q), arguments(of_k)
    for key in _ROTATION:
        if one[key] is not other[key] and one[key] != other[key]:
            return f"q has {key}={one[key]}, k has {key}={other[key]}"
    values: dict[str, Any] = {"v": args["v"], **{key: one[key] for key in _ROTATION}}
    values |= {key: args[key] for key in _PLACE if args[key] is not None}
    if of_q.target is ops.rope:
        values |= {"q": one["x"], "k": other["x"]}
    elif of_q is not of_k or q.args[1] != 0 or k.args[1] != 1:
        return f"q is a result of {of_q.name}, k of {of_k.name}"
    else:
        values |= {"q": one["q"], "k": one["k"], **{key: one[key] for key in _NORM}}
    attention.args = (attention.args[0], None, None, *attention.args[3:])
    return join(
        program, ops.rope_kv_write, values, results=[q], covered=[k, of_q, of_k], before=attention,
        made_by="fuse_rope_kv_write",
    )  # fmt: skip


def _maker(value: fx.Node) -> str:
    return target_name(value.target) if value.op == "call_function" else value.name
