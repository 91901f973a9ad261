"""The table's driver, and one architecture of each mechanism through all that the table asks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from graphsrt.coverage import table
from graphsrt.coverage.architectures import architectures
from graphsrt.coverage.driver import Job, Results, cover, run_jobs
from graphsrt.coverage.measure import EAGER_TOLERANCE, RANKS_TOLERANCE, measure
from graphsrt.coverage.tiny_config import SIZES, VOCAB, tiny_config
from graphsrt.coverage.tiny_model import worst

MECHANISMS = {
    "grouped heads, rope": ("llama", "9/3"),
    "sandwich norms, windows, two soft caps": ("gemma2", "8/4"),
    "norms of heads": ("qwen3", "9/3"),
    "transposed fused weights, learned positions": ("gpt2", "8/4"),
    "ALiBi": ("bloom", "8/4"),
    "experts, gates": ("afmoe", "8/4"),
    "latent attention, groups of experts": ("deepseek_v3", "8/4"),
}
"""Mechanism -> the architecture that stands for it, and its heads. All of them run at 1 and 4 ranks."""


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_mechanism(mechanism: str) -> None:
    model_type, sizes = MECHANISMS[mechanism]
    row = measure(model_type, sizes, (1, 4))
    assert not row.refused, row.refused
    for tp, result in row.tp.items():
        assert result.status == "ok", f"tp={tp}: {result.reason}"
        assert 0 <= result.error_eager <= EAGER_TOLERANCE and 0 <= result.error_pieces <= EAGER_TOLERANCE
    assert not row.without_effect, f"would not be missed: {row.without_effect}"
    assert 0 < row.tp[4].error_ranks <= RANKS_TOLERANCE, "sums in another order: exactly equal would be no sharding"
    layers = [count for layer, count in row.tp[4].audit.collectives.items() if layer not in ("ends", "small")]
    assert layers == [2] * len(layers), "each layer completes what it made itself, wherever a fusion does so"
    assert row.tp[4].audit.bytes_per_rank < 0.5 * row.tp[4].audit.total_bytes


def test_driver_keeps_rows_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run measures nothing; a row of another version is measured again; the page has every row."""
    results, page = tmp_path / "rows.jsonl", tmp_path / "coverage.md"
    options = {"only": ["lfm2", "bert", "mamba"], "tps": [1, 2], "results": results, "markdown": page}
    text = cover(**options)
    assert "ShortConv" in text and text.count("refused") >= 2
    lines = results.read_text().splitlines()
    assert len(lines) == 2
    monkeypatch.setattr("graphsrt.coverage.driver.multiprocessing.get_context", pytest.fail)
    monkeypatch.setattr(
        "graphsrt.coverage.driver.run_jobs", lambda jobs, *a, **k: pytest.fail(str(jobs)) if jobs else None
    )
    assert cover(**options) == text
    made = page.read_text()
    assert "| lfm2 | 8/4 |" in made and "| bert | an encoder that attends in both directions" in made
    results.write_text("\n".join([lines[0], lines[1].replace('"text": "', '"text": "x'), '{"key": {"cut']) + "\n")
    kept = Results(results)
    kept.read()
    assert list(kept.rows) == [json.loads(lines[0])["job"]]


def test_a_crash_and_a_hang_are_rows(tmp_path: Path) -> None:
    """A process that ends without a word and one that takes too long cost one row each, and the next one runs."""
    results = Results(tmp_path / "rows.jsonl")
    run_jobs([Job("mamba", "no such sizes", (1,))], results)
    run_jobs([Job("jamba", "8/4", (1,))], results, timeout_s=0.0)
    run_jobs([Job("rwkv", "8/4", (1,))], results)
    mamba, jamba, rwkv = results.rows.values()
    assert table.status(mamba) == "crashed" and "ended with status 1" in mamba["refused"]
    assert table.status(jamba) == "crashed" and "no result after 0 s" in jamba["refused"]
    assert table.status(rwkv) == "refused" and "state that every token updates" in rwkv["refused"]


def test_caller_mistakes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no causal LM 'llamma'"):
        cover(only=["llamma"], results=tmp_path / "rows")
    with pytest.raises(ValueError, match="no tiny sizes are called '7/7'"):
        cover(only=["llama"], heads=["7/7"], results=tmp_path / "rows")


def test_architectures_are_all_told_apart() -> None:
    """Every model type of transformers is a row or stands apart with a reason; tiny configs are tiny, with windows."""
    known = {one.model_type: one for one in architectures()}
    assert len(known) > 150 and known["llama"].apart is None
    assert known["bert"].apart and known["bart"].apart and known["gemma3"].apart
    for name, why in {"git": "image", "xlm": "causal=False", "xlnet": "attn_type='bi'"}.items():
        assert why in known[name].apart
    for name in ("doge", "cpmant", "blt", "phi4_multimodal"):  # decoders, whether they can be divided or not
        assert known[name].apart is None
    for name in ("llama", "gemma2", "qwen2_moe", "deepseek_v3", "gpt_oss"):
        for sizes in SIZES.values():
            config = tiny_config(name, sizes)
            assert config.vocab_size == VOCAB and config.num_attention_heads == sizes.heads
            widths = [config.hidden_size, config.intermediate_size, config.vocab_size, sizes.heads * sizes.head_dim]
            assert len(set(widths)) >= 3 and max(widths) < 200
    assert tiny_config("gemma2").sliding_window == 5
    assert set(tiny_config("gpt_oss").layer_types) == {"sliding_attention", "full_attention"}
    assert tiny_config("glm4_moe").first_k_dense_replace == 1 < tiny_config("glm4_moe").num_hidden_layers


def test_worst_is_never_fooled() -> None:
    one = torch.tensor([1.0, 2.0])
    assert worst(one, one) == 0.0 and worst(one + 1, one) == 0.5
    for wrong in (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("inf")]), torch.tensor([1.0])):
        assert worst(wrong, one) == float("inf") and worst(one, wrong) == float("inf")
    masked = torch.tensor([1.0, float("-inf")])
    assert worst(masked, masked) == 0.0
