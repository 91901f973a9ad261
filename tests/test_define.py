"""Operators of other packages: how they are defined, divided, printed, and known to rank processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from graphsrt import ops
from graphsrt.check_placements import check_placements
from graphsrt.errors import CompileError
from graphsrt.passes import shard_tensor_parallel
from graphsrt.placement import Layout, Shard
from graphsrt.program import Program
from graphsrt.testing import check, trace


@ops.define("(Tensor x, *, float limit) -> Tensor", namespace="graphsrt_tests", placement="pointwise")
def capped(x: torch.Tensor, *, limit: float) -> torch.Tensor:
    return limit * torch.tanh(x / limit)


@ops.define("(Tensor x, Tensor weight) -> Tensor", namespace="graphsrt_tests", placement="rowwise")
def weighted_softmax(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1) * weight


def mlp(x: Any, up: Any, down: Any) -> Any:
    return linear(capped(linear(x, up), limit=2.0), down)


def per_head(x: Any, up: Any, scale: Any, down: Any) -> Any:
    heads = weighted_softmax(linear(x, up).view(-1, 4, 8), scale)
    return linear(heads.view(-1, 32), down)


def over_the_width(x: Any, up: Any, scale: Any, down: Any) -> Any:
    return linear(weighted_softmax(linear(x, up), scale), down)


def test_pointwise_is_divided() -> None:
    program = trace(mlp, tp=2, inputs={"x": ("T", 34)}, weights={"up": (46, 34), "down": (34, 46)})
    done = check(shard_tensor_parallel, program, fires=2)
    assert "f64[T, 46/2] S(1) = graphsrt_tests.capped(linear, limit=2.0)" in done.after


def test_rowwise_is_divided_by_rows() -> None:
    """Heads are rows here: their number is divided, never what is in one."""
    weights = {"up": (32, 34), "scale": (8,), "down": (34, 32)}
    done = check(shard_tensor_parallel, trace(per_head, tp=2, inputs={"x": ("T", 34)}, weights=weights), fires=2)
    assert "f64[T, 4/2, 8] S(1) = graphsrt_tests.weighted_softmax(view, scale)" in done.after


def test_rowwise_is_not_divided_within_rows() -> None:
    weights = {"up": (32, 34), "scale": (32,), "down": (34, 32)}
    program = trace(over_the_width, tp=2, inputs={"x": ("T", 34)}, weights=weights)
    done = check(shard_tensor_parallel, program)
    assert "f64[T, 32] R = graphsrt_tests.weighted_softmax(linear, scale)" in done.after


def test_the_check_refuses_rows_that_are_divided() -> None:
    weights = {"up": (32, 34), "scale": (8,), "down": (34, 32)}
    program = trace(per_head, tp=2, inputs={"x": ("T", 34)}, weights=weights, passes=[shard_tensor_parallel])
    (node,) = program.calls(weighted_softmax)
    node.meta["placement"] = Shard(2, Layout.blocks(16, 2))
    with pytest.raises(CompileError, match=r"graphsrt_tests\.weighted_softmax: the recorded placement"):
        check_placements(program)


def test_text_parses_back() -> None:
    text = str(trace(mlp, inputs={"x": ("T", 34)}, weights={"up": (46, 34), "down": (34, 46)}))
    assert "graphsrt_tests.capped(linear, limit=2.0)" in text
    assert str(Program.from_text(text)) == text


@pytest.mark.parametrize(
    ("namespace", "placement", "words"),
    [
        ("aten", "pointwise", "a namespace of your own"),
        ("a.b", "pointwise", "a namespace of your own"),
        ("graphsrt_tests", "columnwise", '"pointwise" or "rowwise"'),
        ("graphsrt_tests", "pointwise", "graphsrt_tests::capped already"),
    ],
)
def test_refused(namespace: str, placement: str, words: str) -> None:
    def other(x: torch.Tensor) -> torch.Tensor:
        return x

    other.__name__ = "capped"
    with pytest.raises(ValueError, match=words):
        ops.define("(Tensor x) -> Tensor", namespace=namespace, placement=placement)(other)


OPERATORS = """
import torch
from graphsrt import ops, rewrite

@ops.define("(Tensor x) -> Tensor", namespace="beside_a_script", placement="pointwise")
def squared_relu(x):
    return torch.relu(x).square()

@rewrite(shapes={"x": ("T", "F")}, confirm=True, before="shard_tensor_parallel")
def fuse_squared_relu(x):
    return torch.square(torch.relu(x))

@fuse_squared_relu.becomes
def _(x):
    return squared_relu(x)
"""

SCRIPT = """
import sys
import torch, transformers
import graphsrt
from graphsrt.passes import PIPELINE, insert
from my_operators import fuse_squared_relu

config = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=48, max_position_embeddings=64, hidden_act="relu2",
)
model = transformers.LlamaForCausalLM(config).eval()
ids = [1, 7, 3, 40]
with torch.no_grad():
    wanted = model(torch.tensor([ids])).logits[0]
with graphsrt.compile(model, tp=2, passes=insert(PIPELINE, fuse_squared_relu), backend=sys.argv[1]) as compiled:
    assert compiled.program().count("beside_a_script::squared_relu") == 1
    torch.testing.assert_close(compiled.logits(ids), wanted, rtol=1e-4, atol=1e-5)
"""


def test_rank_processes_know_the_operator(tmp_path: Path, backend: str = "eager") -> None:
    """The module lies beside a script; ranks are started elsewhere and find it."""
    (tmp_path / "my_operators.py").write_text(OPERATORS)
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), backend],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
