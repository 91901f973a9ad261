"""The runner: what it does around every pass, and what it says when one fails."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import graphsrt
from graphsrt import ops
from graphsrt.dump import DumpFolder
from graphsrt.errors import CompileError
from graphsrt.passes import PIPELINE
from graphsrt.passes.recognize_gated_mlp import recognize_gated_mlp
from graphsrt.passes.runner import insert, pass_name, run, select
from graphsrt.passes.shard_tensor_parallel import shard_tensor_parallel
from graphsrt.placement import R
from graphsrt.program import NearMiss, Program, aten
from graphsrt.testing import trace
from tests.support import captures, hand, tiny


def gated() -> Program:
    weights = {"gate": (4, 6), "up": (4, 6)}

    def block(x: Any, gate: Any, up: Any) -> Any:
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    return trace(block, inputs={"x": ("T", 6)}, weights=weights)


def test_report() -> None:
    stages = run(gated(), [recognize_gated_mlp])
    (report,) = stages.final.history
    assert (report.name, report.fired, report.nodes_before, report.nodes_after) == ("recognize_gated_mlp", 1, 4, 3)
    assert report.milliseconds > 0 and stages.names == ["capture", "recognize_gated_mlp"]
    assert stages.after("capture").count("graphsrt::glu") == 0  # a copy, not the program that was rewritten
    made = stages.final.calls(ops.glu)[0]
    assert made.meta["made_by"] == ("recognize_gated_mlp",)


def test_provenance_of_silent_passes() -> None:
    """A pass that does not say what it made is still written down."""

    def replace(program: Program) -> int:
        old = program.output
        new = program.call(aten.relu.default, old, name="new", before=old.next)
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        return 1

    assert run(gated(), [replace]).final.output.meta["made_by"] == ("replace",)


def test_selection() -> None:
    names = [pass_name(p) for p in PIPELINE]
    assert [pass_name(p) for p in select(PIPELINE, without=["merge_qkv"], stop_after="merge_gate_up")] == [
        n for n in names[: names.index("merge_gate_up") + 1] if n != "merge_qkv"
    ]
    assert select(PIPELINE, stop_after="capture") == []
    for options in ({"without": ["merge_qvk"]}, {"stop_after": "merge_qvk"}):
        with pytest.raises(ValueError, match="no pass is called 'merge_qvk'") as caught:
            select(PIPELINE, **options)  # type: ignore[arg-type]
        assert "merge_qkv" in str(caught.value)
    with pytest.raises(ValueError, match="no pass called 'merge_qkv' ran"):
        run(gated(), []).after("merge_qkv")


def test_users_pass_joins() -> None:
    seen: list[str] = []

    def look(program: Program, *, word: str) -> int:
        seen.append(word)
        assert program.count("graphsrt::attention") == 1
        return 0

    mine = functools.partial(look, word="here")
    passes = insert(PIPELINE, mine, before="page_attention")
    names = [pass_name(p) for p in passes]
    assert names[names.index("page_attention") - 1] == "look"
    assert [pass_name(p) for p in insert(PIPELINE, mine, after="normalize")][1] == "look"
    assert insert(PIPELINE, mine)[-1] is mine
    with pytest.raises(ValueError, match="no pass is called 'nothing'"):
        insert(PIPELINE, mine, after="nothing")
    with captures.shared():
        traced = graphsrt.trace(tiny.config("llama", layers=1), tp=2, dtype="float64", passes=passes)
    assert seen == ["here"] and "look" in traced.summary()


def fails(program: Program) -> int:
    raise KeyError("boom")


def test_failure_names_the_pass() -> None:
    with pytest.raises(CompileError, match="fails failed: KeyError: 'boom'") as caught:
        run(gated(), [fails])
    assert "pass fails" in str(caught.value) and "dump=DIR" in str(caught.value)

    def refuses(program: Program) -> int:
        raise CompileError("not like this\n  got:      that")

    with pytest.raises(CompileError) as caught:
        run(gated(), [refuses])
    assert [line.split() for line in str(caught.value).splitlines()] == [
        ["not", "like", "this"], ["pass:", "refuses"], ["got:", "that"],
    ]  # fmt: skip


def test_reproducer(tmp_path: Path) -> None:
    """What re-runs the failing pass alone is in the dump; the program there is the one that the pass got."""
    program = gated()
    with pytest.raises(CompileError, match="see failure/ in the dump folder"):
        run(program, [recognize_gated_mlp, fails], dump=DumpFolder(tmp_path / "dump"))
    folder = tmp_path / "dump" / "failure"
    options = json.loads((folder / "options.json").read_text())
    assert options["pass"].endswith("fails") and "boom" in options["error"]
    got = Program.from_text((folder / "before.txt").read_text())
    assert got.count("graphsrt::glu") == 1 and (tmp_path / "dump" / "01_recognize_gated_mlp.diff").is_file()


def test_fired_nowhere() -> None:
    """Expected and not found is an error that shows the nearest miss; expected nowhere is none."""

    def hopeful(program: Program, *, near_misses: list[NearMiss]) -> int:
        near_misses.append(NearMiss("linear", "", "it is too blue"))
        return 0

    hopeful.expect = lambda program: 2  # type: ignore[attr-defined]
    with pytest.raises(CompileError, match="hopeful fired nowhere") as caught:
        run(gated(), [hopeful])
    assert "2 places" in str(caught.value) and "linear: it is too blue" in str(caught.value)
    hopeful.expect = lambda program: 0  # type: ignore[attr-defined]
    assert run(gated(), [hopeful]).final.history[0].near_misses[0].reason == "it is too blue"


def test_what_is_made_is_read() -> None:
    """A count of rewrites that nothing came of is an error, not a report."""

    def for_nothing(program: Program, *, sites: list[Any]) -> int:
        old = program.output
        sites.append(program.call(aten.relu.default, old, name="new", before=old.next, like=old))
        return 1

    with pytest.raises(CompileError, match="for_nothing made new, which nothing reads"):
        run(gated(), [for_nothing])


def test_change_of_dtype_or_shape() -> None:
    def rounds(program: Program) -> int:
        old = program.output
        new = program.call(aten.to.dtype, old, torch.float32, name="rounded", before=old.next)
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        return 1

    with pytest.raises(CompileError, match="rounds changed the type of the result") as caught:
        run(gated(), [rounds])
    assert "float64" in str(caught.value) and "float32" in str(caught.value)


def test_lint() -> None:
    def disorder(program: Program) -> int:
        first, second = program.nodes[:2]
        second.append(first)  # used before it is computed
        return 1

    with pytest.raises(CompileError, match="disorder"):
        run(gated(), [disorder])

    def twins(program: Program) -> int:
        program.nodes[0].name = program.nodes[1].name
        return 1

    with pytest.raises(CompileError, match=r"two values are called|redefined name"):
        run(gated(), [twins])


def test_wrong_shapes() -> None:
    def breaks(program: Program) -> int:
        linear = program.calls(aten.linear.default)[0]
        new = program.call(aten.view.default, linear, [-1, 3], name="bad", before=linear.next)
        linear.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        for node in program.nodes:
            node.meta.pop("val", None)
        return 1

    with pytest.raises(CompileError, match="does not accept its arguments") as caught:
        run(gated(), [breaks])
    assert "breaks" in str(caught.value)


def test_lost_collective() -> None:
    """A pass that drops a sum over ranks is caught by placements derived anew, whatever it says itself."""

    def drops(program: Program) -> int:
        for node in program.calls(ops.all_reduce):
            (partial,) = node.all_input_nodes
            node.replace_all_uses_with(partial)
            partial.meta["placement"] = R
        return 1

    with pytest.raises(CompileError, match="drops"):
        run(hand.mlp(tp=2), [shard_tensor_parallel, drops])


def test_limits() -> None:
    final = run(gated(), [recognize_gated_mlp], limits={"recognize_gated_mlp": 0}).final
    assert final.count("graphsrt::glu") == 0
    with pytest.raises(ValueError, match="fails takes no limit"):
        run(gated(), [fails], limits={"fails": 1})
