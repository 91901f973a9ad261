"""recognize_latent_attention: what is expanded from one latent for all heads, and what only looks like it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from graphsrt import ops
from graphsrt.passes.normalize import normalize
from graphsrt.passes.recognize_latent_attention import recognize_latent_attention
from graphsrt.testing import check, trace

H, N, R, V, L = 6, 5, 4, 7, 9
INPUTS: dict[str, Any] = {"q": ("T", H, N + R), "latent": ("T", L), "shared": ("T", R)}
WEIGHTS: dict[str, Any] = {"w": (H * (N + V), L)}


def block(q: Any, latent: Any, shared: Any, w: Any, *, twist: str = "", **how: Any) -> Any:
    """Latent attention as models write it, heads first; ``twist`` changes one thing about it."""
    kv = F.linear(latent, w).view(-1, H, N + V).transpose(0, 1)
    own, value = kv[..., :N], kv[..., N:]
    if twist == "own part is computed":
        own = own * 2.0
    if twist == "values lie first":
        value, own = kv[..., :V], kv[..., V:]
    parts = [own, shared[None].expand(H, -1, -1)]
    if twist == "shared part lies first":
        parts.reverse()
    key = torch.cat(parts, -1)
    return ops.attention(q, key.transpose(0, 1), value.transpose(0, 1), layer_id=3, scale=0.3, **how)


def traced(**how: Any) -> Any:
    spelled: Any = lambda q, latent, shared, w: block(q, latent, shared, w, **how)  # noqa: E731
    return trace(spelled, inputs=INPUTS, weights=WEIGHTS, passes=[normalize])


def test_text() -> None:
    done = check(recognize_latent_attention, traced(sliding_window=3, softcap=2.0), fires=1, tolerance=1e-12)
    assert "aten.linear(latent, w)" in done.before and "graphsrt.attention(q," in done.before
    assert done.after.splitlines() == [
        "q_nope: f64[T, 6, 5] = aten.slice.Tensor(q, 2, 0, 5)",
        "q_rope: f64[T, 6, 4] = aten.slice.Tensor(q, 2, 5, 9)",
        "attention: f64[T, 6, 7] = graphsrt.latent_attention(q_nope, q_rope, latent, shared, w, layer_id=3, scale=0.3, "
        "sliding_window=3, softcap=2.0)",
        "return attention",
    ]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"twist": "own part is computed"}, "not both from one linear"),
        ({"twist": "values lie first"}, "same structure but other numbers"),
        ({"twist": "shared part lies first"}, "comes before each head's own"),
        ({"chunk_size": 4}, "attention has chunk_size, which latent attention does not carry"),
    ],
)
def test_near_misses(how: dict[str, Any], words: str) -> None:
    check(recognize_latent_attention, traced(**how), fires=0, near_miss=words)


def test_nothing_is_saved() -> None:
    """A latent as wide as what is expanded from it is no reason to remember it instead."""

    def wide(q: Any, latent: Any, shared: Any, w: Any) -> Any:
        kv = F.linear(latent, w).view(-1, 1, N + V)
        key = torch.cat([kv[..., :N].expand(-1, 2, -1), shared[:, None].expand(-1, 2, -1)], -1)
        return ops.attention(q, key, kv[..., N:].expand(-1, 2, -1), layer_id=0, scale=0.3)

    program = trace(wide, inputs={**INPUTS, "q": ("T", 2, N + R)}, weights={"w": (N + V, L)}, passes=[normalize])
    check(recognize_latent_attention, program, fires=0)


def test_plain_attention() -> None:
    program = trace(
        lambda q, k, v: ops.attention(q, k, v, layer_id=0, scale=0.5),
        inputs={"q": ("T", 4, 6), "k": ("T", 2, 6), "v": ("T", 2, 6)},
    )
    check(recognize_latent_attention, program, fires=0)
