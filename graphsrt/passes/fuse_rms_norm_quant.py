"""fuse_rms_norm_quant: a norm whose result is only read in FP8 rounds it at once.

    n, h = add_rms_norm(x, residual, weight); s = fp8_scale(n); q = quantize_fp8(n, s)
    → q, s, h = add_rms_norm_quant(x, residual, weight)

With or without a residual before the norm and a sum over ranks before that; by scales of each token, of each block of
columns, or by one that the checkpoint gives (``add_rms_norm_static_quant``). A norm that a router or anything else
reads as it is stays by itself, and a near miss names the reader.

Needs: quantize_linears, recognize_rms_norm.
Leaves: ``graphsrt::[all_reduce_][add_]rms_norm_[static_]quant``.
Numerics: exact; the norm is rounded to its dtype before it is scaled, as the operators by themselves do.
Source: ours; the fused kernels of vLLM and TensorRT-LLM.
"""

from __future__ import annotations

import operator
from typing import Any

import torch.fx as fx

from graphsrt import ops
from graphsrt.passes.joining import fuse_each
from graphsrt.passes.norm_forms import FORMS, grow, residual_sum, why_no_residual
from graphsrt.passes.rounding import Rounding, rounding_of
from graphsrt.program import NearMiss, Program, arguments, target_name

_GATED = (ops.silu_mul, ops.glu)
"""What fuse_silu_mul_quant is about."""


def fuse_rms_norm_quant(
    program: Program,
    *,
    limit: int | None = None,
    near_misses: list[NearMiss] | None = None,
    sites: list[fx.Node] | None = None,
) -> int:
    """Fuse wherever a value that is rounded to FP8 is the result of an RMS norm."""

    def fuse(quantized: fx.Node) -> fx.Node | str:
        found = _look(program, quantized)
        return found if isinstance(found, str) else _apply(program, *found)

    places = [node for node in program.calls(ops.quantize_fp8) if arguments(node)["x"].target not in _GATED]
    return fuse_each(places, fuse, limit, near_misses, sites)


def _look(program: Program, quantized: fx.Node) -> tuple[fx.Node, Rounding] | str:
    norm: Any = arguments(quantized)["x"]
    if norm.target is operator.getitem:
        norm = norm.args[0] if norm.args[1] == 0 else norm
    form = FORMS.get(norm.target)
    if form is None:
        made = target_name(norm.target) if norm.op == "call_function" else norm.name
        return f"what is rounded is no norm, but made by {made}"
    if form.kind != "rms_norm":
        return f"what is rounded is a {form.kind}, of which no operator rounds its result"
    found = rounding_of(program, quantized)
    return found if isinstance(found, str) else (norm, found)


def _apply(program: Program, norm: fx.Node, rounding: Rounding) -> fx.Node:
    """Takes an addition before the norm along, so that no order of passes loses it."""
    args, absorbed = dict(rounding.arguments), rounding.absorbed
    more: dict[str, Any] = {"quantizes": rounding.kind}
    total = None if FORMS[norm.target].adds else residual_sum(norm)
    if total is not None and why_no_residual(program, total, norm) is None:
        args |= {"x": arguments(total)["other"], "residual": arguments(total)["self"]}
        absorbed |= {"total": total}
        more["adds"] = True
    return grow(program, norm, args, "fuse_rms_norm_quant", absorbed=absorbed, **more)


def _expected(program: Program) -> int:
    return sum(not isinstance(_look(program, quantized), str) for quantized in program.calls(ops.quantize_fp8))


fuse_rms_norm_quant.expect = _expected  # type: ignore[attr-defined]
