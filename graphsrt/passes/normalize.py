"""normalize: one spelling for everything that a model's code can say in several.

    embedding [1, T, E] … transpose(view(q, [1, T, H, D]), 1, 2) … to(x, bf16) of a bf16 x
    → embedding [T, E] … view(q, [-1, H, D]) …

The batch of one that transformers wants is dropped, so values are ``[T, E]``. Casts to the dtype that a value already
has, aliases, copies, dropout outside training, whole slices, factors of one and pairs of transposes go. ``chunk`` and
``split`` become slices, ``reshape`` and ``flatten`` become ``view`` where that copies nothing, ``repeat`` becomes
``cat``, dimensions count from the front.

Needs: a captured program.  Leaves: no value with a leading batch dimension, unless an operator is not known here (its
arguments then get the dimension back and the result is still right).
Numerics: exact.  Source: ours.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx

from graphsrt import ops
from graphsrt.program import Program, Weight, aten, map_arguments, target_name
from graphsrt.recipes import Transpose

Value = tuple[Any, int | None]
"""A new node (or list of them), and where its dropped batch dimension was; None if it never had one."""

_SAME = {aten.alias.default, aten.contiguous.default, aten.clone.default, aten.detach.default, aten.dropout.default,
         aten.lift_fresh_copy.default, aten.detach_.default}  # fmt: skip
_CASTS = {
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten._to_copy.default,
    aten.type_as.default,
    aten.to.other,
}
_VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_BY_DIM = {  # operator -> names of the arguments that are dimensions
    aten.slice.Tensor: ("dim",), aten.cat.default: ("dim",), aten.mean.dim: ("dim",), aten.sum.dim_IntList: ("dim",),
    aten.softmax.int: ("dim",), aten._softmax.default: ("dim",), aten.amax.default: ("dim",),
    aten.cumsum.default: ("dim",),
    aten.index_select.default: ("dim",), aten.split.Tensor: ("dim",), aten.split.sizes: ("dim",),
    aten.split_with_sizes.default: ("dim",), aten.chunk.default: ("dim",),
}  # fmt: skip


def normalize(program: Program) -> int:
    """Rewrite the whole program; the count is the number of operators that went."""
    before = len(program.nodes)
    changed = _Rewriter(program).run()
    removed = before - len(program.nodes)
    return max(removed, int(changed))


class _Rewriter:
    """Emits the program anew into an empty graph, simplifying as it goes."""

    def __init__(self, program: Program):
        self.old = program.graph
        self.program = program
        self.values: dict[fx.Node, Value] = {}
        self.node: fx.Node  # the node being rewritten
        self.changed = False
        self._dtypes: dict[str, torch.dtype] = {}

    def run(self) -> bool:
        names = [node.name for node in self.old.nodes if node.op == "call_function"]
        values = {node.name: node.meta.get("val") for node in self.old.nodes}
        self._dtypes = {name: value.dtype for name, value in values.items() if isinstance(value, torch.Tensor)}
        program, old_outputs = self.program, self.program.outputs
        program.graph = fx.Graph()
        program.forget_names()
        program._taken.update(names)  # a value keeps its name, so no other may take it
        for node in self.old.nodes:
            self.node = node
            if node.op == "placeholder":
                self.values[node] = program.add_input(node.name, program.inputs[node.name]), None
            elif node.op == "get_attr":
                self.values[node] = program.weight_node(str(node.target)), None
            elif node.op == "output":
                outputs = {name: self.values[value] for name, value in old_outputs.items()}
                program.set_outputs({name: self._with_batch(*value) for name, value in outputs.items()})
            else:
                self.values[node] = self._rewrite(node)
        program.remove_dead()
        return names != [node.name for node in program.nodes]

    # -- one node ------------------------------------------------------------------------------------------------

    def _rewrite(self, node: fx.Node) -> Value:
        target: Any = node.target
        self.program._taken.discard(node.name)
        if target is operator.getitem:
            items, batch = self.values[node.all_input_nodes[0]]
            index: Any = node.args[1]
            return (items[index] if isinstance(items, list) else self._emit(target, items, index)), batch
        arguments = self._arguments(node)
        x: Any
        first = arguments.get("self", arguments.get("input"))
        x, batch = first if isinstance(first, tuple) else (None, None)  # a number in torch.where, say
        if target in _SAME:
            if target is aten.dropout.default and arguments["train"] and arguments["p"]:
                return self._unknown(node)
            return x, batch
        if target in _CASTS:
            return self._cast(x, node.meta["val"].dtype), batch
        if target is aten.unsqueeze.default:
            return self._unsqueeze(x, batch, arguments["dim"])
        if target is aten.squeeze.dim:
            return self._squeeze(x, batch, arguments["dim"])
        if target is aten.select.int:
            dim = self._dim(x, batch, arguments["dim"])
            if dim == batch:
                return x, None
            kept = None if batch is None else batch - (dim < batch)
            return self._emit(target, x, self._without(dim, batch), arguments["index"]), kept
        if target in (aten.transpose.int, aten.permute.default):
            return self._permute(x, batch, self._permutation(target, x, batch, arguments))
        if target in _VIEWS:
            return self._view(x, batch, list(arguments.get("shape") or arguments["size"]))
        if target in (aten.flatten.using_ints, aten.unflatten.int):
            return self._view(x, batch, self._sizes(node))
        if target is aten.expand.default:
            return self._expand(x, batch, list(arguments["size"]))
        if target in _BY_DIM:
            return self._by_dim(target, arguments)
        if target is aten.stack.default:
            return self._stack(arguments)
        if target is aten.linear.default:
            rank = self._rank(x, batch)
            if batch is None or batch < rank - 1:
                bias = arguments["bias"]
                rest = [] if bias is None else [bias[0]]
                return self._emit(target, x, arguments["weight"][0], *rest), batch
        if target in (aten.addmm.default, aten.mm.default) and self._is_affine(arguments):
            return self._affine(arguments)
        if target is aten.layer_norm.default and (batch is None or batch < self._rank(x, batch) - 1):
            vectors = [arguments[name] and arguments[name][0] for name in ("weight", "bias")]
            if len(arguments["normalized_shape"]) == 1:
                return self._emit(target, x, arguments["normalized_shape"], *vectors, arguments["eps"]), batch
        if target is aten.rms_norm.default and arguments["weight"] is None:
            size = arguments["normalized_shape"]
            if len(size) == 1 and (batch is None or batch < self._rank(x, batch) - 1):
                return self._emit(target, x, size, None, arguments["eps"]), batch
        if target is aten.repeat.default:
            repeated = self._repeat(x, batch, list(arguments["repeats"]))
            if repeated is not None:
                return repeated
        if target is aten.embedding.default:
            return self._emit(target, arguments["weight"][0], arguments["indices"][0]), arguments["indices"][1]
        if target in (aten.matmul.default, aten.bmm.default):
            y, other_batch = arguments["other" if "other" in arguments else "mat2"]
            if batch == 0 == other_batch and self._rank(x, 0) == self._rank(y, 0) >= 3:
                return self._emit(aten.matmul.default, x, y), 0
        if isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags:
            return self._pointwise(node)
        return self._unknown(node)

    def _arguments(self, node: fx.Node) -> dict[str, Any]:
        """Arguments by name; tensors as :data:`Value`, lists of tensors as lists of them."""
        from graphsrt.program import arguments

        return {
            k: fx.node.map_arg(v, lambda a: self.values[a]) if v is not None else None
            for k, v in arguments(node).items()
        }

    def _pointwise(self, node: fx.Node) -> Value:
        operands = [self.values[a] for a in node.all_input_nodes]
        rank = node.meta["val"].dim()
        from_end = {self._rank(x, b) - b for x, b in operands if b is not None}
        if len(from_end) > 1:
            return self._unknown(node)
        batch = rank - from_end.pop() if from_end else None
        if node.target is aten.mul.Tensor and len(operands) == 1 and node.args[1] == 1.0 and self._keeps_dtype(node):
            return operands[0]

        def align(argument: fx.Node) -> Any:
            value, own = self.values[argument]
            if batch is not None and own is None and value.meta["val"].dim() >= rank - batch:
                assert value.meta["val"].shape[value.meta["val"].dim() - (rank - batch)] == 1, value.name
                return self._emit(aten.squeeze.dim, value, value.meta["val"].dim() - (rank - batch))
            return value

        args, kwargs = map_arguments(node, align)
        return self._emit(node.target, *args, **kwargs), batch

    def _is_affine(self, arguments: dict[str, Any]) -> bool:
        """Whether ``addmm`` or ``mm`` multiplies by a weight ``[in, out]`` and adds a weight ``[out]`` or nothing."""
        weight = self.program.weight_of(arguments["mat2"][0])
        if "mat1" not in arguments:
            return weight is not None
        bias = self.program.weight_of(arguments["self"][0])
        return (
            weight is not None
            and bias is not None
            and len(bias.shape) == 1
            and arguments["beta"] == 1 == arguments["alpha"]
        )

    def _affine(self, arguments: dict[str, Any]) -> Value:
        """The same as ``linear``, whose weight is ``[out, in]``: GPT-2 keeps its weights the other way round."""
        x, batch = arguments["mat1" if "mat1" in arguments else "self"]
        name = str(arguments["mat2"][0].target)
        whole = self.program.weights[name]
        path, _, last = name.rpartition(".")
        turned = f"{path}.transposed_{last}" if path else f"transposed_{last}"
        if turned not in self.program.weights:
            recipe = Transpose(whole.recipe, 0, 1)
            self.program.add_weight(turned, Weight((whole.shape[1], whole.shape[0]), whole.dtype, recipe))
        bias = [arguments["self"][0]] if "mat1" in arguments else []
        return self._emit(aten.linear.default, x, self.program.weight_node(turned), *bias), batch

    def _keeps_dtype(self, node: fx.Node) -> bool:
        return node.meta["val"].dtype == node.all_input_nodes[0].meta["val"].dtype

    def _unknown(self, node: fx.Node) -> Value:
        """Any other operator: its arguments get their batch dimension back."""
        args, kwargs = map_arguments(node, lambda a: self._with_batch(*self.values[a]))
        return self._emit(node.target, *args, **kwargs), None

    def _with_batch(self, value: Any, batch: int | None) -> Any:
        if batch is None:
            return value
        if isinstance(value, list):
            return [self._with_batch(item, batch) for item in value]
        return self._emit(aten.unsqueeze.default, value, batch)

    # -- dimensions ----------------------------------------------------------------------------------------------

    def _rank(self, x: fx.Node, batch: int | None) -> int:
        """Number of dimensions that the original value had."""
        return x.meta["val"].dim() + (batch is not None)

    def _dim(self, x: fx.Node, batch: int | None, dim: int, extra: int = 0) -> int:
        return dim % (self._rank(x, batch) + extra)

    @staticmethod
    def _without(dim: int, batch: int | None) -> int:
        """A dimension of the original value, counted without the batch."""
        return dim if batch is None or dim < batch else dim - 1

    def _unsqueeze(self, x: fx.Node, batch: int | None, dim: int) -> Value:
        dim = self._dim(x, batch, dim, extra=1)
        if batch is None and dim == 0 and (x.op == "placeholder" or x.target is ops.attention):
            return x, 0  # this is where the batch of one comes from, and comes back
        kept = None if batch is None else batch + (dim <= batch)
        return self._emit(aten.unsqueeze.default, x, self._without(dim, kept)), kept

    def _squeeze(self, x: fx.Node, batch: int | None, dim: int) -> Value:
        dim = self._dim(x, batch, dim)
        if dim == batch:
            return x, None
        kept = None if batch is None else batch - (dim < batch)
        if x.meta["val"].shape[self._without(dim, batch)] != 1:
            return x, batch
        return self._emit(aten.squeeze.dim, x, self._without(dim, batch)), kept

    def _permutation(self, target: Any, x: fx.Node, batch: int | None, arguments: dict[str, Any]) -> list[int]:
        rank = self._rank(x, batch)
        if target is aten.permute.default:
            return [d % rank for d in arguments["dims"]]
        order = list(range(rank))
        a, b = arguments["dim0"] % rank, arguments["dim1"] % rank
        order[a], order[b] = order[b], order[a]
        return order

    def _permute(self, x: fx.Node, batch: int | None, order: list[int]) -> Value:
        kept = None if batch is None else order.index(batch)
        rest = [self._without(d, batch) for d in order if d != batch]
        moved = [i for i, d in enumerate(rest) if i != d]
        if not moved:
            return x, kept
        if len(moved) == 2:
            stored = self._stored_transposed(x, moved)
            return (self._emit(aten.transpose.int, x, *moved) if stored is None else stored), kept
        return self._emit(aten.permute.default, x, rest), kept

    def _stored_transposed(self, x: fx.Node, dims: list[int]) -> fx.Node | None:
        """A weight that is only ever used with two dimensions swapped is loaded so; None for anything else."""
        weight = self.program.weight_of(x)
        if weight is None:
            return None
        (old,) = self.node.all_input_nodes
        if any(user.target is not self.node.target or user.args[1:] != self.node.args[1:] for user in old.users):
            return None
        name = f"{x.target}.transposed"
        if name not in self.program.weights:
            shape = list(weight.shape)
            a, b = dims
            shape[a], shape[b] = shape[b], shape[a]
            self.program.add_weight(name, Weight(tuple(shape), weight.dtype, Transpose(weight.recipe, a, b)))
        return self.program.weight_node(name)

    def _view(self, x: fx.Node, batch: int | None, shape: list[int]) -> Value:
        if batch not in (None, 0):
            x, batch = self._with_batch(x, batch), None
        if shape[0] == 1 and (batch == 0 or self._is_token_first(x, shape)):
            return self._emit(aten.view.default, x, shape[1:]), 0
        return self._emit(aten.view.default, x, shape), None

    def _sizes(self, node: fx.Node) -> list[int]:
        """The sizes of a value as a view writes them: -1 for the one that depends on the tokens."""
        return [size if isinstance(size, int) else -1 for size in self.program.shape(node)]

    def _is_token_first(self, x: fx.Node, shape: list[int]) -> bool:
        """``[T, …] -> [1, T, …]``: the batch of one comes back."""
        return len(shape) > 1 and shape[1] == -1 and self.program.shape(x)[:1] == ("T",)

    def _expand(self, x: fx.Node, batch: int | None, size: list[int]) -> Value:
        if batch is None:
            return self._emit(aten.expand.default, x, size), None
        batch_out = len(size) - (self._rank(x, batch) - batch)
        if size[batch_out] not in (1, -1):
            return self._emit(aten.expand.default, self._with_batch(x, batch), size), None
        rest = size[:batch_out] + size[batch_out + 1 :]
        return self._emit(aten.expand.default, x, rest), batch_out

    def _repeat(self, x: fx.Node, batch: int | None, repeats: list[int]) -> Value | None:
        """A value put beside itself along one dimension is a ``cat``; None for other repetitions."""
        many = [d for d, times in enumerate(repeats) if times != 1]
        if len(repeats) != self._rank(x, batch) or len(many) != 1 or many[0] == batch:
            return None
        (dim,) = many
        return self._emit(aten.cat.default, [x] * repeats[dim], self._without(dim, batch)), batch

    def _by_dim(self, target: Any, arguments: dict[str, Any]) -> Value:
        first = next(iter(arguments))
        parts = arguments[first] if isinstance(arguments[first], list) else [arguments[first]]
        batches = {b for _, b in parts}
        if len(batches) > 1 or any(not isinstance(x, fx.Node) for x, _ in parts):
            return self._unknown(self.node)
        (batch,) = batches
        rank = self._rank(*parts[0])
        dims = arguments["dim"] if isinstance(arguments["dim"], list) else [arguments["dim"]]
        dims = [d % rank for d in dims]
        if batch in dims and target is aten.slice.Tensor:
            return parts[0]  # a batch of one has nothing to cut
        if batch in dims:
            return self._unknown(self.node)
        local = [self._without(d, batch) for d in dims]
        keeps_rank = target not in (aten.mean.dim, aten.sum.dim_IntList, aten.amax.default) or arguments["keepdim"]
        kept = batch if batch is None or keeps_rank else batch - sum(d < batch for d in dims)
        new_dim = local if isinstance(arguments["dim"], list) else local[0]
        values: Any = [x for x, _ in parts] if isinstance(arguments[first], list) else parts[0][0]
        return self._with_dim(target, values, new_dim, arguments), kept

    def _stack(self, arguments: dict[str, Any]) -> Value:
        parts = arguments["tensors"]
        batches = {batch for _, batch in parts}
        if len(batches) > 1:
            return self._unknown(self.node)
        (batch,) = batches
        dim = self._dim(parts[0][0], batch, arguments["dim"], extra=1)
        kept = None if batch is None else batch + (dim <= batch)
        return self._emit(aten.stack.default, [x for x, _ in parts], self._without(dim, kept)), kept

    def _with_dim(self, target: Any, x: Any, dim: Any, arguments: dict[str, Any]) -> Any:
        if target is aten.slice.Tensor:
            return self._slice(x, dim, arguments["start"] or 0, arguments["end"], arguments["step"])
        if target is aten.cat.default:
            real = [part for part in x if part.meta["val"].shape[dim] != 0]
            return real[0] if len(real) == 1 else self._emit(target, real, dim)
        if target in (aten.chunk.default, aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default):
            items, start = [], 0
            for part in self.node.meta["val"]:
                length = part.shape[dim if self.values[self.node.all_input_nodes[0]][1] is None else self._back(dim)]
                items.append(self._slice(x, dim, start, start + int(length), 1))
                start += int(length)
            return items
        rest = {k: v for k, v in arguments.items() if k not in ("self", "input", "dim") and v is not None}
        if target is aten.index_select.default:
            return self._emit(target, x, dim, rest["index"][0])
        if target in (aten.mean.dim, aten.sum.dim_IntList, aten.amax.default):
            extra = {"dtype": rest["dtype"]} if "dtype" in rest else {}
            return self._emit(target, x, dim, rest["keepdim"], **extra)
        return self._emit(target, x, dim, *rest.values())

    def _back(self, dim: int) -> int:
        batch = self.values[self.node.all_input_nodes[0]][1]
        return dim if batch is None or dim < batch else dim + 1

    def _slice(self, x: fx.Node, dim: int, start: int, end: int | None, step: int) -> fx.Node:
        size = x.meta["val"].shape[dim]
        if start == 0 and step == 1 and (end is None or end >= 2**62):
            return x
        if isinstance(size, int):
            start = start + size if start < 0 else min(start, size)
            end = size if end is None else end + size if end < 0 else min(end, size)
            if start == 0 and end == size and step == 1:
                return x
        return self._emit(aten.slice.Tensor, x, dim, start, end, *([step] if step != 1 else []))

    def _cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return x if x.meta["val"].dtype == dtype else self._emit(aten.to.dtype, x, dtype)

    # -- emitting ------------------------------------------------------------------------------------------------

    def _emit(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Add a call, unless a simpler value is the same."""
        x = args[0] if args and isinstance(args[0], fx.Node) else None
        if target is aten.view.default and x is not None:
            shape = [s if isinstance(s, int) else -1 for s in self.program.shape(x)]
            if shape == list(args[1]):
                return x
            if x.target in (aten.view.default, aten.reshape.default):
                return self._emit(target, x.args[0], *args[1:])
            if not _is_viewable(x.meta["val"], args[1]):
                target = aten.reshape.default  # the copy that made it contiguous went with `contiguous` or `clone`
        if target is aten.transpose.int and x is not None and x.target is target and set(x.args[1:]) == set(args[1:]):
            return x.args[0]
        if target is aten.expand.default and x is not None and self._expands_nothing(x, args[1]):
            return x
        if target is aten.select.int and x is not None and x.target is aten.unsqueeze.default and x.args[1] == args[1]:
            return x.args[0]
        label = self.node.name
        if target is not self.node.target:
            role = target_name(target).split(".")[1] if "." in target_name(target) else "value"
            label = ".".join(part for part in (self.node.meta.get("module"), role) if part)
        new = self.program.call(target, *args, name=label, like=self.node, **kwargs)
        self.program.infer([new])
        dtype = getattr(new.meta["val"], "dtype", None)
        while self._dtypes.get(new.name, dtype) != dtype:
            self.program.rename(new, f"{new.name}_0")  # the name of a value of another dtype stays with that
        return new

    def _expands_nothing(self, x: fx.Node, size: list[int]) -> bool:
        shape = self.program.shape(x)
        return len(shape) == len(size) and all(s in (-1, d) for s, d in zip(size, shape))


def _is_viewable(value: torch.Tensor, shape: list[int]) -> bool:
    try:
        value.view(shape)
    except (RuntimeError, ValueError):  # fake tensors raise the one or the other
        return False
    return True
