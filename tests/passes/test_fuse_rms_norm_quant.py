"""fuse_rms_norm_quant: norms whose results are rounded to FP8, with and without residuals and sums before them."""

from __future__ import annotations

import functools
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from graphsrt import ops
from graphsrt.passes import quantize_linears, shard_tensor_parallel
from graphsrt.passes.fuse_add_rms_norm import fuse_add_rms_norm
from graphsrt.passes.fuse_all_reduce_add_rms_norm import fuse_all_reduce_add_rms_norm
from graphsrt.passes.fuse_rms_norm_quant import fuse_rms_norm_quant
from graphsrt.passes.runner import run
from graphsrt.passes.scatter_residual import scatter_residual
from graphsrt.program import Program
from graphsrt.testing import check, check_ranks, step_text, trace
from tests.support import fp8, fusing

E, INNER, OUT = 38, 54, 46
NORM: dict[str, Any] = {"eps": 3e-6, "cast": "before_weight", "offset": 0.0}
WEIGHTS = {"up": (INNER, E), "down": (E, INNER), "bias": (E,), "w": (E,), "head": (OUT, E), "out": (E, OUT)}


def layer(x: Any, residual: Any, up: Any, down: Any, bias: Any, w: Any, head: Any, out: Any) -> Any:
    total = residual + F.linear(F.relu(F.linear(x, up)), down, bias)
    return total + F.linear(F.relu(F.linear(ops.rms_norm(total, w, **NORM), head)), out)


def first(x: Any, residual: Any, up: Any, down: Any, bias: Any, w: Any, head: Any, out: Any) -> Any:
    """The first norm: nothing is added before it."""
    rest = F.linear(F.relu(F.linear(residual, up)), down, bias)
    return rest + F.linear(F.relu(F.linear(ops.rms_norm(x, w, **NORM), head)), out)


def made(scheme: str, tp: int = 1, passes: Any = (), function: Any = layer) -> Program:
    plain = trace(function, inputs={"x": ("T", E), "residual": ("T", E)}, weights=WEIGHTS, tp=tp)
    divide = [shard_tensor_parallel] if tp > 1 else []
    return run(fp8.stored(plain, scheme), [*divide, quantize_linears, *passes]).final


@pytest.mark.parametrize(
    ("scheme", "call", "results"),
    [
        ("token", "add_rms_norm_quant({}, w, eps=3e-06, cast=\"before_weight\", offset=0.0, block=0, largest=None)",
         ("rms_norm.fp8", "rms_norm.scale", "add")),
        ("block", "add_rms_norm_quant({}, w, eps=3e-06, cast=\"before_weight\", offset=0.0, block=16, largest=None)",
         ("rms_norm.fp8", "rms_norm.scale", "add")),
        ("static", "add_rms_norm_static_quant({}, w, head.input_scale, eps=3e-06, cast=\"before_weight\", offset=0.0)",
         ("rms_norm.fp8", "add")),
    ],
)  # fmt: skip
def test_text(scheme: str, call: str, results: tuple[str, ...]) -> None:
    """Each kind of scale, whether addition and norm were one operator before or not."""
    texts = []
    for passes in ((), (fuse_add_rms_norm,)):
        program = made(scheme, passes=passes)
        done = check(
            fuse_rms_norm_quant, program, fires=1, tolerance=0, source=fp8.source(program), tokens=fusing.counts(3)
        )
        lines = [line.partition(": ") for line in done.after.splitlines()]
        at = next(i for i, line in enumerate(lines) if "rms_norm_" in line[0])
        assert lines[at][2].endswith(f"= graphsrt.{call.format('linear_1, residual')}")
        assert tuple(name for name, _, _ in lines[at + 1 : at + 1 + len(results)]) == results
        assert "graphsrt.rms_norm(" not in done.after and "add_rms_norm(" not in done.after
        assert f"fp8_linear(rms_norm.fp8, {'head.input' if scheme == 'static' else 'rms_norm.'}" in done.after
        texts.append(done.after)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("scheme", fp8.SCHEMES)
def test_without_residual(scheme: str) -> None:
    program = made(scheme, function=first)
    done = check(fuse_rms_norm_quant, program, fires=1, tolerance=0, source=fp8.source(program))
    assert f"= graphsrt.rms_norm_{'static_' * (scheme == 'static')}quant(x, w, " in done.after


@pytest.mark.parametrize("scheme", fp8.SCHEMES)
def test_every_order_finds_the_whole(scheme: str) -> None:
    """Sum over ranks, residual, norm and rounding are one operator, whichever of the smaller fusions came first."""
    tp, texts = 3, set()
    rounds = f"_{'static_' * (scheme == 'static')}quant"
    program = made(scheme, tp)
    given = fp8.source(program)
    for order in permutations([fuse_add_rms_norm, fuse_all_reduce_add_rms_norm, fuse_rms_norm_quant]):
        fused = run(program.copy(), order, may_miss=["fuse_add_rms_norm"]).final
        texts.add(step_text(fused))
        assert fused.count(f"graphsrt::all_reduce_add_rms_norm{rounds}") == 1 and not fused.calls(
            ops.rms_norm, ops.add_rms_norm
        )
        last = next(report for report in fused.history if report.name == "fuse_add_rms_norm")
        ran = [function.__name__ for function in order]
        ran = ran[: ran.index("fuse_add_rms_norm")]
        if ran:  # it says who has taken its site
            taken = "all_reduce_" * ("fuse_all_reduce_add_rms_norm" in ran) + "add_rms_norm"
            taken += rounds * ("fuse_rms_norm_quant" in ran)
            reasons = [miss.reason for miss in last.near_misses]
            assert reasons == [f"graphsrt.{taken} has it already, made by {ran[-1]}"]
    assert len(texts) == 1
    check_ranks(program, fused, source=given, tolerance=0, tokens=fusing.counts(tp))
    assert str(Program.from_text(str(fused))) == str(fused)


def test_near_misses() -> None:
    def routed(x: Any, residual: Any, up: Any, down: Any, bias: Any, w: Any, head: Any, out: Any) -> Any:
        normed = ops.rms_norm(residual + F.linear(F.relu(F.linear(x, up)), down, bias), w, **NORM)
        return normed * 2.0 + F.linear(F.relu(F.linear(normed, head)), out)

    for function, reason in (
        (routed, "mul reads rms_norm unrounded"),
        (layer, "what is rounded is no norm, but made by aten.relu"),
        (layer, "what is rounded is no norm, but made by x"),
    ):
        program = made("token", function=function)
        misses: list[Any] = []
        assert fuse_rms_norm_quant(program, near_misses=misses) == (function is layer)
        assert reason in [miss.reason for miss in misses]

    program = made("token")
    (scale,) = (node for node in program.calls(ops.fp8_scale) if node.name == "rms_norm.scale")
    largest = program.call(ops.all_reduce, scale, axis="tp", op="max", name="m", before=scale.next, like=scale)
    for node in [user for user in scale.users if user is not largest]:  # as of a row that is divided
        node.replace_input_with(scale, largest)
    misses = []
    assert fuse_rms_norm_quant(program, near_misses=misses) == 0
    assert any("its scale is the maximum over ranks" in miss.reason for miss in misses)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    tokens=st.integers(1, 7), width=st.integers(1, 40), block=st.sampled_from([0, 1, 8, 16]),
    eps=st.sampled_from([0.0, 1e-6, 1e-3]), offset=st.sampled_from([0.0, 1.0]), batched=st.booleans(),
    cast=st.sampled_from(["before_weight", "after_weight"]), largest=st.sampled_from([None, 0.5]),
    dtypes=st.sampled_from([("float64", "float64"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]),
)  # fmt: skip
def test_operators_are_what_they_take_the_place_of(
    tokens: int, width: int, block: int, eps: float, offset: float, batched: bool, cast: str, largest: float | None,
    dtypes: tuple[str, str],
) -> None:  # fmt: skip
    """Bit for bit, ``[1, T, E]`` as ``[T, E]``, also where the norm's weight is wider than what it norms."""
    generator = torch.Generator().manual_seed(tokens * 41 + width)
    shape = (1, tokens, width) if batched else (tokens, width)

    def random(dtype: str, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))

    x, residual, weight = random(dtypes[0], *shape), random(dtypes[0], *shape), random(dtypes[1], width)
    given_scale = torch.tensor([[0.02]])
    how: dict[str, Any] = {"eps": eps, "cast": cast, "offset": offset}
    with fusing.poisoned():
        for adds in (False, True):
            args = (x, residual, weight) if adds else (x, weight)
            normed, total = ops.add_rms_norm(*args, **how) if adds else (ops.rms_norm(*args, **how), None)
            scale = ops.fp8_scale(normed, block=block, largest=largest)
            dynamic, static = (
                (ops.add_rms_norm_quant, ops.add_rms_norm_static_quant)
                if adds
                else (ops.rms_norm_quant, ops.rms_norm_static_quant)
            )
            for target, more, want in (
                (dynamic, {"block": block, "largest": largest},
                 (ops.quantize_fp8(normed, scale, block=block or width), scale)),
                (static, {}, (ops.quantize_fp8(normed, given_scale),)),
            ):  # fmt: skip
                inputs = (*args, given_scale) if target is static else args
                got = target(*inputs, **how, **more)
                got = got if isinstance(got, tuple) else (got,)
                for found, wanted in zip(got, (*want, total) if adds else want, strict=True):
                    assert found.dtype == wanted.dtype and found.shape == wanted.shape
                    assert torch.equal(found.double(), wanted.double())
                faked = target(*(t.to("meta") for t in inputs), **how, **more)
                faked = faked if isinstance(faked, tuple) else (faked,)
                assert [(f.shape, f.dtype, f.is_contiguous()) for f in faked] == [
                    (g.shape, g.dtype, g.is_contiguous()) for g in got
                ]


def test_scattered_tokens() -> None:
    """Each rank norms and rounds its own tokens; the sum that gives it these stays, and a near miss says so."""
    program = made("token", 3)
    always = functools.partial(scatter_residual, min_tokens=1)
    passes = [always, fuse_add_rms_norm, fuse_all_reduce_add_rms_norm, fuse_rms_norm_quant]
    fused = run(program.copy(), passes, may_miss=["fuse_all_reduce_add_rms_norm"]).final
    (node,) = fused.calls(ops.add_rms_norm_quant)
    assert [str(place) for place in node.meta["placement"]] == ["S(0)", "S(0)", "S(0)"]
    misses = {report.name: report.near_misses for report in fused.history}["fuse_all_reduce_add_rms_norm"]
    assert any("each rank gets its own tokens of the sum (reduce_scatter)" in miss.reason for miss in misses)
    check_ranks(program, fused, source=fp8.source(program), tolerance=0, tokens=fusing.counts(3))
