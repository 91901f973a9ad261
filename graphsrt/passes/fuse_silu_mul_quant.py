"""fuse_silu_mul_quant: a SiLU gate whose result is only read in FP8 rounds it at once.

    y = silu_mul(gu); s = fp8_scale(y); q = quantize_fp8(y, s)  →  q, s = silu_mul_quant(gu)

The width of a gated unit is divided over ranks. Scales of blocks that lie on one rank, and one that the checkpoint
gives, are known there; a scale of a whole row is the maximum over ranks, so that all ranks round alike: an all_reduce
stands between its making and its use, nothing can be fused over it, and a near miss says so.

Needs: quantize_linears, fuse_silu_mul.
Leaves: ``graphsrt::silu_mul_[static_]quant``.
Numerics: exact; the product is rounded to its dtype before it is scaled, as the operators by themselves do.
Source: ours; the fused kernels of vLLM and SGLang.
"""

from __future__ import annotations

import torch.fx as fx

from graphsrt import ops
from graphsrt.passes.joining import fuse_each, join
from graphsrt.passes.rounding import Rounding, rounding_of
from graphsrt.program import NearMiss, Program, arguments

_FUSED = {"static": ops.silu_mul_static_quant, "dynamic": ops.silu_mul_quant}


def fuse_silu_mul_quant(
    program: Program,
    *,
    limit: int | None = None,
    near_misses: list[NearMiss] | None = None,
    sites: list[fx.Node] | None = None,
) -> int:
    """Fuse wherever a value that is rounded to FP8 is the result of ``silu_mul``."""

    def fuse(quantized: fx.Node) -> fx.Node | str:
        gated, found = arguments(quantized)["x"], _look(program, quantized)
        if isinstance(found, str):
            return found
        return join(
            program, _FUSED[found.kind], {"gate_up": arguments(gated)["gate_up"], **found.arguments},
            results=list(found.absorbed.values()), covered=[gated], before=gated, made_by="fuse_silu_mul_quant",
        )  # fmt: skip

    gates = (ops.silu_mul, ops.glu)
    places = [node for node in program.calls(ops.quantize_fp8) if arguments(node)["x"].target in gates]
    return fuse_each(places, fuse, limit, near_misses, sites)


def _look(program: Program, quantized: fx.Node) -> Rounding | str:
    gated = arguments(quantized)["x"]
    if gated.target is ops.glu:
        return f"its gate is glu(…, act={arguments(gated)['act']!r}), which fuse_silu_mul left as it is"
    return rounding_of(program, quantized)


def _expected(program: Program) -> int:
    nodes = [node for node in program.calls(ops.quantize_fp8) if arguments(node)["x"].target is ops.silu_mul]
    return sum(not isinstance(_look(program, node), str) for node in nodes)


fuse_silu_mul_quant.expect = _expected  # type: ignore[attr-defined]
