"""A norm to length one; and norms in pieces, for a width that is divided among ranks: each rank's share of a row's
sums, and the norm given them.

``owned [E_local]`` is one where this rank owns the channel and zero where it holds a copy or a pad of it, so that sums
over ranks count each channel once; None where every channel is owned. ``width`` is the whole width ``E``.
"""

from __future__ import annotations

import torch

from graphsrt.ops import _define, compute_dtype, normed_like


def _one_per_row(x: torch.Tensor, *rest: torch.Tensor | None, width: int = 0) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], 1), dtype=compute_dtype(x.dtype))


@_define("(Tensor x, *, float eps) -> Tensor", lambda x, *, eps: x.new_empty(x.shape))
def l2_norm(x: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Each row of the last dimension divided by its length: ``x / sqrt(sum(x²) + eps)``, accumulated in float32 or
    wider (nGPT, Loshchilov et al. 2024)."""
    wide = x.to(compute_dtype(x.dtype))
    return (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + eps)).to(x.dtype)


@_define("(Tensor x, Tensor? owned) -> Tensor", _one_per_row)
def row_sum(x: torch.Tensor, owned: torch.Tensor | None) -> torch.Tensor:
    """This rank's share of the sum of each row: ``[…, E_local] -> […, 1]`` in float32, or float64 of float64."""
    wide = x.to(compute_dtype(x.dtype))
    return (wide if owned is None else wide * owned).sum(-1, keepdim=True)


@_define("(Tensor x, Tensor? owned, Tensor? total=None, *, int width) -> Tensor", _one_per_row)
def sum_of_squares(
    x: torch.Tensor, owned: torch.Tensor | None, total: torch.Tensor | None = None, *, width: int
) -> torch.Tensor:
    """This rank's share of the sum of squares of each row, around the mean ``total / width`` where ``total`` is given:
    ``[…, E_local] -> […, 1]`` in float32, or float64 of float64."""
    wide = x.to(compute_dtype(x.dtype))
    squares = (wide if total is None else wide - total / width).square()
    return (squares if owned is None else squares * owned).sum(-1, keepdim=True)


@_define(
    "(Tensor x, Tensor squares, Tensor weight, *, int width, float eps, str cast, float offset=0.0) -> Tensor",
    lambda x, squares, weight, *, width, eps, cast, offset=0.0: normed_like(x, weight, cast),
)
def rms_norm_of(
    x: torch.Tensor,
    squares: torch.Tensor,
    weight: torch.Tensor,
    *,
    width: int,
    eps: float,
    cast: str,
    offset: float = 0.0,
) -> torch.Tensor:
    """:func:`graphsrt.ops.rms_norm` of this rank's channels, given the whole sum of squares ``[…, 1]`` of each row."""
    wide = x.to(squares.dtype)
    normed = wide * torch.rsqrt(squares / width + eps)
    if cast == "before_weight":
        return weight * normed.to(x.dtype)
    scale = weight.to(wide.dtype)
    if offset:
        scale = scale + offset
    return (normed * scale).to(x.dtype)


@_define(
    "(Tensor x, Tensor squares, *, float eps) -> Tensor", lambda x, squares, *, eps: x.new_empty(x.shape)
)  # fmt: skip
def l2_norm_of(x: torch.Tensor, squares: torch.Tensor, *, eps: float) -> torch.Tensor:
    """:func:`l2_norm` of this rank's channels, given the whole sum of squares ``[…, 1]`` of each row."""
    return (x.to(squares.dtype) * torch.rsqrt(squares + eps)).to(x.dtype)


@_define(
    "(Tensor x, Tensor total, Tensor squares, Tensor? weight, Tensor? bias, *, int width, float eps) -> Tensor",
    lambda x, total, squares, weight, bias, *, width, eps: x.new_empty(x.shape),
)
def layer_norm_of(
    x: torch.Tensor,
    total: torch.Tensor,
    squares: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    width: int,
    eps: float,
) -> torch.Tensor:
    """Layer norm (Ba et al. 2016) of this rank's channels, given each row's whole sum and sum of squares around the
    mean, both ``[…, 1]``."""
    wide = x.to(squares.dtype)
    normed = (wide - total / width) * torch.rsqrt(squares / width + eps)
    if weight is not None:
        normed = normed * weight
    if bias is not None:
        normed = normed + bias
    return normed.to(x.dtype)
