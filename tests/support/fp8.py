"""Programs whose matrices are stored in FP8, and random checkpoints for them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import replace

import torch

from graphsrt.program import Program
from graphsrt.recipes import Ckpt, DequantFp8
from graphsrt.testing import RandomSource, checkpoint_shapes

BLOCK = 16
SCHEMES = ("static", "token", "block")
"""One scale for a matrix and its inputs; one for each row and token; one for each block of both."""


def stored(program: Program, scheme: str, *, skip: Iterable[str] = (), block: int = BLOCK) -> Program:
    """A copy in which every matrix is stored as ``scheme`` says; matrices with one input share its static scale."""
    made = program.copy()
    for name, weight in made.weights.items():
        if len(weight.shape) != 2 or name in skip:
            continue
        rows, columns = weight.shape
        blocks = {"static": (rows, columns), "token": (1, columns), "block": (block, block)}[scheme]
        given = Ckpt(f"input of {columns}.input_scale") if scheme == "static" else None
        recipe = DequantFp8(Ckpt(name), Ckpt(f"{name}_scale"), (rows, columns), blocks, scheme, given)
        made.weights[name] = replace(weight, recipe=recipe)
    return made


class Source(RandomSource):
    """Scales are positive, and no number saturates: random inputs are less than 448 input scales."""

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> torch.Tensor:
        if name.endswith("scale") and name not in self._tensors:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            value = 0.5 + torch.rand(self.shapes[name], generator=generator)
            self._tensors[name] = value * 0.03 if "input" in name else value
        return super().read(name, slices)


def source(program: Program) -> Source:
    return Source(checkpoint_shapes(program))
