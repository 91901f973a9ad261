"""plan: what a model needs on each rank and how fast it can be at best, from its config alone.

Nothing here knows a field of a config: weights, KV bytes and the cost of a step are read off the final program, the one
that ``compile`` would serve with. A model is captured once; for every number of ranks only the passes run again, on a
copy of the capture. Formulas are in ``docs/plan.md``, costs of operators in ``costs.py``, devices in ``devices.py``.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx

from graphsrt import ops
from graphsrt.costs import Cost, Sizes, Step, cost, is_pool, peak_activation_bytes, slot_bytes, uncounted
from graphsrt.devices import Device, device
from graphsrt.dump import weight_bytes
from graphsrt.errors import CompileError, explain
from graphsrt.placement import Layout, Placement, Run, Shard
from graphsrt.program import PREFILL_MIN_TOKENS, Program, layer_of, target_name

COMPARED = (1, 2, 4, 8, 16)
"""Numbers of ranks that are shown side by side."""
DEFAULT_CONTEXT = 32768


@dataclass(frozen=True)
class Split:
    """Bytes on all ranks together, by why they are there. Each rank holds ``total / ranks``, exactly.

    ``divided``: each address once. ``whole``: values that every rank holds whole, counted on every rank. ``replicas``:
    parts that several ranks need (KV heads, where there are fewer than ranks). ``padding``: what makes ranks equal.
    """

    divided: int = 0
    whole: int = 0
    replicas: int = 0
    padding: int = 0

    @property
    def total(self) -> int:
        return self.divided + self.whole + self.replicas + self.padding

    def __add__(self, other: Split) -> Split:
        return Split(*(getattr(self, name) + getattr(other, name) for name in vars(self)))


@dataclass(frozen=True)
class Kind:
    """Operators that cost the same in several layers. ``cost`` is one layer's on one rank; times are in seconds."""

    label: str
    count: int
    cost: Cost
    compute_s: float
    memory_s: float
    links_s: float

    @property
    def time_s(self) -> float:
        """Roofline time: compute and memory traffic overlap perfectly, collectives with neither."""
        return max(self.compute_s, self.memory_s) + self.links_s

    @property
    def bound(self) -> str:
        """Which of the three takes longest."""
        times = {"compute": self.compute_s, "memory": self.memory_s, "links": self.links_s}
        return max(times, key=lambda name: times[name])


@dataclass(frozen=True)
class StepPlan:
    """One step on one rank, by kinds of layers in the order of their first layer."""

    step: Step
    kinds: list[Kind]

    @property
    def cost(self) -> Cost:
        return sum((kind.cost.times(kind.count) for kind in self.kinds), Cost())

    @property
    def time_s(self) -> float:
        return sum(kind.count * kind.time_s for kind in self.kinds)

    @property
    def whole(self) -> Kind:
        """All of the step as one line; its time is the sum of the kinds' times, not of the three columns."""
        seconds = [sum(k.count * getattr(k, name) for k in self.kinds) for name in ("compute_s", "memory_s", "links_s")]
        return Kind("step", 1, self.cost, *seconds)


@dataclass(frozen=True)
class RankPlan:
    """What a program needs on each of its ranks, and its two steps."""

    name: str
    dtype: str
    ranks: int
    device: Device
    context: int
    batch: int
    weights: Split
    kv_token: Split
    """KV bytes of one token in all layers."""
    activation_bytes: int
    page_size: int
    prefill: StepPlan
    decode: StepPlan
    collectives: dict[str, int]
    """Collectives of a step, by operator."""
    notes: list[str] = field(default_factory=list)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that each rank allocates."""
        return self.weights.total // self.ranks

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of the KV pool that each rank needs for one token."""
        return self.kv_token.total // self.ranks

    @property
    def left_bytes(self) -> int:
        """Memory of a rank that is left for keys and values; negative if there is none."""
        return int(self.device.memory_bytes) - self.weight_bytes - self.activation_bytes

    @property
    def num_sequences(self) -> int | None:
        """Sequences of ``context`` tokens whose keys and values fit, in whole pages; None if the model caches none."""
        if not self.kv_token_bytes:
            return None
        page = self.page_size * self.kv_token_bytes
        pages = max(self.left_bytes, 0) // page - 1  # page 0 is reserved
        return max(pages, 0) // math.ceil(self.context / self.page_size)

    @property
    def fits(self) -> bool:
        """Whether weights and activations fit, and one sequence."""
        return self.left_bytes >= 0 and self.num_sequences != 0

    @property
    def fits_batch(self) -> bool:
        """Whether ``batch`` sequences of ``context`` tokens fit."""
        return self.fits and (self.num_sequences is None or self.num_sequences >= self.batch)


@dataclass(frozen=True)
class Plan:
    """``chosen``, and the same for other numbers of ranks: a plan, or the reason why there is none."""

    chosen: RankPlan
    compared: dict[int, RankPlan | str]

    def __str__(self) -> str:
        from graphsrt.plan_text import plan_text

        return plan_text(self)

    def as_dict(self) -> dict[str, Any]:
        """All figures, in bytes, FLOPs and seconds, for ``json``."""
        from graphsrt.plan_text import plan_dict

        return plan_dict(self)


def plan(
    model: Any,
    *,
    tp: int = 1,
    device: Device | str = "h200",
    context: int | None = None,
    batch: int = 64,
    compare: Iterable[int] = COMPARED,
    page_size: int = 16,
    passes: Sequence[Any] | None = None,
    without: Iterable[str] = (),
    dtype: Any = None,
    kv_dtype: Any = None,
    experts: str = "tp",
    quantize: str | None = None,
    context_length: int | None = None,
    trust_remote_code: bool = False,
) -> Plan:
    """Plan a model (anything that ``trace`` takes) for ``tp`` ranks, and for those of ``compare`` beside it.

    ``context``: tokens of each sequence (default 32768, or the model's if that is less); ``batch``: sequences of a
    decode step. ``dtype``, ``kv_dtype``, ``experts``, ``quantize``, ``passes`` and the rest are those of ``trace``.
    ValueError for numbers out of range, CompileError if the model cannot be compiled for ``tp`` ranks.
    """
    from graphsrt.api import _kv_dtype, chosen_passes, trace, with_cache
    from graphsrt.passes import scatter_residual
    from graphsrt.passes.runner import bind, run_phases

    where = _device(device)
    others = {*compare}
    others |= {tp} if others else set()
    least = min([tp, batch, page_size, *others, *([context] if context is not None else [])])
    if least < 1:
        raise ValueError(explain("tp, compare, context, batch and page_size must be at least 1", got=str(least)))
    chosen = chosen_passes(passes, without, experts, quantize=quantize)
    traced = trace(
        model, dtype=dtype, stop_after="capture", context_length=context_length, trust_remote_code=trust_remote_code
    )
    captured = traced.program()
    chosen = with_cache(chosen, traced.source, captured, _kv_dtype(kv_dtype))
    limit = captured.constants["context_length"]
    tokens = context if context is not None else min(DEFAULT_CONTEXT, limit)
    if tokens > limit:
        raise ValueError(explain("context is longer than the model's", expected=f"at most {limit}", got=str(tokens)))

    chosen = bind(chosen, scatter_residual, device=where, max_tokens=tokens)

    def planned(ranks: int) -> RankPlan:
        program = captured.copy()
        program.mesh = {"tp": ranks}
        stages = run_phases(program, chosen)
        prefill = stages.prefill.final if stages.prefill else None
        return plan_program(
            stages.final, where, context=tokens, batch=batch, page_size=page_size, prefill_program=prefill
        )

    mine = planned(tp)
    columns: dict[int, RankPlan | str] = {}
    for ranks in sorted(others):
        try:
            columns[ranks] = mine if ranks == tp else planned(ranks)
        except CompileError as error:  # said in its column: the plan that was asked for is there
            columns[ranks] = str(error).splitlines()[0]
    return Plan(mine, columns)


def plan_program(
    program: Program,
    device: Device,
    *,
    context: int,
    batch: int = 64,
    page_size: int = 16,
    axis: str = "tp",
    prefill_program: Program | None = None,
) -> RankPlan:
    """Plan a final program as it stands, for the ranks of its mesh.

    ``prefill_program``: what runs steps of at least its ``prefill_min_tokens``, where that is another program.
    """
    ranks = program.mesh.get(axis, 1)
    first = program
    if prefill_program is not None and context >= prefill_program.constants[PREFILL_MIN_TOKENS]:
        first = prefill_program
    sizes = [Sizes(first, Step.prefill(context)), Sizes(program, Step.decode(batch, context))]
    notes = [f"FLOPs of {name} are not known and not counted" for name in uncounted(program)]
    if ranks > device.max_ranks:
        notes.append(f"{ranks} ranks are more than the {device.max_ranks} that the links of {device.name} join")
    prefill, decode = (_step_plan(size.program, size, device, ranks) for size in sizes)
    kinds = [ops.kind_of_collective(node.target) for node in program.nodes if node.target in ops.COLLECTIVES]
    names = [target_name(kind).removeprefix("graphsrt.") for kind in kinds if ranks > 1 and kind is not ops.take_own]
    return RankPlan(
        program.name, str(program.dtype).removeprefix("torch."), ranks, device, context, batch,
        weights=sum((split(weight_bytes(w), w.placement, ranks) for w in program.weights.values()), Split()),
        kv_token=_kv_token(program, ranks),
        activation_bytes=max(map(peak_activation_bytes, sizes)),
        page_size=page_size, prefill=prefill, decode=decode,
        collectives={name: names.count(name) for name in sorted(set(names))}, notes=notes,
    )  # fmt: skip


def _device(given: Device | str) -> Device:
    return given if isinstance(given, Device) else device(given)


# -- memory ------------------------------------------------------------------------------------------------------------


def split(local_bytes: int, placement: Placement | None, ranks: int) -> Split:
    """Why the bytes of a value are held: ``local_bytes`` on each of ``ranks`` ranks, placed as ``placement`` says."""
    if ranks == 1:
        return Split(divided=local_bytes)
    if not isinstance(placement, Shard):
        return Split(whole=local_bytes * ranks)
    layout = placement.layout
    divided, replicas, padding = copies(layout)
    element = local_bytes // layout.local_size  # bytes of all that is at one address of the divided dimension
    return Split(divided=divided * element, replicas=replicas * element, padding=padding * element)


@functools.lru_cache(maxsize=4096)
def copies(layout: Layout) -> tuple[int, int, int]:
    """(addresses, replicas, pads) of a layout over all ranks.

    Inside a segment (one of the parts that lie side by side in a fused weight), an address that r ranks hold at least,
    whichever address it is, is there for r ranks: r - 1 of its copies are replicas. All further copies are pads.
    """
    addresses = replicas = pads = 0
    for runs in _segments(layout):
        counts = list(_holders([run for rank in runs for run in rank]))
        size = sum(length for length, _ in counts)
        least = min(count for _, count in counts)
        addresses += size
        replicas += (least - 1) * size
        pads += sum(length * (count - least) for length, count in counts)
    return addresses, replicas, pads


def _holders(runs: list[Run]) -> Iterator[tuple[int, int]]:
    """(length, how often it is held) of each stretch of addresses."""
    bounds = sorted({bound for run in runs for bound in (run.start, run.start + run.length)})
    for start, end in itertools.pairwise(bounds):
        held = sum(run.start <= start and end <= run.start + run.length for run in runs)
        if held:
            yield end - start, held


def _segments(layout: Layout) -> Iterator[list[list[Run]]]:
    """Cut where every rank is done with all lower addresses at the same local position."""
    cuts = [0]
    for address in sorted({run.start for rank in layout.runs for run in rank}):
        positions = {_position(rank, address) for rank in layout.runs}
        if len(positions) == 1 and None not in positions and 0 not in positions:
            cuts.append(address)
    cuts.append(layout.size)
    for low, high in itertools.pairwise(cuts):
        yield [
            [
                Run(start, end - start, run.owned)
                for run in rank
                if (start := max(run.start, low)) < (end := min(run.start + run.length, high))
            ]
            for rank in layout.runs
        ]


def _position(runs: tuple[Run, ...], address: int) -> int | None:
    """How many elements of a rank are below ``address``, if they all come first."""
    position = 0
    for index, run in enumerate(runs):
        below = min(max(address - run.start, 0), run.length)
        position += below
        if below < run.length:
            return position if all(later.start >= address for later in runs[index + 1 :]) else None
    return position


def _kv_token(program: Program, ranks: int) -> Split:
    nodes = [node for node in program.graph.nodes if is_pool(program, node)]
    parts = [split(slot_bytes(program, str(node.target)), node.meta.get("placement"), ranks) for node in nodes]
    return sum(parts, Split())


# -- time --------------------------------------------------------------------------------------------------------------


def _step_plan(program: Program, sizes: Sizes, device: Device, ranks: int) -> StepPlan:
    found: dict[Any, tuple[list[str], Cost]] = {}
    for label, nodes in _layers(program):
        costs = [cost(sizes, node) for node in nodes]
        # layers are of one kind if their operators are the same and cost the same
        key = tuple((target_name(node.target), repr(part)) for node, part in zip(nodes, costs))
        found.setdefault(key, ([], sum(costs, Cost())))[0].append(label)
    kinds = []
    for labels, one in found.values():
        compute = sum(flops / device.peak(dtype) for dtype, flops in one.flops.items())
        memory = one.memory_bytes / device.memory_bandwidth
        # each launch waits once; then a ring keeps every link busy
        links = one.num_collectives * device.link_latency_s
        links += one.sent_bytes / device.link(ranks) if one.sent_bytes else 0.0
        kinds.append(Kind(_label(labels), len(labels), one, compute, memory, links))
    return StepPlan(sizes.step, kinds)


def _layers(program: Program) -> Iterator[tuple[str, list[fx.Node]]]:
    """The operators by layer, in order, each with the layer's number, or what they come before or after.

    A value that is named after an earlier layer belongs to the layer that it stands in.
    """
    highest = -1
    groups: dict[int, list[fx.Node]] = {}
    tail: list[fx.Node] = []
    for node in program.nodes:
        layer = layer_of(node.name)
        if layer is None:
            tail.append(node)
            continue
        if tail:  # between layers, not after them
            groups.setdefault(highest, []).extend(tail)
            tail = []
        highest = max(highest, layer)
        groups.setdefault(highest, []).append(node)
    for layer, nodes in groups.items():
        yield (str(layer) if layer >= 0 else "before the layers"), nodes
    if tail:
        yield ("after the layers" if groups else "all operators"), tail


def _label(labels: list[str]) -> str:
    """``layers 1–30``, ``layers 0, 2–4``, ``before the layers``."""
    if not labels[0].isdecimal():
        return labels[0]
    spans: list[list[int]] = []
    for number in map(int, labels):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    step = {b[0] - a[0] for a, b in itertools.pairwise(spans)}
    if len(spans) > 2 and len(step) == 1 and all(a == b for a, b in spans):
        return f"layers {spans[0][0]}, {spans[1][0]}, … {spans[-1][0]}"
    written = ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in spans)
    return f"layer{'s' if len(labels) > 1 else ''} {written}"
