"""What ``graphsrt plan`` says about the final program, as a table of devices and bars."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from graphsrt.program import Program
from graphsrt.report.figures import Bar, Figure, size_text

if TYPE_CHECKING:
    from graphsrt.plan import RankPlan, StepPlan

DEVICE = "h200"
"""The device that the bars are drawn for; the table has all."""
BATCH = 64


@dataclass
class PlanSection:
    """``devices``: name and cells, one for each of ``terms``."""

    note: str
    terms: list[str]
    devices: list[tuple[str, list[str]]] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)


def plan_figures(program: Program) -> PlanSection | None:
    """None for a program that has no KV pool yet: it has no prefill and no decode step."""
    if "kv_pool" not in program.inputs:
        return None
    from graphsrt.devices import DEVICES
    from graphsrt.plan import DEFAULT_CONTEXT, plan_program

    context = min(DEFAULT_CONTEXT, program.constants["context_length"])
    plans = {name: plan_program(program, device, context=context, batch=BATCH) for name, device in DEVICES.items()}
    drawn = plans[DEVICE]
    note = (
        f"Best times by arithmetic, memory and links of the devices. Prefill: one sequence of {context:,} tokens. "
        f"Decode: {BATCH} sequences of {context:,} tokens. The bars are for {drawn.device.name}."
    )
    terms = ["memory", "fits", "sequences that fit", "prefill", "limited by", "decode", "limited by"]
    return PlanSection(
        note,
        terms,
        [(name, _cells(plan)) for name, plan in plans.items()],
        [
            _memory(drawn),
            _step("Prefill by layer", drawn.prefill),
            _step("Decode by layer", drawn.decode),
        ],
    )


def _cells(plan: RankPlan) -> list[str]:
    sequences = "–" if plan.num_sequences is None else f"{plan.num_sequences:,}"
    return [
        size_text(plan.device.memory_bytes), "yes" if plan.fits else "no", sequences,
        _time_text(plan.prefill.time_s), plan.prefill.whole.bound,
        _time_text(plan.decode.time_s), plan.decode.whole.bound,
    ]  # fmt: skip


def _memory(plan: RankPlan) -> Figure:
    """What lies in a rank's memory when the batch is full."""
    kv = plan.kv_token_bytes * plan.context * plan.batch
    rows = [("weights", plan.weight_bytes), ("activations, most", plan.activation_bytes)]
    rows += [(f"KV of {plan.batch} sequences", kv), ("memory of the device", int(plan.device.memory_bytes))]
    bars = [
        Bar(label, [("left" if label.startswith("memory") else "S", label, amount)], size_text(amount))
        for label, amount in rows
    ]
    return Figure("Memory of a rank", "bytes", bars)


def _step(title: str, step: StepPlan) -> Figure:
    """Time of each kind of layer, all of that kind together: what binds it, then links."""
    bars = []
    for kind in step.kinds:
        bound = "compute" if kind.compute_s >= kind.memory_s else "memory"
        parts = [
            (bound, bound, kind.count * max(kind.compute_s, kind.memory_s)),
            ("links", "links", kind.count * kind.links_s),
        ]
        label = f"{kind.label} ({kind.count} ×)" if kind.count > 1 else kind.label
        bars.append(Bar(label, parts, _time_text(kind.count * kind.time_s)))
    legend = [("compute", "limited by compute"), ("memory", "limited by memory"), ("links", "links")]
    return Figure(title, f"time, {_time_text(step.time_s)} in all", bars, legend)


def _time_text(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:,.2f} {unit}"
    return f"{seconds * 1e6:,.1f} µs"
