"""Linears whose weights and inputs are eight-bit floats: their operators, part of :mod:`graphsrt.ops`.

A value is stored as ``float8_e4m3fn`` numbers and float32 *scales*, and means their product. What a scale is for can be
told from its shape. ``scale``: one for everything (``[]`` or ``[1, 1]``), one for each row (``[…, T, 1]``), or one for
each *block* of columns (``[…, T, G]``, ``G = ceil(E / block)``, the last block may be short). The scales of a weight
``[O, E]`` have rows as well: one for all, one for each, or one for each block of ``block`` rows.

A rank that holds some columns of a divided width need not hold whole blocks: ``columns`` (int64 ``[E]``) says to which
block each of its columns belongs, and scales are those of all blocks.

Making a scale and using it are two operators, so that a scale over a divided width can be completed between them:
:func:`fp8_scale` of what each rank holds is ``P(max)``, and after ``all_reduce(op="max")`` all ranks round alike.

Other formats of few bits get operators of their own beside these; what they share is :func:`over_columns`.
Source: Micikevicius et al. 2022 (FP8 formats); blocks of 128 are DeepSeek-V3's (arXiv:2412.19437, section 3.3).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from graphsrt.ops import _define, compute_dtype

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest number of ``float8_e4m3fn``, which has no infinity."""
SMALLEST_AMAX = 1e-10
"""A row of zeros, or of less than this, is scaled as if this were its largest number: quotients stay finite."""


def over_columns(scale: torch.Tensor, width: int, block: int, columns: torch.Tensor | None) -> torch.Tensor:
    """``scale [..., 1 or G]`` so that it broadcasts over ``width`` columns. ValueError if it is for another width."""
    if scale.dim() == 0 or scale.shape[-1] == 1:
        return scale
    if columns is not None:
        return scale.index_select(-1, columns)
    groups = -(-width // block)
    if scale.shape[-1] != groups:
        raise ValueError(
            f"{scale.shape[-1]} scales for {width} columns in blocks of {block}: expected 1, or {groups} of them"
        )
    return scale.repeat_interleave(block, -1)[..., :width]


def over_rows(scale: torch.Tensor, height: int, block: int) -> torch.Tensor:
    """``scale [1, height or ceil(height / block), …]`` so that it broadcasts over ``height`` rows. ValueError else."""
    if scale.dim() == 0 or scale.shape[0] in (1, height):
        return scale
    groups = -(-height // block)
    if scale.shape[0] != groups:
        raise ValueError(
            f"{scale.shape[0]} rows of scales for {height} rows in blocks of {block}: expected 1, {groups} or {height}"
        )
    return scale.repeat_interleave(block, 0)[:height]


def _num_scales(x: torch.Tensor, block: int, columns: torch.Tensor | None, num_blocks: int | None) -> int:
    if (columns is None) != (num_blocks is None) or (columns is not None and not block):
        raise ValueError("columns, num_blocks and block are given together")
    return num_blocks if num_blocks is not None else -(-x.shape[-1] // block) if block else 1


@_define(
    "(Tensor x, *, int block=0, Tensor? columns=None, int? num_blocks=None, float? largest=None) -> Tensor",
    lambda x, *, block=0, columns=None, num_blocks=None, largest=None: x.new_empty(
        (*x.shape[:-1], _num_scales(x, block, columns, num_blocks)), dtype=torch.float32
    ),
)
def fp8_scale(
    x: torch.Tensor,
    *,
    block: int = 0,
    columns: torch.Tensor | None = None,
    num_blocks: int | None = None,
    largest: float | None = None,
) -> torch.Tensor:
    """The scale that makes the largest number of each row the largest of FP8: ``max(amax |x|, 1e-10) / 448``.

    ``x [..., E]`` -> float32 ``[..., 1]``; with ``block``, one for each block of columns, ``[..., ceil(E / block)]``.
    With ``columns [E]`` (int64, the block of each column), one for each of ``num_blocks``; a block of which no column
    is here gets the smallest scale, so that the maximum over ranks is the scale of all columns. ``largest``: what is
    larger counts as this, and saturates when it is quantised (FBGEMM's ``activation_scale_ub``).
    """
    size = x.abs().to(torch.float32)
    groups = _num_scales(x, block, columns, num_blocks)
    if columns is not None:
        index = columns.expand(size.shape)
        amax = size.new_zeros((*x.shape[:-1], groups)).scatter_reduce(-1, index, size, "amax", include_self=True)
    elif block:
        amax = F.pad(size, (0, groups * block - x.shape[-1])).unflatten(-1, (groups, block)).amax(-1)
    else:
        amax = size.amax(-1, keepdim=True)
    return amax.clamp(min=SMALLEST_AMAX, max=largest) / FP8_MAX


@_define(
    "(Tensor x, Tensor scale, *, int block=128, Tensor? columns=None) -> Tensor",
    lambda x, scale, *, block=128, columns=None: x.new_empty(x.shape, dtype=FP8),
)
def quantize_fp8(
    x: torch.Tensor, scale: torch.Tensor, *, block: int = 128, columns: torch.Tensor | None = None
) -> torch.Tensor:
    """``clamp(x / scale, -448, 448)`` rounded to ``float8_e4m3fn`` (to nearest, ties to even): ``[..., E]``.

    ``scale`` (float32) as at the top of this file; it divides in float32, or in float64 where ``x`` is float64. What is
    larger than 448 scales saturates; NaN stays NaN.
    """
    wide = x.to(compute_dtype(x.dtype))
    quotient = wide / over_columns(scale, x.shape[-1], block, columns).to(wide.dtype)
    return quotient.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def dequantize_fp8(
    w: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, block: int = 128, columns: torch.Tensor | None = None
) -> torch.Tensor:
    """What a stored weight ``w [O, E]`` means: each number times its scale, in ``dtype``."""
    both = over_columns(over_rows(scale, w.shape[0], block), w.shape[1], block, columns)
    return w.to(dtype) * both.to(dtype)


@_define(
    "(Tensor q, Tensor x_scale, Tensor w, Tensor w_scale, Tensor? bias=None, *, ScalarType out_dtype, int block=128, "
    "Tensor? columns=None) -> Tensor",
    lambda q, x_scale, w, w_scale, bias=None, *, out_dtype, block=128, columns=None: q.new_empty(
        (*q.shape[:-1], w.shape[0]), dtype=out_dtype
    ),
)
def fp8_linear(
    q: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype,
    block: int = 128,
    columns: torch.Tensor | None = None,
) -> torch.Tensor:
    """``(q · x_scale) @ (w · w_scale).T + bias`` for ``q [..., E]`` and ``w [O, E]`` in FP8 -> ``[..., O]``.

    Scales as at the top of this file; ``columns [E]`` is for the blocks of both. Products are summed in float32, or in
    float64 where ``out_dtype`` is float64, and rounded once, to ``out_dtype``, after the bias was added.
    """
    wide = compute_dtype(out_dtype)
    x = q.to(wide) * over_columns(x_scale, q.shape[-1], block, columns).to(wide)
    weight = dequantize_fp8(w, w_scale, wide, block=block, columns=columns)
    return F.linear(x, weight, None if bias is None else bias.to(wide)).to(out_dtype)
