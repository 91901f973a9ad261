"""Checkpoints that store experts one by one, or as the class does, read by ranks in slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import graphsrt
from graphsrt.models.checkpoint import Checkpoint
from tests.support import mixtures, tiny
from tests.support.captures import shared


@pytest.mark.parametrize(
    ("family", "tp", "experts", "stored"),
    [
        ("mixtral", 2, "tp", "experts.3.w1.weight"),
        ("mixtral", 2, "ep", "experts.3.w1.weight"),
        ("qwen3_moe", 2, "tp", "experts.3.gate_proj.weight"),
        ("gpt_oss", 2, "tp", "experts.gate_up_proj"),
    ],
)
def test_a_folder_gives_transformers_logits(tmp_path: Path, family: str, tp: int, experts: str, stored: str) -> None:
    net = mixtures.model(family)
    net.save_pretrained(tmp_path)
    with shared(), graphsrt.compile(
        str(tmp_path), tp=tp, ranks="simulated", dtype=torch.float64, experts=experts
    ) as model:  # fmt: skip
        assert any(stored in name for name in _names(model.source.require_checkpoint())), "the format under test"
        ids = tiny.tokens(11, seed=4)
        # transformers computes norms, rope and softmax in float32 whatever the model's dtype is: 24 bits, not 53
        assert tiny.worst(model.logits(ids), tiny.eager_logits(net, ids)) <= 1e-5


def _names(checkpoint: Any) -> list[str]:
    return checkpoint.inner.names() if hasattr(checkpoint, "inner") else checkpoint.names()


def test_a_rank_reads_its_experts_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``experts="ep"`` rank 1 of 2 opens the tensors of experts 3 and 4 and of no other expert."""
    from graphsrt.models.checkpoint import SafetensorsCheckpoint
    from graphsrt.recipes import evaluate

    net = mixtures.model("mixtral")
    net.save_pretrained(tmp_path)
    with shared():
        model = graphsrt.compile(str(tmp_path), tp=2, ranks="simulated", dtype=torch.float64, experts="ep")
    read: list[str] = []
    plain = SafetensorsCheckpoint._read

    def noting(self: Checkpoint, name: str, slices: Any) -> torch.Tensor:
        read.append(name)
        return plain(self, name, slices)  # type: ignore[arg-type]

    monkeypatch.setattr(SafetensorsCheckpoint, "_read", noting)
    (weight,) = [w for name, w in model.program().weights.items() if name.endswith("layers.0.mlp.experts.gate_up_proj")]
    value = evaluate(weight.recipe, 1, model.source.require_checkpoint(), torch.float64)
    real = [name for name in read if "experts.4" in name or "experts.3" in name]
    assert value.shape[0] == 3 and real and set(read) == set(real)
    model.close()
