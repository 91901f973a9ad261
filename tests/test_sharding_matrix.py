"""Every family at every head count: sharded against one rank, against transformers, and in pieces through the pool."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphsrt
from graphsrt import ops
from graphsrt.coverage.pieces import PAGE, run_pieces
from graphsrt.dump import weight_bytes
from graphsrt.placement import Replicate, Shard
from graphsrt.program import aten
from graphsrt.runtime.model_runner import EngineSizes, simulated_runner
from graphsrt.runtime.phases import Phases
from tests.support import tiny
from tests.support.captures import compiled, shared, traced

TOKENS = (1, 2, 7, 37)
RANKS: dict[tuple[int, int], list[int]] = {}
for _heads, _kv, _tp in tiny.HEADS:
    RANKS.setdefault((_heads, _kv), []).append(_tp)


@pytest.mark.parametrize(
    ("family", "heads", "kv_heads"),
    [
        (family, heads, kv_heads)
        for family in tiny.FAMILIES
        for heads, kv_heads in RANKS
        if family != "llama_tied" or heads in (8, 9)  # it differs from llama in the vocabulary only
    ],
)
def test_matrix(family: str, heads: int, kv_heads: int) -> None:
    """One test for all that is asked of one model, so that it is captured once."""
    # Two layers where it matters (Gemma-2 has two kinds; residuals and layer numbers), else one: captures are slow.
    layers = 2 if family == "gemma2" or (family, heads, kv_heads) == ("llama", 8, 2) else 1
    for tp in RANKS[heads, kv_heads]:
        check_numbers(family, heads, kv_heads, tp, layers)
        check_all_is_sharded(family, heads, kv_heads, tp, layers)
        check_pieces(family, heads, kv_heads, tp, layers)


def check_numbers(family: str, num_heads: int, kv_heads: int, tp: int, layers: int) -> None:
    """Sharded against one rank and against transformers."""
    net = tiny.model(family, num_heads, kv_heads, layers)
    one = compiled(family, num_heads, kv_heads, 1, layers)
    sharded = compiled(family, num_heads, kv_heads, tp, layers)
    for count in TOKENS:
        ids = tiny.tokens(count, seed=count)
        alone, together = one.logits(ids), sharded.logits(ids)
        assert together.shape == (count, tiny.VOCAB) and together.dtype == torch.float64
        assert tiny.worst(together, alone) <= 1e-9, f"{count} tokens, tp={tp} against tp=1"
        # transformers computes norms, rope and softmax in float32 whatever the model's dtype is: 24 bits, not 53
        eager = tiny.eager_logits(net, ids)
        assert tiny.worst(together, eager) <= 1e-5, f"{count} tokens, tp={tp} against transformers"


def check_all_is_sharded(family: str, num_heads: int, kv_heads: int, tp: int, layers: int) -> None:
    """Weights are divided, and collectives are as few as Megatron-LM's: two sums a layer and one for the embedding."""
    sharded = compiled(family, num_heads, kv_heads, tp, layers)
    program = sharded.program()
    report = next(r for r in program.history if r.name == "shard_tensor_parallel")
    assert report.fired == report.expected and not report.near_misses
    assert ops.count_collectives(node.target for node in program.nodes) == (2 * layers + 1, 0)
    assert not program.calls(aten.embedding.default)
    for node in [*program.calls(aten.linear.default), *program.calls(ops.vocab_embedding)]:
        weight = program.weight_of(node.args[1])
        assert weight is not None and isinstance(weight.placement, Shard), node.name
        # No rank holds more than its share of the units, rounded up, or one replicated KV head for a group of ranks.
        assert weight.placement.layout.local_size < weight.placement.layout.size, node.name
    whole = {name: w for name, w in program.weights.items() if isinstance(w.placement, Replicate)}
    assert all(len(w.shape) <= 1 or "table" in name for name, w in whole.items()), list(whole)
    assert sum(map(weight_bytes, program.weights.values())) <= allowed_bytes(sharded, whole, num_heads, kv_heads, tp)


def allowed_bytes(sharded: Any, whole: dict[str, Any], heads: int, kv_heads: int, tp: int) -> float:
    """A rank's share of every matrix, with padded units: what the layouts' local sizes are computed from by hand."""
    one = sharded.stages.programs[0][1].weights
    width, f64 = heads * 12, 8
    total = 0.0
    group = heads // kv_heads
    kv_local = min((-(-kv_heads * r // tp), -(-group // r)) for r in range(1, tp + 1) if tp % r == 0)
    attention = kv_local[0] * (2 * kv_local[1] + 2)  # query and output heads, key and value heads
    head_size = 16 if any(tuple(w.shape)[:1] == (heads * 16,) for w in one.values()) else 12
    layers = sharded.program().constants["num_layers"]
    total += layers * attention * head_size * (width + 1) * f64  # +1: biases
    total += layers * 3 * -(-tiny.INTERMEDIATE // tp) * width * f64
    vocabulary = -(-tiny.VOCAB // tp) * width * f64
    total += vocabulary * sum("embed" in n or "lm_head" in n for n in one)
    replicated = sum(map(weight_bytes, whole.values()))
    return total + replicated + layers * width * f64 + 8  # a row-parallel bias is on each rank; the vocabulary's start


# -- in pieces ---------------------------------------------------------------------------------------------------------


def check_pieces(family: str, num_heads: int, kv_heads: int, tp: int, layers: int) -> None:
    """Chunked prefill and decode of two sequences in the same steps, through pages out of order."""
    model = compiled(family, num_heads, kv_heads, tp, layers)
    sequences = [tiny.tokens(23, seed=5), tiny.tokens(17, seed=6)]
    sizes = EngineSizes(max_running=4, context_length=tiny.CONTEXT, page_size=PAGE, num_pages=24)
    checkpoint = model.source.require_checkpoint()
    runner = simulated_runner(Phases(model.program()), checkpoint, sizes)
    for ids, got in zip(sequences, run_pieces(runner, sizes, sequences)):
        assert tiny.worst(got, model.logits(ids)) <= 1e-9


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_engine_chunks(family: str) -> None:
    """The engine's own chunks of 5 tokens in pages of 4 give the logits and the greedy tokens of whole prompts."""
    whole = compiled(family, 8, 2, 4)
    options = (("max_tokens_per_step", 5), ("page_size", PAGE), ("max_running", 2))
    pieces = compiled(family, 8, 2, 4, options=options)
    prompts = [tiny.tokens(13, seed=1), tiny.tokens(1, seed=2), tiny.tokens(8, seed=3)]
    for one, other in zip(whole.logits(prompts), pieces.logits(prompts)):
        assert tiny.worst(other, one) <= 1e-9
    params = graphsrt.SamplingParams(max_new_tokens=6, ignore_eos=True)
    assert [g.token_ids for g in pieces.generate(prompts, params)] == greedy(family, prompts, 6)


def greedy(family: str, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens by transformers, computing the whole sequence anew for every token."""
    net = tiny.model(family, 8, 2, 2)
    found = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(tiny.eager_logits(net, ids)[-1].argmax()))
        found.append(ids[len(prompt) :])
    return found


def test_one_text_for_any_number_of_tokens() -> None:
    """No size of the step is written into the program: the same text runs 1, 2 and 37 tokens."""
    text = str(traced("llama").program())
    # Times of the passes may have any digits.
    body = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("pass "))
    assert "i64[T]" in body and "1009" not in body


@pytest.mark.parametrize("family", [family for family in tiny.FAMILIES if family != "llama_tied"])
def test_inductor(family: str) -> None:
    """The lowered engine: mixed steps, chunks and decode, against transformers in float32."""
    net = tiny.build(family).float()
    prompts = [tiny.tokens(13, seed=1), tiny.tokens(1, seed=2), tiny.tokens(37, seed=3)]
    with shared(), graphsrt.compile(net, tp=1, dtype="float32", max_tokens_per_step=11, max_running=3) as model:
        for ids, got in zip(prompts, model.logits(prompts)):
            assert tiny.worst(got, tiny.eager_logits(net, ids)) <= 1e-4
        params = graphsrt.SamplingParams(max_new_tokens=4, ignore_eos=True)
        for ids, made in zip(prompts, model.generate(prompts, params)):
            whole = [*ids, *made.token_ids]
            wanted = tiny.eager_logits(net, whole)[len(ids) - 1 : -1].argmax(-1).tolist()
            assert made.token_ids == wanted
