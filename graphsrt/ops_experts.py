"""The experts of a mixture of experts as one operator, ``graphsrt::moe_experts``.

Which experts a token goes to is the router's affair: ordinary operators before this one, whose results are the same on
every rank. Shape letters as in :mod:`graphsrt.ops`, and ``X`` experts, ``k`` experts of one token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from graphsrt.ops import ACTIVATIONS, _define

EXPERT_ACTIVATIONS = {**ACTIVATIONS, "relu2": lambda x: F.relu(x).square()}
"""The functions that ``act`` may name."""


def activate(
    hidden: torch.Tensor, *, act: str, gated: bool, interleaved: bool, limit: float | None, alpha: float | None,
    up_offset: float,
) -> torch.Tensor:  # fmt: skip
    """What experts do between their two products: ``[…, 2F] -> […, F]``, or ``[…, F] -> […, F]`` without gate."""
    if not gated:
        return EXPERT_ACTIVATIONS[act](hidden)
    gate, up = (hidden[..., 0::2], hidden[..., 1::2]) if interleaved else hidden.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    activated = EXPERT_ACTIVATIONS[act](gate) if alpha is None else gate * torch.sigmoid(gate * alpha)
    return activated * (up + up_offset if up_offset else up)


@_define(
    "(Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor gate_up, Tensor down, *, str act, bool gated=True, "
    "bool interleaved=False, float? limit=None, float? alpha=None, float up_offset=0.0, Tensor? gate_up_bias=None, "
    "Tensor? down_bias=None, Tensor? first_expert=None) -> Tensor",
    lambda x, *arguments, **options: x.new_empty(x.shape),
    traced=False,
)
def moe_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    act: str,
    gated: bool = True,
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
    up_offset: float = 0.0,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    first_expert: torch.Tensor | None = None,
) -> torch.Tensor:
    """``sum over j of expert_weights[t, j] · expert_{expert_ids[t, j]}(x[t])`` for ``x [T, E]`` -> ``[T, E]``.

    ``expert_ids [T, k]`` (integers) and ``expert_weights [T, k]`` come from the router. An expert is
    ``down @ activation(gate_up @ x + gate_up_bias) + down_bias`` with ``gate_up [X, 2F, E]``, ``down [X, E, F]`` and
    biases ``[X, 2F]``, ``[X, E]``. The rows of ``gate_up`` are all gates, then all ups; gate and up in turn where
    ``interleaved``; ups only, ``[X, F, E]``, where not ``gated``. The activation is ``act(gate) · (up + up_offset)``
    (Shazeer 2020), ``act`` a key of :data:`EXPERT_ACTIVATIONS`; ``alpha`` makes it ``gate · sigmoid(alpha · gate)``;
    ``limit`` bounds the gate from above and the up on both sides first (gpt-oss).

    ``first_expert`` (int64 ``[1]``): the id of the first of the given experts. A token's experts that are not among the
    given ones add nothing, so the sum over ranks that hold different experts is the whole.

    Tokens are grouped by expert and each expert multiplies its own; the terms of a token are added in the order of
    ``j``, whatever else is in the step, in the wider dtype of products and routing weights.
    """
    tokens, k = expert_ids.shape
    experts = down.shape[0]
    ids = expert_ids.reshape(-1)
    if first_expert is not None:
        ids = ids - first_expert
    ids = torch.where((ids < 0) | (ids >= experts), experts, ids)
    order = ids.argsort(stable=True)
    ends = torch.bincount(ids, minlength=experts + 1).cumsum(0).tolist()
    rows = x[order // k]
    products = x.new_zeros((tokens * k, down.shape[1]))
    start = 0
    for expert, end in enumerate(ends[:experts]):
        if end > start:
            hidden = F.linear(rows[start:end], gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert])
            hidden = activate(
                hidden, act=act, gated=gated, interleaved=interleaved, limit=limit, alpha=alpha, up_offset=up_offset
            )
            products[start:end] = F.linear(hidden, down[expert], None if down_bias is None else down_bias[expert])
        start = end
    weighted = products * expert_weights.reshape(-1)[order][:, None]
    terms = torch.empty_like(weighted)
    terms[order] = weighted
    return terms.view(tokens, k, -1).sum(1).to(x.dtype)
