"""quantize_weights: linears over integers compute what the rounded weights mean, on any number of ranks the same."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import graphsrt
from graphsrt import ops
from graphsrt.check_placements import check_placements
from graphsrt.errors import CompileError
from graphsrt.passes import PIPELINE, merge_gate_up, quantize_weights, shard_tensor_parallel
from graphsrt.passes.runner import bind, run
from graphsrt.program import Program, arguments
from graphsrt.recipes import evaluate
from graphsrt.testing import RandomSource, check, check_ranks, result, trace
from tests.support import tiny
from tests.support.fp8 import stored

E, INNER, V = 96, 192, 50
"""96 columns are a block of 64 and a half one of 32, and so are the 96 of 192 that each of two ranks has; three ranks
have 64 each. Four ranks have 48, no whole groups."""
SHAPES = {
    "gate": (INNER, E),
    "up": (INNER, E),
    "down": (E, INNER),
    "down_bias": (E,),
    "head": (V, E),
    "head_bias": (V,),
}
FORMS = ("int8", "int4")
ROUNDED = {"int8": 0.02, "int4": 0.25}
"""How far a result may move, relative to the largest: 8 bits move a weight by 1/254 of the largest of its row at most,
4 bits by 1/30 of what a group spans, which is about three and a half times as wide as its deviation; three products one
after the other, with errors that are as good as random. What exactly is computed, ``test_what_it_computes`` knows."""


def mlp(x: Any, gate: Any, up: Any, down: Any, down_bias: Any, head: Any, head_bias: Any) -> Any:
    hidden = F.linear(ops.glu(F.linear(x, gate), F.linear(x, up), act="silu"), down, down_bias)
    return F.linear(hidden, head, head_bias)


def program(tp: int = 1, passes: list[Any] | None = None) -> Program:
    return trace(mlp, inputs={"x": ("T", E)}, weights=SHAPES, tp=tp, passes=passes)


def source() -> RandomSource:
    return RandomSource(SHAPES)


def rounded(weight: torch.Tensor, form: str) -> torch.Tensor:
    """What a weight becomes, number for number in float64, without the code of the package but for dtypes."""
    rows = []
    for row in weight.float():
        if form == "int8":
            scale = row.abs().max() / 127
            rows.append((row / scale).round().double() * scale.double())
            continue
        for group in row.split(32):
            scale = ((group.max() - group.min()) / 15).bfloat16().float()
            offset = group.min().bfloat16().float()
            q = ((group - offset) / scale).round().clamp(0, 15)
            rows.append((q * scale + offset).double())
    return torch.stack(rows).view(weight.shape)


@pytest.mark.parametrize("form", FORMS)
def test_what_it_computes(form: str) -> None:
    """Against the formula. The head has 8 bits either way, and biases stay as they are."""
    given = source()
    quantized = partial(quantize_weights, to=form)
    done = check(quantized, program(), fires=4, source=given, tolerance=ROUNDED[form])
    x = torch.randn(7, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def linear(x: torch.Tensor, name: str, form: str = form) -> torch.Tensor:
        bias = given.read(f"{name}_bias") if f"{name}_bias" in SHAPES else None
        return F.linear(x, rounded(given.read(name), form), bias)

    want = linear(linear(F.silu(linear(x, "gate")) * linear(x, "up"), "down"), "head", "int8")
    weights = {n: [evaluate(w.recipe, 0, given, w.dtype)] for n, w in done.program.weights.items()}
    got = result(done.program, {"x": x}, weights)
    # Both multiply the same float64 numbers, but that a number of the weights is a product rounded to float32 in one:
    # 2**-24 of each, and three products one after the other.
    assert float((got - want).abs().max() / want.abs().max()) <= 2e-7


def test_text() -> None:
    quantized = partial(quantize_weights, to="int4")
    done = check(quantized, program(), fires=4, source=source(), tolerance=ROUNDED["int4"])
    assert done.after.splitlines() == [
        "linear: f64[T, 192] = graphsrt.int4_linear(x, gate_int4, gate_pairs)",
        "linear_1: f64[T, 192] = graphsrt.int4_linear(x, up_int4, up_pairs)",
        'glu: f64[T, 192] = graphsrt.glu(linear, linear_1, act="silu")',
        "linear_2: f64[T, 96] = graphsrt.int4_linear(glu, down_int4, down_pairs, down_bias)",
        "linear_3: f64[T, 50] = graphsrt.int8_linear(linear_2, head_int8, head_scales, head_bias)",
        "return linear_3",
    ]
    text = str(done.program)
    assert '  gate_int4: u8[192, 64] = quantized(ckpt("gate"), "int4")\n' in text
    assert '  gate_pairs: bf16[192, 3, 2] = quantized(ckpt("gate"), "int4_pairs")\n' in text
    assert '  head_scales: f32[50] = quantized(ckpt("head"), "int8_scales")\n' in text


def test_nothing_unless_asked() -> None:
    check(quantize_weights, program(), fires=0)
    assert run(program(), [quantize_weights]).final.history[-1].expected == 0


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("form", FORMS)
def test_divided(form: str, tp: int) -> None:
    """Ranks have parts of the same integers, so results differ by the order of sums in float64 alone."""
    quantized = partial(quantize_weights, to=form)
    whole = program(1, [quantized])
    divided = program(tp, [shard_tensor_parallel, merge_gate_up, quantized])
    check_placements(divided)
    check_ranks(whole, divided, source=source(), tolerance=1e-13, tokens=(1, 2, 7))
    assert str(Program.from_text(str(divided))) == str(divided)
    assert divided.count("graphsrt::all_reduce") == 1
    assert not divided.calls(torch.ops.aten.linear.default)


def test_parts_of_groups_stay_plain() -> None:
    quantized = partial(quantize_weights, to="int4")
    divided = program(4, [shard_tensor_parallel, merge_gate_up])
    done = check(quantized, divided, fires=2, source=source(), tolerance=ROUNDED["int4"])
    (miss,) = done.near_misses
    assert (miss.node, miss.reason) == ("linear_2", "a rank has 48 of its columns, no whole groups of 32")
    whole = program(1, [partial(quantized, skip=("linear_2",))])
    check_ranks(whole, done.program, source=source(), tolerance=1e-13)
    narrow = trace(
        lambda x, w, head: F.linear(F.linear(x, w), head),
        inputs={"x": ("T", 40)}, weights={"w": (32, 40), "head": (V, 32)},
    )  # fmt: skip
    done = check(quantized, narrow, fires=1, near_miss="its 40 columns are no whole groups of 32", tolerance=0.02)
    assert "int8_linear(linear, head_int8" in done.after


@pytest.mark.parametrize("form", FORMS)
def test_a_tied_head_has_integers_of_its_own(form: str) -> None:
    """The lookup reads the plain table, of which each rank has its rows."""

    def tied(tokens: Any, table: Any) -> Any:
        return F.linear(F.embedding(tokens, table), table)

    def traced(tp: int, passes: list[Any]) -> Program:
        return trace(tied, inputs={"tokens": ("T",)}, weights={"table": (V, E)}, tp=tp, passes=passes)

    quantized = partial(quantize_weights, to=form)
    done = check(quantized, traced(1, []), fires=1, tolerance=ROUNDED["int8"])
    assert done.after.splitlines() == [
        "embedding: f64[T, 96] = aten.embedding(table, tokens)",
        "linear: f64[T, 50] = graphsrt.int8_linear(embedding, table_int8, table_scales)",
        "return linear",
    ]
    divided = traced(2, [shard_tensor_parallel, quantized])
    check_ranks(done.program, divided, tolerance=1e-13, source=RandomSource({"table": (V, E)}))


def test_a_weight_of_two_linears_is_rounded_once() -> None:
    def twice(x: Any, w: Any, head: Any) -> Any:
        return F.linear(F.linear(F.linear(x, w), w), head)

    shared = trace(twice, inputs={"x": ("T", E)}, weights={"w": (E, E), "head": (V, E)})
    done = check(partial(quantize_weights, to="int4"), shared, fires=3, tolerance=ROUNDED["int4"])
    assert sorted(done.program.weights) == ["head_int8", "head_scales", "w_int4", "w_pairs"]


def test_limit() -> None:
    assert partial(quantize_weights, to="int8")(cut := program(), limit=2) == 2
    assert len(cut.calls(ops.int8_linear)) == 2


def test_refusals() -> None:
    plain = trace(mlp, inputs={"x": ("T", E)}, weights=SHAPES)
    with pytest.raises(CompileError, match="stored in FP8"):
        run(stored(plain, "token", skip={"gate"}), [partial(quantize_weights, to="int8")])
    config = tiny.config("llama")
    with pytest.raises(ValueError, match=r"no such format of weights(.|\n)*int8 or int4(.|\n)*'int5'"):
        graphsrt.trace(config, quantize="int5")
    with pytest.raises(ValueError, match=r"multiplied in float32(.|\n)*float64"):
        graphsrt.trace(config, quantize="int8", dtype="float64")
    with pytest.raises(ValueError, match="no pass does it"):
        graphsrt.trace(config, quantize="int8", without=["quantize_weights"])
    assert graphsrt.trace(config, quantize="int8", dtype="float32", stop_after="normalize").program()


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_other_passes_fire_as_before(family: str) -> None:
    """Fusions look at what is between linears; logits are computed for chosen rows; routers and experts stay plain."""
    config = tiny.config(family, head_dim=32, hidden_size=96, intermediate_size=128)
    plain, quantized = (
        graphsrt.trace(config, tp=2, dtype="float16", quantize=form).program() for form in (None, "int4")
    )
    for before, after in zip(plain.history, quantized.history):
        if before.name != "quantize_weights":
            assert (before.name, before.fired, before.expected) == (after.name, after.fired, after.expected)
    assert quantized.dtype == torch.float16
    (head,) = quantized.calls(ops.int8_linear)
    assert quantized.shape(head)[0] == "R" and quantized.calls(ops.int4_linear)
    (report,) = [report for report in quantized.history if report.name == "quantize_weights"]
    assert report.fired == report.expected
    reasons = {miss.reason for miss in report.near_misses}
    if family == "mixtral":
        assert reasons == {"weights of experts stay as they are", "it says where tokens go"}
        assert len(quantized.calls(torch.ops.aten.linear.default)) == config.num_hidden_layers
    else:
        assert not reasons


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tp", [1, 2])
def test_every_stage_is_verified(form: str, tp: int) -> None:
    """In the miniature o_proj has 32 columns. Two ranks have 16 each, so with 4 bits it stays plain there, and in what
    is compared with."""
    config = tiny.config("llama_tied", 4, 2, head_dim=32, hidden_size=128, intermediate_size=192)
    graphsrt.verify(config, tp=tp, quantize=form).raise_if_bad()


def test_where_it_stands() -> None:
    names = [function.__name__ for function in PIPELINE]
    assert names.index("quantize_linears") + 1 == names.index("quantize_weights")
    bound = bind(PIPELINE, quantize_weights, to="int8")
    assert sum(isinstance(function, partial) for function in bound) == 1


def test_arguments_keep_their_places() -> None:
    done = run(program(), [partial(quantize_weights, to="int8")]).final
    head = done.output
    given = arguments(head)
    assert [given[name].name for name in ("x", "q", "scales", "bias")] == [
        "linear_2", "head_int8", "head_scales", "head_bias",
    ]  # fmt: skip
