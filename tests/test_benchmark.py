"""`graphsrt bench` on a tiny checkpoint: real engine processes, and what is made of their times."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import graphsrt
from graphsrt.benchmark.ceilings import Ceilings
from graphsrt.benchmark.engine_process import EngineError, EngineProcess, EngineSpec
from graphsrt.benchmark.measure import Bench, Decode, Prefill, Times, measure
from graphsrt.benchmark.show import plot, text
from graphsrt.cli import main
from tests.support import tiny

try:
    import matplotlib  # noqa: F401

    PLOT_REFUSED = "a plot's format is what its file's name ends with"
except ImportError:
    PLOT_REFUSED = "a plot needs matplotlib"

EAGER = (("backend", "eager"),)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    tiny.build("llama").float().save_pretrained(folder)
    return folder


def test_engines_in_turn(checkpoint: Path, tmp_path: Path) -> None:
    """Ours and transformers; a peer that is not there is left out and says why."""
    specs = [EngineSpec("graphsrt", str(checkpoint), options=EAGER), EngineSpec("hf", str(checkpoint))]
    absent = EngineSpec("openvino", str(checkpoint))
    program = graphsrt.trace(str(checkpoint), dtype="float32").program()
    told: list[str] = []
    found = measure(
        [*specs, absent], [Decode(2, 20), Prefill(9)], program, dtype="float32", threads=1, rounds=2, new=4,
        starts=False, told=told.append,
    )  # fmt: skip
    assert set(found.versions) == {"graphsrt", "hf"} and "openvino failed to load" in found.failures["openvino"]
    assert "bench/peers.md" in found.failures["openvino"]
    for times in found.cases:
        assert {name: len(seconds) for name, seconds in times.seconds.items()} == {"graphsrt": 2, "hf": 2}
        assert times.best_peer() == "hf" and times.ratio("graphsrt", "hf") is not None and not times.failures
        assert len(times.ceilings) == 2 and min(times.ceilings) > 0 and times.of_ceiling() > 0
    assert found.peak_bytes["hf"] > 1e7
    # the steps of one run: its prompts, and three more tokens
    assert len(found.cases[0].host_s) == 2 and all(0 < host < 1 for host in found.cases[0].host_s)
    assert found.cases[1].host_s == []
    assert found.cases[0].bytes_read > found.weight_bytes / 2 and found.cases[1].flops > 0
    shown = text(found)
    assert "| decode, batch 2 at 20 |" in shown and "| prefill of 9 |" in shown and "openvino" in shown
    assert json.loads(json.dumps(found.as_dict()))["cases"][0]["case"] == {"kind": "decode", "batch": 2, "context": 20}
    assert any("round 2 of 2" in words for words in told)
    if "needs matplotlib" in PLOT_REFUSED:
        with pytest.raises(ValueError, match=PLOT_REFUSED):
            plot(found, tmp_path / "bench.png")
    else:
        plot(found, tmp_path / "bench.png")
        assert (tmp_path / "bench.png").stat().st_size > 1000


def test_an_engine_generates_what_is_asked_for(checkpoint: Path) -> None:
    """The same greedy tokens from both; and an error of an engine comes with its own words."""
    prompts = [tiny.tokens(6, seed) for seed in (1, 2)]
    tokens = []
    for spec in (EngineSpec("graphsrt", str(checkpoint), options=EAGER), EngineSpec("hf", str(checkpoint))):
        with EngineProcess(spec) as engine:
            assert engine.load(threads=1, dtype="float32", context=32, batch=2) > 0
            tokens.append(engine.run(prompts, 5).tokens)
            assert engine.peak_memory() > 1e7
            with pytest.raises(EngineError, match=f"{spec.name} failed to run"):
                engine.run([[999]], 2)  # no such token
    assert tokens[0] == tokens[1] and [len(row) for row in tokens[0]] == [5, 5]


def test_ratios_are_of_the_same_round() -> None:
    times = Times(Decode(4, 100), {"graphsrt": [1.0, 2.0, 4.0], "hf": [3.0, 4.0, 20.0], "vllm": [9.0, 9.0, 9.0]})
    assert times.best_peer() == "hf" and times.median("hf") == 4.0 and times.median("openvino") is None
    assert times.ratio("graphsrt", "hf") == (3.0, 2.0, 5.0)
    bench = Bench("m", "bfloat16", 2, 1, versions={"graphsrt": "1", "hf": "2"}, cases=[times])
    # 5, 2.5 and 1.25 GB/s
    times.ceilings, times.bytes_read = [10e9, 5e9, 6.25e9], 5 * 10**9
    assert "| decode, batch 4 at 100 | 2.0 | 1.0 | 2.5 GB/s, 50% | hf | 3.00 (2.00–5.00) | – |" in text(bench)
    assert "read: 5.0 to 10.0 GB/s" in text(bench)
    times.host_s += [0.001, 0.003, 0.002]
    assert "| 3.00 (2.00–5.00) | 2.00 |" in text(bench)


def test_ceilings() -> None:
    """A product's rate counts two FLOPs for each multiplication, and every occurrence of a shape."""
    import torch

    most = Ceilings(1 << 20, [(64, 32), (64, 32), (16, 64)], [torch.float32], torch.get_num_threads())
    assert most.read_bandwidth(seconds=0.01) > 1e8
    rate = most.product_rate(8, seconds=0.01)
    assert math.isfinite(rate) and rate > 1e6


def test_mistakes(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words, status in (
        (["--peers", "tgi"], "no peer is called 'tgi'", 1),
        (["--contexts", "16"], "too short to decode 33", 1),
        (["--batches", "1,two"], "--batches takes numbers with commas", 2),
        (["--batches", "0"], "--batches takes numbers from 1 on", 2),
        (["--peer-python", "hf"], "--peer-python takes NAME=VALUE", 2),
        (["--json", "nowhere/bench.json"], "--json names a file in a folder that is not there", 1),
        (["--plot", "nowhere/bench.png"], "--plot names a file in a folder that is not there", 1),
        (["--plot", "bench.docx"], PLOT_REFUSED, 1),
    ):
        assert main(["bench", str(checkpoint), *arguments]) == status
        assert words in capsys.readouterr().err
