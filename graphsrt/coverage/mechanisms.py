"""What a program does beside the common: said in the table, and each of it shown to matter for the numbers.

A tiny model whose window is longer than the text, or whose soft cap is far above every score, would be right without
them. So each attribute of attention is taken out of the captured program in turn (the scale: halved), and the logits
have to move.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from graphsrt import ops
from graphsrt.program import Program, arguments, aten, target_name
from graphsrt.simulate import Values, simulate

_NAMES = {
    "sliding_window": "window", "softcap": "soft cap", "sinks": "sinks", "alibi_slopes": "ALiBi",
    "chunk_size": "chunks",
}  # fmt: skip
MOVES = 1e-3
"""Logits have to move by this much, relative to the largest, when something is taken out."""


def mechanisms(captured: Program, final: Program) -> list[str]:
    """Words for what the program has; from its graph alone."""
    found = []
    calls = captured.calls(ops.attention)
    for attribute, word in _NAMES.items():
        if any(arguments(node).get(attribute) is not None for node in calls):
            found.append(word)
    shapes = {(node.args[0].meta["val"].shape[1:], node.args[1].meta["val"].shape[1:]) for node in calls}  # type: ignore[union-attr]
    if len(shapes) > 1:
        found.append("heads differ by layer")
    names = {target_name(node.target) for node in final.nodes}
    words = {"latent_attention": "latent attention", "moe": "experts", "rope": "rope", "layer_norm": "layer norm"}
    found += [word for part, word in words.items() if any(part in name for name in names)]
    ropes = final.calls(ops.rope, ops.qk_norm_rope, ops.rope_kv_write)
    if any(arguments(node)["interleaved"] for node in ropes):
        found.append("interleaved")
    if len(captured.calls(aten.embedding.default)) > 1:
        found.append("learned positions")
    tables = {arguments(node)["weight"] for node in captured.calls(aten.embedding.default)}
    if any(arguments(node)["weight"] in tables for node in captured.calls(aten.linear.default)):
        found.append("tied head")
    if any(arguments(node)["bias"] is not None for node in captured.calls(aten.linear.default)):
        found.append("biases")
    return found


def without_effect(captured: Program, weights: Mapping[str, Values], tokens: list[int]) -> list[str]:
    """Attributes of attention that can be taken out, in all layers, without the logits moving. Empty is good."""
    inputs = {"tokens": torch.tensor(tokens), "positions": torch.arange(len(tokens))}

    def logits(program: Program) -> torch.Tensor:
        return simulate(program, {name: inputs[name] for name in program.inputs}, weights)[0].double()

    want = logits(captured)
    found = []
    for attribute in [*_NAMES, "scale"]:
        changed = _without(captured, attribute)
        if changed is None:
            continue
        gap = (logits(changed) - want).abs()
        if not float(gap[torch.isfinite(gap)].max()) > MOVES * float(want[torch.isfinite(want)].abs().max()):
            found.append(_NAMES.get(attribute, attribute))
    return found


def _without(captured: Program, attribute: str) -> Program | None:
    program = captured.copy()
    changed = False
    for node in program.calls(ops.attention):
        value: Any = arguments(node).get(attribute)
        if value is None:
            continue
        node.kwargs = {**node.kwargs, attribute: 0.5 * value if attribute == "scale" else None}
        changed = True
    return program if changed else None
