"""Capture: unmodified models, symbolic token counts, and a clear refusal of what a program could not honour."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import graphsrt
from graphsrt import ops
from graphsrt.capture import _attention, meta_model
from graphsrt.coverage.architectures import model_class
from graphsrt.coverage.tiny_config import tiny_config
from graphsrt.errors import CompileError
from graphsrt.program import arguments
from graphsrt.testing import check_ranks
from tests.support import captures, tiny


class Layer(nn.Module):
    """What an attention module must have."""

    layer_idx = 3
    is_causal = True


def call(module: nn.Module | None = None, **extra: Any) -> Any:
    q, kv = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    return _attention(module or Layer(), q, kv, kv, extra.pop("attention_mask", None), **extra)


def test_carried() -> None:
    extra: dict[str, Any] = {"scaling": 0.25, "sliding_window": 4, "softcap": 2.0, "s_aux": torch.randn(4)}
    out, weights = call(**extra, position_ids=None, use_cache=False)
    assert out.shape == (1, 5, 4, 8) and weights is None
    call(dropout=0.0, is_causal=True)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"attention_mask": torch.ones(1, 1, 5, 5)}, "an attention mask"),
        ({"is_causal": False}, "non-causal attention"),
        ({"chunk_size": 4}, "the argument chunk_size"),
        ({"position_bias": torch.ones(1, 4, 5, 5)}, "the argument position_bias"),
        ({"head_mask": torch.ones(4)}, "the argument head_mask"),
    ],
)
def test_refused_by_name(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(CompileError, match=f"attention of layer 3 .Layer. needs {words}"):
        call(**extra)


def test_refused_modules() -> None:
    with pytest.raises(CompileError, match="which layer it is"):
        call(nn.Identity())
    encoder = Layer()
    encoder.is_causal = False
    with pytest.raises(CompileError, match="non-causal"):
        call(encoder)
    chunked = Layer()
    chunked.config = type("Config", (), {"layer_types": ["full_attention"] * 3 + ["chunked_attention"]})()  # type: ignore[assignment]
    with pytest.raises(CompileError, match="no attention_chunk_size"):
        call(chunked)
    chunked.config.attention_chunk_size = 2
    q, kv = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    out = _attention(chunked, q, kv, kv)[0]
    alone = _attention(Layer(), q[:, :, 2:4], kv[:, :, 2:4], kv[:, :, 2:4])[0]  # tokens 2 and 3 are a chunk
    torch.testing.assert_close(out[:, 2:4], alone)
    window = Layer()
    window.config = type("Config", (), {"layer_types": ["sliding_attention"] * 4})()  # type: ignore[assignment]
    with pytest.raises(CompileError, match="passes no sliding_window"):
        call(window)
    window.config.sliding_window = 2
    with pytest.raises(CompileError, match="passes no sliding_window"):
        call(window)  # nothing says that the model's mask would have it


def test_window_of_the_mask() -> None:
    """Qwen2-MoE leaves its window to the mask, which transformers makes from the config."""
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeAttention, Qwen2MoeConfig

    config = Qwen2MoeConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4,
                            use_sliding_window=True, sliding_window=3)  # fmt: skip
    q, kv = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8)
    far = kv.clone()
    far[:, :, :4] = 0.0
    for layer, moves in ((0, False), (1, True)):  # layers 0 and 2 have windows
        made = [_attention(Qwen2MoeAttention(config, layer), q, keys, keys)[0][:, -1] for keys in (kv, far)]
        assert torch.equal(*made) is not moves


SMALL: dict[str, Any] = {"vocab_size": 67, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
FOREIGN: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("BloomConfig", {"vocab_size": 67, "hidden_size": 48, "n_layer": 2, "n_head": 4}),
    "mamba": ("MambaConfig", {"vocab_size": 67, "hidden_size": 48, "num_hidden_layers": 2}),
    "lfm2": ("Lfm2Config", {**SMALL, "num_key_value_heads": 2, "intermediate_size": 64,
                            "layer_types": ["conv", "full_attention"]}),
    "jamba": ("JambaConfig", {**SMALL, "num_key_value_heads": 2, "intermediate_size": 64, "use_mamba_kernels": False,
                              "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_d_conv": 2}),
}  # fmt: skip


@pytest.mark.parametrize("kind", FOREIGN)
def test_refused_models(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention outside the interface, or state between tokens: refused, with the class's name or the layer's."""
    monkeypatch.setenv("GRAPHSRT_DISABLED_ARCHS", "BloomForCausalLM")  # there is a reference model of it
    name, sizes = FOREIGN[kind]
    config = getattr(transformers, name)(**sizes, pad_token_id=0)
    with pytest.raises(CompileError) as caught:
        graphsrt.trace(config, context_length=64, dtype="float32")
    message = str(caught.value)
    assert name.removesuffix("Config").lower() in message.lower()  # by its class or its file
    assert any(w in message for w in ("attention", "cannot be captured", "number of tokens as a value"))


def test_attention_count() -> None:
    """One of two layers goes around the interface: the program would be wrong, so there is none."""
    net = tiny.build("llama", layers=2)

    class Around(nn.Module):
        def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
            return hidden_states * 2.0, None

    net.model.layers[1].self_attn = Around()
    with pytest.raises(CompileError, match="does not go through transformers' attention interface") as caught:
        graphsrt.trace(net)
    assert "2 attention operators" in str(caught.value) and "1 ([0])" in str(caught.value)


def test_tokens_are_symbolic() -> None:
    """The same program runs 1, 2 and 37 tokens, though it was captured with seven."""
    program = captures.stage("capture", "gemma2", layers=2)
    assert program.inputs["tokens"].shape == ("T",) and program.shape(program.output) == ("T", 67)
    check_ranks(program, captures.before("page_attention", "gemma2", layers=2), tokens=(1, 2, 37), tolerance=1e-5)


def test_attributes() -> None:
    """Windows, caps and scales are Gemma-2's own, layer by layer."""
    program = captures.stage("capture", "gemma2", layers=2)
    found = [arguments(node) for node in program.calls(ops.attention)]
    assert [a["layer_id"] for a in found] == [0, 1] and [a["sliding_window"] for a in found] == [5, None]
    assert {a["softcap"] for a in found} == {3.0} and {a["scale"] for a in found} == {11**-0.5}


def test_users_model_is_untouched() -> None:
    net = tiny.build("gemma2", layers=1).train()
    before = state(net)
    graphsrt.trace(net, tp=2, dtype="bfloat16")
    assert state(net) == before
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
    dynamic = tiny.build("llama", layers=1, rope_parameters=rope)
    before = state(dynamic)
    graphsrt.trace(dynamic, context_length=100)
    assert state(dynamic) == before
    ids = tiny.tokens(5)
    assert torch.isfinite(tiny.eager_logits(dynamic, ids)).all()


def state(net: Any) -> list[Any]:
    """All that capture could have changed."""
    tensors = [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]
    modules = [(n, m.training, type(m), sorted(m.__dict__), m.__dict__.get("forward")) for n, m in net.named_modules()]
    kept = [(n, id(t), t.dtype, t.device, t._version, t.requires_grad, t.double().sum().item()) for n, t in tensors]
    return [kept, modules, net.config.to_json_string(), net.config._attn_implementation]


def test_tied_and_untied() -> None:
    tied, untied = captures.stage("capture", "llama_tied"), captures.stage("capture", "llama")
    assert "lm_head.weight" not in tied.weights and len(tied.weight_node("model.embed_tokens.weight").users) == 2
    assert "lm_head.weight" in untied.weights


def test_dtype() -> None:
    """The dtype asked for is the program's, whatever the model in memory has; float32 casts inside stay."""
    net = tiny.build("llama", layers=1)
    for dtype in (torch.bfloat16, torch.float32):
        program = graphsrt.trace(net, dtype=dtype, stop_after="capture").program()
        assert {w.dtype for n, w in program.weights.items() if n.endswith("weight")} == {dtype}
        assert program.output.meta["val"].dtype == dtype
    assert graphsrt.trace(net, stop_after="capture").program().dtype == torch.float64
    assert next(net.parameters()).dtype == torch.float64


def test_arguments() -> None:
    config = tiny.config("llama")
    for tp in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="tp is the number of ranks"):
            graphsrt.trace(config, tp=tp)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no such dtype"):
        graphsrt.trace(config, dtype="float12")
    with pytest.raises(ValueError, match="context_length must be positive"):
        graphsrt.trace(config, context_length=-1)


def test_buffers_are_computed_by_the_model_around_them() -> None:
    """Gemma-3n's text model knows how its scales are made; the causal LM around it does not."""
    config = tiny_config("gemma3n_text")
    model = meta_model(config, model_class("gemma3n_text"), torch.float32)
    scale = dict(model.named_buffers())["model.per_layer_projection_scale"]
    assert scale.item() == pytest.approx(config.hidden_size**-0.5)
