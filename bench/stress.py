"""Thousands of mixed requests at once: nothing is lost, nothing leaks, and every token is right.

    python bench/stress.py [--requests 2000] [--tp 1 2] [--longest 2000] [--model smollm2] [--results DIR]

Coroutines stream all requests from one model at the same time, in float32: log-uniform lengths up to --longest, a third
with shared prefixes, a tenth left by their callers, and a KV pool far too small for what runs, so that requests are
preempted. Afterwards nothing may be held. A part of the requests with shared prefixes runs with and without the prefix
cache. At last every token of the requests that ran to their end is checked by forcing, with transformers' own model:
one forward over prompt and output gives the logits before each token, of which it must be the largest. Where it is not,
the two must be as close as rounding explains (--tie), and these near ties are counted. Between numbers of ranks the
tokens may only differ after a near tie. The exit status is 1 if anything is wrong.

It takes hours on two cores. With --results each part that is done is kept there, and another call goes on behind it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
    parser.add_argument("--results", type=Path, help="folder for what is done; another call goes on behind it")
    options = parser.parse_args()
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
    wrong: list[str] = []
    runs: dict[int, dict[str, Any]] = {}
    asks = [
        Ask(number, prompt, graphsrt.SamplingParams(max_new_tokens=new, ignore_eos=True), shared, leave_after)
        for number, prompt, new, shared, leave_after in _kept(options, "asks", lambda: _asks(options))
    ]  # fmt: skip
    for tp in options.tp:
        runs[tp] = _kept(options, f"tp{tp}", lambda tp=tp: _run(options, tp, asks))  # type: ignore[misc]
        wrong += runs[tp]["wrong"]
    if options.reuse:
        reuse = _kept(options, "reuse", lambda: _reuse(options, asks))
        wrong += reuse["wrong"]
    first = runs[options.tp[0]]["tokens"]
    differing = {tp: [n for n, tokens in run["tokens"].items() if first[n] != tokens] for tp, run in runs.items()}
    forced = {}
    with Forcing(options) as forcing:
        for tp, run in runs.items():
            # What another number of ranks gave, token for token, was checked with that.
            numbers = list(first) if tp == options.tp[0] else differing[tp]
            forced[tp] = forcing.check(f"tp{tp}", {n: (asks[int(n)].prompt, run["tokens"][n]) for n in numbers})
            wrong += [f"tp {tp}: {what}" for what in forced[tp]["wrong"]]
    rows: list[tuple[str, ...]] = [("", *(f"tp {tp}" for tp in options.tp))]
    for label in next(iter(runs.values()))["facts"]:
        rows.append((label, *(run["facts"][label] for run in runs.values())))
    for label in ("forced", "near ties", "largest gap of one"):
        rows.append((label, *(found[label] for found in forced.values())))
    rows.append(("not as the first tp", "–", *(str(len(differing[tp])) for tp in options.tp[1:])))
    print(table(rows))
    if options.reuse:
        print("\n" + reuse["text"])
    print("\n" + ("\n".join(f"WRONG: {what}" for what in wrong) or "all is right"))
    return 1 if wrong else 0


def _kept(options: argparse.Namespace, name: str, make: Callable[[], Any]) -> Any:
    """A part's result: from the folder if it is there, else made and kept."""
    if options.results is None:
        return make()
    file = options.results / f"{name}.json"
    if not file.exists():
        file.write_text(json.dumps(make()))
    return json.loads(file.read_text())


def _asks(options: argparse.Namespace) -> list[tuple[int, list[int], int, bool, int | None]]:
    """The requests. They are made of this repository's text, and so kept with what becomes of them."""
    tokenizer = graphsrt.trace(options.model, stop_after="capture").source.require_tokenizer()
    traffic = Traffic(tokenizer, seed=options.seed, longest=options.longest, most_new=options.new)
    asks = [traffic.ask() for _ in range(options.requests)]
    return [(ask.number, ask.prompt, ask.params.max_new_tokens, ask.shared, ask.leave_after) for ask in asks]


def _run(options: argparse.Namespace, tp: int, asks: Sequence[Ask]) -> dict[str, Any]:
    """All requests at once on so many ranks."""
    with _compile(options, tp) as model:
        start = time.perf_counter()
        got = asyncio.run(asyncio.wait_for(_all(model, asks), options.hang))
        seconds = time.perf_counter() - start
        metrics = model.metrics()
        print(f"tp {tp}\n{metrics}\n", file=sys.stderr)
        wrong = [f"tp {tp}: {what}" for what in leftovers(model)]
    complete = {ask.number: got[ask.number] for ask in asks if ask.leave_after is None}
    for ask in asks:
        if ask.leave_after is None and len(got[ask.number]) != ask.params.max_new_tokens:
            wrong.append(f"tp {tp}: request {ask.number} gave {len(got[ask.number])} tokens of "
                         f"{ask.params.max_new_tokens}")  # fmt: skip
    if not metrics.num_preemptions and options.requests >= 100:
        wrong.append(f"tp {tp}: the pool was never short, so nothing was preempted")
    prompt_tokens = sum(len(ask.prompt) for ask in asks)
    facts = {
        "requests": f"{len(asks)}, {len(asks) - len(complete)} of them left by the caller",
        "prompt tokens": f"{prompt_tokens} ({metrics.cached_tokens} of {metrics.asked_tokens} reused)",
        "generated tokens": str(metrics.generated_tokens),
        "seconds": f"{seconds:.0f}",
        "preemptions": str(metrics.num_preemptions),
    }
    return {"wrong": wrong, "facts": facts, "tokens": {str(number): tokens for number, tokens in complete.items()}}


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


class Forcing:
    """transformers' own model in float32, which says for each token how far it is from the most probable one."""

    def __init__(self, options: argparse.Namespace):
        self._options = options

    def __enter__(self) -> Forcing:
        from transformers import AutoModelForCausalLM

        folder = graphsrt.trace(self._options.model, stop_after="capture").source.folder
        self._net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return self

    def __exit__(self, *_: object) -> None:
        del self._net

    def check(self, name: str, rows: dict[str, tuple[list[int], list[int]]]) -> dict[str, Any]:
        """``rows``: request -> prompt and output. What is known of a row is kept line by line."""
        file = None if self._options.results is None else self._options.results / f"{name}.forced.jsonl"
        lines = file.read_text().splitlines() if file is not None and file.exists() else []
        gaps: dict[str, list[float]] = dict(json.loads(line) for line in lines)
        for number, (prompt, tokens) in rows.items():
            if number not in gaps:
                gaps[number] = self._gaps(prompt, tokens)
                if file is not None:
                    with file.open("a") as out:
                        print(json.dumps([number, gaps[number]]), file=out)
        tie = self._options.tie
        flat = [gap for number in rows for gap in gaps[number]]
        near = [gap for gap in flat if 0 < gap <= tie]
        worse = {number: [i for i, gap in enumerate(gaps[number]) if not gap <= tie] for number in rows}  # NaN too
        wrong = [f"request {number}: token {at[0]} is not the most probable, by {gaps[number][at[0]]:.3g}"
                 for number, at in worse.items() if at]  # fmt: skip
        return {"forced": f"{len(rows)} requests, {len(flat)} tokens", "near ties": str(len(near)),
                "largest gap of one": f"{max(near, default=0.0):.1e}", "wrong": wrong}  # fmt: skip

    def _gaps(self, prompt: list[int], tokens: list[int]) -> list[float]:
        """For each token, by how much another one is more probable; 0 where none is."""
        ids = torch.tensor([[*prompt, *tokens[:-1]]])
        with torch.no_grad():
            logits = self._net(ids, use_cache=False, logits_to_keep=len(tokens)).logits[0]
        return (logits.max(dim=1).values - logits[torch.arange(len(tokens)), torch.tensor(tokens)]).tolist()


def _reuse(options: argparse.Namespace, asks: Sequence[Ask]) -> dict[str, Any]:
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
    wrong = []
    if ratio < 2 and options.requests >= 100:
        wrong.append(f"reuse makes requests with shared prefixes {ratio:.2f} times as fast, not twice")
    same = sum(a == b for a, b in zip(tokens[False], tokens[True]))
    count = sum(len(ask.prompt) for ask in chosen)
    rows = [("shared prefixes", "seconds", "prompt tokens/s")]
    rows += [(name, f"{seconds[key]:.1f}", f"{count / seconds[key]:.0f}")
             for name, key in (("computed each time", False), ("reused", True))]  # fmt: skip
    text = table(rows) + f"\n\n{ratio:.2f} times; {same} of {len(chosen)} requests have the same tokens both times."
    return {"wrong": wrong, "text": text}


if __name__ == "__main__":
    sys.exit(main())
