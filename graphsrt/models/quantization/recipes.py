"""A captured program is told how its weights are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from graphsrt.models.quantization.scales import Stored
from graphsrt.program import Program
from graphsrt.recipes import Ckpt, DequantFp8


def mark_stored(program: Program, stored: Mapping[str, Stored]) -> None:
    """Every weight of a module in ``stored`` becomes its numbers times its scales; nothing else changes."""
    for name, weight in program.weights.items():
        module, _, leaf = name.rpartition(".")
        how = stored.get(module)
        if leaf != "weight" or how is None or weight.recipe != Ckpt(name):
            continue
        rows, columns = weight.shape
        recipe = DequantFp8(
            Ckpt(name), Ckpt(f"{module}.weight_scale"), (rows, columns), how.scheme.block_of(weight.shape),
            how.scheme.inputs, None if how.input_scale is None else Ckpt(how.input_scale), how.scheme.largest,
        )  # fmt: skip
        program.weights[name] = replace(weight, recipe=recipe)
