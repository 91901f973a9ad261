"""``rope``, ``qk_norm_rope`` and ``rope_kv_write`` on CUDA devices: one Triton kernel, a head of a token each program.

What the kernel is not made for (float64, tables or weights of another dtype) is computed by the operators' references.
Importing this needs no Triton; the first call on a CUDA device does.
"""

from __future__ import annotations

from typing import Any

import torch

from graphsrt import ops


def _rope(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, **how: Any) -> torch.Tensor:
    from graphsrt.lowering.kernels.rope.kernel import launch, supports

    if supports(x, x, positions, table) is not None:
        return ops.REFERENCE[ops.rope](x, positions, table, **how)
    return launch(x, x[:, :0], positions, table, **how)[0]


def _qk_norm_rope(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, positions: torch.Tensor,
    table: torch.Tensor, **how: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    from graphsrt.lowering.kernels.rope.kernel import launch, supports

    if supports(q, k, positions, table, q_weight, k_weight) is not None:
        return ops.REFERENCE[ops.qk_norm_rope](q, k, q_weight, k_weight, positions, table, **how)
    return launch(q, k, positions, table, q_weight=q_weight, k_weight=k_weight, **how)


def _rope_kv_write(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, table: torch.Tensor,
    kv_pool: torch.Tensor, out_cache_loc: torch.Tensor, **how: Any,
) -> torch.Tensor:  # fmt: skip
    from graphsrt.lowering.kernels.rope.kernel import launch_write, supports_write

    arguments = (q, k, v, positions, table, kv_pool, out_cache_loc)
    if supports_write(*arguments, **how) is not None:
        return ops.REFERENCE[ops.rope_kv_write](*arguments, **how)
    return launch_write(*arguments, **how)


for _target, _run in (
    (ops.rope, _rope), (ops.qk_norm_rope, _qk_norm_rope), (ops.rope_kv_write, _rope_kv_write),
):  # fmt: skip
    ops.register_kernel(_target, "cuda", _run)
