"""Load one rank's weights: evaluate every recipe, reading only the bytes that the rank keeps."""

from __future__ import annotations

from collections.abc import Callable

import torch

from graphsrt.errors import CheckpointError, explain
from graphsrt.program import Program
from graphsrt.recipes import TensorSource, evaluate


def load_weights(
    program: Program,
    rank: int,
    source: TensorSource,
    *,
    device: str = "cpu",
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, torch.Tensor]:
    """The program's weights on ``rank``, by name: local shape, contiguous, owned by the caller.

    ``progress(done, total, label)`` counts weights. CheckpointError if a recipe gives another shape than declared.
    """
    weights: dict[str, torch.Tensor] = {}
    for number, (name, weight) in enumerate(program.weights.items(), start=1):
        value = evaluate(weight.recipe, rank, source, weight.dtype)
        if tuple(value.shape) != tuple(weight.shape):
            raise CheckpointError(
                explain(f"weight {name} has another shape than its recipe promises", where=f"rank {rank}",
                        expected=str(list(weight.shape)), got=str(list(value.shape)))
            )  # fmt: skip
        # what was read may be mapped memory or the caller's own tensor; a rank owns its weights
        weights[name] = value.to(device, copy=True)
        if progress is not None:
            progress(number, len(program.weights), name)
    return weights
