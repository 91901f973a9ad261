"""Attention over the paged KV pool: the compiled kernel on the CPU, the plain reference on every other device."""

from __future__ import annotations

from torch import Tensor

from graphsrt.lowering.kernels.radix_attention import cpu, fp8, reference

__all__ = ["kv_write", "radix_attention"]


def kv_write(
    k: Tensor,
    v: Tensor,
    kv_pool: Tensor,
    out_cache_loc: Tensor,
    layer_id: int,
    kv_layer: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write new keys and values to the pool, converted to its dtype.

    k ``[T, K, D]``, v ``[T, K, Dv]`` (any strides, the last 1); kv_pool, kv_layer and scales: as in
    :func:`radix_attention`;
    out_cache_loc int64 ``[T]``, the slot of each token, -1 for rows that are not written. Slots must differ.
    Raises ``ValueError`` for wrong shapes, dtypes or slots, before anything is written. Source: ours.
    """
    scales = fp8.check(kv_pool, k_scale, v_scale)
    layer = layer_id if kv_layer is None else kv_layer
    if kv_pool.is_cpu:
        cpu.kv_write(k, v, kv_pool, out_cache_loc, layer, *scales)
    elif scales:
        fp8.kv_write(k, v, kv_pool, out_cache_loc, layer, *scales)
    else:
        reference.kv_write(k, v, kv_pool, out_cache_loc, layer)


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
    kv_layer: int | None = None,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    chunk_size: int | None = None,
    causal: bool = True,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Causal attention of the new tokens to all that is cached of their sequences -> out ``[T, H, Dv]``, q's dtype.

    q ``[T, H, D]``: the new tokens of all sequences, one after the other, then padding rows.
    k ``[T, K, D]``, v ``[T, K, Dv]`` or both None: written first to slots ``out_cache_loc`` int64 ``[T]`` (-1: not
    written).
    kv_pool ``[L, 2, S, K, D]``: keys and values, where both have one head size; ``[L, 1, S, K, D + Dv]``: the keys of
    a head beside its values. **Layer kv_layer of it is written** where k and v are given.
    kv_layer: which of the pool's layers, where it does not hold all layers of the model; None: it is layer_id.
    req_to_token int32 ``[max_reqs, max_ctx]``: slot of each token of each request, the new ones included.
    req_pool_indices, seq_lens int64 ``[B]``: each sequence's row in it, and its length with the new tokens.
    query_start_loc int64 ``[B + 1]``: where each sequence's new tokens start in T; an empty range reads nothing.

    The i-th of n new tokens sits at ``p = seq_len - n + i`` and sees tokens ``max(0, p - sliding_window + 1) .. p``
    (no window: ``0 .. p``), with weights ``softmax(c(scale * q.k))``, where ``c(x) = softcap * tanh(x / softcap)`` if
    given. ``sinks`` ``[H]`` are logits that join the denominator only. ``alibi_slopes`` ``[H]``: token j's logit is
    raised by ``slope * (j - p)``, after the cap. ``chunk_size``: of these tokens only those with
    ``j // chunk_size == p // chunk_size`` are seen. Query head h reads KV head ``h // (H / K)``.
    Padding rows (from ``query_start_loc[B]`` on) are neither read nor written; they come out as zeros.

    ``k_scale``, ``v_scale``: float32, one number each, with a pool of float8_e4m3fn and only then: keys are stored
    divided by theirs, rounded, and multiplied by it where they are read; values likewise.

    q, k, v may be slices of one fused tensor (last stride 1). float64, float32, bfloat16 and float16, pool and q of
    the same dtype or not; sums are float64 where q or the pool is, else float32. On the CPU what a sequence gets does
    not depend, bit for bit, on the others in the batch or on the number of threads.

    Raises ``ValueError`` for wrong shapes, dtypes, lengths or slots, before anything is written; ``CompileError``
    where the CPU kernel cannot be built. Source: FlashAttention-2 (arXiv:2307.08691), Flash-Decoding.
    """
    scales = fp8.check(kv_pool, k_scale, v_scale)
    where = cpu if q.is_cpu else fp8 if scales else reference
    return where.radix_attention(  # type: ignore[attr-defined]
        q, k, v, kv_pool, req_to_token, req_pool_indices, seq_lens, query_start_loc, out_cache_loc,
        layer_id=layer_id if kv_layer is None else kv_layer, scale=scale, sliding_window=sliding_window,
        softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, chunk_size=chunk_size, causal=causal,
        **dict(zip(("k_scale", "v_scale"), scales)),
    )  # fmt: skip
