"""The Triton kernel behind rms_norm, add_rms_norm and their quantised forms: a row is read once and written once.

Numbers are those of the references in ``ops.py`` and ``ops_fused_fp8.py``: the sum is rounded to its dtype before the
norm reads it, the norm accumulates in float32 and is rounded before it is quantised. Sums over a row are in another
order, so results may differ by a rounding of the dtype. Rows of NaN touch no other row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphsrt.lowering.kernels.rows import FP8, as_rows, store_row, stored, unsupported


@triton.jit
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, scale_ptr, given_ptr, total_ptr, width, x_stride, residual_stride, eps,
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
    store_row(normed, out_ptr, scale_ptr, given_ptr, row, width, largest, QUANT, GROUPS, COLUMNS)


def supports(x: torch.Tensor, weight: torch.Tensor, block: int = 0) -> str | None:
    """None if the kernel computes rows like these, else why it does not."""
    if weight.dtype not in (x.dtype, torch.float32) and x.dtype != torch.float64:
        return f"rows are {x.dtype} and the weight is {weight.dtype}"
    return unsupported(x, x.shape[-1], block)


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
    rows, stride = as_rows(x)
    dtype = x.dtype if cast == "after_weight" else torch.promote_types(x.dtype, weight.dtype)
    made = stored(
        x, x.shape[-1], dtype, static_scale=static_scale, block=block, largest=largest, numbers=numbers
    )  # fmt: skip
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    other, other_stride = (rows, stride) if residual is None else as_rows(residual)
    if rows.shape[0]:
        rms_norm_kernel[(rows.shape[0],)](
            rows, other, weight, *made.pointers, made.out if total is None else total, x.shape[-1], stride,
            other_stride, eps, offset, made.largest, ADDS=residual is not None, AFTER_WEIGHT=cast == "after_weight",
            **made.constants,
        )  # fmt: skip
    return tuple(value for value in (made.out, made.scale, total) if value is not None)
