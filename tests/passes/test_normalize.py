"""normalize: the batch of one, casts that do nothing, pairs of transposes and other spellings go."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from graphsrt import ops
from graphsrt.passes.normalize import normalize
from graphsrt.program import Program
from graphsrt.testing import check, trace
from tests.support import captures


def made(function: Any, **weights: tuple[int, ...]) -> Program:
    return trace(function, inputs={"x": ("T", 6)}, weights=weights)


def test_batch_of_one_and_transposes() -> None:
    def block(x: Any, w: Any) -> Any:
        h = F.linear(x[None], w).view(1, -1, 4, 2).transpose(1, 2)
        return h.transpose(1, 2).reshape(1, -1, 8).contiguous()[0]

    done = check(normalize, made(block, w=(8, 6)), tolerance=0)
    assert done.before.count("\n") == 7
    assert done.after == "linear: f64[T, 8] = aten.linear(x, w)\nreturn linear"


def test_spellings() -> None:
    def block(x: Any) -> Any:
        a, b = x.to(torch.float64).chunk(2, -1)
        c, d = F.dropout(a, 0.5, training=False).split([1, 2], dim=-1)
        return torch.cat([b * 1.0, c, d], dim=-1).reshape(-1, 2, 3)[:, 0:2]

    done = check(normalize, made(block), tolerance=0)
    assert done.after == (
        "slice: f64[T, 3] = aten.slice.Tensor(x, 1, 0, 3)\n"
        "slice_1: f64[T, 3] = aten.slice.Tensor(x, 1, 3, 6)\n"
        "slice_2: f64[T, 1] = aten.slice.Tensor(slice, 1, 0, 1)\n"
        "slice_3: f64[T, 2] = aten.slice.Tensor(slice, 1, 1, 3)\n"
        "cat: f64[T, 6] = aten.cat([slice_1, slice_2, slice_3], 1)\n"
        "view: f64[T, 2, 3] = aten.view(cat, [-1, 2, 3])\n"
        "return view"
    )


def test_what_has_an_effect_stays() -> None:
    """A cast to float32 rounds, a factor other than one scales: neither goes."""

    def block(x: Any) -> Any:
        return (x.to(torch.float32).to(torch.float64) * 2.0).transpose(0, 1).contiguous().transpose(0, 1)

    done = check(normalize, made(block), tolerance=0)
    assert done.after.count("aten.to.dtype") == 2 and "aten.mul.Tensor" in done.after
    assert "transpose" not in done.after
    check(normalize, done.program, fires=0)


def test_a_weight_that_is_only_used_transposed_is_loaded_so() -> None:
    def block(x: Any, w: Any) -> Any:
        return torch.bmm(x.view(-1, 2, 3).transpose(0, 1), w.transpose(1, 2))

    done = check(normalize, made(block, w=(2, 5, 3)), tolerance=0)
    assert 'transpose(ckpt("w"), 1, 2)' in str(done.program).replace("dim0=", "").replace("dim1=", "")
    assert "w.transposed)" in done.after and done.after.count("transpose.int") == 1

    def both(x: Any, w: Any) -> Any:
        return torch.matmul(torch.matmul(x, w.transpose(0, 1)), w)

    check(normalize, made(both, w=(5, 6)), fires=0)


def test_a_value_that_is_no_view_is_reshaped() -> None:
    """What was expanded has no memory of its own in the new shape."""

    def block(x: Any) -> Any:
        return x.view(-1, 3, 2).amax(-1)[:, :, None].expand(-1, 3, 2).contiguous().view(-1, 6)

    assert "aten.reshape(" in check(normalize, made(block), tolerance=0).after


def test_attention_of_a_model() -> None:
    """An attention of a captured model: q, k and v reach the operator as ``[T, heads, D]`` without detours."""
    done = check(normalize, captures.before("normalize", "llama", tp=1), tolerance=0, tokens=(1, 5))
    assert "f64[1, T, 48]" not in done.after and "aten.alias" not in done.after and "f64[T, 48]" in done.after
    lines = {line.partition(":")[0]: line for line in done.after.splitlines()}
    assert lines["layers.0.self_attn.q_proj"].endswith(
        "aten.linear(layers.0.input_layernorm.mul_1, model.layers.0.self_attn.q_proj.weight, "
        "model.layers.0.self_attn.q_proj.bias)"
    )
    assert done.program.shape(done.program.calls(ops.attention)[0]) == ("T", 4, 16)
