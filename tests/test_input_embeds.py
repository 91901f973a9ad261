"""Prompts of embeddings: what transformers makes of ``inputs_embeds``, wherever the scheduler cuts them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import graphsrt
from tests.support import tiny
from tests.support.captures import shared

TOLERANCE = 1e-5  # of transformers in float64: it casts to float32 inside norms and softmax all the same
NEW = 14  # tokens: enough that pages run short
PARAMS = graphsrt.SamplingParams(max_new_tokens=NEW, ignore_eos=True)


def embeds(count: int, seed: int = 0) -> torch.Tensor:
    """Of the size that a model's own have, but no token's."""
    return torch.randn(count, 48, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.15


@torch.no_grad()
def eager(model: PreTrainedModel, parts: list[Any]) -> torch.Tensor:
    """transformers' logits of ids and embeddings, one after the other."""
    table = model.get_input_embeddings()
    # ids through the table as it is, since that is what transformers replaces
    given = torch.cat([p if isinstance(p, torch.Tensor) else table(torch.tensor(p)) for p in parts])
    return model(inputs_embeds=given[None], use_cache=False).logits[0]


@torch.no_grad()
def eager_tokens(model: PreTrainedModel, parts: list[Any], count: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(int(eager(model, [*parts, tokens] if tokens else parts)[-1].argmax()))
    return tokens


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gemma2"])  # Gemma-2 scales what it is given, as it does its own
def test_logits_and_tokens_are_those_of_transformers(family: str, tp: int) -> None:
    model = tiny.model(family)
    options: dict[str, Any] = {"ranks": "simulated"} if tp > 1 else {"backend": "eager"}
    # 5 rows in a step and a pool of 36 slots: prompts are cut in pieces, and requests are preempted
    sizes = dict(page_size=4, max_tokens_per_step=5, max_running=4, max_total_tokens=36)
    with shared(), graphsrt.compile(model, tp=tp, input_embeds=True, **sizes, **options) as compiled:
        ids = tiny.tokens(7)
        prompts = [[embeds(9)], [ids[:3], embeds(4, 1), ids[3:], embeds(2, 2)], [ids]]
        flat: list[Any] = [prompts[0][0], [*ids[:3], embeds(4, 1), ids[3:], embeds(2, 2)], ids]
        for got, parts in zip(compiled.logits(flat), prompts, strict=True):
            want = eager(model, parts)
            assert got.shape == want.shape and tiny.worst(got, want) < TOLERANCE
        assert tiny.worst(compiled.logits(embeds(9)), eager(model, prompts[0])) < TOLERANCE

        results = compiled.generate(flat, PARAMS)
        assert sum(result.num_preemptions for result in results) > 0
        for result, parts in zip(results, prompts, strict=True):
            assert result.token_ids == eager_tokens(model, parts, NEW)
        assert results[1].prompt_token_ids == [*ids[:3], *[0] * 4, *ids[3:], *[0] * 2]
        # the places of embeddings hold the token 0, and so does this prompt: they have nothing else in common
        for _ in range(2):
            zeros = compiled.generate([[0] * 9], PARAMS)[0]
            assert zeros.token_ids == eager_tokens(model, [[0] * 9], NEW)
            assert compiled.generate(embeds(9), PARAMS)[0].token_ids == results[0].token_ids
            other = compiled.generate([embeds(9, 5)], PARAMS)[0]
            assert other.token_ids == eager_tokens(model, [embeds(9, 5)], NEW)
            assert other.num_cached_tokens == 0
        assert compiled.metrics().pages_used == 0
        # a model's own embeddings are as good as its tokens
        own = model.get_input_embeddings()(torch.tensor(ids)).detach()
        assert compiled.generate(own, PARAMS)[0].token_ids == results[2].token_ids


def test_rank_processes_and_bfloat16_take_them() -> None:
    model = tiny.build("llama").to(torch.bfloat16)
    given = embeds(9).to(torch.bfloat16)
    with graphsrt.compile(model, tp=2, backend="eager", input_embeds=True) as compiled:
        got = compiled.logits([given, given.float().numpy()])
        assert torch.equal(got[0], got[1])  # float32 holds every bfloat16
        with torch.no_grad():
            want = model(inputs_embeds=given[None], use_cache=False).logits[0].float()
        assert tiny.worst(got[0], want) < 0.05  # two layers rounded to 8 bits, in another order


def test_without_the_option_nothing_is_there() -> None:
    with shared():
        plain = graphsrt.trace(tiny.model("llama"), tp=2).program()
        taking = graphsrt.trace(tiny.model("llama"), tp=2, input_embeds=True).program()
    assert "embeds" not in "".join(plain.inputs)
    assert len(taking.nodes) == len(plain.nodes) + 1
    assert str(graphsrt.Program.from_text(str(taking))) == str(taking)
    with shared(), graphsrt.compile(tiny.model("llama"), backend="eager") as compiled:
        for prompt in (embeds(3), [embeds(3)], [[5, embeds(3)]]):
            with pytest.raises(ValueError, match=r"prompt 0 has embeddings(?s:.*)input_embeds=True"):
                compiled.generate(prompt, PARAMS)


def test_what_does_not_fit_is_refused() -> None:
    with shared(), graphsrt.compile(tiny.model("llama"), backend="eager", input_embeds=True) as compiled:
        for prompt, message in (
            (torch.zeros(3, 47), r"finite \[T, 48\](?s:.*)\[3, 47\]"),
            (np.full((3, 48), np.nan), "not all finite"),
            ([[embeds(2), [99]]], "token ids outside the vocabulary"),
            (torch.zeros(0, 48), "prompt 0 is empty"),
        ):
            with pytest.raises(ValueError, match=message):
                compiled.generate(prompt, PARAMS)
        with pytest.raises(ValueError, match="no prompt_logprobs"):
            compiled.generate(embeds(3), graphsrt.SamplingParams(prompt_logprobs=1))
