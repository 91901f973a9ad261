"""scatter_logits: the last gather goes, where the program is sampled from and ranks hold the vocabulary in order."""

from __future__ import annotations

import pytest
import torch

import graphsrt
from graphsrt import ops
from graphsrt.passes.scatter_logits import scatter_logits
from graphsrt.passes.select_logit_rows import select_logit_rows
from graphsrt.placement import Layout, Run, Shard
from graphsrt.program import Program, arguments, aten
from graphsrt.runtime.split_logits import Columns
from graphsrt.testing import check
from tests.support import captures, tiny


def test_text() -> None:
    """Gather and cut are gone; what is returned says how the vocabulary is divided."""
    done = check(scatter_logits, captures.before("scatter_logits", "llama"), fires=1)
    assert [line.partition(" = ")[0] for line in done.before.splitlines()[-4:]] == [
        "lm_head: f64[R, 67/2{0:34|34:67,~66:67}] S(1)",
        "lm_head.all_gather: f64[R, 68] R",
        "lm_head.vocabulary: f64[R, 67] R",
        "return lm_head.vocabulary",
    ]
    assert done.after.splitlines()[-1] == "return lm_head" and "all_gather" not in done.after
    assert done.after.splitlines()[:-1] == done.before.splitlines()[:-3]
    again = Program.from_text(str(done.program))
    assert Columns.of(again.output) == Columns((0, 34), (34, 33), 0, torch.stack)


@pytest.mark.parametrize("family", ["llama_tied", "gemma2"])
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_tied_heads_and_capped_logits(family: str, tp: int) -> None:
    """Whatever stands between the head and the gather is computed on parts already."""
    done = check(scatter_logits, captures.before("scatter_logits", family, tp=tp), fires=1)
    assert done.program.output.meta["placement"] == Shard(1, Layout.blocks(tiny.VOCAB, tp))
    assert not done.program.calls(ops.all_gather)


def test_a_vocabulary_without_padding() -> None:
    traced = graphsrt.trace(tiny.config("llama", layers=1, vocab_size=66), tp=2, dtype=torch.float64)
    done = check(scatter_logits, traced.stages.around("scatter_logits")[0].copy(), fires=1)
    assert "66/2" in done.after.splitlines()[-2]


def test_one_rank_has_nothing_to_gather() -> None:
    misses: list = []
    program = captures.before("scatter_logits", "llama", tp=1)
    assert scatter_logits(program, near_misses=misses) == 0 and not misses
    assert scatter_logits.expect(program) == 0  # type: ignore[attr-defined]


def test_without_selected_rows() -> None:
    """A program that is only executed keeps its whole result."""
    program = captures.before("select_logit_rows", "llama")
    check(scatter_logits, program, fires=0, near_miss="nobody samples from this program")


def test_a_cut_that_is_no_padding() -> None:
    program = captures.before("scatter_logits", "llama")
    node = program.output
    node.args = (*node.args[:3], 60)
    node.meta.pop("val")
    program.infer()
    check(scatter_logits, program, fires=0, near_miss="lm_head.vocabulary cuts off more than padding")


def test_a_gather_that_others_read() -> None:
    program = captures.before("scatter_logits", "llama")
    whole = arguments(program.output)["self"]
    extra = program.call(aten.exp.default, whole, name="extra", before=program.output, like=whole)
    extra.meta["placement"] = whole.meta["placement"]
    program.infer()
    misses: list = []
    assert scatter_logits(program, near_misses=misses) == 0
    assert [miss.reason for miss in misses] == ["its whole value is used elsewhere"]


def test_a_vocabulary_in_pieces() -> None:
    """What the sampler could not number: a rank that holds several pieces of the vocabulary."""
    program = captures.before("scatter_logits", "llama", tp=2)
    local = arguments(arguments(program.output)["self"])["x"]
    local.meta["placement"] = Shard(
        1, Layout.of([[Run(0, 10), Run(34, 24)], [Run(10, 24), Run(58, 9), Run(0, 1, False)]])
    )
    misses: list = []
    assert scatter_logits(program, near_misses=misses) == 0
    assert "rank 0 owns several pieces of 67/2" in misses[0].reason


def test_it_follows_select_logit_rows() -> None:
    from graphsrt.passes import PIPELINE

    assert PIPELINE.index(scatter_logits) == PIPELINE.index(select_logit_rows) + 1
