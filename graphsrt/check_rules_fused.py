"""Operators that fusions make: rules of :mod:`graphsrt.check_rules`."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from graphsrt import ops
from graphsrt.check_rules import SUM, WHOLE, Call, Held, Refused, describe, like_value, not_partial, rule, shard
from graphsrt.check_rules_attention import check_write
from graphsrt.check_rules_collectives import _axis
from graphsrt.check_rules_fp8 import _in_blocks
from graphsrt.check_rules_norms import _norm
from graphsrt.check_rules_views import _silu_mul
from graphsrt.placement import Shard


@rule(ops.add_layer_norm)
def _add_layer_norm(call: Call) -> tuple[Held, Held]:
    vectors = [call.args[n] for n in ("weight", "bias") if isinstance(call.args[n], fx.Node)]
    held = _norm(call, [call.args["x"], call.args["residual"]], vectors, 1)
    return held, held


@rule(ops.all_reduce_add_rms_norm, ops.all_reduce_add_layer_norm, ops.all_reduce_add_rms_norm_quant,
      ops.all_reduce_add_rms_norm_static_quant)  # fmt: skip
def _all_reduce_add_norm(call: Call) -> tuple[Held, ...]:
    """Only the first argument is summed over ranks; what it meets then must be the same on all of them."""
    held = _axis(call)
    if held != SUM:
        raise Refused("only a sum that is not complete may be summed", "P(sum)", str(held))
    for node in call.node.all_input_nodes:
        if node is not call.args["x"] and call.held[node] != WHOLE:
            raise Refused(f"{node.name} meets the sum over all ranks", "R", str(call.held[node]))
    if call.args["residual"] is call.args["x"]:
        raise Refused("the residual is a sum that is not complete", "R", str(held))
    return tuple(WHOLE for _ in call.node.meta["val"])


@rule(ops.rms_norm_quant, ops.rms_norm_static_quant, ops.add_rms_norm_quant, ops.add_rms_norm_static_quant)
def _norm_quant(call: Call) -> Any:
    """A norm sees whole rows, so its scales are those of whole rows; a scale that is given is one for all ranks."""
    tensors = [call.args[name] for name in ("x", "residual") if name in call.args]
    held = _norm(call, tensors, [call.args["weight"]], 1)
    _one_scale(call)
    return like_value(call, held)


def _one_scale(call: Call) -> None:
    if "scale" in call.args and call.of("scale") != WHOLE:
        raise Refused("the scale of a rounded result differs from rank to rank", "R", str(call.of("scale")))


@rule(ops.silu_mul_quant, ops.silu_mul_static_quant)
def _silu_mul_quant(call: Call) -> Any:
    """Of a divided width a rank may scale whole blocks, or be given the scale; not rows, of which it holds a part."""
    held, last = _silu_mul(call), call.ndim("gate_up") - 1
    _one_scale(call)
    if "scale" in call.args or not isinstance(held.placement, Shard) or held.placement.dim != last:
        return like_value(call, held)
    layout, block = held.placement.layout, call.args["block"]
    blocks = _in_blocks(layout, block) if block else None
    if blocks is None:
        raise Refused(
            "each rank would scale its own part of a row", f"whole rows, or whole blocks of {block or 'columns'}",
            str(held),
        )  # fmt: skip
    return held, shard(last, blocks)


@rule(ops.qk_norm_rope)
def _qk_norm_rope(call: Call) -> tuple[Held, Held]:
    for name in ("q_weight", "k_weight", "positions", "table"):
        if call.of(name) != WHOLE:
            raise Refused(f"the {name} of normed and rotated heads differs from rank to rank", "R", str(call.of(name)))
    for name in ("q", "k"):
        place = not_partial(call, name)
        if isinstance(place, Shard) and place.dim != 1:
            raise Refused(
                "a norm of heads and a rope need whole heads and all tokens", "S(1), by heads", describe(place)
            )
    return call.of("q"), call.of("k")


@rule(ops.rope_kv_write)
def _rope_kv_write(call: Call) -> Held:
    check_write(call, "q")
    return call.of("q")
