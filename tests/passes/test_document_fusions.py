"""docs/fusions.md is what its command writes, and every site of a fusion fires or has a reason."""

from __future__ import annotations

from pathlib import Path

from graphsrt.passes.document_fusions import FUSIONS, HEADER, MODELS, lines, section

PAGE = Path(__file__).parent.parent.parent / "docs/fusions.md"
HINT = "python -m graphsrt.passes.document_fusions > docs/fusions.md writes it anew"


def test_page_is_not_stale() -> None:
    """One model stands for the others, which take as long again each: it has a site of most fusions."""
    page = PAGE.read_text()
    assert page.startswith(HEADER), HINT
    assert [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")] == [
        model.name for model in MODELS
    ], HINT
    assert section(MODELS[-1]) in page, HINT


def test_counts_of_a_model() -> None:
    """Of 64 layers: two residuals each, heads, gates, and what is rounded; the first norm follows no sum."""
    found = {line.name: line for line in lines(MODELS[-1])}
    counts = {name: line.in_all(64) for name, line in found.items()}
    assert counts == {
        "scatter_residual": (129, 128),
        "fuse_add_rms_norm": (129, 128),
        "fuse_all_reduce_add_rms_norm": (129, 128),
        "fuse_qk_norm_rope": (64, 64),
        "fuse_rope_kv_write": (64, 64),
        "fuse_silu_mul": (64, 64),
        "fuse_rms_norm_quant": (192, 128),
        "fuse_silu_mul_quant": (64, 64),
    }
    for line in found.values():
        assert bool(line.reasons) == bool(line.missed) and all(why for _, why in line.reasons)
    assert set(counts) <= set(FUSIONS)
