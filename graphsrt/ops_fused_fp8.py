"""Norms and gated units whose results are quantised to FP8: fused operators, part of :mod:`graphsrt.ops`.

``*_quant`` make a scale of the values themselves (``block=0``: one for each row; ``block``: one for each block of
columns, the last may be short; ``largest`` as in :func:`graphsrt.ops_fp8.fp8_scale`) and return it beside the numbers;
``*_static_quant`` are given one scale for everything. All are what ``fp8_scale`` and ``quantize_fp8`` make of the
result of the operator without the suffix, which is rounded to its dtype before.
"""

from __future__ import annotations

import torch

from graphsrt.ops import REFERENCE, _define, add_rms_norm, normed_like, rms_norm, silu_mul
from graphsrt.ops_fp8 import FP8, fp8_scale, quantize_fp8
from graphsrt.ops_fused import _after_all_reduce

Quantised = tuple[torch.Tensor, torch.Tensor]
"""Numbers in ``float8_e4m3fn``, shaped as the values, and their float32 scales."""
_NORM = "float eps, str cast, float offset=0.0"
_SCALE = "int block=0, float? largest=None"


def _dynamic(x: torch.Tensor, block: int, largest: float | None) -> Quantised:
    scale = REFERENCE[fp8_scale](x, block=block, largest=largest)
    return REFERENCE[quantize_fp8](x, scale, block=block or x.shape[-1]), scale


def _rounded_like(value: torch.Tensor, block: int | None) -> tuple[torch.Tensor, ...]:
    """Shapes of a value's numbers and, unless ``block`` is None, of its scales."""
    numbers = value.new_empty(value.shape, dtype=FP8)
    if block is None:
        return (numbers,)
    scales = -(-value.shape[-1] // block) if block else 1
    return numbers, value.new_empty((*value.shape[:-1], scales), dtype=torch.float32)


@_define(
    f"(Tensor x, Tensor weight, *, {_NORM}, {_SCALE}) -> (Tensor, Tensor)",
    lambda x, weight, *, cast, block=0, **_: _rounded_like(normed_like(x, weight, cast), block),
)
def rms_norm_quant(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, cast: str, offset: float = 0.0, block: int = 0,
    largest: float | None = None,
) -> Quantised:  # fmt: skip
    """``rms_norm(x)`` in FP8, and its scale: ``[T, E]`` and ``[T, 1 or blocks]``."""
    return _dynamic(REFERENCE[rms_norm](x, weight, eps=eps, cast=cast, offset=offset), block, largest)


@_define(
    f"(Tensor x, Tensor weight, Tensor scale, *, {_NORM}) -> Tensor",
    lambda x, weight, scale, *, cast, **_: _rounded_like(normed_like(x, weight, cast), None)[0],
)
def rms_norm_static_quant(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *, eps: float, cast: str, offset: float = 0.0
) -> torch.Tensor:
    """``rms_norm(x)`` in FP8 by the one ``scale`` given."""
    return REFERENCE[quantize_fp8](REFERENCE[rms_norm](x, weight, eps=eps, cast=cast, offset=offset), scale)


@_define(
    f"(Tensor x, Tensor residual, Tensor weight, *, {_NORM}, {_SCALE}) -> (Tensor, Tensor, Tensor)",
    lambda x, residual, weight, *, cast, block=0, **_: (
        *_rounded_like(normed_like(x, weight, cast), block),
        residual.new_empty(residual.shape),
    ),
)
def add_rms_norm_quant(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float, cast: str, offset: float = 0.0,
    block: int = 0, largest: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The norm of ``total = residual + x`` in FP8, its scale, and ``total``."""
    normed, total = REFERENCE[add_rms_norm](x, residual, weight, eps=eps, cast=cast, offset=offset)
    return (*_dynamic(normed, block, largest), total)


@_define(
    f"(Tensor x, Tensor residual, Tensor weight, Tensor scale, *, {_NORM}) -> (Tensor, Tensor)",
    lambda x, residual, weight, scale, *, cast, **_: (
        *_rounded_like(normed_like(x, weight, cast), None),
        residual.new_empty(residual.shape),
    ),
)
def add_rms_norm_static_quant(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *, eps: float, cast: str,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The norm of ``total = residual + x`` in FP8 by the one ``scale`` given, and ``total``."""
    normed, total = REFERENCE[add_rms_norm](x, residual, weight, eps=eps, cast=cast, offset=offset)
    return REFERENCE[quantize_fp8](normed, scale), total


all_reduce_add_rms_norm_quant = _after_all_reduce(add_rms_norm_quant)
all_reduce_add_rms_norm_static_quant = _after_all_reduce(add_rms_norm_static_quant)


def _half(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


@_define(
    f"(Tensor gate_up, *, {_SCALE}) -> (Tensor, Tensor)",
    lambda gate_up, *, block=0, **_: _rounded_like(_half(gate_up), block),
)
def silu_mul_quant(gate_up: torch.Tensor, *, block: int = 0, largest: float | None = None) -> Quantised:
    """``silu(gate) · up`` of the two halves of ``[T, 2F]`` in FP8, ``[T, F]``, and its scale."""
    return _dynamic(REFERENCE[silu_mul](gate_up), block, largest)


@_define("(Tensor gate_up, Tensor scale) -> Tensor", lambda gate_up, scale: _rounded_like(_half(gate_up), None)[0])
def silu_mul_static_quant(gate_up: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``silu(gate) · up`` of the two halves of ``[T, 2F]`` in FP8 by the one ``scale`` given."""
    return REFERENCE[quantize_fp8](REFERENCE[silu_mul](gate_up), scale)
