"""This engine against itself: ranks, and weights in integers, decoding the same prompts in turn.

    python bench/variants.py MODEL [--batches 1,8] [--context 128] [--rounds 3] [--threads 2]

MODEL is a checkpoint folder, or "smollm2". Each variant is a process of its own; a round goes through all of them, and
ratios are of the same round: tokens a second of a variant over those of one rank with plain weights.
"""

from __future__ import annotations

import argparse
import random
import statistics
from contextlib import ExitStack

from graphsrt.benchmark.engine_process import OURS, EngineProcess, EngineSpec
from graphsrt.benchmark.measure import decode_step

VARIANTS = {"tp=1": {}, "tp=2": {"tp": 2}, "int8": {"quantize": "int8"}, "int4": {"quantize": "int4"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--new", type=int, default=33)
    asked = parser.parse_args()
    batches = [int(batch) for batch in asked.batches.split(",")]
    with ExitStack() as stack:
        engines = {}
        for name, options in VARIANTS.items():
            spec = EngineSpec(OURS, asked.model, options=tuple(options.items()))
            engine = stack.enter_context(EngineProcess(spec))
            engine.load(threads=asked.threads, dtype="bfloat16", context=asked.context + 64, batch=max(batches))
            engines[name] = engine
            print(f"{name} is loaded", flush=True)
        print("| batch | variant | tokens/s | of tp=1 (least, most) | host ms a step |\n|---|---|---|---|---|")
        for batch in batches:
            source = random.Random(batch)
            length = asked.context - asked.new
            prompts = [[source.randrange(3, 30000) for _ in range(length)] for _ in range(batch)]
            seconds: dict[str, list[float]] = {name: [] for name in engines}
            hosts: dict[str, list[float]] = {name: [] for name in engines}
            for number in range(asked.rounds + 1):  # the first one warms up
                for name, engine in engines.items():
                    step, host = decode_step(engine, prompts, asked.new)
                    if number:
                        seconds[name].append(step)
                        hosts[name].append(host or 0.0)
            for name, steps in seconds.items():
                ratios = sorted(plain / step for plain, step in zip(seconds["tp=1"], steps))
                rate, ratio = batch / statistics.median(steps), statistics.median(ratios)
                spread = f"{ratio:.2f} ({ratios[0]:.2f}, {ratios[-1]:.2f})"
                print(f"| {batch} | {name} | {rate:.1f} | {spread} | {1e3 * statistics.median(hosts[name]):.2f} |")


if __name__ == "__main__":
    main()
