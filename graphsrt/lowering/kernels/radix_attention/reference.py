"""The plain meaning of paged attention in dense PyTorch: any device, loops over sequences, no speed."""

from __future__ import annotations

import torch
from torch import Tensor


def keys_and_values(kv_pool: Tensor, layer_id: int, head_size: int) -> tuple[Tensor, Tensor]:
    """One layer of a pool ``[L, 2, S, K, D]`` or ``[L, 1, S, K, D + Dv]`` as views ``[S, K, D]`` and ``[S, K, Dv]``."""
    layer = kv_pool[layer_id]
    return (layer[0], layer[1]) if len(layer) == 2 else (layer[0][..., :head_size], layer[0][..., head_size:])


def kv_write(k: Tensor, v: Tensor, kv_pool: Tensor, out_cache_loc: Tensor, layer_id: int) -> None:
    """Write k ``[T, K, D]``, v ``[T, K, Dv]`` to slots ``out_cache_loc`` (int64 ``[T]``, -1: not written) of layer
    ``layer_id`` of ``kv_pool``, whose layouts are those of this package. Source: ours."""
    rows = out_cache_loc >= 0
    slots = out_cache_loc[rows]
    for pool, new in zip(keys_and_values(kv_pool, layer_id, k.shape[2]), (k, v)):
        pool[slots] = new[rows].to(pool.dtype)


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
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    chunk_size: int | None = None,
    causal: bool = True,
) -> Tensor:
    """As ``radix_attention`` of this package. Computes in float64 where q or the pool is, else in float32."""
    if not causal:
        raise ValueError("radix_attention is causal only")
    if k is not None and v is not None:
        kv_write(k, v, kv_pool, out_cache_loc, layer_id)
    dtype = torch.float64 if torch.float64 in (q.dtype, kv_pool.dtype) else torch.float32
    group = q.shape[1] // kv_pool.shape[3]
    key_pool, value_pool = keys_and_values(kv_pool, layer_id, q.shape[2])
    out = q.new_zeros((*q.shape[:2], value_pool.shape[2]))
    bounds = query_start_loc.tolist()
    for b, (request, seq_len) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist())):
        begin, end = bounds[b], bounds[b + 1]
        if begin == end:
            continue
        position = torch.arange(seq_len - (end - begin), seq_len, device=q.device)[:, None]
        first = 0 if sliding_window is None else max(0, int(position[0]) - sliding_window + 1)
        if chunk_size is not None:
            first = max(first, int(position[0]) // chunk_size * chunk_size)
        index = torch.arange(first, seq_len, device=q.device)[None, :]
        slots = req_to_token[request, first:seq_len].long()
        keys = key_pool[slots].to(dtype).repeat_interleave(group, dim=1)  # [kv, H, D]
        values = value_pool[slots].to(dtype).repeat_interleave(group, dim=1)  # [kv, H, Dv]
        logits = torch.einsum("qhd,khd->hqk", q[begin:end].to(dtype), keys) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if alibi_slopes is not None:
            logits = logits + alibi_slopes.to(dtype)[:, None, None] * (index - position)
        visible = index <= position
        if sliding_window is not None:
            visible &= index > position - sliding_window
        if chunk_size is not None:
            visible &= index // chunk_size == position // chunk_size
        logits = logits.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            sink = sinks.to(dtype)[:, None, None].expand(-1, end - begin, 1)
            logits = torch.cat([logits, sink], dim=-1)
        weights = torch.softmax(logits, dim=-1)[..., : seq_len - first]
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out
