"""A plan as text for people, and as a dictionary for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from graphsrt.plan import Kind, Plan, RankPlan, Split, StepPlan

_LINES = {
    "divided": "divided among ranks",
    "whole": "whole on each rank",
    "replicas": "replicas",
    "padding": "padding",
}


def plan_text(plan: Plan) -> str:
    """Memory of a rank, the two steps by kinds of layers, and the other numbers of ranks side by side."""
    mine = plan.chosen
    notes = list(mine.notes)
    if not mine.fits:
        notes.append("this does not fit: times are for memory that the device has not got")
    elif not mine.fits_batch:
        notes.append(
            f"only {mine.num_sequences} sequences fit, not {mine.batch}: decode is for memory that is not there"
        )
    lines = [_headline(mine), "", *_memory(mine)]
    for title, step in ((f"prefill of {mine.context} tokens of one sequence", mine.prefill),
                        (f"decode of {mine.batch} sequences of {mine.context} tokens", mine.decode)):  # fmt: skip
        lines += ["", *_step(title, step)]
    if plan.compared:
        lines += ["", *_columns(plan)]
    if notes:
        lines += ["", *(f"note: {note}" for note in notes)]
    return "\n".join(lines)


def plan_dict(plan: Plan) -> dict[str, Any]:
    """Bytes, FLOPs and seconds; splits are of all ranks together, everything else of one rank."""
    compared = [
        {"tp": ranks, "error": other} if isinstance(other, str) else _summary(other)
        for ranks, other in plan.compared.items()
    ]
    mine = plan.chosen
    return {
        "model": mine.name,
        "dtype": mine.dtype,
        "device": asdict(mine.device),
        "context": mine.context,
        "batch": mine.batch,
        "page_size": mine.page_size,
        **_summary(mine),
        "weights_of_all_ranks": asdict(mine.weights),
        "kv_of_a_token_of_all_ranks": asdict(mine.kv_token),
        "steps": {step.step.name: [_kind_dict(kind) for kind in step.kinds] for step in (mine.prefill, mine.decode)},
        "compared": compared,
        "notes": mine.notes,
    }


def _summary(plan: RankPlan) -> dict[str, Any]:
    steps: dict[str, Any] = {}
    for step in (plan.prefill, plan.decode):
        steps[f"{step.step.name}_s"] = step.time_s
        steps[f"{step.step.name}_bound"] = step.whole.bound
    return {
        "tp": plan.ranks,
        "fits": plan.fits,
        "fits_batch": plan.fits_batch,
        "weight_bytes_per_rank": plan.weight_bytes,
        "activation_bytes_per_rank": plan.activation_bytes,
        "left_bytes_per_rank": plan.left_bytes,
        "kv_bytes_per_token_per_rank": plan.kv_token_bytes,
        "sequences": plan.num_sequences,
        "collectives": plan.collectives,
        **steps,
    }


def _kind_dict(kind: Kind) -> dict[str, Any]:
    cost = {name: value for name, value in vars(kind.cost).items() if name != "flops"}
    flops = {str(dtype).removeprefix("torch."): value for dtype, value in kind.cost.flops.items()}
    times = {name: getattr(kind, name) for name in ("compute_s", "memory_s", "links_s", "time_s")}
    return {"label": kind.label, "count": kind.count, "flops": flops, **cost, **times, "bound": kind.bound}


# -- text --------------------------------------------------------------------------------------------------------------


def _headline(plan: RankPlan) -> str:
    device = plan.device
    links = f", links {_bytes(device.link(plan.ranks))}/s each way" if plan.ranks > 1 else ""
    memory = f"{_bytes(device.memory_bytes)} at {_bytes(device.memory_bandwidth)}/s"
    return f"{plan.name}, tp={plan.ranks}, {plan.dtype}, on {device.name}: {memory}{links}"


def _memory(plan: RankPlan) -> list[str]:
    sequences = "no limit" if plan.num_sequences is None else str(plan.num_sequences)
    left = _bytes(plan.left_bytes) if plan.left_bytes >= 0 else f"{_bytes(-plan.left_bytes)} too little"
    rows = [
        ("weights", _bytes(plan.weight_bytes), f"{plan.weight_bytes:,} bytes"),
        *_split_rows(plan.weights, plan.ranks),
        ("activations", _bytes(plan.activation_bytes), "most at a time, in the larger step"),
        ("left", left, "for keys and values"),
        ("KV of a token", _bytes(plan.kv_token_bytes), f"{plan.kv_token_bytes:,} bytes"),
        *_split_rows(plan.kv_token, plan.ranks),
        ("sequences", sequences, f"of {plan.context} tokens"),
    ]
    return ["memory of a rank", *(f"  {name:<22} {value:>12}   {comment}".rstrip() for name, value, comment in rows)]


def _split_rows(split: Split, ranks: int) -> list[tuple[str, str, str]]:
    if ranks == 1:
        return []
    return [(f"  {name}", _bytes(getattr(split, key) / ranks), "") for key, name in _LINES.items()]


_HEADS = ("", "×", "FLOPs", "weights", "activations", "KV", "sent", "compute", "memory", "links", "time", "bound by")


def _step(title: str, step: StepPlan) -> list[str]:
    rows = [_HEADS, *(_kind_row(kind, kind.count, kind.time_s) for kind in step.kinds)]
    rows.append(_kind_row(step.whole, None, step.time_s))
    return [title, *_table(rows)]


def _kind_row(kind: Kind, count: int | None, time_s: float) -> tuple[str, ...]:
    cost = kind.cost
    return (
        kind.label, "" if count is None else str(count), _scaled(cost.total_flops, ""), _bytes(cost.weight_bytes),
        _bytes(cost.activation_bytes), _bytes(cost.kv_read_bytes + cost.kv_written_bytes), _bytes(cost.sent_bytes),
        _seconds(kind.compute_s), _seconds(kind.memory_s), _seconds(kind.links_s), _seconds(time_s), kind.bound,
    )  # fmt: skip


def _columns(plan: Plan) -> list[str]:
    mine = plan.chosen
    names = (
        "tp", "weights of a rank", "KV of a token", "left for KV", f"sequences of {mine.context}", "prefill",
        "  bound by", f"decode of {mine.batch}", "  bound by", "  tokens/s", "collectives a step",
    )  # fmt: skip
    columns = [names, *(_column(ranks, other, ranks == mine.ranks) for ranks, other in plan.compared.items())]
    lines = ["side by side", *_table(list(zip(*columns)))]
    refused = [f"  tp={ranks}: {other}" for ranks, other in plan.compared.items() if isinstance(other, str)]
    beyond = [r for r, other in plan.compared.items() if not isinstance(other, str) and r > other.device.max_ranks]
    if beyond:
        most = mine.device.max_ranks
        refused.append(f"  * more ranks than the {most} that these links join: time of collectives is too low")
    return lines + refused


def _column(ranks: int, plan: RankPlan | str, chosen: bool) -> tuple[str, ...]:
    label = f"[{ranks}]" if chosen else str(ranks)
    if isinstance(plan, str):
        return (label, "refused", *[""] * 9)
    label += "*" if ranks > plan.device.max_ranks else ""
    sequences = "no limit" if plan.num_sequences is None else str(plan.num_sequences)
    memory = (label, _bytes(plan.weight_bytes), _bytes(plan.kv_token_bytes))
    if not plan.fits:
        return (*memory, "does not fit", *[""] * 7)
    launches = str(sum(plan.collectives.values()))
    prefill = (_seconds(plan.prefill.time_s), plan.prefill.whole.bound)
    decode = (_seconds(plan.decode.time_s), plan.decode.whole.bound, f"{plan.batch / plan.decode.time_s:,.0f}")
    if not plan.fits_batch:
        decode = ("does not fit", "", "")
    return (*memory, _bytes(plan.left_bytes), sequences, *prefill, *decode, launches)


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  " + "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:]))]).rstrip()
        for row in rows
    ]


def _scaled(count: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(count) < 999.5 or prefix == "P":
            break
        count /= 1000
    digits = 0 if count == int(count) and not prefix else max(0, 3 - len(str(int(abs(count)))))
    return f"{count:.{digits}f} {prefix}{unit}".rstrip()


def _bytes(count: float) -> str:
    return _scaled(count, "B").replace(" kB", " KB")


def _seconds(seconds: float) -> str:
    if not seconds:
        return "0"
    if seconds < 1e-3:
        return _scaled(seconds * 1e6, "µs")
    return _scaled(seconds * 1e3, "ms") if seconds < 1 else _scaled(seconds, "s")
