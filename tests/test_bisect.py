"""bisect: the pass and the single rewrite after which a check fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch.fx as fx

from graphsrt import cli, ops
from graphsrt.bisect import Bisection, bisect_program, load_check
from graphsrt.bisect import _numbers as numbers
from graphsrt.bisect import _told as told
from graphsrt.passes import PIPELINE, insert
from graphsrt.passes.merge_gate_up import merge_gate_up
from graphsrt.passes.merge_qkv import merge_qkv
from graphsrt.passes.recognize_rope import recognize_rope
from graphsrt.passes.runner import run, select
from graphsrt.program import Program, aten
from graphsrt.testing import check_ranks
from tests.support import captures, tiny

LAYERS: dict[str, Any] = {"heads": 2, "kv_heads": 2, "layers": 3}


def scale_glu(program: Program, *, limit: int | None = None, sites: list[fx.Node] | None = None) -> int:
    """Right in all layers but the second, where it doubles."""
    fired = 0
    for node in program.calls(ops.glu):
        if limit is not None and fired >= limit:
            break
        factor = 2.0 if ".1." in node.name else 1.0
        scaled = program.call(aten.mul.Tensor, node, factor, name=f"{node.name}.scaled", before=node.next, like=node)
        if "placement" in node.meta:
            scaled.meta["placement"] = node.meta["placement"]
        node.replace_all_uses_with(scaled, delete_user_cb=lambda user, own=scaled: user is not own)  # type: ignore[misc]
        fired += 1
        if sites is not None:
            sites.append(scaled)
    return fired


def search(check: Any, passes: Any = None) -> Bisection:
    captured = captures.stage("capture", "llama", **LAYERS)
    chosen = PIPELINE if passes is None else passes
    return bisect_program(captured, chosen, lambda program, _: told(check, program))


def test_the_single_rewrite_is_found() -> None:
    def check(program: Program) -> None:
        assert not any(n.name == "layers.2.mlp.silu_mul" for n in program.nodes), "it is there"

    found = search(check)
    assert (found.name, found.rewrite, found.fired) == ("fuse_silu_mul", 3, 3)
    first, where, *rest = str(found).splitlines()
    assert first == "fuse_silu_mul, rewrite 3 of 3: layers.2.mlp.silu_mul"
    assert "modeling_llama.py:164, rule graphsrt/passes/fuse_silu_mul.py:" in where
    assert "layers.2.mlp.glu" in rest[0] and "AssertionError: it is there" in rest[1]


def test_answers_of_a_check() -> None:
    assert search(lambda program: None).ok and search(lambda program: True).ok
    found = search(lambda program: False)
    assert found.name == "capture" and "before any pass: check returned False" in str(found)
    found = search(lambda program: program.count("graphsrt::radix_attention") == 0)
    assert str(found) == "page_attention\n  check returned False"  # half of it would be no program
    found = search(lambda program: not any(n.name == "layers.1.self_attn.qkv_proj" for n in program.nodes))
    assert str(found).startswith("merge_qkv, rewrite 2 of 3: layers.1.self_attn.qkv_proj")


def test_a_check_may_spoil_the_program() -> None:
    def check(program: Program) -> None:
        for node in reversed(program.nodes):
            node.name = "spoiled"

    assert search(check).ok


def test_wrong_numbers_are_found() -> None:
    passes = select(insert(PIPELINE, scale_glu, before="shard_tensor_parallel"), stop_after="merge_qkv")
    found = bisect_program(captures.stage("capture", "llama", **LAYERS), passes, numbers)
    assert str(found).startswith("scale_glu, rewrite 2 of 3: layers.1.mlp.glu.scaled"), found
    assert "is off by" in found.reason


def test_a_rewrite_that_the_runner_refuses_is_found() -> None:
    def writes(program: Program, *, limit: int | None = None) -> int:
        nodes = program.calls(ops.glu)[: 3 if limit is None else limit]
        for node in nodes:
            target = aten.mul_.Tensor if ".2." in node.name else aten.mul.Tensor
            new = program.call(target, node, 1.0, name=f"{node.name}.same", before=node.next, like=node)
            node.replace_all_uses_with(new, delete_user_cb=lambda user, own=new: user is not own)  # type: ignore[misc]
        return len(nodes)

    found = search(lambda program: None, select(insert(PIPELINE, writes, after="recognize_gated_mlp")))
    assert (found.name, found.rewrite) == ("writes", 3)
    assert "in-place write" in found.reason and "layers.2.mlp.glu.same" in found.reason


@pytest.mark.parametrize("function", [merge_qkv, merge_gate_up, recognize_rope])
def test_half_done_is_a_valid_program(function: Any) -> None:
    """What ``limit`` leaves passes every check of the runner and computes the same."""
    before = captures.before(function.__name__, "llama", **LAYERS)
    half = run(before.copy(), [function], limits={function.__name__: 1}).final
    report = half.history[-1]
    assert report.fired == len(report.sites) == 1
    assert "layers.0." in report.sites[0].node
    check_ranks(before, half, tokens=(3,))


def test_command(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(tiny.config("llama", 2, 2, layers=2).to_json_string(use_diff=False))
    script = tmp_path / "no_fused_gate.py"
    script.write_text("def check(program):\n    return program.count('graphsrt::silu_mul') < 2\n")
    with captures.shared():
        assert cli.main(["bisect", str(config), "--tp", "2", "--check", str(script)]) == 1
    assert capsys.readouterr().out.startswith("fuse_silu_mul, rewrite 2 of 2: layers.1.mlp.silu_mul\n")
    assert cli.main(["bisect", str(config)]) == 2
    with pytest.raises(ValueError, match=r"the check .* cannot be loaded"):
        load_check(str(tmp_path / "nothing.py"))
