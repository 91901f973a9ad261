"""The Triton kernel behind silu_mul and its quantised forms: both halves are read once, the product written once.

Numbers are those of the references: the gate's activation is rounded to its dtype, and so is the product, before it is
quantised.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphsrt.lowering.kernels.rows import FP8, as_rows, store_row, stored, unsupported


@triton.jit
def silu_mul_kernel(
    x_ptr, out_ptr, scale_ptr, given_ptr, width, x_stride, largest,
    QUANT: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One row: ``width`` columns of the gate, and as many that it is multiplied with."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, GROUPS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = column < width
    gate = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * x_stride + width + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    product = (active.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    store_row(product, out_ptr, scale_ptr, given_ptr, row, width, largest, QUANT, GROUPS, COLUMNS)


def supports(gate_up: torch.Tensor, block: int = 0) -> str | None:
    """None if the kernel computes rows like these, else why it does not."""
    return unsupported(gate_up, gate_up.shape[-1] // 2, block)


def launch(
    gate_up: torch.Tensor,
    *,
    static_scale: torch.Tensor | None = None,
    block: int | None = None,
    largest: float | None = None,
    numbers: torch.dtype = FP8,
) -> tuple[torch.Tensor, ...]:
    """``silu(gate) · up`` of rows ``[..., 2F]``: ``(products or numbers [..., F], scale?)``, as the operators return.

    Options and errors are those of :func:`graphsrt.lowering.kernels.rms_norm.kernel.launch`.
    """
    reason = supports(gate_up, block or 0)
    if reason is not None:
        raise ValueError(f"the kernel of silu_mul does not serve this: {reason}")
    rows, stride = as_rows(gate_up)
    width = gate_up.shape[-1] // 2
    made = stored(
        gate_up, width, gate_up.dtype, static_scale=static_scale, block=block, largest=largest, numbers=numbers
    )
    if rows.shape[0]:
        silu_mul_kernel[(rows.shape[0],)](rows, *made.pointers, width, stride, made.largest, **made.constants)
    return (made.out,) if made.scale is None else (made.out, made.scale)
