"""The HTML report: complete, self-contained, and (where a browser is found) usable."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import graphsrt
from graphsrt import cli
from graphsrt.api import Traced
from graphsrt.printer import call_text, name_text
from graphsrt.program import NearMiss
from graphsrt.report import report_html, write_report
from graphsrt.report.stages import EXPRESSION, NAME, RELATIVE, StageTexts, relative
from graphsrt.report.weights import weights_data
from tests.support import browser, tiny

VOID = {"br", "meta", "link", "input", "hr", "img"}


class _Page(HTMLParser):
    """Checks that tags nest, and keeps ids, attributes that could load something, and the embedded data."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.options: dict[str, list[str]] = {}
        self.data = ""
        self._select: str | None = None
        self._in_data = False
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag not in VOID:
            self.open.append(tag)
        if "id" in given:
            self.ids.append(given["id"] or "")
        self.loads += [given[name] or "" for name in ("src", "href", "data", "action", "poster") if name in given]
        self._in_data = tag == "script" and given.get("id") == "data"
        if tag == "select":
            self._select = given["id"]
        elif tag == "option" and self._select:
            self.options.setdefault(self._select, [])

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, (tag, self.open)
        self.open.pop()
        if tag == "select":
            self._select = None

    def handle_data(self, data: str) -> None:
        if self._in_data:
            self.data += data
            self._in_data = False
        elif self._select and data.strip():
            self.options[self._select].append(data.strip())


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def traced(request: pytest.FixtureRequest) -> Traced:
    return graphsrt.trace(tiny.config(request.param, layers=6), tp=2)


def test_page_is_whole_and_loads_nothing(traced: Traced, tmp_path: Path) -> None:
    path = write_report(traced, tmp_path / "report.html")
    page = _Page(path.read_text())
    assert len(set(page.ids)) == len(page.ids)
    assert {"pipeline", "program", "difference", "graph", "weights", "figures"} <= set(page.ids)
    assert all(target.startswith(("#", "data:,")) for target in page.loads), page.loads
    assert not re.search(r"https?://", path.read_text())
    for choice in ("stage", "from", "to", "graph-stage"):
        assert page.options[choice] == traced.stages.names
    assert [stage["name"] for stage in json.loads(page.data)["stages"]] == traced.stages.names
    assert path.stat().st_size < 400_000


def test_every_line_of_every_stage_can_be_put_together_again(traced: Traced) -> None:
    texts = StageTexts()
    for name, program in traced.stages.programs:
        texts.add(name, program)
    data = texts.data()
    for stage, (_, program) in zip(data["stages"], traced.stages.programs):
        found = [
            (_filled(row[NAME], layer), _filled(row[EXPRESSION], layer))
            for layer, _, text in stage["segments"]
            for row in (data["rows"][index] for index in data["texts"][text][1])
        ]
        assert found == [(name_text(node.name), call_text(node, short=True)) for node in program.nodes]
        assert sum(period * times for _, period, times in stage["blocks"]) == len(stage["segments"])


def test_identical_layers_are_sent_once() -> None:
    def rows(layers: int) -> int:
        texts = StageTexts()
        for name, program in graphsrt.trace(tiny.config("gemma2", layers=layers), tp=2).stages.programs:
            texts.add(name, program)
        return len(texts.data()["rows"])

    assert rows(8) == rows(6)


def test_layers_are_counted_from_their_own() -> None:
    here, before = chr(RELATIVE), chr(RELATIVE - 1)
    assert relative("layers.12.up layers.11.add layers.1.x", "layers.", 12) == (
        f"layers.{here}.up layers.{before}.add layers.{chr(RELATIVE - 11)}.x"
    )
    assert relative('shard(ckpt("model.h.3.up"), layer_id=3, dim=3)', "layers.", 3) == (
        f'shard(ckpt("model.h.{here}.up"), layer_id={here}, dim=3)'
    )
    assert relative("players.3.x layers.3x", "layers.", 3) == "players.3.x layers.3x"


def test_weights_say_what_each_rank_reads(traced: Traced) -> None:
    program = traced.program()
    data = weights_data(program)
    found = {_filled(data["kinds"][kind]["name"], layer): data["kinds"][kind] for kind, layer in data["items"]}
    assert list(found) == list(program.weights)
    down = found["model.layers.4.mlp.down_proj.weight"]
    assert (down["placement"], down["dtype"]) == ("S(1)", "f32")
    assert [_filled(text, 4) for text in down["reads"]] == [
        "model.layers.4.mlp.down_proj.weight[:, 0:21]",
        "cat([model.layers.4.mlp.down_proj.weight[:, 21:41], "
        "0 · model.layers.4.mlp.down_proj.weight[:, 40:41]], dim=1)",
    ]
    assert down["owns"] == ["owns 0:21", "owns 21:41; copies 40:41"]
    norm = found["model.layers.4.input_layernorm.weight"]
    assert norm["held"] == "whole on every rank" and len(norm["reads"]) == 1


def test_near_misses_are_listed_with_their_reason_and_text_is_escaped() -> None:
    traced = graphsrt.trace(tiny.config("llama"), tp=2)
    report = traced.stages.final.history[0]
    report.near_misses = [NearMiss("layers.0.q", "layers.0.self_attn", "a </script><b>bad</b> reason")] * 3
    report.near_misses += [NearMiss(f"layers.{n}.up", "", f"layers.{n}.up is used twice") for n in range(2)]
    text = report_html(traced)
    _Page(text)
    assert "3 × a &lt;/script&gt;&lt;b&gt;bad&lt;/b&gt; reason" in text
    assert "2 × layers.*.up is used twice" in text and "layers.1.up is used twice" in text
    assert "<code>layers.0.q</code>" in text and "<code>layers.0.self_attn</code>" in text


def test_a_program_that_stopped_early_has_a_page() -> None:
    text = report_html(graphsrt.trace(tiny.config("llama"), tp=1, stop_after="recognize_rope"))
    page = _Page(text)
    assert page.options["stage"][-1] == "recognize_rope" and "plan" not in page.ids


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.config("llama").save_pretrained(tmp_path)
    target = tmp_path / "report.html"
    assert cli.main(["inspect", str(tmp_path), "--tp", "2", "--html", str(target)]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    _Page(target.read_text())
    assert cli.main(["inspect", str(tmp_path), "--html", str(target), "--layer", "0"]) == 2
    assert "--html stands alone" in capsys.readouterr().err
    assert cli.main(["inspect", str(tmp_path), "--html", str(tmp_path / "none" / "report.html")]) == 2
    assert "folder that exists" in capsys.readouterr().err


def _filled(text: str, layer: int | None) -> str:
    """What the page's script does with relative layer numbers."""
    return re.sub("[\ue000-\ue8ff]", lambda m: str(ord(m[0]) - RELATIVE + (layer or 0)), text)


# -- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    if browser.find_browser() is None:
        pytest.skip(f"no browser on PATH ({', '.join(browser.NAMES)}): the page was not opened")
    with browser.page(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture
def opened(tab: browser.Page, traced: Traced, tmp_path: Path) -> browser.Page:
    tab.problems.clear()
    tab.requests.clear()
    tab.size(1280)
    tab.open(write_report(traced, tmp_path / "report.html"))
    return tab


def _count(page: browser.Page, selector: str) -> int:
    return page.run(f"document.querySelectorAll({selector!r}).length")


def _choose(page: browser.Page, selector: str, value: Any) -> None:
    page.run(
        f"(() => {{ const f = document.querySelector({selector!r}); f.value = {json.dumps(str(value))};"
        " f.dispatchEvent(new Event('change')); })()"
    )


def test_browser_shows_the_page_without_errors_at_both_widths(opened: browser.Page) -> None:
    for width in (1280, 390):
        opened.size(width)
        opened.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        assert opened.run("document.documentElement.scrollWidth") <= width
        assert opened.run("document.body.scrollWidth") <= width
    assert _count(opened, "#lines .fold") and _count(opened, "#diff .fold") and _count(opened, "#drawing .node")
    assert not opened.problems
    assert [url for url in opened.requests if not url.startswith(("file:", "data:"))] == []


def test_browser_search_opens_folds_and_filters(opened: browser.Page) -> None:
    opened.type("#search", "layers.3.self_attn.o_proj.weight")
    lines = "#lines details[open] > .body .code .line"
    assert _count(opened, lines) > 0
    assert "line" in opened.run("document.querySelector('#found').textContent")
    shown = opened.run(f"[...document.querySelectorAll({lines!r})].map(l => l.textContent)")
    assert all("layers.3.self_attn.o_proj.weight" in line for line in shown)  # found by the path, so shown with it
    opened.type("#search", "all_reduce")
    assert _count(opened, "#lines mark") > 2
    opened.type("#search", "no such thing")
    assert opened.run("document.querySelector('#found').textContent") == "no line matches"
    opened.type("#search", "")
    before = _count(opened, "#lines details[open]")
    opened.run("document.querySelector('#lines .fold > summary').click()")
    assert _count(opened, "#lines details[open]") == before + 1
    assert not opened.problems


def test_browser_difference_marks_what_a_pass_changed(opened: browser.Page, traced: Traced) -> None:
    names = traced.stages.names
    at = names.index("merge_qkv")
    _choose(opened, "#from", at - 1)
    _choose(opened, "#to", at)
    left, right = (f"#diff .sides > .code:nth-child({n}) .line" for n in (1, 2))
    assert _count(opened, left) == _count(opened, right) > 0
    added = opened.run("[...document.querySelectorAll('#diff .sides .added')].map(l => l.textContent).join('\\n')")
    assert "qkv_proj" in added
    _choose(opened, "#from", at)
    assert "as it is" in opened.run("document.querySelector('#diff-status').textContent")
    opened.run("document.querySelector('[data-pass=shard_tensor_parallel]').click()")
    assert opened.run("document.querySelector('#to').value") == str(names.index("shard_tensor_parallel"))
    assert not opened.problems


def test_browser_draws_every_layer_of_every_stage(opened: browser.Page, traced: Traced) -> None:
    last = len(traced.stages.names) - 1
    for stage in range(last + 1):
        _choose(opened, "#graph-stage", stage)
        assert _count(opened, "#drawing .node.own") > 3
    assert _count(opened, "#drawing .collective") == 2
    overlaps = """(() => {
        const boxes = [...document.querySelectorAll('#drawing .node')].map(n => n.getBoundingClientRect());
        return boxes.some((a, i) => boxes.some((b, j) => i < j && a.left < b.right - 4 && b.left < a.right - 4
            && a.top < b.bottom - 4 && b.top < a.bottom - 4)); })()"""
    assert not opened.run(overlaps)
    opened.run("document.querySelector('#drawing .collective').dispatchEvent(new Event('click'))")
    assert "all_reduce" in opened.run("document.querySelector('#chosen').textContent")
    opened.run("document.querySelector('#graph-inputs').click()")
    assert not opened.run(overlaps)
    assert not opened.problems


def test_browser_filters_weights(opened: browser.Page) -> None:
    opened.type("#weight-filter", "layers.5.mlp.down")
    assert _count(opened, "#weight-rows tr") == 1
    opened.run("document.querySelector('#weight-rows button').click()")
    assert "rank 1: " in opened.run("document.querySelector('#weight-rows').textContent")
    assert "1 weight," in opened.run("document.querySelector('#weight-status').textContent")
    opened.type("#weight-filter", "")
    assert not opened.problems
