"""A :class:`Bench` as text, and as a picture."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from graphsrt.benchmark.engine_process import OURS
from graphsrt.benchmark.measure import Bench, Decode, Prefill, Times
from graphsrt.errors import explain


def text(bench: Bench) -> str:
    """Tables in Markdown: times and ratios by case, starts, memory, and what failed."""
    engines = list(bench.versions)
    ours = f", {OURS} with {bench.quantize} weights" if bench.quantize else ""
    lines = [f"{bench.model}, {bench.dtype}{ours}, tp={bench.tp}, {bench.threads} threads"]
    lines += [f"{name}: {version}" for name, version in bench.versions.items()]
    found: dict[type, list[float]] = {Decode: [], Prefill: []}
    for times in bench.cases:
        found[type(times.case)] += times.ceilings
    if found[Decode]:
        lines += [f"read: {_range(found[Decode], 1e9, 1)} GB/s, over {bench.weight_bytes / 1e6:,.0f} MB"]
    if found[Prefill]:
        lines += [f"multiplied: {_range(found[Prefill], 1e12, 3)} TFLOP/s in the model's products"]
    lines += [""]
    head = ["case", *(f"{name} tokens/s" for name in engines), f"{OURS} of the ceiling", "best peer", "times as fast"]
    head += [f"{OURS} host ms a step"]
    rows = [_row(times, engines) for times in bench.cases]
    lines += [_table([head, *rows]), ""]
    names = [name for name in engines if name in bench.starts or name in bench.peak_bytes]
    starts = [
        [name, *(f"{bench.starts.get(name, {}).get(kind, float('nan')):.1f}" for kind in ("cold", "warm")),
         f"{bench.peak_bytes.get(name, 0) / 1e6:,.0f}"]
        for name in names
    ]  # fmt: skip
    lines += [_table([["engine", "cold start s", "warm start s", "peak MB (PSS)"], *starts])]
    failures = dict(bench.failures)
    for times in bench.cases:
        failures |= {f"{name}, {times.case.name}": why for name, why in times.failures.items()}
    for what, why in failures.items():
        lines += ["", f"{what}: {why}"]
    return "\n".join(lines)


def _range(values: list[float], unit: float, digits: int) -> str:
    least, most = (f"{value / unit:.{digits}f}" for value in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"


def _row(times: Times, engines: list[str]) -> list[str]:
    tokens = times.case.batch if isinstance(times.case, Decode) else times.case.tokens
    rates = []
    for name in engines:
        seconds = times.median(name)
        rates.append("–" if seconds is None else f"{tokens / seconds:,.1f}")
    peer, rate, share = times.best_peer(), times.rate(), times.of_ceiling()
    reached = "–"
    if rate is not None and share is not None:
        told = f"{rate / 1e9:.1f} GB/s" if isinstance(times.case, Decode) else f"{rate / 1e12:.3f} TFLOP/s"
        reached = f"{told}, {share:.0%}"
    ratio = times.ratio(OURS, peer) if peer else None
    told = "–" if ratio is None else f"{ratio[0]:.2f} ({ratio[1]:.2f}–{ratio[2]:.2f})"
    host = f"{1e3 * statistics.median(times.host_s):.2f}" if times.host_s else "–"
    return [times.case.name, *rates, reached, peer or "–", told, host]


def check_plot(file: Path) -> None:
    """ValueError if ``plot`` could not make this file: without matplotlib, and for a format that it does not know."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise ValueError(explain("a plot needs matplotlib", hint='pip install "graphsrt[bench]"')) from None
    formats = FigureCanvasAgg.get_supported_filetypes()
    if file.suffix.lstrip(".").lower() not in formats:
        raise ValueError(
            explain("a plot's format is what its file's name ends with", expected=", ".join(formats), got=file.name)
        )


def plot(bench: Bench, file: Path) -> None:
    """Tokens a second by case and engine, in the format that the file's name ends with. ValueError as ``check_plot``.

    Each case has bars of its own scale: relative to our engine's rate, which is 1.
    """
    check_plot(file)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    engines = list(bench.versions)
    figure: Any
    figure, axes = pyplot.subplots(figsize=(8, 0.6 + 0.5 * len(bench.cases) * max(1, len(engines)) / 2))
    height = 0.8 / max(1, len(engines))
    for number, name in enumerate(engines):
        where, values = [], []
        for row, times in enumerate(bench.cases):
            mine, theirs = times.median(OURS), times.median(name)
            if mine is not None and theirs is not None:
                where.append(row + number * height)
                values.append(mine / theirs)
        bars = axes.barh(where, values, height=height * 0.9, label=name)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(bench.cases))], [t.case.name for t in bench.cases])
    axes.invert_yaxis()
    axes.set_xlabel(f"speed, {OURS} = 1")
    ours = f", {OURS} with {bench.quantize} weights" if bench.quantize else ""
    axes.set_title(f"{bench.model}, {bench.dtype}{ours}, {bench.threads} threads", fontsize=9)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)


def _table(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
