"""What Triton kernels of rows share: a program holds one row, and stores it as it is or rounded to FP8.

Importing this needs Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

FP8 = torch.float8_e4m3fn
NONE, STATIC, DYNAMIC = 0, 1, 2
"""How a row is rounded: not at all, by a scale that is given, or by scales of the row itself."""
MOST_COLUMNS = 32768
"""Of a row, which a program holds in registers."""


@triton.jit
def store_row(values, out_ptr, scale_ptr, given_ptr, row, width, largest, QUANT: tl.constexpr, GROUPS: tl.constexpr,
              COLUMNS: tl.constexpr):  # fmt: skip
    """Store a row of ``width`` columns, seen as ``GROUPS`` blocks of ``COLUMNS``, the last may be short."""
    column = tl.arange(0, GROUPS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = column < width
    if QUANT == 0:
        tl.store(out_ptr + row * width + column, values.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        wide = values.to(tl.float32)
        if QUANT == 1:
            scale = tl.full((GROUPS, 1), 1.0, tl.float32) * tl.load(given_ptr)
        else:
            amax = tl.max(tl.abs(wide), axis=1, keep_dims=True)
            scale = tl.div_rn(tl.minimum(tl.maximum(amax, 1e-10), largest), 448.0)
            group = tl.arange(0, GROUPS)[:, None]
            count = tl.cdiv(width, COLUMNS)
            tl.store(scale_ptr + row * count + group, scale, mask=group < count)
        quotient = tl.div_rn(wide, scale.broadcast_to((GROUPS, COLUMNS)))
        clamped = tl.minimum(tl.maximum(quotient, -448.0, tl.PropagateNan.ALL), 448.0, tl.PropagateNan.ALL)
        tl.store(out_ptr + row * width + column, clamped.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Stored:
    """Where rows are stored: ``out``, the ``scale`` that is made, and the kernel's constants and pointers for both."""

    out: torch.Tensor
    scale: torch.Tensor | None
    given: torch.Tensor
    largest: float
    constants: dict[str, int]

    @property
    def pointers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``out_ptr``, ``scale_ptr``, ``given_ptr``; one that is not read is that of ``out``."""
        return self.out, self.out if self.scale is None else self.scale, self.given


def stored(
    like: torch.Tensor,
    width: int,
    dtype: torch.dtype,
    *,
    static_scale: torch.Tensor | None,
    block: int | None,
    largest: float | None,
    numbers: torch.dtype,
) -> Stored:
    """Memory for rows of ``width`` columns as many as ``like`` has, in ``dtype`` or rounded.

    ``static_scale``: round by it; ``block``: by scales of blocks, 0 for one of each row. ``numbers``: what rounded
    values are stored as.
    """
    quant = STATIC if static_scale is not None else NONE if block is None else DYNAMIC
    columns, groups = layout(width, block or 0)
    shape = like.shape[:-1]
    out = torch.empty((*shape, width), dtype=numbers if quant else dtype, device=like.device)
    scale = None
    if quant == DYNAMIC:
        scale = torch.empty((*shape, -(-width // columns) if block else 1), dtype=torch.float32, device=like.device)
    constants = {"QUANT": quant, "GROUPS": groups, "COLUMNS": columns, "num_warps": num_warps(width)}
    given = out if static_scale is None else static_scale
    return Stored(out, scale, given, float("inf") if largest is None else largest, constants)


def unsupported(x: torch.Tensor, width: int, block: int) -> str | None:
    """Why a program cannot hold such a row; None if it can."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"rows are {x.dtype}"
    if block and block & (block - 1):
        return f"blocks of {block} columns are no power of two"
    if width > MOST_COLUMNS:
        return f"rows have {width} columns, more than {MOST_COLUMNS}"
    return None


def layout(width: int, block: int) -> tuple[int, int]:
    """(columns of a block, blocks) in which a kernel sees a row; both are powers of two."""
    columns = block or triton.next_power_of_2(width)
    return columns, triton.next_power_of_2(-(-width // columns))


def num_warps(width: int) -> int:
    """So that a thread holds 16 numbers or so: fewer leave it idle, many more spill."""
    return max(1, min(16, triton.next_power_of_2(width) // 512))


def as_rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """``x`` as rows whose columns lie side by side, and the distance between two."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    return rows, rows.stride(0)
