"""Thousands of mixed requests at once: nothing is lost, nothing leaks, and every token is right.

    python bench/stress.py [--requests 2000] [--tp 1 2] [--longest 2000] [--model smollm2]

Coroutines stream all requests from one model at the same time, in float32: log-uniform lengths up to --longest, a third
with shared prefixes, a tenth left by their callers, and a KV pool far too small for what runs, so that requests are
preempted. Afterwards nothing may be held. Every token of the requests that ran to their end is then checked by forcing:
one forward over prompt and output gives the logits before each token, of which it must be the largest. Where it is not,
the two must be as close as rounding explains (--tie), and these near ties are counted. Between numbers of ranks the
tokens may only differ after a near tie. At last a part of the requests with shared prefixes runs with and without the
prefix cache. The exit status is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence

import torch
from traffic import Ask, Traffic, leftovers, table

import graphsrt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--longest", type=int, default=2000, help="tokens of the longest prompt")
    parser.add_argument("--new", type=int, default=40, help="most new tokens of a request")
    parser.add_argument("--pool", type=int, help="KV pool in tokens; default a little more than one longest request")
    parser.add_argument("--running", type=int, default=64, help="most requests that run at a time")
    parser.add_argument(
        "--reuse", type=int, default=100, help="requests with shared prefixes, run with and without reuse"
    )
    parser.add_argument("--tie", type=float, default=2e-3, help="difference of logits that counts as a tie")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--hang", type=float, default=3600.0, help="seconds after which a run counts as hung")
    options = parser.parse_args()
    wrong: list[str] = []
    rows: list[tuple[str, ...]] = [("", *(f"tp {tp}" for tp in options.tp))]
    columns, outputs = [], {}
    asks: list[Ask] = []
    for tp in options.tp:
        with _compile(options, tp) as model:
            if not asks:
                traffic = Traffic(model.tokenizer, seed=options.seed, longest=options.longest, most_new=options.new)
                asks = [traffic.ask() for _ in range(options.requests)]
            start = time.perf_counter()
            got = asyncio.run(asyncio.wait_for(_all(model, asks), options.hang))
            seconds = time.perf_counter() - start
            print(f"tp {tp}\n{model.metrics()}\n", file=sys.stderr)
            metrics = model.metrics()
            wrong += [f"tp {tp}: {what}" for what in leftovers(model)]
            complete = {ask.number: got[ask.number] for ask in asks if ask.leave_after is None}
            for ask in asks:
                if ask.leave_after is None and len(got[ask.number]) != ask.params.max_new_tokens:
                    wrong.append(f"tp {tp}: request {ask.number} gave {len(got[ask.number])} tokens of "
                                 f"{ask.params.max_new_tokens}")  # fmt: skip
            if not metrics.num_preemptions and options.requests >= 100:
                wrong.append(f"tp {tp}: the pool was never short, so nothing was preempted")
            # What another number of ranks gave, token for token, was checked with that.
            known = next(iter(outputs.values()), {})
            differing = [number for number, tokens in complete.items() if known and known[number] != tokens]
            checked = [ask for ask in asks if ask.number in complete and (not known or ask.number in differing)]
            exact, ties, worst, bad = _force(model, checked, complete, options.tie)
            wrong += [f"tp {tp}: {what}" for what in bad]
            outputs[tp] = complete
        prompt_tokens = sum(len(ask.prompt) for ask in asks)
        columns.append([
            f"{len(asks)}, {len(asks) - len(complete)} of them left by the caller",
            f"{prompt_tokens} ({metrics.cached_tokens} of {metrics.asked_tokens} reused)",
            str(metrics.generated_tokens),
            f"{seconds:.0f}", f"{prompt_tokens / seconds:.0f}", f"{metrics.generated_tokens / seconds:.0f}",
            str(metrics.num_preemptions), f"{len(checked)} requests, {exact + ties} tokens", str(ties),
            f"{worst:.1e}", str(len(differing)) if known else "–",
        ])  # fmt: skip
    labels = ["requests", "prompt tokens", "generated tokens", "seconds", "prompt tokens/s", "generated tokens/s",
              "preemptions", "forced", "near ties", "largest gap of one", "not as the first tp"]  # fmt: skip
    rows += [(label, *(column[i] for column in columns)) for i, label in enumerate(labels)]
    print(table(rows))
    if options.reuse:
        print("\n" + _reuse(options, asks, wrong))
    print("\n" + ("\n".join(f"WRONG: {what}" for what in wrong) or "all is right"))
    return 1 if wrong else 0


def _compile(options: argparse.Namespace, tp: int, **more: object) -> graphsrt.CompiledModel:
    context = options.longest + options.longest // 10 + options.new + 16
    return graphsrt.compile(
        options.model, tp=tp, dtype="float32", backend=options.backend, context_length=context, page_size=4,
        max_total_tokens=options.pool or 21 * context // 20, max_running=options.running, max_queue=None, **more,
    )  # fmt: skip


async def _all(model: graphsrt.CompiledModel, asks: Sequence[Ask]) -> dict[int, list[int]]:
    """Every request's tokens, of those that are left as far as they were read."""

    async def read(ask: Ask) -> list[int]:
        tokens: list[int] = []
        events = model.astream(ask.prompt, ask.params)
        try:
            if ask.leave_after == 0:  # before its first token, in line or in the middle of its prompt
                await asyncio.wait_for(anext(events), 0.05 * (1 + ask.number % 40))
            async for event in events:
                tokens += event.token_ids
                if ask.leave_after is not None and len(tokens) >= ask.leave_after:
                    break
        except TimeoutError:
            pass
        finally:
            await events.aclose()  # type: ignore[attr-defined]
        return tokens

    results = await asyncio.gather(*(read(ask) for ask in asks))
    return {ask.number: tokens for ask, tokens in zip(asks, results)}


def _force(
    model: graphsrt.CompiledModel, asks: Sequence[Ask], outputs: dict[int, list[int]], tie: float
) -> tuple[int, int, float, list[str]]:
    """How many tokens are the most probable after all before them, how many nearly, by how much, and the others."""
    exact = ties = 0
    worst, bad = 0.0, []
    for ask in asks:
        tokens = outputs[ask.number]
        logits = model.logits([*ask.prompt, *tokens[:-1]])[len(ask.prompt) - 1 :]
        gaps = logits.max(dim=1).values - logits[torch.arange(len(tokens)), torch.tensor(tokens)]
        exact += int((gaps == 0).sum())
        near = (gaps > 0) & (gaps <= tie)
        ties += int(near.sum())
        worst = max(worst, float(gaps[near].max()) if near.any() else 0.0)
        if not bool((gaps <= tie).all()):  # so that NaN does not pass
            first = int((~(gaps <= tie)).nonzero()[0])
            bad.append(f"request {ask.number}: token {first} is not the most probable, by {float(gaps.max()):.3g}")
    return exact, ties, worst, bad


def _reuse(options: argparse.Namespace, asks: Sequence[Ask], wrong: list[str]) -> str:
    """The requests with shared prefixes with and without reuse of what is computed; at the largest number of ranks."""
    chosen = [ask for ask in asks if ask.shared][: options.reuse]
    seconds, tokens = {}, {}
    for reuse in (False, True):
        with _compile(options, max(options.tp), prefix_cache=reuse) as model:
            model.generate([[1]], graphsrt.SamplingParams(max_new_tokens=2))  # what is done once
            start = time.perf_counter()
            results = model.generate([ask.prompt for ask in chosen], [ask.params for ask in chosen])
            seconds[reuse] = time.perf_counter() - start
            tokens[reuse] = [result.token_ids for result in results]
    ratio = seconds[False] / seconds[True]
    if ratio < 2 and options.requests >= 100:
        wrong.append(f"reuse makes requests with shared prefixes {ratio:.2f} times as fast, not twice")
    same = sum(a == b for a, b in zip(tokens[False], tokens[True]))
    count = sum(len(ask.prompt) for ask in chosen)
    rows = [("shared prefixes", "seconds", "prompt tokens/s")]
    rows += [(name, f"{seconds[key]:.1f}", f"{count / seconds[key]:.0f}")
             for name, key in (("computed each time", False), ("reused", True))]  # fmt: skip
    return table(rows) + f"\n\n{ratio:.2f} times; {same} of {len(chosen)} requests have the same tokens both times."


if __name__ == "__main__":
    sys.exit(main())
