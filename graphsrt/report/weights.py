"""The weights of a program for the page's table: type, recipe, and what each rank reads and owns."""

from __future__ import annotations

from typing import Any

from graphsrt.dump import weight_bytes
from graphsrt.folding import _LAYER, slices_text
from graphsrt.placement import Layout, Shard
from graphsrt.printer import dtype_text, placement_text, recipe_text, tensor_type_text
from graphsrt.program import Program, Weight
from graphsrt.recipes import OnOwner
from graphsrt.report.stages import last_part, relative


def weights_data(program: Program) -> dict[str, Any]:
    """``kinds``: what weights of all layers have in common, layer numbers relative; ``items``: (kind, layer or None)
    of every weight, in the program's order; ``prefixes``: of every kind."""
    ranks = program.mesh.get("tp", 1)
    kinds: dict[tuple[str, str], int] = {}
    described: list[dict[str, Any]] = []
    items: list[tuple[int, int | None]] = []
    for name, weight in program.weights.items():
        match = _LAYER.match(name)
        layer, prefix = (int(match[2]), last_part(match[1])) if match else (None, "")

        def short(text: str, prefix: str = prefix, layer: int | None = layer) -> str:
            return text if layer is None else relative(text, prefix, layer)

        declared = f"{tensor_type_text(weight.shape, weight.dtype, weight.placement)} {recipe_text(weight.recipe)}"
        key = (short(name), short(declared))
        if key not in kinds:
            kinds[key] = len(described)
            reads = [short(slices_text(weight.recipe, rank, len(weight.shape))) for rank in range(ranks)]
            described.append(
                {
                    "name": key[0],
                    "shape": f"[{', '.join(map(str, weight.shape))}]",
                    "global": tensor_type_text(weight.shape, weight.dtype, weight.placement, short=True),
                    "dtype": dtype_text(weight.dtype),
                    "placement": placement_text(weight.placement).strip(),
                    "recipe": short(recipe_text(weight.recipe, short=True)),
                    "held": held_text(weight, ranks),
                    # the same on all ranks: said once
                    "reads": reads[:1] if len(set(reads)) == 1 else reads,
                    "owns": owned_texts(weight),
                    "bytes": weight_bytes(weight),
                }
            )
        items.append((kinds[key], layer))
    return {"kinds": described, "items": items}


def held_text(weight: Weight, ranks: int) -> str:
    """Who holds the weight, in words."""
    if ranks == 1:
        return "the one rank"
    if isinstance(weight.recipe, OnOwner):
        return "rank 0; zeros elsewhere"
    if not isinstance(weight.placement, Shard):
        return "whole on every rank"
    layout = weight.placement.layout
    copies = layout.local_size * layout.ranks - layout.size
    return f"1/{layout.ranks} each" + (f", {copies:,} of {layout.size:,} twice or padded" if copies else "")


def owned_texts(weight: Weight) -> list[str]:
    """For an uneven layout, each rank's addresses of the divided dimension; empty where ``reads`` says it all."""
    if not isinstance(weight.placement, Shard) or weight.placement.layout.is_even:
        return []
    return [_runs_text(weight.placement.layout, rank) for rank in range(weight.placement.layout.ranks)]


def _runs_text(layout: Layout, rank: int) -> str:
    owned = [f"{r.start}:{r.start + r.length}" for r in layout.runs[rank] if r.owned]
    copied = [f"{r.start}:{r.start + r.length}" for r in layout.runs[rank] if not r.owned]
    parts = [f"owns {', '.join(owned)}" if owned else "owns nothing", f"copies {', '.join(copied)}" if copied else ""]
    return "; ".join(part for part in parts if part)


def unowned_share(weight: Weight, rank: int) -> float:
    """The part of a rank's bytes that another rank owns as well, or that are padding."""
    if not isinstance(weight.placement, Shard):
        return 0.0
    layout = weight.placement.layout
    return sum(r.length for r in layout.runs[rank] if not r.owned) / max(layout.local_size, 1)
