"""Values whose tokens are divided over the ranks: rules of :mod:`graphsrt.check_rules`.

Nothing passes but what computes each token from that token alone, so that padding rows stay where they are, and a rank
needs no token of another. Everything else is refused, whatever its own rule would say.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from graphsrt import ops
from graphsrt.check_rules import WHOLE, Call, Held, Refused, like_value, rule
from graphsrt.placement import TOKENS, ShardTokens
from graphsrt.program import aten

PER_TOKEN: dict[Any, str | None] = {
    aten.to.dtype: None, aten._to_copy.default: None, aten.clone.default: None, aten.contiguous.default: None,
    ops.rms_norm: None, ops.add_rms_norm: None, ops.add_layer_norm: None, ops.l2_norm: None,
    ops.glu: None, ops.silu_mul: None, ops.fp8_scale: None, ops.quantize_fp8: None,
    ops.rms_norm_quant: None, ops.rms_norm_static_quant: None, ops.add_rms_norm_quant: None,
    ops.add_rms_norm_static_quant: None, ops.silu_mul_quant: None, ops.silu_mul_static_quant: None,
    aten.slice.Tensor: "dim", aten.select.int: "dim", aten.softmax.int: "dim", aten.topk.default: "dim",
    aten.mean.dim: "dim", aten.sum.dim_IntList: "dim", aten.amax.default: "dim",
}  # fmt: skip
"""Operators besides the pointwise and the rowwise ones, and the argument with the dims along which they work."""


@rule(ShardTokens)
def _scattered(call: Call) -> Any:
    target: Any = call.node.target
    tags = target.tags if isinstance(target, torch._ops.OpOverload) else ()
    if target is aten.layer_norm.default:
        _along(call, [-1 - i for i in range(len(call.args["normalized_shape"]))], "input")
    elif target in PER_TOKEN:
        dims = PER_TOKEN[target]
        if dims is not None:
            _along(call, call.args[dims], "self")
    elif torch.Tag.pointwise not in tags and target not in ops.ROWWISE:
        raise Refused(
            "the tokens are divided, and this operator is not known to treat each alone",
            "R (after all_gather)",
            "S(0) by tokens",
        )
    value = call.node.meta["val"]
    results = value if isinstance(value, (tuple, list)) else [value]
    for argument in call.node.all_input_nodes:
        _check_argument(call, argument, max(result.dim() for result in results))
    return like_value(call, Held(ShardTokens(call.ranks)))


def _along(call: Call, dims: Any, name: str) -> None:
    """Refused where an operator works along the tokens."""
    ndim = call.ndim(name)
    chosen = range(ndim) if dims in (None, []) else [dims] if isinstance(dims, int) else dims
    if any(dim % ndim == 0 for dim in chosen):
        raise Refused("this operator works along the tokens, which are divided", "another dim", str(list(chosen)))


def _check_argument(call: Call, argument: fx.Node, ndim: int) -> None:
    held, shape = call.held[argument], call.shape(argument)
    if held == Held(ShardTokens(call.ranks)):
        if len(shape) != ndim:
            raise Refused(f"the rows of {argument.name} are not those of the result", f"{ndim} dims", str(len(shape)))
    elif held != WHOLE:
        raise Refused(f"{argument.name} meets divided tokens", "S(0) by tokens, or R without tokens", str(held))
    elif len(shape) >= ndim and shape[0] != 1:
        raise Refused(
            f"{argument.name} has all tokens where others have one rank's", "S(0) by tokens (after take_own)", "R"
        )


def token_blocks(call: Call) -> Held | None:
    """What a collective along the tokens gives; None if it runs along anything else."""
    return Held(ShardTokens(call.ranks)) if call.dim("x") == 0 and call.shape(call.args["x"])[0] == TOKENS else None


def gathered_tokens(call: Call) -> Held | None:
    """All tokens, of as many rows as there are; None if the value's tokens are not divided."""
    held, rows_of = call.of("x"), call.args["rows_of"]
    if held != Held(ShardTokens(call.ranks)):
        return None
    if call.dim("x") != 0 or not isinstance(rows_of, fx.Node):
        raise Refused("divided tokens are gathered with the number of all", "dim=0 and rows_of", str(call.args["dim"]))
    if call.of("rows_of") != WHOLE or call.shape(rows_of)[:1] != (TOKENS,):
        raise Refused("rows_of does not have the rows of all tokens", f"[{TOKENS}, …] R", str(call.of("rows_of")))
    return WHOLE
