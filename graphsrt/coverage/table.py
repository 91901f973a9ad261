"""The rows as a table: text for a terminal, markdown for the documentation, reasons in groups to work from."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

Line = dict[str, Any]
"""A :class:`graphsrt.coverage.measure.Row` as JSON; numbers of ranks are strings there."""


def status(row: Line) -> str:
    """ok at every number of ranks, or the worst that happened: crashed, refused, wrong, partly."""
    if row.get("crashed"):
        return "crashed"
    if row["refused"]:
        return "refused"
    found = {result["status"] for result in row["tp"].values()}
    return next((s for s in ("wrong", "refused", "partly") if s in found), "ok")


def reason(row: Line) -> str:
    """Why the row is not ok: the first reason, with the numbers of ranks that it holds for."""
    if row["refused"]:
        return row["refused"]
    by_reason: dict[str, list[str]] = defaultdict(list)
    for tp, result in row["tp"].items():
        if result["status"] != "ok":
            by_reason[f"{result['status']}: {result['reason']}"].append(tp)
    return " | ".join(f"tp {','.join(tps)} {why}" for why, tps in by_reason.items())


def text_table(rows: Iterable[Line]) -> str:
    """One line for each architecture: kind, sizes, status at each number of ranks, errors, reason."""
    lines = []
    for row in sorted(rows, key=lambda r: (r["kind"], r["model_type"], r["sizes"])):
        states = " ".join(f"{tp}:{result['status']}" for tp, result in row["tp"].items()) or "refused"
        error = max((r["error_eager"] or 0.0 for r in row["tp"].values()), default=0.0)
        lines.append(
            f"{row['model_type']:24} {row['kind']:7} {row['sizes']:5} {states:32} {error:8.1e}  {reason(row)[:300]}"
        )
    return "\n".join(lines)


def counts_text(rows: Iterable[Line]) -> str:
    """For each kind how many are ok, of how many."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        kinds[f"{row['kind']} {row['sizes']}"].append(status(row))
    return "\n".join(
        f"{kind:12} {states.count('ok'):3} ok of {len(states)}"
        + "".join(f", {states.count(s)} {s}" for s in ("partly", "refused", "wrong", "crashed") if s in states)
        for kind, states in sorted(kinds.items())
    )


def grouped_reasons(rows: Iterable[Line]) -> str:
    """Reasons with names and numbers taken out, most frequent first, and the architectures of each."""
    groups: dict[str, list[str]] = defaultdict(list)
    example: dict[str, str] = {}
    for row in rows:
        if status(row) == "ok":
            continue
        why = reason(row)
        key = re.sub(r"where: .*?expected:", "expected:", why)
        key = re.sub(r"layers\.\d+\S*|\b[\w.]+_\d+\b", "…", key)
        key = re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", key)[:160]
        groups[key].append(f"{row['model_type']} ({row['kind']})")
        example.setdefault(key, why)
    parts = []
    for key, names in sorted(groups.items(), key=lambda item: -len(item[1])):
        parts.append(f"[{len(names)}] {', '.join(names)}\n    {example[key][:900]}\n")
    return "\n".join(parts)


def markdown(rows: Iterable[Line], apart: Iterable[tuple[str, str]], key: dict[str, str], date: str) -> str:
    """The page ``docs/coverage.md``."""
    lines = list(rows)
    tps = sorted({int(tp) for row in lines for tp in row["tp"]})
    head = [
        "# Which architectures are sharded, and how that is known",
        "",
        f"Made by `graphsrt coverage` on {date} with graphsrt {key['graphsrt']} (text {key['text']}), "
        f"torch {key['torch']}, transformers {key['transformers']}. Do not edit by hand.",
        "",
        INTRODUCTION,
        "",
        "```",
        counts_text(lines),
        "```",
    ]
    parts = ["\n".join(head)]
    for kind in sorted({row["kind"] for row in lines}):
        mine = sorted((r for r in lines if r["kind"] == kind), key=lambda r: (r["model_type"], r["sizes"]))
        columns = "".join(f" tp {tp} |" for tp in tps)
        body = [f"## {kind}", "", f"| architecture | heads |{columns} bytes at tp {tps[-1] if tps else 1} | whole | "
                "collectives | error | notes |", "|---|---|" + "---|" * (len(tps) + 5)]  # fmt: skip
        body += [_markdown_row(row, tps) for row in mine]
        parts.append("\n".join(body))
    listed = [f"| {name} | {why} |" for name, why in apart]
    parts.append("\n".join(["## Not decoder-only", "", "| model type | why it stands apart |", "|---|---|", *listed]))
    return "\n\n".join(parts) + "\n"


INTRODUCTION = """\
Each row is a tiny model with random weights (head counts in the second column; every size another, every kind of layer,
windows shorter than the text, biases and routers random) that transformers builds from its own config class. It is
captured once, divided over 1, 2, 4 and 8 ranks, and executed in float64 on all of them in one process.

`ok`: every matrix of attention, MLP, experts, embedding and head is divided (latents are made whole on each rank, as
replicated KV heads are; so are bottlenecks, a pair of linears through at most a quarter of the width, where dividing
them would take a sum of its own); there are no more collectives than needed (two in a layer, one in a parallel one,
one each for embedding and logits; those of one value a token, which norms over a divided width take, are not counted);
logits of 1, 2, 7 and 37 tokens agree with transformers' eager code to 1e-5 of the largest one (it computes norms and
softmax in float32) and with one rank to 1e-10 (both without their casts to float32, where those make more); and so do
those of two sequences that go through the paged pool in chunks and single tokens, in the same steps. `partly`: right,
but something stays whole or costs a collective more. `refused`: no program; the reason is given. `wrong`: the numbers
differ. Of kind `other` are models in which a token does not see just the tokens before it, all or those in a window.

Bytes: of one rank, in units of its share (total / tp). Whole: what of that is on every rank in any case, as a part of
the total. Collectives: of the first, the second, … layer, then those of embedding and logits, then small ones. Error:
the largest against transformers, then in chunks."""


def _markdown_row(row: Line, tps: list[int]) -> str:
    results = row["tp"]
    states = " | ".join(results[str(tp)]["status"] if str(tp) in results else "refused" for tp in tps)
    last = results.get(str(tps[-1])) if tps else None
    audit = (last or {}).get("audit") or {}
    share = whole = collectives = errors = ""
    if audit:
        share = f"{audit['bytes_per_rank'] * tps[-1] / audit['total_bytes']:.2f}"
        whole = "; ".join(f"{name} {size / audit['total_bytes']:.1%}" for name, size in audit["whole_bytes"].items())
        layers = [str(n) for name, n in audit["collectives"].items() if name not in ("ends", "small")]
        ends, small = (audit["collectives"].get(name, 0) for name in ("ends", "small"))
        collectives = f"{' '.join(layers)} + {ends}" + (f" + {small} small" if small else "")
    if any(r["error_eager"] is not None for r in results.values()):
        errors = ", ".join(
            f"{max(r[name] for r in results.values() if r[name] is not None):.0e}"
            for name in ("error_eager", "error_pieces")
        )
    note = reason(row).replace("|", "/").replace("\n", " ")
    cells = [row["model_type"], row["sizes"], states, share, whole, collectives, errors, note]
    return "| " + " | ".join(cells) + " |"
