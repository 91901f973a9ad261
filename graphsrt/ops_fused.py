"""Operators that fusions make of two or more: each is defined by the operators that it takes the place of.

``*_add_*_norm`` return ``(normed, total)`` with ``total = residual + x``, the residual of what comes next. In
``all_reduce_*`` the sum over the ranks of ``axis`` comes first: ``x`` is each rank's term, the results are whole.
``ops.AFTER_ALL_REDUCE`` says what follows the sum, and whoever has no kernel for both runs them one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from graphsrt.ops import (
    AFTER_ALL_REDUCE,
    REFERENCE,
    _collective,
    _define,
    add_rms_norm,
    kv_write,
    normed_like,
    rms_norm,
    rope,
)

Pair = tuple[torch.Tensor, torch.Tensor]


# -- residual and norm ------------------------------------------------------------------------------------------------


@_define(
    "(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, *, float eps) -> (Tensor, Tensor)",
    lambda x, residual, weight, bias, *, eps: (x.new_empty(x.shape), residual.new_empty(residual.shape)),
)
def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, *, eps: float
) -> Pair:
    """``total = residual + x``; returns ``(layer_norm(total), total)``, the norm (Ba et al. 2016) over the last dim."""
    total = residual + x
    return F.layer_norm(total, total.shape[-1:], weight, bias, eps), total


def _after_all_reduce(inner: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """``all_reduce_<inner>``: the same arguments, and ``axis`` first among the keywords."""
    name = inner._schema.name.removeprefix("graphsrt::")
    positional, keywords = str(inner._schema).removeprefix(f"graphsrt::{name}").split(" *, ", 1)
    overload = _collective(
        f"all_reduce_{name}", f"{positional} *, str axis, {keywords}", lambda *args, axis, **kw: inner(*args, **kw)
    )
    AFTER_ALL_REDUCE[overload] = inner
    return overload


all_reduce_add_rms_norm = _after_all_reduce(add_rms_norm)  # type: ignore[has-type]  # the modules import each other
all_reduce_add_layer_norm = _after_all_reduce(add_layer_norm)


# -- norm of each head, and rope --------------------------------------------------------------------------------------


@_define(
    "(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor positions, Tensor table, *, float eps, str cast, "
    "float offset=0.0, bool interleaved=False) -> (Tensor, Tensor)",
    lambda q, k, q_weight, k_weight, positions, table, *, eps, cast, offset=0.0, interleaved=False: (
        normed_like(q, q_weight, cast),
        normed_like(k, k_weight, cast),
    ),
)
def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    *,
    eps: float,
    cast: str,
    offset: float = 0.0,
    interleaved: bool = False,
) -> Pair:
    """Each head of ``q [T, H, D]`` and ``k [T, K, D]`` normed with weights ``[D]`` and rotated at ``positions [T]``.

    ``rope(rms_norm(·), positions, table)`` of both; see :func:`graphsrt.ops.rms_norm` and :func:`graphsrt.ops.rope`.
    """

    def one(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed = REFERENCE[rms_norm](x, weight, eps=eps, cast=cast, offset=offset)
        return REFERENCE[rope](normed, positions, table, interleaved=interleaved)

    return one(q, q_weight), one(k, k_weight)


# -- rope, and what attention remembers -------------------------------------------------------------------------------


@_define(
    "(Tensor q, Tensor k, Tensor v, Tensor positions, Tensor table, Tensor(a!) kv_pool, Tensor out_cache_loc, "
    "*, int layer_id, int? kv_layer=None, bool interleaved=False, Tensor? k_scale=None, Tensor? v_scale=None, "
    "Tensor? q_weight=None, Tensor? k_weight=None, float eps=0.0, str cast='before_weight', float offset=0.0) "
    "-> Tensor",
    lambda q, *_, q_weight=None, cast="before_weight", **__: (
        q.new_empty(q.shape) if q_weight is None else normed_like(q, q_weight, cast)
    ),
)
def rope_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    kv_pool: torch.Tensor,
    out_cache_loc: torch.Tensor,
    *,
    layer_id: int,
    kv_layer: int | None = None,
    interleaved: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    cast: str = "before_weight",
    offset: float = 0.0,
) -> torch.Tensor:
    """The rotated ``q [T, H, D]``; the rotated ``k [T, K, D]`` and ``v [T, K, Dv]`` go to slots of the pool.

    ``rope`` of q and k, or ``qk_norm_rope`` where ``q_weight`` and ``k_weight`` are given, then ``kv_write``; see
    :func:`qk_norm_rope`, :func:`graphsrt.ops.rope` and :func:`graphsrt.ops.kv_write`.
    """
    if q_weight is None or k_weight is None:
        q, k = (REFERENCE[rope](x, positions, table, interleaved=interleaved) for x in (q, k))
    else:
        how: dict[str, Any] = {"eps": eps, "cast": cast, "offset": offset, "interleaved": interleaved}
        q, k = REFERENCE[qk_norm_rope](q, k, q_weight, k_weight, positions, table, **how)
    kv_write(k, v, kv_pool, out_cache_loc, layer_id=layer_id, kv_layer=kv_layer, k_scale=k_scale, v_scale=v_scale)
    return q
