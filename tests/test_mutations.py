"""Correct programs, broken in one place at random: what the verifier accepts is true of the numbers, always."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch

from graphsrt.check_placements import check_placements
from graphsrt.errors import CompileError
from graphsrt.passes import scatter_residual
from graphsrt.passes.runner import run
from graphsrt.program import Program
from graphsrt.simulate import load
from graphsrt.testing import RandomSource, checkpoint_shapes, example_inputs, result
from tests.support import captures
from tests.support.mutations import mutate, untrue

PROGRAMS: dict[str, dict[str, Any]] = {
    "qwen2": {"heads": 6, "kv_heads": 3, "tp": 2},  # padded heads, biases
    "gemma2": {"heads": 4, "kv_heads": 2, "tp": 4},  # replicated KV heads, sandwich norms, soft caps
    "qwen3": {"heads": 9, "kv_heads": 3, "tp": 3},  # per-head norms
    "olmo2": {"heads": 6, "kv_heads": 3, "tp": 2},  # norms over a divided width
    "mixtral": {"heads": 4, "kv_heads": 2, "tp": 3},  # experts and their router
    "gemma2, tokens divided": {"heads": 4, "kv_heads": 2, "tp": 3, "scattered": True},
    "gpt_neox": {"heads": 5, "kv_heads": 5, "tp": 2},  # parallel branches, layer norms
}
EACH = 100
TOKENS = 5


def outcome(original: Program, seed: int, source: RandomSource, wanted: torch.Tensor) -> tuple[str, str]:
    """What becomes of one mutation, and what it was."""
    program = original.copy()
    told = mutate(program, random.Random(seed))
    try:
        program.remove_dead()
        program.lint()
        program.infer()
        check_placements(program, record=True)
    except (CompileError, ValueError, RuntimeError, TypeError, IndexError) as error:
        return "refused" if isinstance(error, CompileError) else "not a program", told
    inputs = example_inputs(program, TOKENS)
    try:
        weights = load(program, source)
        got = result(program, inputs, weights)
    except (RuntimeError, IndexError, ValueError, KeyError) as error:
        return "cannot run", f"{told}: {error}"
    wrong = untrue(program, inputs, weights)
    if wrong is not None:
        return "untrue", f"{told}: {wrong}"
    same = got.shape == wanted.shape and torch.allclose(got, wanted, rtol=1e-9, atol=1e-12)
    return ("equal" if same else "other model"), told


def sharded(family: str, *, scattered: bool = False, **options: Any) -> Program:
    program = captures.stage("shard_tensor_parallel", family.partition(",")[0], **options)
    return run(program, [partial(scatter_residual, min_tokens=1)]).final if scattered else program


@pytest.mark.parametrize("family", PROGRAMS)
def test_what_is_accepted_is_true(family: str) -> None:
    """No mutation is both accepted and untrue: "other model" ones compute something else, but on every rank alike,
    which comparing with the program before (``graphsrt.verify``) tells, and no placement could."""
    original = sharded(family, **PROGRAMS[family])
    source = RandomSource(checkpoint_shapes(original))
    inputs = example_inputs(original, TOKENS)
    wanted = result(original, inputs, load(original, source))
    assert untrue(original, inputs, load(original, source)) is None
    counts: Counter[str] = Counter()
    for seed in range(EACH):
        kind, told = outcome(original, seed, source, wanted)
        assert kind != "untrue", told
        counts[kind] += 1
    print(f"\n{family}: {dict(counts)}")
    assert counts["refused"] + counts["not a program"] > EACH // 3
