"""What the experts of a mixture cost on one rank: only those that tokens are routed to, taken to be even."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.fx as fx

from graphsrt.placement import Shard
from graphsrt.program import arguments

if TYPE_CHECKING:
    from graphsrt.costs import Sizes

WEIGHTS = ("gate_up", "down", "gate_up_bias", "down_bias")


def expert_flops(sizes: Sizes, node: fx.Node, args: dict[str, Any], names: tuple[str, str]) -> int:
    """FLOPs of the (token, expert) pairs that fall on this rank."""
    tokens, k = sizes.of(args["expert_ids"])[0][0]
    _, rows, width = sizes.of(args["gate_up"])[0][0]
    local, _, inner = sizes.of(args["down"])[0][0]
    here = min(1.0, local / num_experts(args["down"]))
    # pairs × this rank's share × a multiplication and an addition × numbers of an expert's two matrices
    return round(tokens * k * here * 2 * width * (rows + inner))


def share_used(sizes: Sizes, node: fx.Node) -> float:
    """The share of its experts' weights that a rank reads: an expert without tokens is not read."""
    args = arguments(node)
    tokens, k = sizes.of(args["expert_ids"])[0][0]
    # an expert is left out by one token with probability 1 - k / experts
    return 1 - (1 - min(1.0, k / num_experts(args["down"]))) ** tokens


def num_experts(down: fx.Node) -> int:
    """Experts on all ranks together, from the weight of their second product."""
    place = down.meta.get("placement")
    return place.layout.size if isinstance(place, Shard) and place.dim == 0 else int(down.meta["val"].shape[0])
