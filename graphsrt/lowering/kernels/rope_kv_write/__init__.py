"""``rope_kv_write`` on CUDA devices: one Triton kernel, a head of a token for each program.

What the kernel is not made for (float64, tables of another dtype) is computed by the operator's reference. Importing
this needs no Triton; the first call on a CUDA device does.
"""

from __future__ import annotations

from typing import Any

import torch

from graphsrt import ops


def _on_cuda(*tensors: torch.Tensor, **how: Any) -> torch.Tensor:
    from graphsrt.lowering.kernels.rope_kv_write.kernel import launch, supports

    if supports(*tensors, **how) is not None:
        return ops.REFERENCE[ops.rope_kv_write](*tensors, **how)
    return launch(*tensors, **how)


ops.register_kernel(ops.rope_kv_write, "cuda", _on_cuda)
