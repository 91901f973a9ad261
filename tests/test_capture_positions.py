"""What capture makes right: chunks, positions that a model counts itself, layers that run more than once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DiffLlamaConfig, HrmTextConfig, Llama4TextConfig

import graphsrt
from graphsrt import ops
from graphsrt.capture import capture
from graphsrt.errors import CompileError
from graphsrt.program import arguments
from tests.support import captures, tiny

SIZES: dict[str, Any] = {
    "vocab_size": tiny.VOCAB, "hidden_size": 72, "intermediate_size": 41, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CONFIGS = {
    "llama4": Llama4TextConfig(
        **SIZES, intermediate_size_mlp=43, moe_layers=[], attention_chunk_size=7, no_rope_layers=[1, 0], floor_scale=5,
        attn_scale=0.4,
    ),
    "diffllama": DiffLlamaConfig(**{**SIZES, "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96}),
    "hrm": HrmTextConfig(**SIZES, num_layers_per_stack=1, H_cycles=2, L_cycles=2),
}  # fmt: skip


def build(config: Any) -> Any:
    torch.manual_seed(0)
    net = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    tiny.randomize(net)
    return net


@pytest.mark.parametrize("name", CONFIGS)
def test_equal_in_chunks_and_side_by_side(name: str) -> None:
    net = build(CONFIGS[name])
    sequences = [tiny.tokens(37), tiny.tokens(9, seed=1), tiny.tokens(1, seed=2)]
    with (
        captures.shared(),
        graphsrt.compile(net, tp=3, ranks="simulated", context_length=64, max_tokens_per_step=10) as model,
    ):
        for got, ids in zip(model.logits(sequences), sequences):
            # transformers computes norms and softmax in float32
            assert tiny.worst(got, tiny.eager_logits(net, ids)) < 1e-5
        found = [arguments(node) for node in model.program("capture").calls(ops.attention)]
    assert [one["layer_id"] for one in found] == list(range(len(found)))  # each call has keys and values of its own
    if name == "llama4":
        assert [one["chunk_size"] for one in found] == [7, None]
    else:
        assert len(found) > 2


class Counts(nn.Module):
    """A plain model that counts its tokens itself; ``mixes`` by looking rows up with the count."""

    def __init__(self, mixes: bool):
        super().__init__()
        self.config, self.mixes = tiny.config("llama"), mixes
        self.embed, self.places = nn.Embedding(67, 12), nn.Embedding(64, 12)
        self.head = nn.Linear(12, 67)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        count = torch.arange(tokens.shape[0], device=tokens.device)
        x = self.embed(tokens) + self.places(count)
        if self.mixes:
            x = x + x[count]
        for layer in range(2):
            q = x.view(-1, 3, 4)
            x = x + ops.attention(q, q, q, layer_id=layer, scale=0.5).view(-1, 12)
        return self.head(x)


def test_a_count_of_tokens_is_their_positions() -> None:
    with torch.device("meta"):
        nets = [Counts(mixes) for mixes in (False, True)]
    program = capture(nets[0], context_length=64)
    assert "positions" in program.inputs
    (lookup,) = (node for node in program.nodes if node.name == "places")
    assert arguments(lookup)["indices"].name == "positions"
    with pytest.raises(CompileError, match="treat each token by itself"):
        capture(nets[1], context_length=64)
