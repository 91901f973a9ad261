"""The rewriter: what a pattern matches, what it does not and why, and how a replacement is put in."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from graphsrt import ops
from graphsrt.passes.recognize_gated_mlp import recognize_gated_mlp
from graphsrt.passes.rewriter import Matched, Rewrite, rewrite
from graphsrt.program import Program
from graphsrt.testing import check, trace

TWO: dict[str, Any] = {"inputs": {"a": ("T", 6), "b": ("T", 6)}}


def scaled_gate(**options: Any) -> Rewrite:
    @rewrite(shapes={"a": ("T", "E"), "b": ("T", "E")}, **options)
    def scaled_gate(a: torch.Tensor, b: torch.Tensor, *, factor: float) -> torch.Tensor:
        return F.relu(a) * b * factor

    @scaled_gate.becomes
    def _(a: Any, b: Any, *, factor: float) -> Any:
        return ops.glu(a, torch.ops.aten.mul.Tensor(b, factor), act="relu")

    return scaled_gate


def made(function: Any, **options: Any) -> Program:
    return trace(function, **(options or TWO))


def test_literal_and_order() -> None:
    """Products match in either order; a keyword-only parameter is whatever number stands there."""
    for function in (
        lambda a, b: F.relu(a) * b * 2.5,
        lambda a, b: b * F.relu(a) * 2.5,
        lambda a, b: 2.5 * (b * F.relu(a)),
    ):
        done = check(scaled_gate(), made(function), fires=1)
        assert re.sub(r"mul_\d", "mul", done.after) == (
            'mul: f64[T, 6] = aten.mul.Tensor(b, 2.5)\nglu: f64[T, 6] = graphsrt.glu(a, mul, act="relu")\nreturn glu'
        )


def test_same_value_twice() -> None:
    @rewrite(shapes={"a": ("T", "E")})
    def doubled(a: torch.Tensor) -> torch.Tensor:
        return F.relu(a) * a

    @doubled.becomes
    def _(a: Any) -> Any:
        return ops.glu(a, a, act="relu")

    check(doubled, made(lambda a, b: (F.relu(a) * a) + b), fires=1)
    check(doubled, made(lambda a, b: F.relu(a) * b), fires=0)


def test_string_literal() -> None:
    """Strings are captured as numbers are: here the activation, handed on as it was."""

    @rewrite(shapes={"a": ("T", "E"), "b": ("T", "E")})
    def swap(a: torch.Tensor, b: torch.Tensor, *, act: str) -> torch.Tensor:
        return ops.glu(a, b, act=act) + 1.0

    @swap.becomes
    def _(a: Any, b: Any, *, act: str) -> Any:
        return torch.ops.aten.sub.Tensor(ops.glu(a, b, act=act), -1.0)

    done = check(swap, made(lambda a, b: ops.glu(a, b, act="gelu") + 1.0), fires=1)
    assert 'act="gelu"' in done.after and "aten.sub.Tensor(glu_1, -1.0)" in done.after


def test_second_user() -> None:
    def block(a: Any, b: Any) -> Any:
        inner = F.relu(a)
        return inner * b * 2.0 + inner

    check(scaled_gate(), made(block), fires=0, near_miss="relu has another user: add")


def test_condition() -> None:
    found = scaled_gate()

    @found.where
    def _(a: Matched, b: Matched, factor: float) -> str | None:
        assert a.shape == b.shape == ("T", 6) and a.dtype == torch.float64 and a.weight is None
        return None if factor < 3 else f"the factor is {factor}"

    check(found, made(lambda a, b: F.relu(a) * b * 2.0), fires=1)
    check(found, made(lambda a, b: F.relu(a) * b * 4.0), fires=0, near_miss="the factor is 4.0")


def test_confirm() -> None:
    """Structure proposes, behaviour confirms: a replacement that computes something else is refused."""
    right = scaled_gate(confirm=True)
    check(right, made(lambda a, b: F.relu(a) * b * 2.0), fires=1)
    wrong = scaled_gate(confirm=True)

    @wrong.becomes
    def _(a: Any, b: Any, *, factor: float) -> Any:
        return ops.glu(a, b, act="relu")

    check(wrong, made(lambda a, b: F.relu(a) * b * 2.0), fires=0, near_miss="same structure but other numbers")


def two_results() -> Rewrite:
    @rewrite(shapes={"a": ("T", "E"), "b": ("T", "E"), "w": ("E",)})
    def norm_and_sum(a: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = a + b
        return ops.rms_norm(total, w, eps=1e-6, cast="before_weight"), total

    @norm_and_sum.becomes
    def _(a: Any, b: Any, w: Any) -> Any:
        pair = ops.add_rms_norm(b, a, w, eps=1e-6, cast="before_weight")
        return pair[0], pair[1]

    return norm_and_sum


def test_two_results() -> None:
    def late(a: Any, b: Any, w: Any) -> Any:
        total = a + b
        norm = ops.rms_norm(total, w, eps=1e-6, cast="before_weight")
        return norm * (total * 2.0)

    def early(a: Any, b: Any, w: Any) -> Any:
        total = a + b
        doubled = total * 2.0
        return ops.rms_norm(total, w, eps=1e-6, cast="before_weight") * doubled

    given: dict[str, Any] = {**TWO, "weights": {"w": (6,)}}
    check(two_results(), trace(late, **given), fires=1, tolerance=0)
    check(two_results(), trace(early, **given), fires=0, near_miss="mul uses add before rms_norm is computed")


def test_limit() -> None:
    """``limit`` cuts a rewrite short, first places first: for bisecting."""
    program = made(lambda a, b: F.silu(F.silu(F.silu(a) * b) * b) * b)
    counts = []
    for limit in range(4):
        copy = program.copy()
        counts.append((recognize_gated_mlp(copy, limit=limit), copy.count("graphsrt::glu")))
    assert counts == [(0, 0), (1, 1), (2, 2), (3, 3)]
    check(recognize_gated_mlp, program, fires=3, tolerance=0)


def test_no_replacement() -> None:
    @rewrite(shapes={"a": ("T", "E")})
    def nothing(a: torch.Tensor) -> torch.Tensor:
        return F.relu(a)

    with pytest.raises(Exception, match="has no replacement"):
        nothing(made(lambda a, b: F.relu(a) + b))
