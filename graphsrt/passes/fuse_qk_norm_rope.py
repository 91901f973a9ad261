"""fuse_qk_norm_rope: the norms of each head of q and k and the rotations after them become one operator.

    q = rope(rms_norm(q, wq), positions, table); k = rope(rms_norm(k, wk), positions, table)
    → q, k = qk_norm_rope(q, k, wq, wk, positions, table)

Needs: recognize_rms_norm, recognize_rope.
Leaves: ``graphsrt::qk_norm_rope`` before each attention whose queries and keys are normed and rotated alike; a norm
over the width of all heads (OLMo-2), a norm after the rotation or of q alone stay, and a near miss says so.
Numerics: exact.  Source: ours; SGLang's and TensorRT-LLM's fused qk-norm and rope of Qwen3.
"""

from __future__ import annotations

import torch.fx as fx

from graphsrt import ops, ops_norms
from graphsrt.passes.joining import join, miss
from graphsrt.passes.norm_forms import VIEWS
from graphsrt.program import NearMiss, Program, arguments, target_name

_NORMS = (ops.rms_norm, ops_norms.rms_norm_of)
_NORM = ("eps", "cast", "offset")
_ROPE = ("positions", "table", "interleaved")


def fuse_qk_norm_rope(
    program: Program,
    *,
    limit: int | None = None,
    near_misses: list[NearMiss] | None = None,
    sites: list[fx.Node] | None = None,
) -> int:
    """Fuse for every attention whose q and k are both normed and rotated."""
    fired, misses = 0, []
    for attention in program.calls(ops.attention, ops.radix_attention):
        if limit is not None and fired >= limit:
            break
        if not _normed(attention):
            continue
        reason = _why_not(program, attention)
        if reason is not None:
            misses.append(miss(attention, reason))
            continue
        made = _apply(program, attention)
        fired += 1
        if sites is not None:
            sites.append(made)
    if near_misses is not None:
        near_misses += misses
    return fired


def _normed(attention: fx.Node) -> bool:
    """Whether a norm is right before or right after where the rotation of q or k is, or should be."""
    return any(_norm_near(_value(attention, name)) is not None for name in "qk")


def _norm_near(value: fx.Node | None) -> fx.Node | None:
    """The RMS norm that a value comes from through rotations and views."""
    while isinstance(value, fx.Node) and value.target in (*VIEWS, ops.rope, ops.rope_kv_write):
        value = value.args[0]  # type: ignore[assignment]
    return value if isinstance(value, fx.Node) and value.target in _NORMS else None


def _value(attention: fx.Node, name: str) -> fx.Node | None:
    value = arguments(attention)[name]
    return value if isinstance(value, fx.Node) else None


def _why_not(program: Program, attention: fx.Node) -> str | None:
    q = _value(attention, "q")
    if q is not None and q.target is ops.rope_kv_write:
        return f"{target_name(q.target)} has the rotations already, made by fuse_rope_kv_write: run it after this pass"
    parts = []
    for name in "qk":
        rope = _value(attention, name)
        norm = _norm_near(rope)
        if rope is None or norm is None:
            return f"{name} is not normed"
        if rope.target is not ops.rope:
            return f"{name} is not rotated, it comes from {target_name(rope.target)}"
        if norm is not rope.args[0]:
            width = program.shape(arguments(norm)["weight"])[0]
            return f"the norm of {name} runs over {width} channels of all heads, not over each head"
        if arguments(norm)["x"].target is ops.rope:
            return f"{name} is normed after its rotation"
        for inner, reader in ((norm, rope), (rope, attention)):
            others = [user.name for user in inner.users if user is not reader]
            if others:
                return f"{others[0]} reads {inner.name} too"
        parts.append((arguments(norm), arguments(rope)))
    (q_norm, q_rope), (k_norm, k_rope) = parts
    for keys, one, other in ((_NORM, q_norm, k_norm), (_ROPE, q_rope, k_rope)):
        for key in keys:
            if one[key] is not other[key] and one[key] != other[key]:
                return f"q has {key}={one[key]}, k has {key}={other[key]}"
    return None


def _apply(program: Program, attention: fx.Node) -> fx.Node:
    q, k = (arguments(attention)[name] for name in "qk")
    q_norm, k_norm = (arguments(rope.args[0]) for rope in (q, k))
    values = {
        "q": q_norm["x"], "q_weight": q_norm["weight"], "k": k_norm["x"], "k_weight": k_norm["weight"],
        **{key: q_norm[key] for key in _NORM}, **{key: arguments(q)[key] for key in _ROPE},
    }  # fmt: skip
    order = {node: index for index, node in enumerate(program.graph.nodes)}
    last = max(q, k, key=order.__getitem__)  # all that q and k need is there, and the attention alone reads them
    return join(
        program, ops.qk_norm_rope, values, results=[q, k], covered=[q.args[0], k.args[0]], before=last,
        made_by="fuse_qk_norm_rope",
    )  # fmt: skip
