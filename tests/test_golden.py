"""Complete texts of two tiny models at three milestones. ``GRAPHSRT_UPDATE_GOLDEN=1`` writes them anew."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from graphsrt.printer import diff_text, print_program
from tests.support.captures import traced

GOLDEN = Path(__file__).parent / "golden"
MODELS = {"llama": (4, 2, 2, 1), "gemma2": (8, 2, 4, 2)}  # heads, KV heads, tp, layers
MILESTONES = ["recognize_gated_mlp", "shard_tensor_parallel", "fuse_silu_mul"]


def stable(text: str) -> str:
    """Text without what differs between versions of transformers: lines of its source files."""
    text = re.sub(r"(?:  # )?(?: · )?\b\w+\.py:\d+(?= ·|$)", lambda m: "  # " if "#" in m[0] else "", text, flags=re.M)
    return re.sub(r"  # (?: · )?$", "", text.replace("#  · ", "# "), flags=re.M)


def test_stable() -> None:
    assert stable("a = f(b)  # by p · x_y.py:71 · in m") == "a = f(b)  # by p · in m"
    assert stable("a = f(b)  # x_y.py:71 · in m\nc  # x.py:1") == "a = f(b)  # in m\nc"
    assert stable("a = f(b)  # by p · x.py:2") == "a = f(b)  # by p"


@pytest.mark.parametrize("milestone", MILESTONES)
@pytest.mark.parametrize("family", MODELS)
def test_golden(family: str, milestone: str) -> None:
    heads, kv_heads, tp, layers = MODELS[family]
    stages = traced(family, heads, kv_heads, tp, torch.bfloat16, layers)
    text = stable(print_program(stages.program(after=milestone), history=False))
    file = GOLDEN / f"{family}_tp{tp}_{MILESTONES.index(milestone) + 1}_{milestone}.txt"
    if os.environ.get("GRAPHSRT_UPDATE_GOLDEN"):
        file.write_text(text, encoding="utf-8")
    assert file.is_file(), f"{file} is missing; GRAPHSRT_UPDATE_GOLDEN=1 writes it"
    difference = diff_text(file.read_text(encoding="utf-8"), text, str(file.name), "now")
    assert not difference, f"{difference}\nIf that is meant, GRAPHSRT_UPDATE_GOLDEN=1 writes it"
