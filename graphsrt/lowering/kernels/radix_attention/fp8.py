"""Paged attention over a pool in FP8, on devices other than the CPU: the reference around the two scales of a layer.

Keys are stored as ``k / k_scale``, rounded to ``float8_e4m3fn`` and saturated; what is read is the product again. So a
score is ``q · stored`` times ``scale · k_scale``, and the result that of stored values, times ``v_scale``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphsrt.errors import explain
from graphsrt.lowering.kernels.radix_attention import reference
from graphsrt.recipes import FP8

FP8_MAX = torch.finfo(FP8).max


def kv_write(
    k: Tensor, v: Tensor, kv_pool: Tensor, out_cache_loc: Tensor, layer_id: int, k_scale: Tensor, v_scale: Tensor
) -> None:
    """As ``kv_write`` of this package."""
    stored = [(x / scale.reshape(()).to(x.dtype)) for x, scale in ((_wide(k), k_scale), (_wide(v), v_scale))]
    k8, v8 = (x.clamp(-FP8_MAX, FP8_MAX) for x in stored)
    reference.kv_write(k8, v8, kv_pool, out_cache_loc, layer_id)


def radix_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    kv_pool: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    out_cache_loc: Tensor,
    *,
    layer_id: int,
    scale: float,
    k_scale: Tensor,
    v_scale: Tensor,
    **how: Any,
) -> Tensor:
    """As ``radix_attention`` of this package."""
    if k is not None and v is not None:
        kv_write(k, v, kv_pool, out_cache_loc, layer_id, k_scale, v_scale)
    out = reference.radix_attention(
        _wide(q), None, None, kv_pool, req_to_token, req_pool_indices, seq_lens, query_start_loc, out_cache_loc,
        layer_id=layer_id, scale=scale * float(k_scale), **how,
    )  # fmt: skip
    return (out * v_scale.reshape(()).to(out.dtype)).to(q.dtype)


def check(kv_pool: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> tuple[Tensor, ...]:
    """The two scales of an FP8 pool; nothing of another. ValueError unless scales are given just then."""
    scales = tuple(scale for scale in (k_scale, v_scale) if scale is not None and scale.numel() == 1)
    if len(scales) != (2 if kv_pool.dtype == FP8 else 0) or (k_scale is None) != (v_scale is None):
        raise ValueError(
            explain(
                f"a pool of {kv_pool.dtype} and scales of keys and values do not go together",
                expected="an FP8 pool and two scales of one number, or another pool and none",
                got=", ".join(str(None if s is None else list(s.shape)) for s in (k_scale, v_scale)),
            )
        )
    return scales


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
