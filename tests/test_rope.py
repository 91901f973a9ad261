"""Every rope through the whole pipeline, against transformers, on both sides of the length where it changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphsrt
from graphsrt.errors import CompileError
from graphsrt.recipes import RopeTable
from tests.support import tiny
from tests.support.captures import shared

ORIGINAL = 16  # the length that a model was trained with, before its rope was stretched
HALF = tiny.HEAD_SIZE // 2
YARN = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL, "beta_fast": 32.0, "beta_slow": 1.0}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL}
FIXED: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.5},
    "yarn": YARN,
    "llama3": LLAMA3,
}


def model_of(family: str, kind: str, parameters: dict[str, Any], **extra: Any) -> Any:
    rope = {"rope_type": kind, "rope_theta": 1000.0, **parameters}
    return tiny.build(family, layers=2, rope_parameters=rope, **extra)


def compiled(net: Any, context_length: int) -> graphsrt.CompiledModel:
    return graphsrt.compile(net, tp=2, ranks="simulated", dtype=torch.float64, context_length=context_length)


def tables(program: graphsrt.Program) -> list[RopeTable]:
    return [w.recipe for w in program.weights.values() if isinstance(w.recipe, RopeTable)]


@pytest.mark.parametrize("kind", FIXED)
def test_fixed(kind: str) -> None:
    """Ropes that do not depend on the length: short and long sequences, and one table for both layers."""
    net = model_of("llama", kind, FIXED[kind])
    model = compiled(net, 40)
    for count in (1, ORIGINAL - 3, 40):
        ids = tiny.tokens(count)
        assert tiny.worst(model.logits(ids), tiny.eager_logits(net, ids)) <= 1e-5
    (table,) = tables(model.program())
    assert table.max_positions == 40 and len(table.inv_freq) == HALF
    assert (table.scaling != 1.0) == (kind == "yarn")


@pytest.mark.parametrize("context", [12, 40])
def test_dynamic(context: int) -> None:
    """Fixed once from the engine's context length, on either side of the length that the model was trained with.

    transformers takes the frequencies from the sequence at hand, so only a sequence as long as the context agrees.
    """
    net = model_of("llama", "dynamic", {"factor": 3.0}, max_position_embeddings=ORIGINAL)
    model = compiled(net, context)
    ids = tiny.tokens(context)
    assert tiny.worst(model.logits(ids), tiny.eager_logits(net, ids)) <= 1e-5
    (table,) = tables(model.program())
    plain = [1000.0 ** (-2 * i / tiny.HEAD_SIZE) for i in range(HALF)]
    assert (table.inv_freq == pytest.approx(plain, rel=1e-5)) == (context <= ORIGINAL)


@pytest.mark.parametrize("context", [12, 40])
def test_longrope(context: int) -> None:
    """Short factors up to the original length, long ones beyond; both with the scaling of attention."""
    rotated = 3  # half of the 12 channels of a head, in pairs
    parameters: dict[str, Any] = {
        "short_factor": [1.0 + 0.3 * i for i in range(rotated)],
        "long_factor": [2.0 + 0.7 * i for i in range(rotated)],
        "original_max_position_embeddings": ORIGINAL,
        "partial_rotary_factor": 0.5,
    }
    net = model_of("phi3", "longrope", parameters, original_max_position_embeddings=ORIGINAL)
    model = compiled(net, context)
    ids = tiny.tokens(context)
    assert tiny.worst(model.logits(ids), tiny.eager_logits(net, ids)) <= 1e-5
    (table,) = tables(model.program())
    factors = parameters["short_factor" if context <= ORIGINAL else "long_factor"]
    wanted = [1000.0 ** (-2 * i / 6) / factor for i, factor in enumerate(factors)]
    assert table.inv_freq == pytest.approx(wanted, rel=1e-5) and table.scaling > 1.0


def test_positions_from_the_middle() -> None:
    """Chunks of 5 tokens: all but the first begin at another position than 0."""
    net = model_of("llama", "llama3", LLAMA3)
    options: dict[str, Any] = {"ranks": "simulated", "dtype": torch.float64, "context_length": 40}
    with shared():
        model = graphsrt.compile(net, tp=2, max_tokens_per_step=5, max_running=2, page_size=4, **options)
    ids = tiny.tokens(33)
    assert tiny.worst(model.logits(ids), tiny.eager_logits(net, ids)) <= 1e-5


@pytest.mark.parametrize("where", ["config", "model"])
def test_unknown(where: str) -> None:
    config = tiny.config("llama")
    config.rope_parameters = {"rope_type": "spiral", "rope_theta": 1000.0}
    given: Any = config
    if where == "model":
        given = tiny.build("llama", layers=1)
        given.config.rope_parameters = config.rope_parameters
    with pytest.raises(CompileError, match="unknown rope type 'spiral'") as caught:
        graphsrt.trace(given)
    assert "llama3" in str(caught.value)
