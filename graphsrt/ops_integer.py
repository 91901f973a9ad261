"""Linears whose weights are integers of 8 or 4 bits: their operators, part of :mod:`graphsrt.ops`.

Inputs and results stay as they are; only what is read of the weight shrinks. How the integers lie, and what they stand
for, says :mod:`graphsrt.integer_weights`. Source: LLM.int8() (arXiv:2208.07339) for scales of rows, GPTQ
(arXiv:2210.17323) for groups of columns; here weights are rounded to the nearest number.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from graphsrt.integer_weights import from_int4, from_int8
from graphsrt.ops import _define, compute_dtype


@_define(
    "(Tensor x, Tensor q, Tensor scales, Tensor? bias=None) -> Tensor",
    lambda x, q, scales, bias=None: x.new_empty((*x.shape[:-1], q.shape[0])),
)
def int8_linear(
    x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x @ (q · scales).T + bias`` for ``x [..., K]``, int8 ``q [N, K]`` and float32 ``scales [N]`` -> ``[..., N]``.

    Products are summed in float32, or in float64 where ``x`` is float64, and rounded once, to the dtype of ``x``, after
    the bias was added.
    """
    return _product(x, from_int8(q, scales), bias)


@_define(
    "(Tensor x, Tensor q, Tensor pairs, Tensor? bias=None) -> Tensor",
    lambda x, q, pairs, bias=None: x.new_empty((*x.shape[:-1], q.shape[0])),
)
def int4_linear(
    x: torch.Tensor, q: torch.Tensor, pairs: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x @ w.T + bias`` for ``x [..., K]`` and the ``w [N, K]`` of four bits that ``q`` and ``pairs`` stand for.

    ``q``: packed uint8 ``[N, ceil(K / 64) · 32]``; ``pairs``: bfloat16 ``[N, K / 32, 2]``, scales and offsets. Sums and
    rounding as in :func:`int8_linear`; -> ``[..., N]``.
    """
    return _product(x, from_int4(q, pairs), bias)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    wide = compute_dtype(x.dtype)
    return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)).to(x.dtype)
