"""Passes of installed packages, and where a pass says that it belongs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import graphsrt
from graphsrt.errors import CompileError
from graphsrt.passes import PIPELINE, insert
from graphsrt.passes.plugins import with_installed
from graphsrt.passes.runner import pass_name
from tests.support.captures import shared
from tests.support.tiny import config

Install = Callable[..., None]
NOTHING = "def {name}(program):\n    return 0\n"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Write an installed package: its module's code, and its entry points."""
    monkeypatch.syspath_prepend(tmp_path)
    made: list[str] = []

    def write(package: str, code: str, **entries: str) -> None:
        module = package.replace("-", "_")
        made.append(module)
        (tmp_path / f"{module}.py").write_text(code)
        info = tmp_path / f"{module}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        lines = "".join(f"{name} = {value}\n" for name, value in entries.items())
        (info / "entry_points.txt").write_text(f"[graphsrt.passes]\n{lines}")

    yield write
    for module in made:
        sys.modules.pop(module, None)


def names() -> list[str]:
    return [pass_name(function) for function in with_installed(PIPELINE)]


def test_none() -> None:
    assert with_installed(PIPELINE) == PIPELINE


def test_a_pass_stands_where_it_says(install: Install) -> None:
    code = NOTHING.format(name="mine") + 'mine.after = "merge_qkv"\n' + NOTHING.format(name="last")
    install("some-passes", code, mine="some_passes:mine", last="some_passes:last")
    assert names().index("mine") == names().index("merge_qkv") + 1
    assert names()[-1] == "last"


def test_a_pass_beside_one_of_another_package(install: Install) -> None:
    install("a-first", NOTHING.format(name="a") + 'a.before = "b"\n', a="a_first:a")
    install("b-second", NOTHING.format(name="b") + 'b.before = "normalize"\n', b="b_second:b")
    assert names()[:3] == ["a", "b", "normalize"]


def test_in_the_summary(install: Install) -> None:
    install("some-passes", NOTHING.format(name="mine") + 'mine.after = "normalize"\n', mine="some_passes:mine")
    with shared():
        traced = graphsrt.trace(config("llama", 4, 2, 1), stop_after="recognize_rms_norm")
        without = graphsrt.trace(config("llama", 4, 2, 1), without=["mine"], stop_after="normalize")
        given = graphsrt.trace(config("llama", 4, 2, 1), passes=PIPELINE[:1])
    rows = [line.split()[0] for line in traced.summary().splitlines()[1:4]]
    assert rows == ["normalize", "mine", "recognize_rms_norm"]
    assert without.stages.names == ["capture", "normalize"]
    assert given.stages.names == ["capture", "normalize"]


def test_disabled(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("some-passes", "raise RuntimeError", mine="some_passes:mine")
    monkeypatch.setenv("GRAPHSRT_DISABLE_PLUGINS", "1")
    assert with_installed(PIPELINE) == PIPELINE


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import no_such_module", ["cannot be loaded", "No module named 'no_such_module'"]),
        ("x = 1", ["cannot be loaded", "AttributeError"]),
        ("mine = 3", ["is no pass", "3"]),
        (NOTHING.format(name="normalize") + "mine = normalize", ["the name of a pass that is there already"]),
        (NOTHING.format(name="mine") + 'mine.before = "nosuch"', ["cannot be placed", "'nosuch'", "fuse_silu_mul"]),
    ],
)
def test_a_broken_package_is_named(install: Install, code: str, words: list[str]) -> None:
    install("some-passes", code, mine="some_passes:mine")
    with pytest.raises(CompileError) as caught:
        with_installed(PIPELINE)
    for word in [*words, "some-passes 1.2", "mine = some_passes:mine", "GRAPHSRT_DISABLE_PLUGINS"]:
        assert word in str(caught.value)


def test_insert() -> None:
    def mine(program: graphsrt.Program, *, depth: int = 1) -> int:
        return depth

    assert insert(PIPELINE, mine) == [*PIPELINE, mine]
    assert insert(PIPELINE, mine, before="normalize") == [mine, *PIPELINE]
    mine.after = "normalize"  # type: ignore[attr-defined]
    assert insert(PIPELINE, mine)[1] is mine
    assert insert(PIPELINE, mine, before="normalize")[0] is mine
    bound = functools.partial(mine, depth=2)
    assert insert(PIPELINE, bound)[1] is bound
    mine.before = "normalize"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="mine has one place"):
        insert(PIPELINE, mine)
    with pytest.raises(ValueError, match="no pass is called 'nosuch'"):
        insert(PIPELINE, mine, after="nosuch")


def test_rewrites_have_a_place() -> None:
    @graphsrt.rewrite(shapes={"x": ("T", "E")}, after="recognize_rope")
    def mine(x):  # type: ignore[no-untyped-def]
        return x.relu()

    names = [pass_name(f) for f in insert(PIPELINE, mine)]
    assert names.index("mine") == names.index("recognize_rope") + 1
