"""How long the passes take as a model gets deeper, and what looking costs.

    python bench/passes.py [--layers 16 32 64 126]

Each depth is traced from a config with Llama-3.1-405B's widths at tp=8: capture, the pipeline, and the pipeline again
with everything that looking needs (every stage kept, all texts and all diffs made). Peak memory is the process's.
"""

from __future__ import annotations

import argparse
import resource
import time

from transformers import LlamaConfig

from graphsrt.api import _capture, _paused_collector
from graphsrt.models.source import resolve
from graphsrt.passes import PIPELINE
from graphsrt.passes.runner import run
from graphsrt.printer import diff_text


def config(layers: int) -> LlamaConfig:
    """Llama-3.1-405B's widths at another depth."""
    return LlamaConfig(
        vocab_size=128256, hidden_size=16384, intermediate_size=53248, num_hidden_layers=layers,
        num_attention_heads=128, num_key_value_heads=8, max_position_embeddings=131072, dtype="bfloat16",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[16, 32, 64, 126])
    print("| layers | capture s | passes s | ms a layer | with all texts and diffs s | ratio | peak GB |")
    print("|---|---|---|---|---|---|---|")
    table = []
    for layers in parser.parse_args().layers:
        with _paused_collector():
            start = time.perf_counter()
            program = _capture(resolve(config(layers)), 8, None)
            captured = time.perf_counter()
            stages = run(program.copy(), PIPELINE)
            plain = time.perf_counter()
            looked = run(program, PIPELINE)
            for (name, before), (other, after) in zip(looked.programs, looked.programs[1:]):
                diff_text(before, after, name, other)
            end = time.perf_counter()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        passes, looking = plain - captured, end - plain
        print(
            f"| {layers} | {captured - start:.1f} | {passes:.2f} | {passes / layers * 1e3:.0f} | {looking:.2f} "
            f"| {looking / passes:.2f} | {peak:.2f} |",
            flush=True,
        )
        table.append((layers, {report.name: report.milliseconds for report in stages.final.history}))
    print("\n| pass, ms | " + " | ".join(str(layers) for layers, _ in table) + " |")
    print("|---" * (len(table) + 1) + "|")
    for name in table[0][1]:
        print(f"| {name} | " + " | ".join(f"{times[name]:.0f}" for _, times in table) + " |")


if __name__ == "__main__":
    main()
