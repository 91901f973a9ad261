"""A small hand-made block: attention and a gated MLP on a residual, with sizes and biases of our choosing."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from graphsrt import ops
from graphsrt.program import Program
from graphsrt.testing import trace


def mlp(*, width: int = 6, inner: int = 8, bias: bool = True, tp: int = 4) -> Program:
    """``x → down(relu(up(x)))``, weights ``up [inner, width]``, ``down [width, inner]`` and a bias of each."""
    shapes: dict[str, tuple[int, ...]] = {"up": (inner, width), "down": (width, inner)}
    if bias:
        shapes |= {"up_bias": (inner,), "down_bias": (width,)}

        def block(x: Any, up: Any, down: Any, up_bias: Any, down_bias: Any) -> Any:
            return F.linear(F.relu(F.linear(x, up, up_bias)), down, down_bias)

        return trace(block, inputs={"x": ("T", width)}, weights=shapes, tp=tp)

    def plain(x: Any, up: Any, down: Any) -> Any:
        return F.linear(F.relu(F.linear(x, up)), down)

    return trace(plain, inputs={"x": ("T", width)}, weights=shapes, tp=tp)


def attention(*, heads: int, kv_heads: int, size: int = 2, width: int = 6, tp: int) -> Program:
    """``x → o(attention(q(x), k(x), v(x)))``."""

    def block(x: Any, q: Any, k: Any, v: Any, o: Any) -> Any:
        parts = [F.linear(x, w).view(-1, n, size) for w, n in ((q, heads), (k, kv_heads), (v, kv_heads))]
        return F.linear(ops.attention(*parts, layer_id=0, scale=0.5).view(-1, heads * size), o)

    weights = {"q": (heads * size, width), "k": (kv_heads * size, width), "v": (kv_heads * size, width)}
    return trace(block, inputs={"x": ("T", width)}, weights={**weights, "o": (width, heads * size)}, tp=tp)


class Given:
    """A checkpoint of tensors that the test chooses."""

    def __init__(self, **tensors: torch.Tensor):
        self.tensors = {name: tensor.double() for name, tensor in tensors.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's whole shape."""
        return tuple(self.tensors[name].shape)

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> torch.Tensor:
        """The tensor, or the given part of it."""
        return self.tensors[name] if slices is None else self.tensors[name][slices]
