"""No operator but attention may let one token see another: else the sequences of a batch would leak into each other.

A step's tokens lie flattened in one dimension, several sequences one after the other. Only the attention operators
know where a sequence starts. Whatever else reads along that dimension (a convolution, a cumulative sum, a shift, a
scan, a reduction, an attention spelled out in plain operators) gives right logits for one sequence alone and wrong ones
in a batch or in chunks. So every operator of a captured graph has to be known to treat tokens one by one: its rule
below says so, or the graph is refused with the operator's name and its line in the model's code.

A dimension holds tokens if its size depends on ``T``. Beside sizes, rules look at the place: tokens of two operands
must meet in the same place, and a view must keep the distance between tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
import torch.fx as fx

from graphsrt.errors import CompileError, explain
from graphsrt.program import Program, arguments, aten, target_name, where

Rule = Callable[[fx.Node, dict[str, Any]], str | None]
"""(node, its arguments by name) -> None if tokens stay apart, else how they meet."""

RULES: dict[Any, Rule] = {}

_MEET = "brings tokens together with other tokens"


def check_tokens(program: Program) -> None:
    """Raise CompileError at the first operator that lets tokens meet, or of which that is not known."""
    for node in program.nodes:
        reason = _reason(node)
        if reason is not None:
            raise CompileError(
                explain(
                    f"{target_name(node.target)} {reason}",
                    where=f"{node.name} {where(node)}",
                    expected="operators that treat each token by itself, apart from attention through the interface",
                    hint="sequences of one batch would leak into each other; such a model cannot be served here",
                )
            )
    if token_dims(program.output) != [0]:
        raise CompileError("the result has no row for each token")


def _reason(node: fx.Node) -> str | None:
    if not any(token_dims(value) for value in node.all_input_nodes):
        return None
    target: Any = node.target
    if target is operator.getitem or getattr(target, "namespace", "") == "graphsrt":
        return None  # ours are defined token by token; attention is the one that may look at others
    rule = RULES.get(target)
    if rule is None and isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags:
        rule = _pointwise
    if rule is None:
        return "is not known to treat each token by itself"
    return rule(node, arguments(node))


# -- dimensions --------------------------------------------------------------------------------------------------------


def token_dims(value: Any) -> list[int]:
    """Dimensions of a node's value whose size depends on the number of tokens; of a tuple, of all its tensors."""
    val = value.meta.get("val") if isinstance(value, fx.Node) else value
    if isinstance(val, (tuple, list)):
        return sorted({dim for item in val for dim in token_dims(item)})
    if not isinstance(val, torch.Tensor):
        return []
    return [dim for dim, size in enumerate(val.shape) if not _is_fixed(size)]


def _is_fixed(size: Any) -> bool:
    return isinstance(size, int) or size.node.expr.is_Integer


def _rank(value: fx.Node) -> int:
    return value.meta["val"].dim()


def _from_end(value: fx.Node) -> list[int]:
    return [dim - _rank(value) for dim in token_dims(value)]


def _touches(value: Any, dims: Any) -> str | None:
    """A reason if one of ``dims`` (None for all) holds tokens."""
    if not isinstance(value, fx.Node):
        return None
    rank = _rank(value)
    chosen = range(rank) if dims is None or dims == [] else dims if isinstance(dims, (list, tuple)) else [dims]
    if {d % rank for d in chosen if rank} & set(token_dims(value)):
        return "reads along the tokens"
    return None


def _aligned(values: Iterable[Any]) -> str | None:
    """Operands that broadcast: tokens have to be in the same place, counted from the last dimension."""
    places = {tuple(_from_end(v)) for v in values if isinstance(v, fx.Node) and token_dims(v)}
    return _MEET if len(places) > 1 else None


# -- rules -------------------------------------------------------------------------------------------------------------


def _rule(*targets: Any) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, rule))
        return rule

    return register


def _operators(*names: str) -> list[Any]:
    """The overloads called ``name.overload`` that this version of torch has."""
    found = []
    for name in names:
        packet, _, overload = name.partition(".")
        if hasattr(aten, packet) and overload in getattr(aten, packet).overloads():
            found.append(getattr(getattr(aten, packet), overload))
    return found


def _pointwise(node: fx.Node, args: dict[str, Any]) -> str | None:
    return _aligned(node.all_input_nodes)


for _target in _operators(
    "masked_fill.Scalar", "masked_fill.Tensor", "where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar",
    "dropout.default", "one_hot.default", "lerp.Tensor", "clamp.Tensor", "copy.default", "isin.Tensor_Scalar",
):  # fmt: skip
    RULES[_target] = _pointwise


@_rule(
    *_operators(
        "to.dtype", "to.dtype_layout", "to.device", "to.other", "_to_copy.default", "type_as.default",
        "contiguous.default",
        "clone.default", "alias.default", "detach.default", "detach_.default", "lift_fresh_copy.default",
        "lift_fresh.default", "zeros_like.default", "ones_like.default", "empty_like.default", "full_like.default",
        "new_zeros.default", "new_ones.default", "new_empty.default", "new_full.default", "transpose.int",
        "permute.default", "unsqueeze.default", "squeeze.dim", "squeeze.default", "squeeze.dims", "t.default",
        "expand.default", "expand_as.default", "numpy_T.default", "swapaxes.default", "movedim.int",
    )
)  # fmt: skip
def _moves_nothing(node: fx.Node, args: dict[str, Any]) -> str | None:
    return None


@_rule(*_operators("view.default", "reshape.default", "_unsafe_view.default", "view_as.default", "flatten.using_ints",
                   "unflatten.int", "reshape_as.default"))  # fmt: skip
def _view(node: fx.Node, args: dict[str, Any]) -> str | None:
    """Tokens may merge with what follows them (``[T, k] -> [T·k]``), never with what comes before."""
    before, after = _spans(args["self"].meta["val"]), _spans(node.meta["val"])
    return None if before == after and before is not None else "mixes the token dimension with others"


def _spans(tensor: torch.Tensor) -> list[int] | None:
    """Elements from one token to the next, for each dimension of tokens; None where a size says too little."""
    found = []
    for dim in token_dims(tensor):
        size: Any = tensor.shape[dim]
        factor, rest = size.node.expr.as_coeff_Mul()
        if not rest.is_Symbol or not factor.is_Integer:
            return None
        found.append(int(factor) * prod(int(s) for s in tensor.shape[dim + 1 :] if _is_fixed(s)))
    return found


@_rule(
    *_operators(
        "softmax.int", "_softmax.default", "log_softmax.int", "_log_softmax.default", "sum.dim_IntList", "sum.default",
        "mean.dim", "mean.default", "amax.default", "amin.default", "max.dim", "min.dim", "argmax.default",
        "prod.dim_int", "argmin.default", "logsumexp.default", "std.dim", "std.correction", "var.dim",
        "var.correction", "std.default",
        "var_mean.correction", "cumsum.default", "cumprod.default", "logcumsumexp.default", "sort.default", "any.dim",
        "sort.stable", "argsort.default", "topk.default", "split.Tensor", "split.sizes", "split_with_sizes.default",
        "chunk.default", "unbind.int", "select.int", "flip.default", "norm.ScalarOpt_dim", "linalg_vector_norm.default",
        "tensor_split.indices", "unfold.default", "diff.default", "all.dim", "max.default", "min.default",
        "any.default",
        "narrow.default", "repeat_interleave.self_int", "var.default", "renorm.default", "glu.default", "all.default",
        "std_mean.correction",
    )
)  # fmt: skip
def _along_dims(node: fx.Node, args: dict[str, Any]) -> str | None:
    x = args.get("self")
    return _touches(x, args["dims"] if "dims" in args else args.get("dim"))


@_rule(*_operators("roll.default"))
def _roll(node: fx.Node, args: dict[str, Any]) -> str | None:
    return _touches(args["self"], args["dims"])


@_rule(*_operators("slice.Tensor"))
def _slice(node: fx.Node, args: dict[str, Any]) -> str | None:
    x, dim = args["self"], args["dim"]
    kept_all = args["start"] in (None, 0) and (args["end"] is None or args["end"] >= 2**62) and args["step"] == 1
    return None if kept_all else _touches(x, dim)


@_rule(*_operators("slice_scatter.default"))
def _slice_scatter(node: fx.Node, args: dict[str, Any]) -> str | None:
    return _slice(node, args) or _aligned([args["self"], args["src"]])


@_rule(*_operators("select_scatter.default"))
def _select_scatter(node: fx.Node, args: dict[str, Any]) -> str | None:
    x, src = args["self"], args["src"]
    dim = args["dim"] % _rank(x)
    kept = [d if d < dim else d - 1 for d in token_dims(x)]
    return _touches(x, dim) or (_MEET if token_dims(src) not in ([], kept) else None)


@_rule(*_operators("cat.default", "stack.default", "concat.default", "hstack.default"))
def _cat(node: fx.Node, args: dict[str, Any]) -> str | None:
    parts = args["tensors"]
    stacked = node.target is aten.stack.default  # along a new dimension
    return (None if stacked else _touches(parts[0], args.get("dim", -1))) or _aligned(parts)


@_rule(*_operators("layer_norm.default", "native_layer_norm.default", "rms_norm.default"))
def _norm(node: fx.Node, args: dict[str, Any]) -> str | None:
    return _touches(args["input"], list(range(-len(args["normalized_shape"]), 0)))


@_rule(*_operators("linear.default"))
def _linear(node: fx.Node, args: dict[str, Any]) -> str | None:
    if token_dims(args["weight"]) or (args["bias"] is not None and token_dims(args["bias"])):
        return "multiplies by a matrix that is made from tokens"
    return _touches(args["input"], -1)


@_rule(*_operators("matmul.default", "bmm.default", "mm.default", "mv.default", "dot.default"))
def _matmul(node: fx.Node, args: dict[str, Any]) -> str | None:
    other = next(args[name] for name in ("other", "mat2", "vec", "tensor") if name in args)
    return _product(args["self"], other)


@_rule(*_operators("addmm.default", "baddbmm.default", "addbmm.default"))
def _addmm(node: fx.Node, args: dict[str, Any]) -> str | None:
    a, b = (args["mat1"], args["mat2"]) if "mat1" in args else (args["batch1"], args["batch2"])
    return _product(a, b) or _aligned([node, args["self"]])


def _product(a: fx.Node, b: fx.Node) -> str | None:
    """A matrix product: tokens are not summed over, and rows and columns are not both tokens."""
    rows = _from_end(a)
    columns = _from_end(b)
    if -1 in rows or (-2 if _rank(b) > 1 else -1) in columns:
        return "sums over the tokens"
    batch = ({d for d in rows if d < -2}, {d for d in columns if d < -2})
    if rows and columns and (batch[0] != batch[1] or -2 in rows or -1 in columns):
        return _MEET
    return None


@_rule(*_operators("embedding.default"))
def _embedding(node: fx.Node, args: dict[str, Any]) -> str | None:
    return "looks up rows of other tokens" if token_dims(args["weight"]) else None


@_rule(*_operators("gather.default", "scatter.src", "scatter.value", "scatter_add.default", "scatter_reduce.two"))
def _index_along(node: fx.Node, args: dict[str, Any]) -> str | None:
    """One index for each element."""
    others = [args[name] for name in ("index", "src") if isinstance(args.get(name), fx.Node)]
    return _touches(args["self"], args["dim"]) or _aligned([args["self"], *others])


@_rule(*_operators("index_select.default"))
def _index_select(node: fx.Node, args: dict[str, Any]) -> str | None:
    """One list of places along a dimension."""
    both = token_dims(args["index"]) and token_dims(args["self"])
    return _touches(args["self"], args["dim"]) or (_MEET if both else None)


@_rule(*_operators("index.Tensor"))
def _index(node: fx.Node, args: dict[str, Any]) -> str | None:
    """``x[i, j, …]``: what is indexed has no tokens along the indexed dimensions, and the indices agree on theirs."""
    x, indices = args["self"], args["indices"]
    indexed = [dim for dim, index in enumerate(indices) if index is not None]
    if reason := _touches(x, indexed):
        return reason
    if token_dims(x) and any(token_dims(i) for i in indices if i is not None):
        return _MEET
    return _aligned([i for i in indices if i is not None])


@_rule(*_operators("pad.default", "constant_pad_nd.default"))
def _pad(node: fx.Node, args: dict[str, Any]) -> str | None:
    widths: Sequence[int] = args["pad"]
    padded = [-1 - i // 2 for i, width in enumerate(widths) if width != 0]
    return _touches(args["self"], padded) if padded else None


@_rule(*_operators("repeat.default", "tile.default"))
def _repeat(node: fx.Node, args: dict[str, Any]) -> str | None:
    repeats = args["repeats"] if "repeats" in args else args["dims"]
    many = [i - len(repeats) for i, count in enumerate(repeats) if count != 1]
    existing = [dim for dim in many if -dim <= _rank(args["self"])]  # others are new dimensions in front
    return _touches(args["self"], existing) if existing else None
