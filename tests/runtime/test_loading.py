"""Loading: every byte of the checkpoint is read once for all ranks of a machine, and every rank gets its own slices."""

from __future__ import annotations

import os
import random
import threading
from itertools import product

import pytest
import torch
from safetensors.torch import save_file

import graphsrt
from graphsrt.errors import CheckpointError, RankError
from graphsrt.lowering import shared_memory
from graphsrt.models.checkpoint import SafetensorsCheckpoint, StateDictCheckpoint
from graphsrt.models.conversion import ConvertedCheckpoint
from graphsrt.placement import Layout
from graphsrt.recipes import Cat, Ckpt, Fill, Mul, OnOwner, ShardOf, Transpose, evaluate
from graphsrt.runtime import load_plan, weights
from graphsrt.runtime.load_plan import plan, spans
from graphsrt.runtime.weights import load_weights
from tests.support import tiny


class ThreadCollectives:
    """Ranks that are threads of this process: as much of ``ProcessCollectives`` as loading uses."""

    def __init__(self, rank: int, size: int, shared: dict):
        self.rank, self.size, self._shared = rank, size, shared

    def gather_objects(self, value):
        told = self._shared.setdefault("told", [None] * self.size)
        told[self.rank] = value
        self.barrier()
        values = list(told)
        self.barrier()
        return values

    def barrier(self):
        self._shared["barrier"].wait(20)

    def subgroup(self, ranks):
        with self._shared["lock"]:
            shared = self._shared.setdefault(tuple(ranks), new_group(len(ranks)))
        return ThreadCollectives(list(ranks).index(self.rank), len(ranks), shared)


def new_group(size: int) -> dict:
    return {"barrier": threading.Barrier(size), "lock": threading.Lock()}


def on_ranks(size: int, work):
    """``work(rank, collectives)`` on threads; their results, or the first exception."""
    group, results = new_group(size), [None] * size

    def run(rank):
        try:
            results[rank] = work(rank, ThreadCollectives(rank, size, group))
        except BaseException as error:  # noqa: BLE001 - raised below
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class Weight:
    def __init__(self, recipe, dtype, shape=()):
        self.recipe, self.dtype, self.shape = recipe, dtype, shape


class Weights:
    """As much of a program as loading reads."""

    def __init__(self, size, source, **recipes):
        self.weights = {}
        for name, (recipe, dtype) in recipes.items():
            whole = evaluate(recipe, 0, source, dtype)  # all ranks' parts are of one size
            self.weights[name] = Weight(recipe, dtype, tuple(whole.shape))


@pytest.fixture
def small_slots(monkeypatch):
    """Slots so small that rows and even parts of rows are pieces of their own."""
    for module in (load_plan, weights):
        monkeypatch.setattr(module, "SLOT_BYTES", 192)
    monkeypatch.setattr(load_plan, "SPAN_BYTES", 16)


def recipes(size: int) -> dict:
    rows, columns = Layout.blocks(12, size), Layout.blocks(18, size)
    return {
        "whole": (Ckpt("a"), torch.float32),
        "rows": (ShardOf(Ckpt("a"), 0, rows), torch.bfloat16),
        "columns": (ShardOf(Ckpt("a"), 1, columns, "zero"), torch.float32),
        "joined": (Cat((ShardOf(Ckpt("a"), 0, rows), ShardOf(Ckpt("b"), 0, rows), Fill((1, 18), 2.0)), 0), torch.half),
        "turned": (ShardOf(Transpose(Ckpt("b"), 0, 1), 0, columns), torch.float32),
        "scaled": (Mul(ShardOf(Ckpt("b"), 1, columns), ShardOf(Ckpt("scale"), 0, columns), 1), torch.float32),
        "middle": (ShardOf(Ckpt("cube"), 1, rows), torch.float64),
        "inner": (ShardOf(Ckpt("cube"), 2, columns), torch.float64),
        "stacked": (ShardOf(Ckpt("experts"), 0, Layout.blocks(6, size)), torch.float32),
        "bias": (OnOwner(Ckpt("scale")), torch.float32),
        "scalar": (Ckpt("one"), torch.float32),
        "empty": (Ckpt("nothing"), torch.float32),
        "made": (Fill((3,), 1.5), torch.float32),
    }


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    cube = torch.randn(5, 12, 18, dtype=torch.float64)
    return {
        "a": torch.randn(12, 18), "b": torch.randn(12, 18), "scale": torch.randn(18), "cube": cube,
        "one": torch.tensor(3.0), "nothing": torch.empty(0, 4),
    } | {f"e{i}": torch.randn(7, 3) for i in range(6)}  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_rank_gets_its_slices_and_bytes_are_read_once(tmp_path, small_slots, tensors, size):
    save_file(tensors, tmp_path / "model.safetensors")
    view = {"experts": ["stack", 0, [f"e{i}" for i in range(6)]]}
    known = ConvertedCheckpoint(StateDictCheckpoint(tensors), view)
    program = Weights(size, known, **recipes(size))
    descriptors = len(os.listdir("/proc/self/fd"))

    def work(rank, collectives):
        source = ConvertedCheckpoint(SafetensorsCheckpoint(tmp_path), view)
        return load_weights(program, rank, source, collectives=collectives if size > 1 else None)

    results = on_ranks(size, work)
    file_bytes = (tmp_path / "model.safetensors").stat().st_size
    header_bytes = SafetensorsCheckpoint(tmp_path).files[0].header_bytes
    for rank, (loaded, report) in enumerate(results):
        assert list(loaded) == list(program.weights)
        for name, weight in program.weights.items():
            want = evaluate(weight.recipe, rank, known, weight.dtype)
            assert torch.equal(loaded[name], want) and loaded[name].dtype == weight.dtype, name
            assert loaded[name].untyped_storage().nbytes() == want.numel() * want.element_size(), name
        assert report.node_ranks == tuple(range(size)) and report.checkpoint_bytes == file_bytes
        assert report.node_bytes_read == file_bytes + (size - 1) * header_bytes
        assert report.bytes_read < file_bytes or size == 1
    assert sum(report.bytes_read for _, report in results) == results[0][1].node_bytes_read
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_two_nodes_read_what_they_keep(tmp_path, small_slots, tensors, monkeypatch):
    save_file(tensors, tmp_path / "model.safetensors")
    known = StateDictCheckpoint(tensors)
    rows = Layout.blocks(12, 4)
    recipe = {"rows": (ShardOf(Ckpt("a"), 0, rows), torch.float32), "scale": (Ckpt("scale"), torch.float32)}
    program = Weights(4, known, **recipe)
    names = threading.local()
    monkeypatch.setattr(weights, "node_name", lambda: names.value)

    def work(rank, collectives):
        names.value = f"node {rank // 2}"
        return load_weights(program, rank, SafetensorsCheckpoint(tmp_path), collectives=collectives)

    for rank, (loaded, report) in enumerate(on_ranks(4, work)):
        assert torch.equal(loaded["rows"], tensors["a"][3 * rank : 3 * rank + 3])
        assert report.node_ranks == ((0, 1) if rank < 2 else (2, 3))
        header_bytes = SafetensorsCheckpoint(tmp_path).files[0].header_bytes
        assert report.node_bytes_read == 2 * header_bytes + 6 * 18 * 4 + 18 * 4


@pytest.mark.parametrize("seed", range(20))
def test_plan_covers_boxes_once(tmp_path, monkeypatch, seed):
    rng = random.Random(seed)
    monkeypatch.setattr(load_plan, "SLOT_BYTES", rng.choice([64, 200, 1000]))
    monkeypatch.setattr(load_plan, "SPAN_BYTES", rng.choice([8, 100]))
    shapes = {f"t{i}": [rng.randint(1, 6) for _ in range(rng.randint(0, 4))] for i in range(4)}
    stored = {name: torch.arange(torch.Size(shape).numel()).view(shape) for name, shape in shapes.items()}
    save_file(stored, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    wanted = []
    for _ in range(3):
        boxes = {}
        for name, shape in shapes.items():
            starts = [rng.randint(0, length) for length in shape]
            boxes[name] = [tuple((start, rng.randint(start, length)) for start, length in zip(starts, shape))]
        wanted.append(boxes)
    seen: dict[str, set] = {name: set() for name in shapes}
    data = (tmp_path / "model.safetensors").read_bytes()
    readers = rng.randint(1, 5)
    for chunk in plan(checkpoint, wanted):
        assert all(p.slot_offset + p.num_bytes <= load_plan.SLOT_BYTES and p.slot_offset % 64 == 0 for p in chunk)
        for piece in chunk:
            values = torch.frombuffer(bytearray(data[piece.file_offset :][: piece.num_bytes]), dtype=torch.int64)
            cut = stored[piece.name][tuple(slice(*limit) for limit in piece.box)]
            assert torch.equal(values, cut.flatten())
            indices = set(values.tolist())
            assert not indices & seen[piece.name]
            seen[piece.name] |= indices
        shares = [share for reader in range(readers) for share in spans(chunk, readers, reader)]
        assert sorted(b for p, start, stop in shares for b in range(p.slot_offset + start, p.slot_offset + stop)) == [
            b for p in chunk for b in range(p.slot_offset, p.slot_offset + p.num_bytes)
        ]
    for boxes, name in product(wanted, shapes):
        kept = stored[name][tuple(slice(*limit) for limit in boxes[name][0])]
        assert set(kept.flatten().tolist()) <= seen[name]


def test_ranks_that_see_different_checkpoints(tmp_path, tensors):
    program = Weights(3, StateDictCheckpoint(tensors), whole=(Ckpt("a"), torch.float32))
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
        extra = {"more": torch.ones(2)} if rank == 1 else {}
        save_file({**tensors, **extra}, tmp_path / str(rank) / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"see different checkpoints\n +where: +rank 1\n"):
        on_ranks(3, lambda rank, group: load_weights(program, rank, SafetensorsCheckpoint(tmp_path / str(rank)),
                                                     collectives=group))  # fmt: skip


def test_no_memory_to_share(tmp_path, tensors, monkeypatch):
    program = Weights(2, StateDictCheckpoint(tensors), whole=(Ckpt("a"), torch.float32))
    save_file(tensors, tmp_path / "model.safetensors")

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_memory.os, "posix_fallocate", no_space)
    with pytest.raises(RankError, match=r"cannot share 64 MiB of memory(?s:.*)No space left"):
        on_ranks(2, lambda rank, group: load_weights(program, rank, SafetensorsCheckpoint(tmp_path),
                                                     collectives=group))  # fmt: skip


def test_rank_processes_read_the_checkpoint_once(tmp_path):
    net = tiny.build("llama", heads=8, kv_heads=4, hidden_size=256, intermediate_size=768, vocab_size=2048)
    net.to(torch.float32).save_pretrained(tmp_path)
    ids = [tiny.tokens(5, seed) for seed in range(2)]
    with graphsrt.compile(str(tmp_path), tp=2, backend="eager", context_length=64, max_total_tokens=128) as model:
        reports, got = model.load_reports, model.logits(ids)
    for number, logits in enumerate(got):
        # float32 sums in another order: two ranks against one
        assert tiny.worst(logits, tiny.eager_logits(net, ids[number])) < 1e-5
    assert [report.rank for report in reports] == [0, 1]
    total = reports[0].checkpoint_bytes
    assert total > 8e6 and all(report.node_ranks == (0, 1) for report in reports)
    assert 0.95 * total < sum(report.bytes_read for report in reports) == reports[0].node_bytes_read <= 1.05 * total
    assert max(report.bytes_read for report in reports) < 0.6 * total


def test_peak_memory(tmp_path):
    from bench.loading import measure

    ranks, largest_bytes = measure(0.5, 2, tmp_path, width=2048)
    for rank in ranks:
        share = rank.report.weight_bytes
        assert share > 200e6 and rank.report.node_bytes_read <= 1.05 * rank.report.checkpoint_bytes
        assert rank.pss_bytes < share + 64e6  # what the allocator keeps
        # what a rank keeps, its part of the weight that is being made, and the slots that all ranks share
        assert rank.peak_bytes < 1.2 * share + largest_bytes
