"""plan: its figures are those of what compile allocates and counts, and of formulas worked out by hand."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from graphsrt import cli, ops
from graphsrt.costs import Cost, Sizes, Step, cost, peak_activation_bytes, ring_bytes, uncounted
from graphsrt.devices import DEVICES, Device, device, read_device
from graphsrt.models.checkpoint import StateDictCheckpoint
from graphsrt.placement import Heads, Layout, R, Shard
from graphsrt.plan import Plan, RankPlan, Split, copies, plan, plan_program, split
from graphsrt.program import Program, aten
from graphsrt.runtime.model_runner import EngineSizes, ModelRunner
from graphsrt.runtime.weights import load_weights
from tests.support import hand, tiny
from tests.support.captures import shared, traced

H200 = device("h200")
CASES = [("llama", 4, 2, tp) for tp in (1, 2, 3, 4)] + [("llama", 9, 3, 2), ("phi3", 8, 2, 4), ("gemma2", 4, 2, 3)]
"""Family, query heads, KV heads, ranks: dividing, replicated and padded heads; weights that are stored fused; tied."""


def program(family: str = "llama", heads: int = 4, kv_heads: int = 2, tp: int = 2, layers: int = 2) -> Program:
    """The final program of a tiny model; it is shared and must not be changed."""
    return traced(family, heads, kv_heads, tp, layers=layers).program()


def planned(*case: Any, context: int = 32, batch: int = 4, on: Device = H200) -> RankPlan:
    return plan_program(program(*case), on, context=context, batch=batch)


@cache
def side_by_side() -> Plan:
    with shared():
        return plan(tiny.config("llama", 8, 2), tp=4, device="h100", compare=(1, 2, 4, 8, 16), batch=3)


# -- memory is what compile allocates ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_that_a_rank_loads(case: tuple[str, int, int, int]) -> None:
    family, heads, kv_heads, tp = case
    checkpoint = StateDictCheckpoint(tiny.model(family, heads, kv_heads).state_dict())
    made = planned(*case)
    for rank in range(tp):
        loaded, _ = load_weights(program(*case), rank, checkpoint)
        assert made.weight_bytes == sum(value.nbytes for value in loaded.values())
    assert made.weights.total == tp * made.weight_bytes


@pytest.mark.parametrize("case", CASES)
def test_divided_and_whole_weights_are_the_model(case: tuple[str, int, int, int]) -> None:
    """Without replicas and padding, and whole weights counted once, what all ranks hold is the model on one rank."""
    made, one = planned(*case), planned(*case[:3], 1)
    starts = sum(w.shape[0] * 8 * case[3] for name, w in program(*case).weights.items() if name.endswith(".start"))
    assert one.weights == Split(divided=one.weight_bytes)
    assert made.weights.divided - starts + made.weights.whole // case[3] == one.weight_bytes


@pytest.mark.parametrize("case", CASES)
def test_kv_bytes_are_those_of_the_pool(case: tuple[str, int, int, int]) -> None:
    sizes = EngineSizes(max_running=2, context_length=32, page_size=4, num_pages=5)
    runner = ModelRunner(program(*case), lambda inputs: torch.empty(0), sizes)
    made = planned(*case)
    (pools,) = runner._kv_pools.values()
    assert made.kv_token_bytes * sizes.num_slots == sum(pool.nbytes for pool in pools)
    assert made.kv_token.divided == planned(*case[:3], 1).kv_token_bytes
    assert made.kv_token.total == case[3] * made.kv_token_bytes


def test_replicas_and_padding_of_keys_and_values_are_told_apart() -> None:
    token = 2 * 2 * tiny.HEAD_SIZE * 8  # layers × keys and values × head × float64: one KV head of a token
    assert planned("llama", 4, 2, 2).kv_token == Split(divided=2 * token)
    assert planned("llama", 4, 2, 4).kv_token == Split(divided=2 * token, replicas=2 * token)
    assert planned("llama", 4, 2, 3).kv_token == Split(divided=2 * token, padding=token)


@pytest.mark.parametrize(
    "layout, expected",
    [
        (Layout.blocks(8, 4), (8, 0, 0)),
        (Layout.blocks(7, 4), (7, 0, 1)),
        (Heads.choose(8, 2, 8).kv, (2, 6, 0)),
        (Heads.choose(28, 4, 8).kv, (4, 4, 0)),
        (Heads.choose(28, 4, 8).query, (28, 0, 4)),
        (Heads.choose(6, 3, 8).kv, (3, 3, 2)),  # four pairs of ranks for three heads: two of each, and a pair too many
        (Layout.concat([Layout.blocks(6, 2), Heads.choose(2, 1, 2).kv]), (7, 1, 0)),
        (Layout.concat([Heads.choose(28, 4, 8).query, *[Heads.choose(28, 4, 8).kv] * 2]), (36, 8, 4)),
    ],
)  # fmt: skip
def test_copies_of_a_layout(layout: Layout, expected: tuple[int, int, int]) -> None:
    assert copies(layout) == expected
    assert sum(expected) == layout.local_size * layout.ranks
    assert split(24 * layout.local_size, Shard(0, layout), layout.ranks).total == 24 * layout.local_size * layout.ranks


def test_a_whole_weight_counts_on_every_rank() -> None:
    assert split(10, R, 4) == Split(whole=40)
    assert split(10, R, 1) == Split(divided=10)


def test_sequences_hold_whole_pages_and_page_0_is_nobodys() -> None:
    needed = planned("llama", 4, 2, 2)
    page = 16 * needed.kv_token_bytes
    for pages, sequences in ((0, 0), (2, 0), (3, 1), (4, 1), (5, 2)):
        memory = needed.weight_bytes + needed.activation_bytes + pages * page
        small = Device("small", H200.flops, memory, 1e9, 1e9, 1e-6)
        made = planned("llama", 4, 2, 2, on=small)
        assert made.num_sequences == sequences
        assert made.fits == (sequences > 0) and not made.fits_batch
    assert not planned("llama", 4, 2, 2, on=Device("tiny", H200.flops, 1000, 1e9, 1e9, 1e-6)).fits


def test_activations_alive_at_a_time() -> None:
    """``x → down(relu(up(x)))``: both results of width 8 are alive at relu, the input is the caller's."""
    sizes = Sizes(hand.mlp(width=6, inner=8, bias=False, tp=1), Step.prefill(5))
    itemsize = sizes.program.output.meta["val"].dtype.itemsize
    assert peak_activation_bytes(sizes) == itemsize * 5 * (8 + 8)


# -- costs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_flops_of_llama(tp: int) -> None:
    """Linears: 2 × tokens × weight elements. Attention: 4 × heads × head size × pairs. One row a
    sequence of the logits, and of what follows the last attention."""
    heads, kv_heads, layers, tokens, batch = 4, 2, 2, 32, 3
    width, local_inner = 12 * heads, -(-tiny.INTERMEDIATE // tp)
    local_heads, local_kv = heads // tp, max(1, kv_heads // tp)
    made = planned("llama", heads, kv_heads, tp, context=tokens, batch=batch)
    qkv = width * (local_heads + 2 * local_kv) * tiny.HEAD_SIZE
    rest = local_heads * tiny.HEAD_SIZE * width + 3 * width * local_inner
    head = width * -(-tiny.VOCAB // tp)
    for step, new, pairs, rows in (
        (made.prefill, tokens, tokens * (tokens + 1) // 2, 1),
        (made.decode, batch, batch * tokens, batch),
    ):
        attention = 4 * local_heads * tiny.HEAD_SIZE * pairs
        linears = new * (layers * qkv + (layers - 1) * rest) + rows * (rest + head)
        assert step.cost.total_flops == layers * attention + 2 * linears
        assert set(step.cost.flops) == {torch.float64}


@pytest.mark.parametrize("window", [None, 1, 3, 5, 6, 7, 50])
@pytest.mark.parametrize("chunk", [None, 1, 3, 6, 50])
@pytest.mark.parametrize("new, length", [(1, 1), (6, 6), (1, 6), (4, 6), (5, 13)])
def test_pairs_and_keys_are_those_of_the_mask(window: int | None, chunk: int | None, new: int, length: int) -> None:
    queries = torch.arange(length - new, length)[:, None]
    keys = torch.arange(length)[None, :]
    visible = (keys <= queries) & (keys > queries - (window or length))
    visible &= keys // (chunk or length) == queries // (chunk or length)
    step = Step("any", 2 * new, 2, length)
    assert step.pairs(window, chunk) == 2 * int(visible.sum())
    assert step.keys_read(window, chunk) == 2 * int(visible.any(0).sum())


def test_a_window_reads_and_computes_less() -> None:
    made = planned("gemma2", 4, 2, 1, context=64)
    sliding, full = (next(kind for kind in made.decode.kinds if kind.label == f"layer {n}").cost for n in (0, 1))
    slot = made.kv_token_bytes // 2
    assert sliding.kv_read_bytes == 4 * tiny.WINDOW * slot and full.kv_read_bytes == 4 * 64 * slot
    assert sliding.kv_written_bytes == full.kv_written_bytes == 4 * slot
    assert sliding.total_flops < full.total_flops


def test_bytes_of_single_operators() -> None:
    """A linear reads input, weight and bias and writes its result; views cost nothing; tables give single rows."""
    found = program("llama", 4, 2, 1)
    sizes = Sizes(found, Step.prefill(10))
    width = 48
    by_name = {node.name: cost(sizes, node) for node in found.nodes}
    qkv = by_name["layers.0.self_attn.qkv_proj"]
    assert qkv.weight_bytes == 8 * (width * 128 + 128) and qkv.activation_bytes == 8 * 10 * (width + 128)
    assert by_name["layers.0.self_attn.view"] == Cost()
    rope = by_name["layers.0.self_attn.rope"]
    assert rope.weight_bytes == 8 * 10 * tiny.HEAD_SIZE
    # q in and out, k and v in, int64 positions and slots; what is written to the pool is counted for itself
    assert rope.activation_bytes == 8 * (2 * 10 * 64 + 2 * 10 * 32 + 2 * 10)
    assert rope.kv_written_bytes == 8 * 2 * 10 * 32 and rope.kv_read_bytes == 0
    assert by_name["embed_tokens"].weight_bytes == 8 * 10 * width
    attention = by_name["layers.0.self_attn.attention"]
    assert attention.kv_read_bytes == 8 * 10 * 2 * 2 * tiny.HEAD_SIZE and attention.kv_written_bytes == 0


def test_weights_are_read_once_a_step_by_decoding() -> None:
    """Everything but the tables, of which a few rows are read; a tied embedding is read whole by the logits."""
    made = planned("llama", 4, 2, 1, batch=1)
    found = program("llama", 4, 2, 1)
    tables = ("model.embed_tokens.weight", "rotary_emb.table")
    rest = made.weight_bytes - sum(8 * torch.Size(found.weights[name].shape).numel() for name in tables)
    rows = 8 * 48 + 2 * 8 * tiny.HEAD_SIZE  # the token's embedding; a row for the rotations of each of two layers
    assert made.decode.cost.weight_bytes == rest + rows


def test_nothing_goes_uncounted() -> None:
    for family in tiny.FAMILIES:
        assert uncounted(program(family, layers=1)) == []
    unknown = hand.mlp(tp=1)
    with unknown.graph.inserting_before(unknown.nodes[-1]):
        extra = unknown.graph.call_function(aten.einsum.default, ("ij->ij", [unknown.nodes[0]]))
    extra.meta = {"val": unknown.nodes[0].meta["val"]}
    assert uncounted(unknown) == ["aten.einsum"]


# -- collectives -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_collectives_are_those_of_the_program(case: tuple[str, int, int, int]) -> None:
    made, found = planned(*case), program(*case)
    kinds = [ops.kind_of_collective(node.target) for node in found.nodes]
    counted = {name: kinds.count(getattr(ops, name)) for name in ("all_gather", "all_reduce", "reduce_scatter")}
    assert made.collectives == ({name: n for name, n in counted.items() if n} if case[3] > 1 else {})
    for step in (made.prefill, made.decode):
        assert step.cost.num_collectives == sum(made.collectives.values())


def test_bytes_sent_by_llama() -> None:
    """Embedding, and two sums a layer, of [T, E], or of [R, E] in the last one; the logits stay where they are."""
    made = planned("llama", 4, 2, 4, context=32, batch=3)
    for step, tokens, rows in ((made.prefill, 32, 1), (made.decode, 3, 3)):
        reduced = 8 * 48 * (3 * tokens + 2 * rows)
        assert step.cost.sent_bytes == 2 * 3 * reduced // 4
    assert planned("llama", 4, 2, 1).prefill.cost.sent_bytes == 0


def test_ring_formulas() -> None:
    assert ring_bytes(ops.all_reduce, 800, 8) == 1400
    assert ring_bytes(ops.reduce_scatter, 800, 8) == 700
    assert ring_bytes(ops.all_gather, 100, 8) == 700
    assert ring_bytes(ops.all_reduce, 800, 2) == 800


# -- time --------------------------------------------------------------------------------------------------------------


def test_time_is_the_roofline() -> None:
    made = planned("llama", 4, 2, 2)
    for kind in made.prefill.kinds:
        one = kind.cost
        assert kind.compute_s == pytest.approx(one.total_flops / 67e12)
        assert kind.memory_s == pytest.approx(one.memory_bytes / 4.8e12)
        assert kind.links_s == pytest.approx(one.sent_bytes / 450e9 + one.num_collectives * 10e-6)
        assert kind.time_s == max(kind.compute_s, kind.memory_s) + kind.links_s
    assert made.prefill.time_s == pytest.approx(sum(kind.time_s * kind.count for kind in made.prefill.kinds))


def test_what_binds() -> None:
    def bound(**changes: float) -> set[str]:
        slow = Device(**{**vars(H200), **changes})  # type: ignore[arg-type]
        kinds = planned("llama", 4, 2, 2, on=slow).prefill.kinds
        return {kind.bound for kind in kinds if kind.cost.total_flops and kind.cost.num_collectives}

    fast = {"link_bandwidth": 1e30, "link_latency_s": 0.0}
    assert bound(**fast, memory_bandwidth=1.0) == {"memory"}
    assert bound(link_latency_s=1.0) == {"links"}
    assert bound(**fast, memory_bandwidth=1e30) == {"compute"}


def test_layers_of_a_kind_are_counted_not_repeated() -> None:
    made = plan_program(program("llama", layers=6), H200, context=32)
    assert [(kind.label, kind.count) for kind in made.decode.kinds] == [
        ("before the layers", 1), ("layer 0", 1), ("layers 1–4", 4), ("layer 5", 1), ("after the layers", 1),
    ]  # fmt: skip
    sizes = Sizes(program("llama", layers=6), Step.decode(64, 32))
    everything = sum((cost(sizes, node) for node in sizes.program.nodes), Cost())
    assert made.decode.cost == everything


def test_more_work_takes_more_time_and_memory() -> None:
    base, longer = planned(context=16, batch=2), planned(context=32, batch=2)
    wider, deeper = planned(context=16, batch=4), planned("llama", 4, 2, 2, 3, context=16, batch=2)
    for other in (longer, deeper):
        assert other.prefill.cost.total_flops > base.prefill.cost.total_flops
        assert other.prefill.time_s > base.prefill.time_s
    for other in (longer, wider, deeper):
        assert other.decode.cost.memory_bytes > base.decode.cost.memory_bytes
        assert other.decode.time_s > base.decode.time_s
    assert wider.prefill == base.prefill
    assert deeper.weight_bytes > base.weight_bytes and longer.weight_bytes == base.weight_bytes


# -- side by side ------------------------------------------------------------------------------------------------------


def test_other_tp_are_what_tracing_them_gives() -> None:
    """The passes that run on a copy of one capture give what a trace of its own gives."""
    made = side_by_side()
    assert list(made.compared) == [1, 2, 4, 8, 16]
    assert made.compared[4] is made.chosen
    for ranks, other in made.compared.items():
        assert isinstance(other, RankPlan)
        own = traced("llama", 8, 2, ranks, dtype=torch.float32, layers=2).program()
        assert other == plan_program(own, device("h100"), context=tiny.CONTEXT, batch=3)
    weights = [other.weight_bytes for other in made.compared.values() if isinstance(other, RankPlan)]
    assert weights == sorted(weights, reverse=True)


def test_keys_and_values_of_another_dtype() -> None:
    with shared():
        made = plan(tiny.config("llama", 8, 2), tp=3, kv_dtype="bfloat16", compare=())
    assert made.chosen.kv_token_bytes == 2 * 2 * tiny.HEAD_SIZE * 2  # one KV head, where float32 would take 4 bytes
    assert made.compared == {}


def test_text() -> None:
    text = str(side_by_side())
    assert "llama, tp=4, float32, on h100: 80.0 GB at 3.35 TB/s, links 450 GB/s each way" in text
    assert f"{side_by_side().chosen.weight_bytes:,} bytes" in text
    assert "[4]" in text and "16*" in text and "more ranks than the 8" in text


def test_a_tp_that_does_not_fit_says_so() -> None:
    one = side_by_side().compared[1]
    assert isinstance(one, RankPlan)
    small = Device(**{**vars(H200), "name": "small", "memory_bytes": one.weight_bytes})
    with shared():
        made = plan(tiny.config("llama", 8, 2), tp=1, device=small, compare=(1, 4), batch=10**9)
    assert not made.chosen.fits
    assert str(made).count("does not fit") == 3  # no column has room for the batch; one has none for the weights
    assert "too little" in str(made)


def test_json() -> None:
    made = json.loads(json.dumps(side_by_side().as_dict()))
    assert made["tp"] == 4 and made["weight_bytes_per_rank"] == side_by_side().chosen.weight_bytes
    assert [column["tp"] for column in made["compared"]] == [1, 2, 4, 8, 16]
    assert sum(made["weights_of_all_ranks"].values()) == 4 * made["weight_bytes_per_rank"]
    assert {"prefill", "decode"} == set(made["steps"])
    assert made["steps"]["decode"][1]["flops"]["float32"] > 0


@pytest.mark.parametrize(
    "options, message",
    [({"context": 65}, "longer than the model's"), ({"tp": 0}, "at least 1"), ({"device": "h900"}, "h200, h100")],
)
def test_numbers_out_of_range(options: dict[str, Any], message: str) -> None:
    with shared(), pytest.raises(ValueError, match=message):
        plan(tiny.config("llama", layers=1), **{"compare": (), **options})


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.config("llama", layers=1).save_pretrained(tmp_path)
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"like": "h100", "memory_bytes": 1e9}))
    with shared():
        arguments = ["plan", str(tmp_path), "--tp", "2", "--compare", "1,2", "--device-file", str(file)]
        assert cli.main([*arguments, "--json"]) == 0
        made = json.loads(capsys.readouterr().out)
        assert made["device"]["name"] == "mine" and made["device"]["memory_bytes"] == 1e9
        assert cli.main(["plan", str(tmp_path), "--compare", "1,x"]) == 2
    assert "numbers with commas" in capsys.readouterr().err


# -- devices -----------------------------------------------------------------------------------------------------------


def test_every_device_is_usable() -> None:
    for name, one in DEVICES.items():
        assert one.name == name
        assert one.peak(torch.bfloat16) >= one.peak(torch.float32) >= one.peak(torch.float64) > 0
        assert one.peak(torch.float8_e4m3fn) >= one.peak(torch.bfloat16)
        assert one.link(2) <= one.link(8) <= one.link_bandwidth
    assert device("a100").peak(torch.float8_e4m3fn) == 312e12
    assert device("mi300x").link(2) == 64e9 and device("mi300x").link(8) == 448e9


def test_the_device_file_of_the_documentation(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "plan.md").read_text()
    (shown,) = re.findall(r"^```json\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "mine.json").write_text(shown)
    made = read_device(tmp_path / "mine.json")
    assert (made.name, made.memory_bytes, made.flops) == ("mine", 94e9, device("h100").flops)


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "cannot be read"),
        ('{"speed": 1}', "speed"),
        ('{"flops": {"bf16": 1e12}}', "leaves figures out"),
        ('{"like": "h100", "flops": {"int3": 1}}', "FLOP/s by dtype"),
        ('{"like": "h100", "memory_bytes": "80GB"}', "memory_bytes must be a positive number"),
        ('{"like": "h101"}', "no device is called"),
    ],
)
def test_wrong_device_files(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "d.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_device(tmp_path / "d.json")
