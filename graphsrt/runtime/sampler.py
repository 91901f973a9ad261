"""From logits to tokens, for a whole batch at once."""

from __future__ import annotations

import torch
from torch import Tensor

from graphsrt.errors import GraphsrtError, explain


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """One token per row of logits: int64[R], on the device of ``logits``.

    logits: [R, V], any float dtype; padded columns of the vocabulary are ``-inf`` already.
    temperature: [R]; 0 takes the largest logit, the first of equals. top_k: int[R], 0 is off. top_p: [R], 1 is off.
    uniform: [R] in [0, 1); the token is where the cumulated probabilities pass it. float64, so that rare tokens of a
        large vocabulary keep their chance.

    Filters apply in the order temperature, ``top_k``, ``top_p`` (of what ``top_k`` left, scaled to sum to 1), as in
    transformers; of equal logits the lower id is kept first, so exactly ``top_k`` tokens remain.
    A row's token does not depend on the other rows. The four [R] tensors lie on one device; on the host they spare the
    device a synchronisation. Raises GraphsrtError for a row that holds NaN or +inf, or nothing but ``-inf``.
    Source: inverse transform sampling; top-p is nucleus sampling (Holtzman et al., 2020, section 3.1).
    """
    # max and not max().values of finite entries only: NaN must win, and does, on every device.
    largest, greedy = logits.max(dim=-1)
    bad = ~torch.isfinite(largest)
    if bool(bad.any()):
        raise GraphsrtError(_describe(logits, int(bad.nonzero()[0, 0])))
    sampled = temperature != 0
    if not bool(sampled.any()):
        return greedy
    tokens = greedy.clone()
    filtered = sampled & ((top_k > 0) | (top_p < 1))
    # Rows without a filter need no sorting. Which way a row takes depends on that row alone.
    for rows, draw in ((sampled & ~filtered, _draw), (filtered, _draw_filtered)):
        chosen = rows.nonzero()[:, 0]
        if len(chosen):
            here = chosen.to(logits.device)
            own = (t[chosen.to(t.device)].to(logits.device) for t in (temperature, top_k, top_p, uniform))
            tokens[here] = draw(logits[here], largest[here], *own)
    return tokens


def _draw(
    logits: Tensor, largest: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor
) -> Tensor:
    return _invert(_weights(logits, largest, temperature), uniform)


def _draw_filtered(
    logits: Tensor, largest: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor
) -> Tensor:
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    weights = _weights(ordered, largest, temperature)
    rank = torch.arange(weights.shape[-1], device=weights.device)
    weights = weights.masked_fill((top_k[:, None] > 0) & (rank >= top_k[:, None]), 0.0)
    reached = weights.cumsum(-1)
    # A token stays if those before it have not reached p; the first always does. Rounding must not cost p = 1 its tail.
    before = torch.nn.functional.pad(reached[:, :-1], (1, 0))
    full = before >= top_p[:, None].double() * reached[:, -1:]
    weights = weights.masked_fill(full & (top_p[:, None] < 1), 0.0)
    return ids.gather(-1, _invert(weights, uniform)[:, None])[:, 0]


def _weights(logits: Tensor, largest: Tensor, temperature: Tensor) -> Tensor:
    """Unscaled probabilities in float64, the largest exactly 1, so that no temperature overflows."""
    return ((logits.double() - largest[:, None].double()) / temperature[:, None].double()).exp()


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Index of the first entry whose cumulated weight exceeds ``uniform`` times the whole."""
    reached = weights.cumsum(-1)
    target = uniform[:, None].double() * reached[:, -1:]
    index = torch.searchsorted(reached, target, right=True)[:, 0]
    # A number that was cast to float32 on its way may be 1.0: the end, past entries of weight 0, which are no choice.
    size = weights.shape[-1]
    last = size - 1 - (weights > 0).flip(-1).to(torch.uint8).argmax(-1)
    return torch.minimum(index, last)


def _describe(logits: Tensor, row: int) -> str:
    values = logits[row]
    num_nan = int(values.isnan().sum())
    got = f"{num_nan} NaN of {len(values)}" if num_nan else f"a maximum of {float(values.max())}"
    return explain(
        f"no token can be sampled from logit row {row}",
        expected="at least one finite logit, no NaN and no +inf",
        got=got,
        hint="the model has overflowed or is miscompiled: run graphsrt verify on it, or try dtype=torch.float32",
    )
