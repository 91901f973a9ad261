"""What each pass changes in a layer: operators that run, collectives, bytes moved. Counted, not measured.

    python bench/pass_costs.py [--tp 8] [--prefill 4096] [--decode 32] [--device h200]

For models of published sizes, of which two and three layers are traced: the difference is one layer, as `graphsrt plan`
counts it (docs/plan.md has the formulas). A launch is an operator that computes something, and attention that writes
its keys to the pool before it reads them is two; views are free. The time is the least that the device's figures allow:
for each operator the larger of bytes over bandwidth and FLOPs over peak, for each collective bytes over the link plus
its latency.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from traffic import table

import graphsrt
from graphsrt import ops
from graphsrt.costs import Cost, Sizes, Step, cost, is_view
from graphsrt.devices import Device, device
from graphsrt.passes.document_fusions import MODELS, Model
from graphsrt.program import Program, arguments

FIRST = "shard_tensor_parallel"
CONTEXT = 8192
CHOSEN = ("Llama-3.1-8B", "Llama-3.1-70B", "Llama-3.1-8B in FP8, blocks of 128")
Row = tuple[int, int, int, int, float]
"""Launches, collectives, bytes sent, bytes through memory, seconds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--prefill", type=int, default=4096, help="tokens of a prompt")
    parser.add_argument("--decode", type=int, default=32, help=f"sequences, each of {CONTEXT} tokens")
    parser.add_argument("--device", default="h200")
    options = parser.parse_args()
    where = device(options.device)
    steps = [Step.prefill(options.prefill), Step.decode(options.decode, CONTEXT)]
    for model in MODELS:
        if model.name not in CHOSEN:
            continue
        two, three = (_traced(model, layers, options.tp, where) for layers in (2, 3))
        for step in steps:
            phase = "prefill" if step.name == "prefill" else "decode"
            rows = [("after", "launches", "collectives", "KB sent", "MB of memory", "µs at best")]
            last: Row | None = None
            for name, less, more in _stages(two, three, phase):
                mine = tuple(b - a for a, b in zip(_row(less, step, where), _row(more, step, where)))
                if mine != last:
                    launches, collectives, sent, memory, seconds = mine
                    rows.append((name, str(launches), str(collectives), f"{sent / 1e3:,.0f}", f"{memory / 1e6:,.1f}",
                                 f"{seconds * 1e6:,.0f}"))  # fmt: skip
                last = mine  # type: ignore[assignment]
            told = f"{step.tokens} tokens" if phase == "prefill" else f"batch {step.sequences} at {CONTEXT}"
            print(f"\n{model.name}, tp={options.tp}, one layer, {phase} ({told}), {where.name}\n\n{table(rows)}")


def _traced(model: Model, layers: int, tp: int, where: Device) -> graphsrt.api.Traced:
    from transformers import AutoConfig

    config: Any = AutoConfig.for_model(model.model_type, num_hidden_layers=layers, **model.config)
    return graphsrt.trace(config, tp=tp, dtype="bfloat16", context_length=CONTEXT, device=where)


def _stages(two: Any, three: Any, phase: str) -> Iterator[tuple[str, Program, Program]]:
    """What is left after each pass from the sharding on, of both depths."""
    less, more = two.stages_of(phase), three.stages_of(phase)
    for name in less.names[less.names.index(FIRST) :]:
        if name in more.names:
            yield name, less.after(name), more.after(name)


def _row(program: Program, step: Step, where: Device) -> Row:
    sizes = Sizes(program, step)
    launches, total, seconds = 0, Cost(), 0.0
    ranks = program.mesh["tp"]
    for node in program.nodes:
        if is_view(sizes, node) and node.target not in ops.COLLECTIVES:
            continue
        launches += 1 + (node.target is ops.radix_attention and arguments(node)["k"] is not None)
        mine = cost(sizes, node)
        total += mine
        flops = sum(count / where.peak(dtype) for dtype, count in mine.flops.items())
        seconds += max(mine.memory_bytes / where.memory_bandwidth, flops)
        if mine.num_collectives:
            seconds += mine.sent_bytes / where.link(ranks) + mine.num_collectives * where.link_latency_s
    return launches, total.num_collectives, total.sent_bytes, total.memory_bytes, seconds


if __name__ == "__main__":
    main()
