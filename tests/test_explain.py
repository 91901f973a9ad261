"""explain: every site of a pass with the model's own line, near misses in words, and where a value comes from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F

from graphsrt import cli, ops, rewrite
from graphsrt.errors import CompileError
from graphsrt.explain import explain_model, explain_node, pass_text
from graphsrt.passes import PIPELINE
from graphsrt.passes.fuse_silu_mul import fuse_silu_mul
from graphsrt.passes.merge_qkv import merge_qkv
from graphsrt.passes.recognize_gated_mlp import recognize_gated_mlp
from graphsrt.passes.runner import run
from graphsrt.program import Program
from graphsrt.testing import trace
from tests.support import captures, tiny

LAYERS: dict[str, Any] = {"heads": 2, "kv_heads": 2, "layers": 3}


@rewrite(shapes={"gate": ("T", "F"), "up": ("T", "F")})
def tanh_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.tanh(gate) * up


@tanh_gate.becomes
def _(gate: Any, up: Any) -> Any:
    return ops.glu(gate, up, act="silu")


# -- a pass -----------------------------------------------------------------------------------------------------------


def test_identical_layers_are_one_line() -> None:
    before = captures.before("fuse_silu_mul", "llama", **LAYERS)
    text = pass_text(before, fuse_silu_mul)
    assert text.splitlines()[0].startswith("fuse_silu_mul   graphsrt/passes/fuse_silu_mul.py:")
    assert "glu(slice(gu, …, 0, F), slice(gu, …, F, 2F)" in text
    (line,) = [line for line in text.splitlines() if "silu_mul  " in line and "layers" in line]
    assert line.split()[:2] == ["layers.0–2.mlp.silu_mul", "modeling_llama.py:164,"]
    assert line.endswith("from layers.N.mlp.glu, layers.N.mlp.gate_proj, layers.N.mlp.up_proj")
    assert text.endswith("3 fired, 3 expected, 0 missed")
    every = pass_text(before, fuse_silu_mul, every=True)
    assert [line.split()[0] for line in every.splitlines() if "modeling_llama" in line] == [
        f"layers.{n}.mlp.silu_mul" for n in range(3)
    ]
    assert before.count("graphsrt::silu_mul") == 0  # it only looks


def compute_weight(program: Program, linear: fx.Node) -> None:
    """The linear's weight is no longer read as it is, so that nothing can be put beside it."""
    weight = next(a for a in linear.all_input_nodes if a.op == "get_attr")
    turned = program.call(torch.ops.aten.neg.default, weight, name="turned", before=linear, like=linear)
    turned.meta["placement"] = weight.meta.get("placement")
    linear.replace_input_with(weight, turned)
    program.infer([turned])


def test_one_layer_that_differs_has_a_line_of_its_own() -> None:
    before = captures.before("merge_qkv", "llama", **LAYERS)
    node = next(n for n in before.nodes if n.name == "layers.1.self_attn.v_proj")
    compute_weight(before, node)
    lines = pass_text(before, merge_qkv).splitlines()
    fired = [line for line in lines if line.startswith("  layers.0,2.self_attn.qkv_proj")]
    missed = [line for line in lines if line.startswith("  layers.1.self_attn.attention")]
    assert len(fired) == 1 and len(missed) == 1, lines
    assert "modeling_llama.py:258, in layers.1.self_attn" in missed[0]
    assert missed[0].endswith("the weight of layers.1.self_attn.v_proj is computed")
    assert lines[-1] == "2 fired, 3 expected, 1 missed"


def test_near_miss_of_a_rewrite() -> None:
    def block(x: Any, gate: Any, up: Any) -> Any:
        silu = F.silu(F.linear(x, gate))
        return silu * F.linear(x, up) + silu

    program = trace(block, inputs={"x": ("T", 6)}, weights={"gate": (4, 6), "up": (4, 6)})
    text = pass_text(program, recognize_gated_mlp)
    assert "nearly" in text and "has another user: add" in text


def test_a_pass_that_fired_nowhere_is_asked_on_relaxed_terms() -> None:
    """One operator of two is there: no near miss by the usual rule, and yet an answer."""
    before = captures.before("recognize_gated_mlp", "llama", **LAYERS)
    assert run(before.copy(), [tanh_gate]).final.history[-1].near_misses == []
    lines = pass_text(before, tanh_gate).splitlines()
    assert "closest to the pattern" in lines
    place = next(line for line in lines if line.startswith("  layers.0–2.mlp"))
    assert "activations.py:103" in place and "expected aten.tanh, found aten.silu" in place
    text = pass_text(captures.stage("fuse_silu_mul", "llama", **LAYERS), tanh_gate)
    assert "nothing in this program resembles what it looks for: it has no aten.tanh and no aten.mul.Tensor" in text


def test_a_pass_that_should_have_fired_is_explained_and_not_refused() -> None:
    before = captures.before("merge_qkv", "llama", **LAYERS)
    for node in [n for n in before.nodes if n.name.endswith("v_proj")]:
        compute_weight(before, node)
    with pytest.raises(CompileError, match="merge_qkv fired nowhere"):
        run(before.copy(), [merge_qkv])
    assert pass_text(before, merge_qkv).endswith("0 fired, 3 expected, 3 missed")


# -- a value ----------------------------------------------------------------------------------------------------------


def test_history_of_a_value() -> None:
    traced = captures.traced("llama", **LAYERS)
    text = explain_node(traced.stages, "layers.2.mlp.silu_mul", rules=PIPELINE)
    lines = text.splitlines()
    assert lines[0] == "layers.2.mlp.silu_mul"
    assert "S(1) = silu_mul(layers.2.mlp.gate_up_proj)" in lines[1]
    stages = [line.split()[0] for line in lines if line and not line.startswith(" ")][1:]
    assert stages == [
        "fuse_silu_mul", "select_logit_rows", "merge_gate_up", "shard_tensor_parallel", "recognize_gated_mlp",
        "normalize", "captured",
    ]  # fmt: skip
    rules = [line.split()[1] for line in lines if line.startswith(("fuse_silu_mul ", "recognize_gated_mlp "))]
    assert [rule.rpartition(":")[0] for rule in rules] == [
        "graphsrt/passes/fuse_silu_mul.py", "graphsrt/passes/recognize_gated_mlp.py",
    ]  # fmt: skip
    assert any("layers.2.mlp.mul: f64[T, 41] = mul(layers.2.mlp.act_fn.silu" in line for line in lines)
    captured = lines[lines.index("captured") + 1 :]
    assert any("layers.2.mlp.act_fn.silu" in line and line.endswith("activations.py:103") for line in captured)
    assert any("layers.2.mlp.gate_proj" in line and line.endswith("modeling_llama.py:164") for line in captured)


def test_the_spelling_that_matched_is_the_rule() -> None:
    final = captures.traced("gemma2", heads=2, kv_heads=1).program(after="recognize_rms_norm")
    norm = final.calls(ops.rms_norm)[0]
    plain = captures.traced("llama", **LAYERS).program(after="recognize_rms_norm").calls(ops.rms_norm)[0]
    assert norm.meta["rule"] != plain.meta["rule"]
    assert norm.meta["rule"].startswith("graphsrt/passes/recognize_rms_norm.py:")


def test_every_value_can_be_explained() -> None:
    traced = captures.traced("qwen3", heads=2, kv_heads=1)
    for node in traced.program().graph.nodes:
        if node.op != "output":
            text = explain_node(traced.stages, node.name, rules=PIPELINE)
            assert "captured" in text and text.startswith(node.name)
            assert node.op != "call_function" or node.meta["module"] == "" or ".py:" in text.rpartition("captured")[2]


def test_reports_know_their_sites() -> None:
    traced = captures.traced("llama", **LAYERS)
    for report in traced.program().history:
        # These make more values than they fire, or none.
        if report.name not in ("normalize", "shard_tensor_parallel", "select_logit_rows", "scatter_logits"):
            assert len(report.sites) == report.fired, report.name
        assert all(site.rule.startswith(f"graphsrt/passes/{report.name}.py:") for site in report.sites), report.name
        assert all(site.source and site.from_nodes for site in report.sites if site.module), report.name
    text = str(traced.program())
    assert Program.from_text(text).history == traced.program().history and "sites" not in text


def test_command(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(tiny.config("llama", 2, 2, layers=1).to_json_string(use_diff=False))
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\nfrom graphsrt import ops, rewrite\n\n"
        "@rewrite(shapes={'x': ('T', 'F'), 'up': ('T', 'F')})\n"
        "def mine(x, up):\n    return torch.sigmoid(x) * up\n\n"
        "@mine.becomes\ndef _(x, up):\n    return ops.glu(x, up, act='silu')\n"
    )
    with captures.shared():
        status = cli.main(
            ["explain", str(config), "mine", "--pass", f"{file}:mine", "--before", "recognize_gated_mlp", "--tp", "2"]
        )
        out = capsys.readouterr().out
        assert status == 0 and out.startswith("mine   mine.py:4")
        assert "layers.0.mlp" in out and "expected aten.sigmoid, found aten.silu" in out
        assert cli.main(["explain", str(config), "layers.0.mlp.silu_mull"]) == 1
        assert "did you mean layers.0.mlp.silu_mul" in capsys.readouterr().err
        with pytest.raises(ValueError, match="no pass and no value is called 'q'"):
            explain_model(tiny.config("llama", 2, 2, layers=1), "q")
