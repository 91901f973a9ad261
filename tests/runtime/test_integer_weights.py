"""Engines with weights of integers: the same numbers on any ranks and any backend, and how they are loaded."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

import graphsrt
from graphsrt.runtime.weights import _Block, load_weights
from tests.support import captures, tiny

SIZES = {"head_dim": 32, "hidden_size": 96, "intermediate_size": 192, "layers": 1}
PROMPTS = [tiny.tokens(17, seed=1), tiny.tokens(3, seed=2)]


def net() -> torch.nn.Module:
    return tiny.build("llama_tied", 6, 3, **SIZES).float()


def logits(form: str, **options: object) -> list[torch.Tensor]:
    with (
        captures.shared(),
        graphsrt.compile(
            net(), quantize=form, max_running=2, context_length=64, max_total_tokens=64, **options
        ) as model,
    ):
        return model.logits(PROMPTS)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_ranks_have_parts_of_the_same_numbers(form: str) -> None:
    """At two ranks heads are replicated and padded; only the order of float32 sums differs."""
    want = logits(form, ranks="simulated")
    for tp in (2, 3):
        for got, wanted in zip(logits(form, ranks="simulated", tp=tp), want):
            assert tiny.worst(got, wanted) <= 1e-5  # 24 bits, and sums over ranks run in another order
    plain = net()(input_ids=torch.tensor([PROMPTS[0]])).logits[0]
    assert 1e-4 < tiny.worst(want[0], plain) < {"int8": 0.05, "int4": 0.5}[form], "rounded, and not by much"


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_compiled_is_plain(form: str) -> None:
    """The kernels read integers as they are stored; each product is summed in float32 in another order. With 4 bits
    inputs are rounded to 2**-15 of the largest of 32, in four products of a layer and the head."""
    for got, want in zip(logits(form), logits(form, backend="eager")):
        assert tiny.worst(got, want) <= {"int8": 1e-5, "int4": 5 * 2**-15 * 32**0.5}[form]


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_loading_reads_once_and_holds_one_matrix(form: str, tmp_path: Path) -> None:
    model = net()
    model.save_pretrained(tmp_path)
    with captures.shared():
        traced = graphsrt.trace(str(tmp_path), quantize=form, dtype="float32", context_length=64)
    most = 0

    def watch(*_: object) -> None:
        nonlocal most
        most = max(most, sum(isinstance(one, _Block) and one.data is not None for one in gc.get_objects()))

    program = traced.program()
    checkpoint = traced.source.require_checkpoint()
    loaded, report = load_weights(program, 0, checkpoint, progress=watch)
    assert most <= 3, "no more than q, k and v, of which one weight is made"
    assert report.bytes_read <= report.checkpoint_bytes
    assert report.weight_bytes == sum(value.nbytes for value in loaded.values())
    wide = sum(value.nbytes for name, value in loaded.items() if value.dtype == torch.float32 and value.dim() == 2)
    assert wide < report.weight_bytes, "the table and rotary table alone stay plain"
    storages = [value.untyped_storage().data_ptr() for value in loaded.values()]
    assert len(set(storages)) == len(storages), "no weight shares memory with another"
