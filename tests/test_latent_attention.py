"""Multi-head latent attention: numbers against transformers and against one rank, the pool, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphsrt
from graphsrt import ops
from graphsrt.check_placements import check_placements
from graphsrt.coverage.pieces import PAGE, run_pieces
from graphsrt.errors import CompileError
from graphsrt.placement import Layout, R, Shard
from graphsrt.program import Program, arguments, aten
from graphsrt.runtime.model_runner import EngineSizes, simulated_runner
from graphsrt.runtime.phases import Phases
from graphsrt.testing import check_ranks
from tests.support import latent, tiny
from tests.support.captures import shared

TOKENS = (1, 2, 7, 37)
RANKS = [("deepseek_v3", 8, (2, 8)), ("deepseek_v2", 6, (4,)), ("minicpm3", 5, (3,)), ("youtu", 6, (16,))]
"""Family, heads, ranks: heads that divide, that do not, and more ranks than heads."""


def traced(family: str, heads: int, tp: int, **options: Any) -> Any:
    with shared():
        return graphsrt.trace(latent.model(family, heads), tp=tp, dtype=torch.float64, **options)


@pytest.mark.parametrize(("family", "heads", "ranks"), RANKS)
def test_numbers(family: str, heads: int, ranks: tuple[int, ...]) -> None:
    net = latent.model(family, heads)
    alone: dict[int, torch.Tensor] = {}
    for tp in (1, *ranks):
        with shared(), graphsrt.compile(net, tp=tp, ranks="simulated", dtype=torch.float64) as compiled:
            for count in TOKENS:
                got = compiled.logits(tiny.tokens(count))
                # transformers computes norms, rope and softmax in float32 whatever the model's dtype is: 24 bits
                assert tiny.worst(got, tiny.eager_logits(net, tiny.tokens(count))) <= 1e-5
                assert tiny.worst(got, alone.setdefault(count, got)) <= 1e-10, f"{count} tokens, tp={tp}"
            program = compiled.program()
        assert program.inputs["kv_pool"].shape == (1, "slots", latent.LATENT + latent.ROPE)
        sums, _ = ops.count_collectives(node.target for node in program.nodes)
        assert sums == (3 if tp > 1 else 0)  # embedding, attention, MLP


@pytest.mark.parametrize(("heads", "tp"), [(6, 4)])
def test_pieces_through_the_pool(heads: int, tp: int) -> None:
    """Two sequences take turns: prompts in chunks, mixed steps with padding, then token by token; pages in no order."""
    net = latent.model("deepseek_v3", heads, layers=2)
    sequences = [tiny.tokens(23, seed=5), tiny.tokens(17, seed=6)]
    sizes = EngineSizes(max_running=4, context_length=tiny.CONTEXT, page_size=PAGE, num_pages=24)
    with shared(), graphsrt.compile(net, tp=tp, ranks="simulated", dtype=torch.float64) as compiled:
        runner = simulated_runner(Phases(compiled.program()), compiled.source.require_checkpoint(), sizes)
        for pool in runner._kv_pools["kv_pool"]:
            pool.fill_(float("nan"))
        for ids, got in zip(sequences, run_pieces(runner, sizes, sequences)):
            assert tiny.worst(got, compiled.logits(ids)) <= 1e-10


def test_expanded_form(tp: int = 4) -> None:
    """Without the recognition, keys and values of all heads are divided like those of any attention."""
    left_out: dict[str, Any] = {"without": ["recognize_latent_attention"], "stop_after": "shard_tensor_parallel"}
    done = traced("deepseek_v3", 6, tp, **left_out)
    before, after = done.stages.around("shard_tensor_parallel")
    check_ranks(before, after, tolerance=1e-10, tokens=(1, 7))
    paged = traced("deepseek_v3", 6, tp, without=["recognize_latent_attention"]).program()
    width = latent.OWN + latent.ROPE + latent.VALUE  # a key beside its value
    assert {name: item.shape for name, item in paged.kv_pools.items()} == {"kv_pool": (1, 1, "slots", 2, width)}


def test_real_sizes() -> None:
    """DeepSeek-V3's own attention, few layers: 2 · (512 + 64) bytes of each token and layer, whatever tp is."""
    config = latent.config(
        "deepseek_v3", 128, hidden_size=7168, intermediate_size=128, q_lora_rank=1536, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, num_hidden_layers=2,
    )  # fmt: skip
    done = graphsrt.trace(config, tp=8, dtype=torch.bfloat16)
    assert "KV of a token       2.30 KB on each rank" in done.summary()  # 2 layers
    program = done.program()
    assert program.inputs["kv_pool"].shape == (2, "slots", 576)
    (attended, *_) = program.calls(ops.radix_latent_attention)
    assert program.shape(attended) == ("T", 16, 512)


# -- what the verifier refuses ----------------------------------------------------------------------------------------


def rows_of_other_heads(program: Program) -> None:
    node = program.calls(ops.latent_attention)[0]
    weight = program.weights[str(arguments(node)["w_kv_b"].target)]
    rows = latent.OWN + latent.VALUE
    other = Shard(0, Layout.of([tuple(reversed(rank)) for rank in _heads_reversed(6, 2, rows)]))
    weight.recipe = type(weight.recipe)(weight.recipe.x, 0, other.layout, "copy")  # type: ignore[attr-defined, call-arg]
    weight.placement = other
    program.weight_node(str(arguments(node)["w_kv_b"].target)).meta["placement"] = other


def _heads_reversed(heads: int, ranks: int, rows: int) -> list[Any]:
    return list(reversed(Layout.blocks(heads * rows, ranks).runs))


def whole_rows(program: Program) -> None:
    node = program.calls(ops.latent_attention)[0]
    name = str(arguments(node)["w_kv_b"].target)
    weight = program.weights[name]
    weight.recipe, weight.placement = weight.recipe.x, R  # type: ignore[attr-defined]
    weight.shape = (6 * (latent.OWN + latent.VALUE), latent.LATENT)
    program.weight_node(name).meta.update(placement=R, val=program.shapes.tensor(weight.shape, weight.dtype))


def divided_latent(program: Program) -> None:
    node = program.calls(ops.latent_attention)[0]
    q_rope = arguments(node)["q_rope"]
    args = list(node.args)
    args[0], args[2] = args[0], program.call(aten.select.int, q_rope, 2, 0, name="part", before=node, like=node)
    args[2].meta["placement"] = q_rope.meta["placement"]
    node.args = tuple(args)
    program.infer([args[2]])


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (rows_of_other_heads, "the rows of w_kv_b are not those of the query heads"),
        (whole_rows, "the rows of w_kv_b are not those of the query heads"),
        (divided_latent, "is shared by all heads"),
    ],
)
def test_wrong_placements_are_refused(breaks: Callable[[Program], None], words: str) -> None:
    program = traced("youtu", 6, 2, stop_after="shard_tensor_parallel").program().copy()
    check_placements(program)
    breaks(program)
    with pytest.raises(CompileError, match=words):
        check_placements(program)


def test_wrong_pool_is_refused() -> None:
    q, kv = torch.zeros(2, 3, 4), torch.zeros(2, 4)
    batch = [torch.zeros(1, 4, dtype=torch.int32), *(torch.tensor(x) for x in ([0], [2], [0, 2], [1, 2]))]
    with pytest.raises(ValueError, match="cannot use kv_pool"):
        ops.radix_latent_attention(q, q, kv, kv, torch.zeros(1, 3, 7), *batch, layer_id=0, scale=1.0)


def test_inductor() -> None:
    """The lowered engine: regions are cut at latent attention; chunks and decode, against transformers in float32."""
    net = copy.deepcopy(latent.model("youtu", 6)).float()
    prompts = [tiny.tokens(13, seed=1), tiny.tokens(1, seed=2)]
    with graphsrt.compile(net, tp=1, dtype="float32", max_tokens_per_step=11, max_running=3) as model:
        for ids, got in zip(prompts, model.logits(prompts)):
            # 24 bits, summed in another order than transformers does
            assert tiny.worst(got, tiny.eager_logits(net, ids)) <= 1e-4
        made = model.generate(prompts, graphsrt.SamplingParams(max_new_tokens=3, ignore_eos=True))
        for ids, tokens in zip(prompts, (one.token_ids for one in made)):
            wanted = tiny.eager_logits(net, [*ids, *tokens])[len(ids) - 1 : -1].argmax(-1).tolist()
            assert tokens == wanted
