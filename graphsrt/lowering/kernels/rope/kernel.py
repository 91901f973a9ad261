"""The Triton kernel behind rope, qk_norm_rope and rope_kv_write: a head is read once and written once.

Numbers are those of the references: norms accumulate in float32 and are rounded to the dtype, so is each product of a
rotation and each sum. Keys go to rows of their own, or with their values to slots of the pool; those of slot -1
(padding) are not written.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _normed(x, squares, weight, size, eps, offset, AFTER_WEIGHT: tl.constexpr):
    """Elements of a head, normed and rounded; ``squares`` is the sum over the head."""
    scaled = x.to(tl.float32) * tl.rsqrt(squares / size + eps)
    if AFTER_WEIGHT:
        return (scaled * (weight.to(tl.float32) + offset)).to(x.dtype)
    return (scaled.to(x.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _store(pointer, value, scale_ptr, inside, SCALED: tl.constexpr):
    """To the pool: its dtype, and divided by the layer's scale where it is FP8."""
    if SCALED:
        quotient = tl.div_rn(value.to(tl.float32), tl.full(value.shape, 1.0, tl.float32) * tl.load(scale_ptr))
        value = tl.minimum(tl.maximum(quotient, -448.0, tl.PropagateNan.ALL), 448.0, tl.PropagateNan.ALL)
    tl.store(pointer, value.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def rope_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, key_pool_ptr, value_pool_ptr, positions_ptr, table_ptr, slots_ptr, q_weight_ptr,
    k_weight_ptr, k_scale_ptr, v_scale_ptr, q_token, q_head, k_token, k_head, v_token, v_head, slot_stride, head_stride,
    table_stride, heads, half, size, value_size, eps, offset,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, AFTER_WEIGHT: tl.constexpr, SCALED: tl.constexpr,
    PAIRS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One head of a token: program ``(t, h)`` rotates query head h, or KV head ``h - heads`` and copies its values."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_query = head < heads
    kv_head = tl.maximum(head - heads, 0)
    slot = tl.load(slots_ptr + token)
    if is_query:
        source, weight_ptr = q_ptr + token * q_token + head * q_head, q_weight_ptr
    else:
        source, weight_ptr = k_ptr + token * k_token + kv_head * k_head, k_weight_ptr
    pair = tl.arange(0, PAIRS)
    in_pair = pair < half
    first = 2 * pair if INTERLEAVED else pair
    second = 2 * pair + 1 if INTERLEAVED else pair + half
    a = tl.load(source + first, mask=in_pair, other=0.0)
    b = tl.load(source + second, mask=in_pair, other=0.0)
    column = tl.arange(0, COLUMNS)
    beyond = (column >= 2 * half) & (column < size)  # channels that no rotation touches
    rest = tl.load(source + column, mask=beyond, other=0.0)
    if NORM:
        wide_a, wide_b, wide_rest = a.to(tl.float32), b.to(tl.float32), rest.to(tl.float32)
        squares = tl.sum(wide_a * wide_a + wide_b * wide_b, axis=0) + tl.sum(wide_rest * wide_rest, axis=0)
        weight_a = tl.load(weight_ptr + first, mask=in_pair, other=0.0)
        weight_b = tl.load(weight_ptr + second, mask=in_pair, other=0.0)
        weight_rest = tl.load(weight_ptr + column, mask=beyond, other=0.0)
        a = _normed(a, squares, weight_a, size, eps, offset, AFTER_WEIGHT)
        b = _normed(b, squares, weight_b, size, eps, offset, AFTER_WEIGHT)
        rest = _normed(rest, squares, weight_rest, size, eps, offset, AFTER_WEIGHT)
    row = table_ptr + tl.load(positions_ptr + token) * table_stride
    cos = tl.load(row + pair, mask=in_pair, other=0.0).to(tl.float32)
    sin = tl.load(row + half + pair, mask=in_pair, other=0.0).to(tl.float32)
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    turned_a = ((wide_a * cos).to(a.dtype).to(tl.float32) - (wide_b * sin).to(a.dtype).to(tl.float32)).to(a.dtype)
    turned_b = ((wide_b * cos).to(a.dtype).to(tl.float32) + (wide_a * sin).to(a.dtype).to(tl.float32)).to(a.dtype)
    if is_query:
        target = out_ptr + (token * heads + head) * size
        tl.store(target + first, turned_a, mask=in_pair)
        tl.store(target + second, turned_b, mask=in_pair)
        tl.store(target + column, rest, mask=beyond)
    elif slot >= 0:
        place = key_pool_ptr + slot * slot_stride + kv_head * head_stride
        _store(place + first, turned_a, k_scale_ptr, in_pair, SCALED)
        _store(place + second, turned_b, k_scale_ptr, in_pair, SCALED)
        _store(place + column, rest, k_scale_ptr, beyond, SCALED)
        inside = column < value_size
        value = tl.load(v_ptr + token * v_token + kv_head * v_head + column, mask=inside, other=0.0)
        place = value_pool_ptr + slot * slot_stride + kv_head * head_stride
        _store(place + column, value, v_scale_ptr, inside, SCALED)


def supports(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, *weights: torch.Tensor
) -> str | None:
    """None if the kernel rotates these, else why it does not."""
    if q.dtype not in _DTYPES:
        return f"heads are {q.dtype}"
    for name, x in (("keys", k), ("the table", table), *(("a norm's weight", weight) for weight in weights)):
        if x.dtype != q.dtype:
            return f"queries are {q.dtype}, {name} {x.dtype}"
    return None


def supports_write(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, table: torch.Tensor,
    kv_pool: torch.Tensor, out_cache_loc: torch.Tensor, **how: Any,
) -> str | None:  # fmt: skip
    """None if the kernel rotates and writes these, else why it does not."""
    weights = [weight for weight in (how.get("q_weight"), how.get("k_weight")) if weight is not None]
    if v.dtype != q.dtype:
        return f"queries are {q.dtype}, values {v.dtype}"
    if kv_pool.dtype not in (*_DTYPES, torch.float8_e4m3fn):
        return f"the pool is {kv_pool.dtype}"
    return supports(q, k, positions, table, *weights)


def launch(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, **how: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated ``q [T, H, D]`` and ``k [T, K, D]``, normed before if ``how`` has weights.

    ``how``: keywords of ``qk_norm_rope``. ValueError where :func:`supports` gives a reason.
    """
    weights = [how[name] for name in ("q_weight", "k_weight") if name in how]
    _refuse(supports(q, k, positions, table, *weights))
    keys = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    rows = torch.arange(q.shape[0], device=q.device)
    return _run(q, k, k[..., :0], positions, table, keys, keys[..., :0], rows, **how), keys


def launch_write(
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
    **how: Any,
) -> torch.Tensor:
    """``rope_kv_write`` of these; ``how``: its other keywords. ValueError where :func:`supports_write` has a reason."""
    from graphsrt.lowering.kernels.radix_attention.reference import keys_and_values

    _refuse(supports_write(q, k, v, positions, table, kv_pool, out_cache_loc, **how))
    keys, values = keys_and_values(kv_pool, layer_id if kv_layer is None else kv_layer, q.shape[2])
    return _run(q, k, v, positions, table, keys, values, out_cache_loc, **how)


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise ValueError(f"the kernel of rotations does not serve this: {reason}")


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    *,
    interleaved: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    cast: str = "before_weight",
    offset: float = 0.0,
) -> torch.Tensor:
    """The rotated q; rotated keys and values are written to rows ``slots`` of ``keys`` and ``values``."""
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    tokens, heads, size = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    half = table.shape[1] // 2
    none: Any = out  # a pointer that is not read where there is nothing
    given = [none if x is None else x for x in (q_weight, k_weight, k_scale, v_scale)]
    rope_kernel[(tokens, heads + k.shape[1])](
        q, k, v, out, keys, values, positions, table, slots, *given, *q.stride()[:2], *k.stride()[:2],
        *v.stride()[:2], *keys.stride()[:2], table.stride(0), heads, half, size, v.shape[2], eps, offset,
        INTERLEAVED=interleaved, NORM=q_weight is not None, AFTER_WEIGHT=cast == "after_weight",
        SCALED=k_scale is not None, **blocks(half, size, v.shape[2]), num_warps=1,
    )  # fmt: skip
    return out


def blocks(half: int, size: int, value_size: int) -> dict[str, int]:
    """Sizes of what a program holds: pairs that are rotated, and columns of a head."""
    return {"PAIRS": triton.next_power_of_2(half), "COLUMNS": triton.next_power_of_2(max(size, value_size))}
