"""Text is the program: what parses back from it gives bitwise the same numbers, at every stage of every tiny model."""

from __future__ import annotations

import pytest
import torch

import graphsrt
from graphsrt import testing
from graphsrt.program import Program
from graphsrt.simulate import load, simulate
from tests.support import tiny


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_every_stage_runs_from_its_text(family: str) -> None:
    traced = graphsrt.trace(
        tiny.config(family, 6, 2), tp=4, dtype=torch.float64
    )  # replicated KV heads, padded query heads
    for name, program in traced.stages.programs:
        again = Program.from_text(str(program))
        assert str(again) == str(program), name
        source = testing.RandomSource(testing.checkpoint_shapes(program))
        for tokens in (1, 5):
            inputs = testing.example_inputs(program, tokens)
            twins = testing.example_inputs(again, tokens)
            one = simulate(program, inputs, load(program, source))
            two = simulate(again, twins, load(again, source))
            assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True)), name
