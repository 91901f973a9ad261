"""The measurements of `graphsrt bench`: what is timed, in which order, and what becomes of the times."""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from graphsrt import ops
from graphsrt.benchmark.ceilings import Ceilings
from graphsrt.benchmark.engine_process import OURS, EngineError, EngineProcess, EngineSpec, start_seconds
from graphsrt.costs import Cost, Sizes, Step, cost
from graphsrt.program import Program, arguments, aten

Told = Callable[[str], None]


@dataclass(frozen=True)
class Decode:
    """One more token of each of ``batch`` sequences that are about ``context`` tokens long."""

    batch: int
    context: int

    @property
    def name(self) -> str:
        return f"decode, batch {self.batch} at {self.context}"


@dataclass(frozen=True)
class Prefill:
    """The first token of one prompt."""

    tokens: int

    @property
    def name(self) -> str:
        return f"prefill of {self.tokens}"


Case = Decode | Prefill


@dataclass
class Times:
    """Seconds of one case by engine and round: a step of decoding, or a whole prefill. None where it failed."""

    case: Case
    seconds: dict[str, list[float]] = field(default_factory=dict)
    host_s: list[float] = field(default_factory=list)
    """Of a step of decoding, what our engine spends outside of kernels and collectives, by round."""
    failures: dict[str, str] = field(default_factory=dict)
    bytes_read: int = 0
    """Weights and cached keys and values that a step reads at least."""
    flops: int = 0
    ceilings: list[float] = field(default_factory=list)
    """By round, right after our engine's run: bytes a second that are read at most; of a prefill, FLOPs."""

    @property
    def work(self) -> int:
        """What is compared with the ceiling: bytes that a step reads at least; of a prefill, its FLOPs."""
        return self.bytes_read if isinstance(self.case, Decode) else self.flops

    def rate(self) -> float | None:
        """Our engine's work a second."""
        seconds = self.median(OURS)
        return self.work / seconds if seconds else None

    def of_ceiling(self) -> float | None:
        """What share of the same round's ceiling that is, in the median round."""
        shares = [self.work / seconds / most for seconds, most in zip(self.seconds.get(OURS, []), self.ceilings)]
        return statistics.median(shares) if shares else None

    def median(self, engine: str) -> float | None:
        return statistics.median(self.seconds[engine]) if self.seconds.get(engine) else None

    def ratio(self, engine: str, other: str) -> tuple[float, float, float] | None:
        """How many times as fast as another: the median of the rounds' ratios, and the least and the most."""
        pairs = [b / a for a, b in zip(self.seconds.get(engine, []), self.seconds.get(other, []))]
        return (statistics.median(pairs), min(pairs), max(pairs)) if pairs else None

    def best_peer(self) -> str | None:
        """The fastest engine that is not ours."""
        found = {name: self.median(name) for name in self.seconds if name != OURS and self.seconds[name]}
        return min(found, key=lambda name: found[name] or 0.0) if found else None


@dataclass
class Bench:
    """All that was measured."""

    model: str
    dtype: str
    threads: int
    tp: int
    quantize: str | None = None
    """What this engine made of the weights."""
    versions: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    weight_bytes: int = 0
    cases: list[Times] = field(default_factory=list)
    starts: dict[str, dict[str, float]] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        found = asdict(self)
        for times, row in zip(self.cases, found["cases"]):
            row["case"] = {"kind": type(times.case).__name__.lower(), **row["case"]}
        return found


def measure(
    specs: Sequence[EngineSpec],
    cases: Sequence[Case],
    program: Program,
    *,
    dtype: str,
    threads: int,
    tp: int = 1,
    rounds: int = 5,
    new: int = 33,
    starts: bool = True,
    told: Told = lambda _: None,
) -> Bench:
    """Measure all cases with all engines in turn, ``rounds`` times, after one round that does not count.

    ``program``: the model's, on one rank; what it reads and computes at least is counted from it. An engine that fails
    to load is left out and says why; one that fails in a case is left out of that case. ``new``: tokens of a sequence
    while decoding is timed: the time of all of them less that of one, over one less than their number.
    """
    bench = Bench(specs[0].model, dtype, threads, tp)
    options = {"threads": threads, "dtype": dtype}
    context = max([c.context + new if isinstance(c, Decode) else c.tokens for c in cases], default=64) + 64
    batch = max([c.batch for c in cases if isinstance(c, Decode)], default=1)
    if starts:
        _measure_starts(bench, specs, {**options, "context": min(context, 256), "batch": 1}, told)
    vocabulary = int(next(w.shape[0] for w in program.weights.values() if len(w.shape) == 2))
    with ExitStack() as open_engines:
        engines: dict[str, EngineProcess] = {}
        for spec in specs:
            told(f"{spec.name}: loads {spec.model}")
            engine = open_engines.enter_context(EngineProcess(spec))
            try:
                engine.load(**options, context=context, batch=batch, **({"tp": tp} if spec.name == OURS else {}))
                engines[spec.name], bench.versions[spec.name] = engine, engine.version
            except EngineError as error:
                bench.failures[spec.name] = str(error)
                told(f"{spec.name} is left out: {str(error).splitlines()[0]}")
        most = _ceilings(program, dtype, threads)
        bench.weight_bytes = most.weight_bytes
        for case in cases:
            bench.cases.append(_measure_case(case, engines, program, most, vocabulary, rounds, new, told))
        bench.peak_bytes = {name: engine.peak_memory() for name, engine in engines.items()}
    return bench


def _measure_case(
    case: Case,
    engines: dict[str, EngineProcess],
    program: Program,
    most: Ceilings,
    vocabulary: int,
    rounds: int,
    new: int,
    told: Told,
) -> Times:
    source = random.Random(str(case))
    times = Times(case, {name: [] for name in engines})
    least = _least(program, case, new)
    times.bytes_read, times.flops = least.weight_bytes + least.kv_read_bytes, least.total_flops

    def prompts() -> list[list[int]]:
        size = (case.batch, case.context - new) if isinstance(case, Decode) else (1, case.tokens)
        return [[source.randrange(vocabulary) for _ in range(max(1, size[1]))] for _ in range(size[0])]

    same = prompts()
    for number in range(rounds + 1):  # the first one warms up
        told(f"{case.name}: round {number} of {rounds}")
        fresh = prompts()
        for name in list(engines) if number % 2 else reversed(list(engines)):
            if name in times.failures:
                continue
            host: float | None = None
            try:
                if isinstance(case, Decode):
                    seconds, host = decode_step(engines[name], same, new)
                else:
                    seconds = engines[name].run(fresh, 1).seconds
            except EngineError as error:
                times.failures[name] = str(error)
                times.seconds[name] = []
                continue
            if number:
                times.seconds[name].append(seconds)
                times.host_s += [host] if host is not None else []
            if number and name == OURS:
                times.ceilings.append(
                    most.read_bandwidth() if isinstance(case, Decode) else most.product_rate(case.tokens)
                )
    return times


def decode_step(engine: EngineProcess, prompts: list[list[int]], new: int) -> tuple[float, float | None]:
    """Seconds of a step, and how much of it the host took, if the engine says. All tokens less the first: what comes
    before decoding is in both, and as much of it is cached: the run before was of one token each time."""
    engine.run(prompts, 1)
    one, every = engine.run(prompts, 1), engine.run(prompts, new)
    seconds = (every.seconds - one.seconds) / (new - 1)
    if not every.counters:
        return seconds, None
    steps, host = (every.counters[name] - one.counters[name] for name in ("steps", "host_s"))
    return seconds, host / steps


def _least(program: Program, case: Case, new: int) -> Cost:
    """What a step reads and computes at least, by the program's own operators."""
    step = Step.prefill(case.tokens) if isinstance(case, Prefill) else Step.decode(case.batch, case.context - new // 2)
    sizes = Sizes(program, step)
    return sum((cost(sizes, node) for node in program.nodes), Cost())


def _ceilings(program: Program, dtype: str, threads: int) -> Ceilings:
    weights = sum(torch.Size(w.shape).numel() * w.dtype.itemsize for w in program.weights.values())
    shapes = []
    for node in program.calls(aten.linear.default, ops.int8_linear, ops.int4_linear):
        x = next(iter(arguments(node).values()))
        shapes.append((int(node.meta["val"].shape[-1]), int(x.meta["val"].shape[-1])))
    return Ceilings(weights, shapes[:-1] or shapes, {getattr(torch, dtype), torch.float32}, threads)


def _measure_starts(bench: Bench, specs: Sequence[EngineSpec], options: dict[str, Any], told: Told) -> None:
    """From nothing to the first token: with empty caches of our own, and again with what that run has left."""
    for spec in specs:
        with tempfile.TemporaryDirectory() as cache:
            own = replace(spec, environment=(*spec.environment, ("GRAPHSRT_CACHE", cache)))
            for kind in ("cold", "warm"):
                told(f"{spec.name}: {kind} start")
                try:
                    seconds = start_seconds(own, **options)
                except EngineError as error:
                    bench.failures.setdefault(spec.name, str(error))
                    break
                bench.starts.setdefault(spec.name, {})[kind] = seconds
