"""What the documentation shows is run, as far as that takes no weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import graphsrt
from graphsrt.passes import PIPELINE

ROOT = Path(__file__).parent.parent


def blocks(name: str) -> list[str]:
    """The Python code of a page."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL)


def test_writing_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphsrt, "compile", lambda model, **options: options["passes"])
    names: dict[str, Any] = {}
    for code in blocks("docs/writing_a_pass.md"):
        exec(code, names)
    names["test_recognize_spelled_silu"]()
    assert len(names["model"]) == len(PIPELINE) + 1


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
        if file.name in ("__init__.py", "__main__.py") or "/kernels/" in name:
            continue
        if name.startswith("passes/") and file.stem in {pass_.__name__ for pass_ in PIPELINE}:
            continue
        assert f"`{name}`" in text, name
