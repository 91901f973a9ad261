"""Random traffic for a long time: memory does not grow, and nothing is held at the end.

    python bench/soak.py [--minutes 20] [--tp 2] [--model smollm2]

Requests arrive at random (--rate a second): streams and whole generations, from coroutines; shared prefixes, deadlines,
callers that leave, log-probabilities, sampling. Memory is the PSS of all processes, sampled every second; after a
warm-up (a fifth of the time) and at the end the median over a tenth of the time is taken. The exit status is 1 if
memory has grown by more than --growth percent, if anything is still held, or if a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import Counter

from traffic import Traffic, leftovers, proportional_bytes, table

import graphsrt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--rate", type=float, default=2.0, help="requests that arrive in a second, on average")
    parser.add_argument("--longest", type=int, default=400)
    parser.add_argument("--growth", type=float, default=2.0, help="percent")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args()
    with graphsrt.compile(
        options.model, tp=options.tp, backend=options.backend, context_length=2 * options.longest,
        max_total_tokens=8 * options.longest, max_running=32,
    ) as model:  # fmt: skip
        ended, samples = asyncio.run(_drive(model, options))
        metrics = model.metrics()
        wrong = leftovers(model)
        if model._background is not None and model._background.num_watched:
            wrong.append(f"{model._background.num_watched} requests still watched")
    span = samples[-1][0]
    early = statistics.median(b for t, b in samples if 0.2 * span <= t <= 0.3 * span)
    late = statistics.median(b for t, b in samples if t >= 0.9 * span)
    growth = 100 * (late - early) / early
    if growth > options.growth:
        wrong.append(f"memory has grown by {growth:.2f} %")
    if metrics.num_failed or ended["error"]:
        wrong.append(f"{metrics.num_failed} requests failed")
    rows = [("", f"tp {options.tp}, {options.minutes:g} minutes"), ("requests", str(metrics.num_requests))]
    rows += [(f"… ended with {reason}", str(count)) for reason, count in sorted(ended.items())]
    rows += [
        ("prompt / generated tokens", f"{metrics.prompt_tokens} / {metrics.generated_tokens}"),
        ("tokens reused", f"{100 * metrics.prefix_hit_rate:.1f} %"), ("preemptions", str(metrics.num_preemptions)),
        ("PSS after warm-up", f"{early / 1e6:.1f} MB"), ("PSS at the end", f"{late / 1e6:.1f} MB"),
        ("growth", f"{growth:+.2f} %"),
    ]  # fmt: skip
    print(table(rows))
    print("\n" + ("\n".join(f"WRONG: {what}" for what in wrong) or "all is right"))
    return 1 if wrong else 0


async def _drive(model: graphsrt.CompiledModel, options: argparse.Namespace) -> tuple[Counter, list[tuple[float, int]]]:
    """How requests ended, and ``(seconds, bytes)`` samples of memory."""
    draw = random.Random(options.seed + 1)
    traffic = Traffic(model.tokenizer, seed=options.seed, longest=options.longest, most_new=48)
    ended: Counter = Counter()
    samples: list[tuple[float, int]] = []
    running: set[asyncio.Task] = set()
    start = time.monotonic()

    async def one() -> None:
        logprobs = 3 if draw.random() < 0.2 else None
        ask = traffic.ask(temperature=draw.choice([0.0, 0.8]), logprobs=logprobs)
        timeout_s = draw.uniform(0.05, 3.0) if draw.random() < 0.1 else None
        if draw.random() < 0.3:
            for result in await model.agenerate([ask.prompt] * draw.randint(1, 3), ask.params, timeout_s=timeout_s):
                ended[result.finish_reason] += 1
            return
        events = model.astream(ask.prompt, ask.params, timeout_s=timeout_s)
        reason, taken = "left by the caller", 0
        async for event in events:
            taken += len(event.token_ids)
            reason = event.finish_reason or reason
            if event.finish_reason is None and ask.leave_after is not None and taken >= ask.leave_after:
                break
        await events.aclose()  # type: ignore[attr-defined]
        ended[reason] += 1

    def note(task: asyncio.Task) -> None:
        running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            ended["error"] += 1
            print(f"{type(task.exception()).__name__}: {task.exception()}", file=sys.stderr)

    arrival = start
    while time.monotonic() - start < 60 * options.minutes:
        now = time.monotonic()
        while arrival <= now:
            arrival += draw.expovariate(options.rate)
            if len(running) < 64:  # a caller with any sense does not pile up more
                task = asyncio.create_task(one())
                running.add(task)
                task.add_done_callback(note)
        if not samples or now - start - samples[-1][0] >= 1.0:
            samples.append((now - start, await asyncio.to_thread(proportional_bytes)))
        await asyncio.sleep(min(0.05, max(arrival - time.monotonic(), 0)))
    while running:
        await asyncio.wait(set(running))
    return ended, samples


if __name__ == "__main__":
    sys.exit(main())
