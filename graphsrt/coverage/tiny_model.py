"""A tiny random model whose numbers show a mistake: nothing zero, nothing one, attention that attends unevenly."""

from __future__ import annotations

import math
from typing import Any

import torch

from graphsrt.coverage.architectures import model_class
from graphsrt.coverage.tiny_config import EVEN, VOCAB, Sizes, tiny_config

_GAIN = 1.5
"""Factor on matrices: scores of attention spread over several units, so that a window, a cap or a scale shows."""


def tiny_model(model_type: str, sizes: Sizes = EVEN) -> Any:
    """The model in float64 with random weights, which computes as transformers' eager code does."""
    config = tiny_config(model_type, sizes)
    torch.manual_seed(0)
    model = model_class(model_type)(config).double().eval()
    model.set_attn_implementation("eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    randomize(model)
    return model


def randomize(model: torch.nn.Module, seed: int = 1) -> None:
    """Matrices keep the size of what they multiply, times a gain; embeddings N(0, 1); biases N(0, 0.5), also those kept
    as buffers; norm weights and other vectors N(0.7, 0.3), times the number that the class fills them with: scales of
    nGPT start at 0.02 and are multiplied by 1 / 0.02 when used; at 0.7 they would make scores of ten thousand."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    stored = set(model.state_dict())
    buffers = ((n, b) for n, b in model.named_buffers() if n in stored and b.is_floating_point())
    with torch.no_grad():
        for name, tensor in sorted([*model.named_parameters(), *buffers]):
            values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            if id(tensor) not in embeddings:
                if "bias" in name.rpartition(".")[2]:
                    values = values * 0.5
                elif tensor.dim() < 2 or min(tensor.shape) == 1:
                    values = (values * 0.3 + 0.7) * _filled_with(tensor)
                else:
                    values = values * _GAIN / math.sqrt(tensor.shape[-1])
            tensor.copy_(values.to(tensor.dtype))


def _filled_with(tensor: torch.Tensor) -> float:
    """The one number that is everywhere in a vector; 1 for zeros, and for vectors of several numbers."""
    first = float(tensor.flatten()[0])
    return first if first and bool((tensor == first).all()) else 1.0


def tiny_tokens(count: int, seed: int = 0) -> list[int]:
    """Random token ids that are no special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB - 2, (count,), generator=generator).tolist()


@torch.no_grad()
def eager_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """transformers' own logits ``[T, V]`` of one sequence."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()


def worst(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference, relative to the largest wanted value; infinite where shapes differ or anything is NaN.

    Infinities (a masked part of the vocabulary) have to be the same.
    """
    if got.shape != want.shape or torch.isnan(got).any() or torch.isnan(want).any():
        return math.inf
    finite = torch.isfinite(want)
    if not torch.equal(finite, torch.isfinite(got)) or not torch.equal(got[~finite], want[~finite].to(got.dtype)):
        return math.inf
    return float((got.double() - want.double())[finite].abs().max() / want.double()[finite].abs().max())
