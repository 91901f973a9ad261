"""Latent attention over the paged pool, absorbed: one KV head, its keys ``[latent | rope]``, its values the latent.

The values are the first columns of the keys, so one row of the pool serves as both, and the kernel of
:mod:`graphsrt.lowering.kernels.radix_attention` does the work on a view of the pool.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphsrt.errors import explain
from graphsrt.lowering.kernels.radix_attention import radix_attention

__all__ = ["radix_latent_attention"]


def radix_latent_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor | None,
    k_rope: Tensor | None,
    kv_pool: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    out_cache_loc: Tensor,
    *,
    layer_id: int,
    kv_layer: int | None = None,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of the new tokens to the cached latents of their sequences -> ``[T, H, L]``, contiguous.

    q_latent ``[T, H, L]``: each head's query, taken through that head's key projection into the latent space.
    q_rope ``[T, H, R]``: its part that meets the shared rotary key; both of one dtype.
    latent ``[T, L]``, k_rope ``[T, R]`` or both None: written first to slots ``out_cache_loc`` (-1: not written).
    kv_pool ``[layers, S, L + R]``: latents and rotary keys; **layer kv_layer of it is written** where they are given.
    kv_layer: which of the pool's layers, where it does not hold all layers of the model; None: it is layer_id.

    Scores are ``scale · (q_latent · latent + q_rope · k_rope)``, and the result is the weighted sum of latents, which
    the head's value projection turns into values. Everything else, what is raised included, is as in
    :func:`graphsrt.lowering.kernels.radix_attention.radix_attention`. Source: DeepSeek-V2 (arXiv:2405.04434), 2.1.
    """
    width, rope = q_latent.shape[-1], q_rope.shape[-1]
    if kv_pool.dim() != 3 or kv_pool.shape[2] != width + rope:
        raise ValueError(
            explain(
                "radix_latent_attention cannot use kv_pool",
                expected=f"[layers, slots, {width} + {rope}]",
                got=str(list(kv_pool.shape)),
            )
        )
    written = None
    if latent is not None and k_rope is not None:
        written = torch.cat([latent, k_rope], -1)[:, None]
    # Keys and values are the same memory, so what is written twice is the same.
    pool = kv_pool[:, None, :, None].expand(-1, 2, -1, -1, -1)
    out = radix_attention(
        torch.cat([q_latent, q_rope], -1),
        written,
        written,
        pool,
        req_to_token,
        req_pool_indices,
        seq_lens,
        query_start_loc,
        out_cache_loc,
        layer_id=layer_id,
        kv_layer=kv_layer,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
    )
    return out[..., :width].contiguous()
