"""What loading takes: bytes from files, host memory at its peak, seconds. Nothing is run.

    python bench/loading.py [--gb 10] [--tp 2] [--folder DIR] [--dense]

Writes a checkpoint with Llama-3-8B's widths and as many layers as make up the size, loads it in ``tp`` rank processes,
and removes it. The file is sparse (it reads as zeros, and costs no disk) unless ``--dense`` writes random bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig

import graphsrt
from graphsrt.models.checkpoint import open_checkpoint, open_spec
from graphsrt.program import Program
from graphsrt.runtime.executor import WorkersExecutor
from graphsrt.runtime.load_plan import LoadReport
from graphsrt.runtime.weights import load_weights
from graphsrt.runtime.wire import StepReply

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Loaded:
    """One rank: its report, and how much memory of its own process grew while it loaded, in bytes.

    peak_bytes: resident set at its highest (what ranks share counts in each); pss_bytes: proportional set at the end.
    """

    report: LoadReport
    peak_bytes: int
    pss_bytes: int


def config(gb: float, width: int = 4096) -> LlamaConfig:
    """Llama-3-8B's proportions, with about ``gb`` gigabytes of bf16 weights."""
    layer_bytes = 2 * width * width * (2.5 + 3 * 3.5)
    layers = max(1, round((gb * 1e9 - 2 * 2 * 32000 * width) / layer_bytes))
    return LlamaConfig(
        vocab_size=32000, hidden_size=width, intermediate_size=width * 7 // 2, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=256, dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip


def write(program: Program, folder: Path, dense: bool = False) -> None:
    """The checkpoint that ``program`` reads, as one safetensors file."""
    header, at = {}, 0
    for name, weight in program.weights.items():
        num_bytes = math.prod(weight.shape) * weight.dtype.itemsize
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [at, at + num_bytes]}
        at += num_bytes
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if dense:
            block = np.random.default_rng(0).bytes(1 << 26)
            for start in range(0, at, len(block)):
                file.write(block[: at - start])
        file.truncate(8 + len(text) + at)


def measure(gb: float, tp: int, folder: Path, *, width: int = 4096, dense: bool = False) -> tuple[list[Loaded], int]:
    """What each rank took, and the bytes of the largest stored tensor."""
    model = graphsrt.trace(config(gb, width), tp=tp)
    whole = model.program("capture")
    stored = {name: w for name, w in whole.weights.items() if type(w.recipe).__name__ == "Ckpt"}
    largest = max(math.prod(w.shape) * w.dtype.itemsize for w in stored.values())
    whole.weights = stored
    write(whole, folder, dense)
    init = pickle.dumps((str(model.program()), open_checkpoint(folder).spec()))
    env = {"PYTHONPATH": str(REPOSITORY)}
    with WorkersExecutor(tp, "bench.loading:LoadOnly", init, env=env) as executor:
        words = executor.step_buffer(np.zeros(1, dtype=np.int64)).token_ids.reshape(tp, 2)
        reports = executor.load_reports
    return [Loaded(report, *map(int, row)) for report, row in zip(reports, words)], largest


class LoadOnly:
    """A rank that loads and does nothing else; a step gives what that took, ``[tp, 2]`` words."""

    def __init__(self, rank, size, collectives, init):
        text, spec = pickle.loads(init)
        program, checkpoint = Program.from_text(text), open_spec(spec)
        Path("/proc/self/clear_refs").write_text("5")  # the highest resident set so far is the present one
        resident, proportional = _memory("status", "VmHWM"), _memory("smaps_rollup", "Pss")
        self.weights, self.load_report = load_weights(program, rank, checkpoint, collectives=collectives)
        peak = _memory("status", "VmHWM") - resident
        mine = torch.tensor([[peak, _memory("smaps_rollup", "Pss") - proportional]])
        self.memory = collectives.all_gather(mine, 0)

    def step(self, buffer):
        return StepReply(self.memory.flatten().numpy())


def _memory(file: str, field: str) -> int:
    line = next(line for line in Path(f"/proc/self/{file}").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=10.0)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written for the time being")
    parser.add_argument("--dense", action="store_true")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="loading-", dir=given.folder))
    try:
        ranks, largest = measure(given.gb, given.tp, folder, dense=given.dense)
    finally:
        shutil.rmtree(folder)
    total = ranks[0].report.checkpoint_bytes
    print(f"{total / 1e9:.2f} GB in {os.cpu_count()} cores' machine, largest tensor {largest / 1e9:.2f} GB")
    print("| rank | keeps GB | read GB | peak GB | peak / share | PSS GB | s |")
    print("|---|---|---|---|---|---|---|")
    for rank in ranks:
        about = asdict(rank.report)
        share = about["weight_bytes"]
        print(
            f"| {about['rank']} | {share / 1e9:.2f} | {about['bytes_read'] / 1e9:.2f} | {rank.peak_bytes / 1e9:.2f} | "
            f"{rank.peak_bytes / share:.2f} | {rank.pss_bytes / 1e9:.2f} | {about['seconds']:.1f} |"
        )
    print(f"read by the machine: {ranks[0].report.node_bytes_read / total:.4f} of the checkpoint")


if __name__ == "__main__":
    main()
