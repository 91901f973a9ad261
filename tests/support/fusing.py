"""What the tests of fusions share: numbers with padding rows and poisoned memory, and the engine with and without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.utils.deterministic

from graphsrt.program import Program
from graphsrt.simulate import load, simulate
from graphsrt.testing import RandomSource, checkpoint_shapes, example_inputs, whole
from tests.support import captures, tiny

PADDING = 3


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, memory that an operator allocates without filling it holds NaN (or the largest integer)."""
    was = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def counts(tp: int) -> list[int]:
    """Numbers of tokens around the number of ranks."""
    return sorted({1, max(tp - 1, 1), tp, tp + 1, 37})


def check_padding(before: Program, after: Program, tokens: Sequence[int]) -> None:
    """Both programs compute the same bits, with rows of NaN after the real ones and without, and these rows change none
    of the others beyond what a matrix product of another height rounds differently."""
    source = RandomSource(checkpoint_shapes(before, after))
    weights = [load(program, source) for program in (before, after)]
    with poisoned():
        for count in tokens:
            found = []
            for program, loaded in zip((before, after), weights):
                inputs = example_inputs(program, count)
                rows = {name for name, item in program.inputs.items() if item.shape[:1] == ("T",)}
                padded = {name: _pad(x) if name in rows else x for name, x in inputs.items()}
                found += [result_rows(program, given, loaded, count) for given in (inputs, padded)]
            alone, with_padding, fused_alone, fused_with_padding = found
            assert torch.equal(alone, fused_alone), f"{count} tokens"
            assert torch.equal(with_padding, fused_with_padding), f"{count} tokens and {PADDING} rows of padding"
            # float64 or float32 sums of a few terms in another order
            assert torch.allclose(alone, with_padding, rtol=1e-5, atol=1e-6), f"{count} tokens: padding reaches them"


def result_rows(program: Program, inputs: dict, weights: dict, count: int) -> torch.Tensor:
    """The first ``count`` rows of what a program returns, from all simulated ranks."""
    place = program.output.meta.get("placement")
    values = [value[:count] for value in simulate(program, inputs, weights)]
    assert all(torch.isfinite(value).all() for value in values)
    return whole(values, place)


def _pad(x: torch.Tensor) -> torch.Tensor:
    fill = float("nan") if x.is_floating_point() else 0
    return torch.cat([x, torch.full((PADDING, *x.shape[1:]), fill, dtype=x.dtype)])


def check_engine(name: str, family: str, tp: int = 2) -> None:
    """Through the engine, a tiny model of the family computes the same bits with the fusion and without it."""
    fused = captures.compiled(family, 4, 2, tp)
    plain = captures.compiled(family, 4, 2, tp, options=(("without", (name,)),))
    reports = {report.name: report for report in fused.program().history}
    assert reports[name].fired > 0 and name not in {report.name for report in plain.program().history}
    ids = tiny.tokens(7)
    with poisoned():
        assert torch.equal(fused.logits(ids), plain.logits(ids))
