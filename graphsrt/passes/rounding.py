"""What fusions with a quantisation share: how a value is rounded to FP8, and whether whoever makes it can do it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch.fx as fx

from graphsrt import ops
from graphsrt.program import Program, arguments, target_name


@dataclass(frozen=True)
class Rounding:
    """How ``value`` becomes the numbers ``quantized``.

    "static": by one scale that is given, ``arguments["scale"]``. "dynamic": by scales of the value itself, made by the
    operator ``scale`` with ``arguments["block"]`` and ``arguments["largest"]``.
    """

    kind: Literal["static", "dynamic"]
    value: fx.Node
    quantized: fx.Node
    scale: fx.Node | None
    arguments: dict[str, Any]

    @property
    def absorbed(self) -> dict[str, fx.Node]:
        """The values of the program that become results of the fused operator, by role."""
        return {"quantized": self.quantized} | ({} if self.scale is None else {"scale": self.scale})


def rounding_of(program: Program, quantized: fx.Node) -> Rounding | str:
    """How a ``quantize_fp8`` rounds, if whoever makes its input can do that as well; else the reason why not."""
    args = arguments(quantized)
    value, scale, block = args["x"], args["scale"], args["block"]
    if args["columns"] is not None:
        return "a rank holds parts of blocks, whose scales are known when all ranks have made theirs"
    if scale.target is ops.all_reduce:
        return "its scale is the maximum over ranks, which is known when all of them have made theirs"
    mine = {quantized, scale}
    others = [user.name for user in value.users if user not in mine]
    if others:
        return f"{' and '.join(others)} read{'s' * (len(others) == 1)} {value.name} unrounded"
    if program.weight_of(scale) is not None:
        if math.prod(int(size) for size in program.shape(scale)) != 1:
            return f"its scale {scale.name} is not one number but {list(program.shape(scale))}"
        return Rounding("static", value, quantized, None, {"scale": scale})
    if scale.target is not ops.fp8_scale or arguments(scale)["x"] is not value:
        made = scale.name if scale.op != "call_function" else target_name(scale.target)
        return f"its scale is no scale of its own values, but made by {made}"
    own = arguments(scale)
    if program.shape(scale)[-1] != 1 and own["block"] != block:
        return f"scales are of blocks of {own['block']}, numbers are rounded in blocks of {block}"
    return Rounding("dynamic", value, quantized, scale, {"block": own["block"], "largest": own["largest"]})
