"""One small model of each mechanism, compiled: chunks, decode and logits are those of the plain engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphsrt
from graphsrt.coverage.architectures import model_class
from graphsrt.coverage.tiny_config import tiny_config
from graphsrt.coverage.tiny_model import randomize, tiny_tokens, worst
from tests.support import captures

TOLERANCE = 1e-5  # float32 has 24 bits, and compiled sums run in another order
ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1}
MECHANISMS: dict[str, tuple[str, dict[str, Any]]] = {
    "one KV head, attention beside the MLP": ("falcon", {"new_decoder_architecture": False, "multi_query": True}),
    "ALiBi": ("bloom", {}),
    "sinks, experts with biases": ("gpt_oss", {"layer_types": ["sliding_attention"]}),
}
"""Mechanism -> architecture, and what makes its tiny config one layer that has it."""


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_compiled_is_plain(mechanism: str) -> None:
    model_type, extra = MECHANISMS[mechanism]
    config = tiny_config(model_type)
    for name, value in (ONE_LAYER | extra).items():
        setattr(config, name, value)
    torch.manual_seed(0)
    net = model_class(model_type)(config).eval()
    randomize(net)
    prompts = [tiny_tokens(17, seed=1), tiny_tokens(3, seed=2)]  # the first one in two chunks
    greedy = graphsrt.SamplingParams(max_new_tokens=3, temperature=0.0, ignore_eos=True)
    found = {}
    for backend in ("eager", "inductor"):
        with (
            captures.shared(),
            graphsrt.compile(
                net, dtype="float32", backend=backend, max_tokens_per_step=11, max_running=2, context_length=64
            ) as model,
        ):
            tokens = [done.token_ids for done in model.generate(prompts, greedy)]
            found[backend] = tokens, model.logits(prompts)
    assert found["inductor"][0] == found["eager"][0]
    for got, want in zip(found["inductor"][1], found["eager"][1]):
        assert worst(got, want) <= TOLERANCE
