"""Every parameter filled, every tensor accounted for; ties as transformers makes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from graphsrt.errors import CheckpointError
from graphsrt.models.checkpoint import StateDictCheckpoint
from graphsrt.models.source import resolve
from graphsrt.models.tying import SKIP_RULES, SkipRule, accounting, effective_ties

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SIZES: dict[str, Any] = dict(
    vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=4,
)  # fmt: skip


def shapes(module):
    return {name: tuple(p.shape) for name, p in module.named_parameters(remove_duplicate=False)}


def test_all_problems_in_one_message():
    checkpoint = StateDictCheckpoint({"a": torch.ones(2), "b": torch.ones(3), "stray": torch.ones(1)})
    with pytest.raises(CheckpointError) as error:
        accounting({"a": (2,), "b": (4,), "gone": (1,)}, checkpoint)
    text = str(error.value)
    assert "1 missing from the checkpoint" in text and "gone" in text
    assert "stray" in text and "no skip rule" in text
    assert "b: expected (4,), got (3,) (memory)" in text


def test_long_lists_are_cut_and_counted():
    with pytest.raises(CheckpointError, match=r"50 missing[\s\S]*… and 30 more"):
        accounting({f"w{i}": (1,) for i in range(50)}, StateDictCheckpoint({}))


def test_skip_rules_name_their_reason_and_spare_real_biases():
    state = {
        "w": torch.ones(2),
        "h.0.attn.bias": torch.ones(1, 1, 4, 4),
        "h.0.attn.masked_bias": torch.tensor(-1e4),
        "layers.0.rotary_emb.inv_freq": torch.ones(2),
        "mtp.w": torch.ones(1),
    }
    rules = (*SKIP_RULES, SkipRule(r"^mtp\.", "multi-token prediction is not served"))
    found = accounting({"w": (2,)}, StateDictCheckpoint(state), {}, rules)
    assert dict(found) == {"w": "w"}
    assert found.skipped["mtp.w"] == "multi-token prediction is not served"
    assert set(found.skipped) == set(state) - {"w"}
    with pytest.raises(CheckpointError, match=r"attn\.bias"):
        accounting({"w": (2,)}, StateDictCheckpoint({"w": torch.ones(2), "attn.bias": torch.ones(4)}))


@pytest.mark.parametrize("stored,wanted", [("norm.weight", "model.norm.weight"), ("model.norm.weight", "norm.weight")])
def test_base_prefix_is_added_or_removed(stored, wanted):
    assert accounting({wanted: (2,)}, StateDictCheckpoint({stored: torch.ones(2)})) == {wanted: stored}


def test_exact_name_wins_over_prefix():
    state = StateDictCheckpoint({"model.w": torch.ones(2), "w": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"no skip rule[\s\S]*\bw\b"):
        accounting({"model.w": (2,)}, state)


def test_ties():
    tied, one, two = {"head": "embed"}, torch.ones(3, 2), torch.zeros(3, 2)
    expected = {"embed": (3, 2), "head": (3, 2)}
    # either name fills both
    assert accounting(expected, StateDictCheckpoint({"embed": one}), tied) == {"embed": "embed", "head": "embed"}
    assert accounting(expected, StateDictCheckpoint({"head": one}), tied) == {"embed": "head", "head": "head"}
    # equal values: read once
    both = StateDictCheckpoint({"embed": one, "head": one.clone()})
    found = accounting(expected, both, tied)
    assert found == {"embed": "embed", "head": "embed"} and "head" in found.skipped
    # different values: not tied, and an error where the program has one tensor for both
    apart = StateDictCheckpoint({"embed": one, "head": two})
    assert accounting(expected, apart, tied) == {"embed": "embed", "head": "head"}
    assert effective_ties(tied, apart) == {} and effective_ties(tied, both) == tied
    with pytest.raises(CheckpointError, match="one tensor in the program"):
        accounting({"embed": (3, 2)}, apart, tied)
    # not tied, no head: missing, never tied in silence
    with pytest.raises(CheckpointError, match=r"missing[\s\S]*head"):
        accounting(expected, StateDictCheckpoint({"embed": one}), {})
    with pytest.raises(CheckpointError, match="2 missing"):
        accounting(expected, StateDictCheckpoint({}), tied)


def tie_case(folder, nested, tie, with_head):
    """A checkpoint whose config (and text config, unless ``nested`` is "absent") says ``tie``/the opposite."""
    torch.manual_seed(1)
    if nested == "absent":
        model: Any = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tie))
    else:
        inside = tie if nested == "agrees" else not tie
        vision: dict[str, Any] = dict(
            model_type="siglip_vision_model", hidden_size=8, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=1, image_size=8, patch_size=4,
        )  # fmt: skip
        config = Gemma3Config(
            text_config=dict(**SIZES, tie_word_embeddings=inside), vision_config=vision, tie_word_embeddings=tie,
            mm_tokens_per_image=4,
        )  # fmt: skip
        model = Gemma3ForConditionalGeneration(config)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    state = load_file(file)
    head = next((n for n in state if n.endswith(HEAD)), None)
    prefix = "language_model." if any(n.startswith("language_model.model.") for n in state) else ""
    if head is not None:
        del state[head]
    if with_head:
        state[prefix + HEAD] = torch.randn(48, 16)
    save_file(state, file, metadata={"format": "pt"})


@pytest.mark.parametrize("nested", ["absent", "agrees", "disagrees"])
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("with_head", [True, False])
def test_tie_matrix_against_transformers(tmp_path, nested, tie, with_head):
    tie_case(tmp_path, nested, tie, with_head)
    source = resolve(tmp_path)
    if not tie and not with_head:
        # transformers leaves the head random here, with a warning
        with pytest.raises(CheckpointError, match=r"lm_head\.weight[\s\S]*tie_word_embeddings is false"):
            source.account(shapes(source.skeleton()))
        return
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    found = source.account(shapes(source.skeleton()))
    assert torch.equal(source.require_checkpoint().read(found[EMBED]), loaded.get_input_embeddings().weight)
    assert torch.equal(source.require_checkpoint().read(found[HEAD]), loaded.get_output_embeddings().weight)
    same = loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    assert same == (found[EMBED] == found[HEAD]) == (HEAD in source.ties())
    skeleton = source.skeleton()
    assert same == (skeleton.get_input_embeddings().weight is skeleton.get_output_embeddings().weight)
    assert source.model_class.__name__.endswith("ForCausalLM")


def test_experts_stored_one_by_one_are_stacked(tmp_path):
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, tie_word_embeddings=False))
    model.save_pretrained(tmp_path)
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in load_file(tmp_path / "model.safetensors")
    source = resolve(tmp_path)
    found = source.account(shapes(model))
    for name, value in model.state_dict().items():
        assert torch.equal(source.require_checkpoint().read(found[name]), value), name
    name = "model.layers.1.mlp.experts.gate_up_proj"
    block = source.require_checkpoint().read(name, (slice(1, 2), slice(24, 36)))
    assert torch.equal(block, model.get_parameter(name)[1:2, 24:36])

    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.0.block_sparse_moe.experts.3.w2.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = resolve(tmp_path)
    with pytest.raises(CheckpointError, match=r"experts\.down_proj: expected \(4, 16, 24\), got \(3, 16, 24\)"):
        source.account(shapes(model))
