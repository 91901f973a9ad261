"""The package of docs/writing_a_pass.md, from its folder to a user who installs it: every command as written there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import LlamaConfig

import graphsrt
from graphsrt.cli import main
from tests.support.captures import shared

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "examples/fold_norm_package"
PAGE = (ROOT / "docs/writing_a_pass.md").read_text()
SIZES = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 3, "vocab_size": 48, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip


def commands() -> list[str]:
    """The lines of the page's shell blocks."""
    return "\n".join(re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)).splitlines()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the package is installed, as ``pip install .`` does it but into a folder of its own."""
    source, target = tmp_path_factory.mktemp("source") / "package", tmp_path_factory.mktemp("site")
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    install = next(line for line in commands() if line.startswith("pip "))
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    done = subprocess.run(
        [sys.executable, "-m", *install.split(), *offline], cwd=source, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(site)
    yield site
    sys.modules.pop("fold_norm", None)


def test_commands(
    installed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the page shows of SmolLM2 holds for a small model of its kind: all norms but the last, and the reason."""
    monkeypatch.chdir(tmp_path)
    LlamaConfig(**SIZES).save_pretrained(tmp_path / "config")
    printed: dict[str, str] = {}
    for line in commands():
        if line.startswith("graphsrt "):
            with shared():
                assert main(line.replace("smollm2", "config/config.json").split()[1:]) == 0, line
            printed[line.replace("graphsrt ", "")] = capsys.readouterr().out
    row = next(row for row in printed["inspect smollm2 --tp 3"].splitlines() if row.startswith("fold_norm_weight"))
    assert row.split()[1] == "4" and row.split()[-1] == "1"
    order = [row.split()[0] for row in printed["inspect smollm2 --tp 3"].splitlines()[1:] if row]
    assert order.index("fold_norm_weight") == order.index("shard_tensor_parallel") + 1
    diff = printed["inspect smollm2 --tp 3 --diff fold_norm_weight"]
    assert '= mul(shard(ckpt("model.layers.0.self_attn.q_proj.weight"), dim=0, layout=48/3, unowned="copy"), ' in diff
    assert "fold_norm_weight" in printed["verify smollm2 --tp 3"]
    assert "grep fold_norm_weight stages/near_misses.txt" in commands()
    misses = (tmp_path / "stages/near_misses.txt").read_text().splitlines(keepends=True)
    (mine,) = [line for line in misses if "fold_norm_weight" in line]
    assert mine in PAGE and mine.startswith("fold_norm_weight: norm: ")


def test_left_out(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(**SIZES)
    assert "fold_norm_weight" in graphsrt.trace(config, stop_after="fold_norm_weight").stages.names
    with pytest.raises(ValueError, match="no pass is called 'fold_norm_weight'"):
        monkeypatch.setenv("GRAPHSRT_DISABLE_PLUGINS", "1")
        graphsrt.trace(config, without=["fold_norm_weight"])


def test_tests_of_the_package(site: Path) -> None:
    """In a process of its own, as its author runs them."""
    line = next(line for line in commands() if "pytest" in line)
    done = subprocess.run(
        [sys.executable, *line.split()[1:], "-p", "no:cacheprovider"],
        cwd=PACKAGE, env={**os.environ, "PYTHONPATH": f"{site}:{ROOT}"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "6 passed" in done.stdout, done.stdout
