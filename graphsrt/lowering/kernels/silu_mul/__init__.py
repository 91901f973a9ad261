"""``silu_mul`` and its quantised forms on CUDA devices: one Triton kernel, a row for each program.

Rows that the kernel is not made for (float64, blocks that are no power of two, results of more than 32,768 columns) are
computed by the operators' references. Importing this needs no Triton; the first call on a CUDA device does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphsrt import ops


def _on_cuda(target: torch._ops.OpOverload) -> Callable[..., Any]:
    makes_scales = any(argument.name == "block" for argument in target._schema.arguments)

    def run(gate_up: torch.Tensor, scale: torch.Tensor | None = None, *, block: int = 0, **how: Any) -> Any:
        from graphsrt.lowering.kernels.silu_mul.kernel import launch, supports

        if supports(gate_up, block) is not None:
            given = (gate_up,) if scale is None else (gate_up, scale)
            return ops.REFERENCE[target](*given, **how, **({"block": block} if makes_scales else {}))
        results = launch(gate_up, static_scale=scale, block=block if makes_scales else None, **how)
        return results if len(results) > 1 else results[0]

    return run


for _target in (ops.silu_mul, ops.silu_mul_quant, ops.silu_mul_static_quant):
    ops.register_kernel(_target, "cuda", _on_cuda(_target))
