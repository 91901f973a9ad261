"""``rms_norm`` and the operators that fusions make of it, on CUDA devices: one Triton kernel, a row for each program.

Rows that the kernel is not made for (float64, blocks that are no power of two, rows of more than 32,768 columns) are
computed by the operators' references. Importing this needs no Triton; the first call on a CUDA device does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphsrt import ops


def _on_cuda(target: torch._ops.OpOverload) -> Callable[..., Any]:
    names = [argument.name for argument in target._schema.arguments if not argument.kwarg_only]
    makes_scales = any(argument.name == "block" for argument in target._schema.arguments)

    def run(*tensors: torch.Tensor, block: int = 0, **how: Any) -> Any:
        from graphsrt.lowering.kernels.rms_norm.kernel import launch, supports

        given = dict(zip(names, tensors))
        if supports(given["x"], given["weight"], block) is not None:
            return ops.REFERENCE[target](*tensors, **how, **({"block": block} if makes_scales else {}))
        results = launch(
            given["x"], given["weight"], residual=given.get("residual"), static_scale=given.get("scale"),
            block=block if makes_scales else None, **how,
        )  # fmt: skip
        return results if len(results) > 1 else results[0]

    return run


for _target in (
    ops.rms_norm, ops.add_rms_norm, ops.rms_norm_quant, ops.rms_norm_static_quant, ops.add_rms_norm_quant,
    ops.add_rms_norm_static_quant,
):  # fmt: skip
    ops.register_kernel(_target, "cuda", _on_cuda(_target))
