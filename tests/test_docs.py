"""What the documentation shows is run, as far as that takes no weights."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import graphsrt
from graphsrt.passes import PIPELINE
from graphsrt.passes.document import document
from graphsrt.printer import diff_text

ROOT = Path(__file__).parent.parent


def blocks(name: str) -> list[str]:
    """The Python code of a page."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL)


def statements(code: str) -> list[str]:
    """The source of each top-level statement, decorators included."""
    lines = code.splitlines()
    starts = [
        min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]) for node in ast.parse(code).body
    ]
    ends = [node.end_lineno or node.lineno for node in ast.parse(code).body]
    return ["\n".join(lines[start - 1 : end]) for start, end in zip(starts, ends)]


def test_writing_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """What names a file is in that file, whose tests run; the rest is run here."""
    from examples.recognize_spelled_silu import recognize_spelled_silu

    names: dict[str, Any] = {"recognize_spelled_silu": recognize_spelled_silu}
    compiled = type("Compiled", (), {"summary": lambda self: "the table"})()
    monkeypatch.setattr(graphsrt, "compile", lambda model, **options: names.update(options) or compiled)
    shown: list[str] = []
    for code in blocks("docs/writing_a_pass.md"):
        if code.startswith("# examples/"):
            shown.append(code.split()[1])
            known = (ROOT / shown[-1]).read_text()
            for statement in statements(code):
                assert statement in known, f"{shown[-1]} does not have\n{statement}"
        else:
            exec(code, names)
            index = names["passes"].index(recognize_spelled_silu)
            assert names["passes"][index + 1].__name__ == "shard_tensor_parallel"
    assert len(shown) == 5 and "passes" in names
    fusion = (ROOT / shown[0]).read_text().partition('"""\n\n')[2]
    assert len(fusion.splitlines()) <= 20


def test_the_package_shown_is_the_one_in_examples() -> None:
    page = (ROOT / "docs/writing_a_pass.md").read_text()
    for name in ("pyproject.toml", "fold_norm/__init__.py"):
        assert (ROOT / "examples/fold_norm_package" / name).read_text().rstrip() in page, name


def test_links() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_passes_page_is_not_stale() -> None:
    now, page = document(), (ROOT / "docs/passes.md").read_text()
    difference = diff_text(page, now, "docs/passes.md", "now")
    assert not difference, f"{difference}\npython -m graphsrt.passes.document > docs/passes.md writes it anew"


def test_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fusion shown is the one in the package; the pass shown joins the pipeline; every name shown exists."""
    monkeypatch.setattr(graphsrt, "compile", lambda model, **options: options["passes"])
    six_lines, fusion, mine = blocks("README.md")
    assert len(six_lines.splitlines()) == 6
    assert fusion in (ROOT / "graphsrt/passes/fuse_add_rms_norm.py").read_text()
    names: dict[str, Any] = {}
    exec(mine, names)
    assert names["recognize_spelled_silu"] in names["model"]
    for name in re.findall(r"model\.(\w+)\(", (ROOT / "README.md").read_text()):
        assert hasattr(graphsrt.CompiledModel, name), name


def test_architecture_names_every_module() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    for file in (ROOT / "graphsrt").rglob("*.py"):
        name = str(file.relative_to(ROOT / "graphsrt"))
        if file.name in ("__init__.py", "__main__.py") or "/kernels/" in name or "/engines/" in name:
            continue
        if name.startswith("passes/") and file.stem in {pass_.__name__ for pass_ in PIPELINE}:
            continue
        assert f"`{name}`" in text, name


def test_generating(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The page runs from top to bottom, on a small model that answers in its own way."""
    from tests.support import tiny

    tokenizer = tiny.tokenizer()
    small = tiny.model("llama", vocab_size=len(tokenizer), eos_token_id=None)
    opened = graphsrt.compile(small, tp=2, ranks="simulated")
    opened.source.tokenizer = opened.engine.intake.tokenizer = tokenizer  # type: ignore[union-attr]
    monkeypatch.setattr(graphsrt, "compile", lambda *_, **__: opened)
    names: dict[str, Any] = {}
    for code in blocks("docs/generating.md"):
        exec(code.replace("[504, 2365]", "[5, 23]"), names)
    assert len(names["results"]) == 3 and names["results"][0].finish_reason == "length"
    assert "graphsrt_generated_tokens_total" in names["text"]


def test_adding_a_model() -> None:
    (code,) = blocks("docs/adding_a_model.md")
    exec(code, {})
