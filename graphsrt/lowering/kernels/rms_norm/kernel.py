"""The Triton kernel behind rms_norm, add_rms_norm and their quantised forms: a row is read once and written once.

Numbers are those of the references in ``ops.py`` and ``ops_fused_fp8.py``: the sum is rounded to its dtype before the
norm reads it, the norm accumulates in float32 and is rounded before it is quantised. Sums over a row are in another
order, so results may differ by a rounding of the dtype. Rows of NaN touch no other row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

FP8 = torch.float8_e4m3fn
NONE, STATIC, DYNAMIC = 0, 1, 2
"""How the result is quantised: not at all, by a scale that is given, or by scales of the row itself."""


@triton.jit
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, given_ptr, out_ptr, total_ptr, scale_ptr, width, x_stride, residual_stride, eps,
    offset, largest,
    ADDS: tl.constexpr, AFTER_WEIGHT: tl.constexpr, QUANT: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One row of ``width`` columns, seen as ``GROUPS`` blocks of ``COLUMNS``, the last may be short."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, GROUPS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = column < width
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    if ADDS:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
        x = (residual.to(tl.float32) + x.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + row * width + column, x, mask=inside)
    wide = x.to(tl.float32)
    squares = tl.sum(tl.sum(wide * wide, axis=1), axis=0)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    normed = wide * tl.rsqrt(squares / width + eps)
    if AFTER_WEIGHT:
        normed = (normed * (weight.to(tl.float32) + offset)).to(x.dtype)
    else:
        normed = normed.to(x.dtype).to(tl.float32) * weight.to(tl.float32)
        if weight.dtype == x.dtype:
            normed = normed.to(x.dtype)  # else the weight is wider, and so is the result
    if QUANT == 0:
        tl.store(out_ptr + row * width + column, normed.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        values = normed.to(tl.float32)
        if QUANT == 1:
            scale = tl.full((GROUPS, 1), 1.0, tl.float32) * tl.load(given_ptr)
        else:
            amax = tl.max(tl.abs(values), axis=1, keep_dims=True)
            scale = tl.div_rn(tl.minimum(tl.maximum(amax, 1e-10), largest), 448.0)
            group = tl.arange(0, GROUPS)[:, None]
            count = tl.cdiv(width, COLUMNS)
            tl.store(scale_ptr + row * count + group, scale, mask=group < count)
        quotient = tl.div_rn(values, scale.broadcast_to((GROUPS, COLUMNS)))
        clamped = tl.minimum(tl.maximum(quotient, -448.0, tl.PropagateNan.ALL), 448.0, tl.PropagateNan.ALL)
        tl.store(out_ptr + row * width + column, clamped.to(out_ptr.dtype.element_ty), mask=inside)


def supports(x: torch.Tensor, weight: torch.Tensor, block: int = 0) -> str | None:
    """None if the kernel computes rows like these, else why it does not."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"rows are {x.dtype}"
    if weight.dtype not in (x.dtype, torch.float32):
        return f"rows are {x.dtype} and the weight is {weight.dtype}"
    if block and block & (block - 1):
        return f"blocks of {block} columns are no power of two"
    if x.shape[-1] > MOST_COLUMNS:
        return f"rows have {x.shape[-1]} columns, more than {MOST_COLUMNS}"
    return None


MOST_COLUMNS = 32768
"""Of a row, which a program holds in registers."""


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    cast: str,
    offset: float = 0.0,
    residual: torch.Tensor | None = None,
    static_scale: torch.Tensor | None = None,
    block: int | None = None,
    largest: float | None = None,
    numbers: torch.dtype = FP8,
) -> tuple[torch.Tensor, ...]:
    """Norms of the rows of ``x [..., E]``: ``(normed or numbers, scale?, total?)``, as the operators return them.

    ``static_scale``: quantise by it; ``block``: by scales of blocks, 0 for one of each row. ValueError where
    :func:`supports` gives a reason. ``numbers``: what quantised values are stored as; float32 keeps them unrounded,
    for Triton's interpreter, which rounds to FP8 wrongly where a carry changes the exponent.
    """
    reason = supports(x, weight, block or 0)
    if reason is not None:
        raise ValueError(f"the kernel of rms_norm does not serve this: {reason}")
    rows, stride = _rows(x)
    width, count = x.shape[-1], rows.shape[0]
    quant = STATIC if static_scale is not None else NONE if block is None else DYNAMIC
    columns, groups = layout(width, block or 0)
    dtype = x.dtype if cast == "after_weight" else torch.promote_types(x.dtype, weight.dtype)
    out = torch.empty(x.shape, dtype=numbers if quant else dtype, device=x.device)
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    scale = None
    if quant == DYNAMIC:
        num_scales = -(-width // columns) if block else 1
        scale = torch.empty((*x.shape[:-1], num_scales), dtype=torch.float32, device=x.device)
    other, other_stride = (rows, stride) if residual is None else _rows(residual)
    if count:
        given: Any = out  # a pointer that is not read where there is nothing
        rms_norm_kernel[(count,)](
            rows, other, weight, given if static_scale is None else static_scale, out,
            given if total is None else total, given if scale is None else scale, width, stride, other_stride, eps,
            offset, float("inf") if largest is None else largest,
            ADDS=residual is not None, AFTER_WEIGHT=cast == "after_weight", QUANT=quant, GROUPS=groups,
            COLUMNS=columns, num_warps=num_warps(width),
        )  # fmt: skip
    return tuple(value for value in (out, scale, total) if value is not None)


def layout(width: int, block: int) -> tuple[int, int]:
    """(columns of a block, blocks) in which the kernel sees a row; both are powers of two."""
    columns = block or triton.next_power_of_2(width)
    return columns, triton.next_power_of_2(-(-width // columns))


def num_warps(width: int) -> int:
    """So that a thread holds 16 numbers or so: fewer leave it idle, many more spill."""
    return max(1, min(16, triton.next_power_of_2(width) // 512))


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """``x`` as rows whose columns lie side by side, and the distance between two."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    return rows, rows.stride(0)
