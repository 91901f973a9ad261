"""Reference models: equal to transformers' own, whole, divided, in chunks, and side by side in the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import graphsrt
from graphsrt.models import registry
from graphsrt.models.checkpoint import Checkpoint, StateDictCheckpoint
from graphsrt.models.conversion import relaid
from tests.support import captures, references, tiny

TOLERANCE = 1e-5
"""transformers computes norms, softmax and rotary angles in float32 even where the model is float64."""


@pytest.fixture(autouse=True)
def readable_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHSRT_REFERENCE_ARCHS", ",".join(registry.READABLE))


@cache
def theirs(name: str) -> PreTrainedModel:
    return references.build(name)


def ours(name: str) -> Any:
    """The reference model with the same weights."""
    net = theirs(name)
    kind = registry.reference_of_module(net)
    assert kind is not None
    made = kind(net.config).double()
    kept = stored(name)
    made.load_state_dict({tensor: kept.read(tensor) for tensor in kept.names()})
    return made.requires_grad_(False)


def stored(name: str) -> Checkpoint:
    """transformers' weights under the names and in the layouts of the reference model."""
    net = theirs(name)
    return relaid(StateDictCheckpoint(net.state_dict()), registry.reference_of_module(net), net.config)


def logits(net: Any, ids: list[int]) -> torch.Tensor:
    return net(torch.tensor(ids), torch.arange(len(ids)))


def test_every_reference_has_a_config_here() -> None:
    covered = {type(theirs(name)).__name__ for name in references.CONFIGS}
    assert covered >= {*registry.REFERENCES, *registry.READABLE}


@pytest.mark.parametrize("name", references.CONFIGS)
def test_equal_to_transformers(name: str) -> None:
    """The same parameters, the same numbers; short enough to be read."""
    net, mine = theirs(name), ours(name)
    there, buffers = stored(name), {n for n, _ in net.named_buffers()}
    assert {n: tuple(p.shape) for n, p in mine.named_parameters(remove_duplicate=False)} == {
        n: there.shape(n) for n in there.names() if n not in buffers
    }
    ids = tiny.tokens(37)
    for length in (1, 2, 7, 37):
        want = references.eager_logits(net, ids[:length])
        assert tiny.worst(logits(mine, ids[:length]), want) < TOLERANCE
    source = registry.__file__.replace("registry", type(mine).__module__.rpartition(".")[2])
    assert len(Path(source).read_text().splitlines()) <= 200


@pytest.mark.parametrize("name", references.CONFIGS)
def test_served(name: str) -> None:
    """Six heads over four ranks, and on one; prompts in chunks, decoded side by side from pages of the pool."""
    net = theirs(name)
    prompts = [tiny.tokens(23), tiny.tokens(9, seed=1)]
    longer = [*map(list, prompts)]
    for ids in longer:
        for _ in range(5):
            ids.append(int(references.eager_logits(net, ids)[-1].argmax()))
    want = [references.eager_logits(net, ids) for ids in longer]
    for tp in (1, 4):
        with (
            captures.shared(),
            graphsrt.compile(net, tp=tp, ranks="simulated", context_length=64, max_tokens_per_step=11) as model,
        ):
            for got, wanted in zip(model.logits(longer), want):
                assert tiny.worst(got, wanted) < TOLERANCE
            params = graphsrt.SamplingParams(max_new_tokens=5, temperature=0.0, ignore_eos=True)
            for done, ids, prompt in zip(model.generate(prompts, params), longer, prompts):
                assert [*prompt, *done.token_ids] == ids


def every(net: Any, attribute: str) -> Iterator[Any]:
    return (part for part in net.modules() if hasattr(part, attribute))


def without(attribute: str, value: Any) -> Callable[[Any], None]:
    def change(net: Any) -> None:
        for part in every(net, attribute):
            setattr(part, attribute, value)

    return change


PARTS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "bloom slopes": ("bloom", lambda net: net.transformer.slopes.zero_()),
    "bloom slopes of other heads": ("bloom", lambda net: net.transformer.slopes.copy_(net.transformer.slopes.flip(0))),
    "bloom residual": ("bloom_post_norm", without("residual_is_normed", False)),
    "dbrx clip": ("dbrx", without("clip", None)),
    "dbrx weights of experts": ("dbrx", without("power", None)),
    "jetmoe experts": ("jetmoe", without("top_k", 1)),
    "jetmoe rope": ("jetmoe", lambda net: net.model.rotary_emb.inv_freq.zero_()),
    "falcon slopes": ("falcon_alibi", lambda net: net.transformer.slopes.zero_()),
    "falcon rope": ("falcon", lambda net: net.transformer.rotary_emb.inv_freq.zero_()),
    "llama4 chunks": ("llama4", without("chunk", None)),
    "llama4 temperature": ("llama4", without("has_temperature", False)),
    "llama4 norms": ("llama4", without("has_norm", False)),
    "llama4 experts": ("llama4", without("top_k", 1)),
    "mpt slopes": ("mpt", lambda net: net.transformer.slopes.zero_()),
    "mpt clip": ("mpt", without("clip", None)),
    "mpt scale": ("mpt", without("scale", 10**-0.5)),
    "gpt-neo window": ("gpt_neo", without("window", None)),
    "gpt-neo positions": ("gpt_neo", lambda net: net.transformer.wpe.weight.zero_()),
    "gpt-neox-japanese bias": (
        "gpt_neox_japanese",
        lambda net: net.gpt_neox_japanese.layers[1].attention.dense_bias.zero_(),
    ),
    "xglm scale": ("xglm", without("scale", 1.0)),
    "xglm padding row": ("xglm", without("padding_row", None)),
    "xglm positions": ("xglm", lambda net: net.model.embed_positions.frequencies.zero_()),
    "qwen3 window": ("qwen3", without("window", None)),
}


@pytest.mark.parametrize("part", PARTS)
def test_every_part_counts(part: str) -> None:
    """What makes a family moves its logits, so that the tests above would see it missing."""
    name, change = PARTS[part]
    mine, ids = ours(name), tiny.tokens(37)
    before = logits(mine, ids)
    change(mine)
    assert tiny.worst(logits(mine, ids), before) > 1e-3


@pytest.mark.parametrize("name", ["bloom", "mpt", "openai_gpt", "dbrx", "jetmoe"])
def test_from_a_folder(name: str, tmp_path: Path) -> None:
    """A saved checkpoint is loaded by name, ties included; each rank reads its own heads' slopes and rows."""
    net = theirs(name)
    net.save_pretrained(tmp_path)
    with (
        captures.shared(),
        graphsrt.compile(tmp_path, tp=3, ranks="simulated", dtype="float64", context_length=64) as model,
    ):
        ids = tiny.tokens(7)
        assert tiny.worst(model.logits(ids), references.eager_logits(net, ids)) < TOLERANCE


def test_verify_uses_the_reference() -> None:
    """The miniature of a config is captured in the same way as the model."""
    assert graphsrt.verify(references.config("falcon_alibi"), tp=2).ok
