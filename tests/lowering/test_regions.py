"""Cutting programs into regions; nothing is compiled here."""

from __future__ import annotations

import pickle

import pytest
import torch
from lowering_programs import captured, inputs_of, paged, weights_of

from graphsrt import ops
from graphsrt.lowering.executable import Executable, take_own
from graphsrt.lowering.region_cache import region_key
from graphsrt.lowering.regions import OperatorStep, RegionStep, cut, distinct_regions
from graphsrt.program import Input, Program, Weight, aten
from graphsrt.recipes import Ckpt


def linear_program(*, view_first: bool) -> Program:
    """x -> view -> attention(view, ...) and x -> linear: a view of an input that another step reads."""
    program = Program("views")
    x = program.add_input("x", Input(("T", 16), torch.float32, "tokens"))
    w = program.add_weight("w", Weight((16, 16), torch.float32, Ckpt("w")))
    heads = program.call(aten.view.default, x, [-1, 2, 8], name="heads")
    queries = heads
    if not view_first:
        queries = program.call(
            aten.view.default, program.call(aten.linear.default, x, w, name="q"), [-1, 2, 8], name="qh"
        )
    out = program.call(ops.attention, queries, heads, heads, name="attn", layer_id=0, scale=0.5)
    program.graph.output(
        program.call(aten.linear.default, program.call(aten.view.default, out, [-1, 16], name="f"), w, name="o")
    )
    program.infer()
    return program


def test_the_number_of_regions_does_not_grow_with_depth() -> None:
    for kind in ("llama", "gemma2"):
        short, long = (distinct_regions(cut(captured(kind, layers, torch.float32))) for layers in (2, 5))
        assert len(short) == len(long) == 3, kind
        assert [r.text for r in short] == [r.text for r in long]
        assert sorted(len(uses) for uses in long.values()) == [1, 1, 4]


def test_equal_regions_differ_in_weights_only() -> None:
    steps = cut(captured("llama", 5, torch.float32))
    first, second, *_ = next(uses for uses in distinct_regions(steps).values() if len(uses) == 4)
    assert first.region.text == second.region.text and first.region == second.region
    assert "layer_id" not in first.region.text
    assert not set(first.weights) & set(second.weights) - {"rotary_emb.table"}
    assert first.weights[0] == "model.layers.0.self_attn.o_proj.weight"
    assert second.weights[0] == "model.layers.1.self_attn.o_proj.weight"


def test_every_operator_is_in_one_step_and_order_is_kept() -> None:
    program = paged(torch.float32)
    steps = cut(program)
    kinds = ["region" if isinstance(s, RegionStep) else s.node.name for s in steps]
    assert kinds == ["region", "attended", "flat", "total", "region"]
    regions = [s for s in steps if isinstance(s, RegionStep)]
    assert sum(len(s.region.calls) for s in regions) + 3 == len(program.nodes)
    available = {n for n in program.graph.nodes if n.op == "placeholder"}
    for step in steps:
        read = step.inputs if isinstance(step, RegionStep) else step.node.all_input_nodes
        assert {n for n in read if n.op != "get_attr"} <= available
        available |= set(step.outputs if isinstance(step, RegionStep) else [step.node])


def test_text_tells_shapes_dtypes_and_strides() -> None:
    steps = cut(paged(torch.bfloat16))
    assert isinstance(steps[0], RegionStep)
    assert steps[0].region.text == (
        "%0 = input int64[T]\n%1 = weight bfloat16[97, 48]\n%2 = weight bfloat16[48]\n%3 = weight bfloat16[64, 48]\n"
        "%4 = aten.embedding(%1, %0)\n%5 = graphsrt.rms_norm(%4, %2, cast='before_weight', eps=1e-05)\n"
        "%6 = aten.linear(%5, %3)\n"
        "%7 = aten.slice.Tensor(%6, 1, 0, 32)\n%8 = aten.view(%7, [-1, 4, 8])\n"
        "%9 = aten.slice.Tensor(%6, 1, 32, 48)\n%10 = aten.view(%9, [-1, 2, 8])\n"
        "%11 = aten.slice.Tensor(%6, 1, 48, 64)\n%12 = aten.view(%11, [-1, 2, 8])\n"
        "return %4 bfloat16[T, 48]\nreturn %8 bfloat16[T, 4, 8] strides (64, 8, 1)\n"
        "return %10 bfloat16[T, 2, 8] strides (64, 8, 1)\nreturn %12 bfloat16[T, 2, 8] strides (64, 8, 1)\n"
    )


def test_views_of_inputs_are_not_compiled() -> None:
    steps = cut(linear_program(view_first=True))
    assert [s.node.name if isinstance(s, OperatorStep) else "region" for s in steps] == ["heads", "attn", "region"]
    steps = cut(linear_program(view_first=False))
    assert [s.node.name if isinstance(s, OperatorStep) else "region" for s in steps] == [
        "heads",
        "region",
        "attn",
        "region",
    ]
    assert isinstance(steps[1], RegionStep) and len(steps[1].region.outputs) == 1


def test_a_cast_of_an_input_is_compiled() -> None:
    program = Program("cast")
    x = program.add_input("x", Input(("T", 16), torch.bfloat16, "tokens"))
    program.graph.output(program.call(aten.to.dtype, x, torch.float32, name="y"))
    program.infer()
    assert [type(s) for s in cut(program)] == [RegionStep]


def test_a_region_travels_and_keeps_its_key() -> None:
    region = next(iter(distinct_regions(cut(paged(torch.float32)))))
    again = pickle.loads(pickle.dumps(region))
    assert again == region and region_key(again) == region_key(region)


def test_the_key_covers_dtype_shape_and_operator_source(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys(dtype: torch.dtype) -> list[str]:
        return [region_key(r) for r in distinct_regions(cut(paged(dtype)))]

    first = keys(torch.float32)
    assert len(set(first)) == 2 and not set(first) & set(keys(torch.bfloat16))
    monkeypatch.setattr("graphsrt.lowering.region_cache._text", lambda file: "an edited reference")
    edited = keys(torch.float32)
    assert not set(first) & set(edited)
    monkeypatch.setattr("graphsrt.lowering.inductor.OPTIONS", {"other": True})
    assert not set(keys(torch.float32)) & {*first, *edited}


def test_a_region_run_by_references_is_the_program() -> None:
    program = captured("llama", 1, torch.float64)
    weights, inputs = weights_of(program), inputs_of(7)
    expected = Executable(program, weights, backend="eager")(inputs)
    values = {n: inputs[n.name] for n in program.graph.nodes if n.op == "placeholder"}
    for step in cut(program):
        if isinstance(step, RegionStep):
            results = step.region.run([*(values[n] for n in step.inputs), *(weights[w] for w in step.weights)])
            values.update(zip(step.outputs, results))
        else:
            args = [values[a] for a in step.node.args]  # type: ignore[index]
            values[step.node] = step.node.target(*args, **step.node.kwargs)  # type: ignore[operator]
    assert torch.equal(values[program.output], expected)


def test_take_own() -> None:
    x = torch.arange(12).view(6, 2)
    assert torch.equal(take_own(x, 0, 1, 3), x[2:4])
    assert torch.equal(take_own(x, 0, 2, 4), x[4:6])
    assert torch.equal(take_own(x, 0, 3, 4), torch.zeros(2, 2))  # nothing is left for the last
