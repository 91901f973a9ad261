"""The program that everything here rewrites: one FX graph with its inputs, weights, mesh, placements and history.

The graph holds ``placeholder`` nodes for the inputs, ``get_attr`` nodes for the weights and ``call_function`` nodes for
operators. A node's name is its name in the text (module path and role, dots included). Node meta:

``val``        fake tensor (or tuple of them) with this rank's local shape, dtype; ``T``, ``B`` and ``R`` are symbolic
``placement``  :class:`~graphsrt.placement.Placement` on the ``tp`` axis (tuple for a tuple value); absent before
               sharding
``module``     path of the module that computed the value in the original model ("" outside of any)
``source``     "file:line" in the model's code
``made_by``    names of the passes that created or replaced the node, oldest first
``rule``       "file:line" of the pass, or of the spelling of a rewrite, that made the node last
``from_nodes`` where the last pass made or renamed the node: names of the values it came from, as they were before it

The text leaves the last two out: ``made_by`` names the pass. A pass says where a node comes from with ``like=`` of
:meth:`Program.call`, or all of it in ``meta["origin"]`` (nodes); the runner makes names of that.
"""

from __future__ import annotations

import copy
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.fx as fx

from graphsrt import ops
from graphsrt.errors import CompileError, explain
from graphsrt.placement import Placement
from graphsrt.recipes import Recipe, is_quantized, localize

aten = torch.ops.aten
Target = Callable[..., Any]
LOGITS = "logits"
"""The name of a program's first result."""
PREFILL_MIN_TOKENS = "prefill_min_tokens"
"""The constant of a prefill program that says from how many tokens on a step is its."""


@dataclass(frozen=True)
class Input:
    """A value that changes with every step. ``shape`` mixes ints and the symbols ``"T"``, ``"B"``, ``"R"``."""

    shape: tuple[int | str, ...]
    dtype: torch.dtype
    role: str
    """``tokens``, ``positions``, ``forward_batch.<field>`` or ``kv_pool``, of which a program may have several."""


@dataclass
class Weight:
    """A value fixed at load time. ``shape`` is one rank's; ``placement`` relates it to the global value."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    recipe: Recipe
    placement: Placement | None = None


@dataclass(frozen=True)
class NearMiss:
    """A place where a pass almost fired: the node, and the reason in words."""

    node: str
    module: str
    reason: str


@dataclass(frozen=True)
class Site:
    """A place where a pass fired: the value that it made, and the names before it of the values it came from."""

    node: str
    module: str
    source: str
    rule: str
    from_nodes: tuple[str, ...] = ()


@dataclass
class PassReport:
    """What a pass did. ``expected`` is None where the pass has no expectation. The text leaves ``sites`` out."""

    name: str
    fired: int = 0
    expected: int | None = None
    nodes_before: int = 0
    nodes_after: int = 0
    milliseconds: float = 0.0
    near_misses: list[NearMiss] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list, compare=False, repr=False)

    def copy(self) -> PassReport:
        """A copy with lists of its own; what is in them never changes."""
        return replace(self, near_misses=list(self.near_misses), notes=list(self.notes), sites=list(self.sites))


class Shapes:
    """Shape inference: one fake-tensor mode in which the symbols ``T``, ``B``, ``R`` are the same everywhere."""

    def __init__(self) -> None:
        self._tensors: dict[tuple, torch.Tensor] = {}
        self._results: dict[tuple, Any] = {}
        self._interned: dict[tuple, torch.Tensor] = {}
        self._dims: dict[str, Any] = {}
        self._names: dict[Any, str] = {}

    @cached_property
    def env(self) -> Any:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv  # seconds: it brings sympy and Dynamo along

        return ShapeEnv()

    @cached_property
    def mode(self) -> Any:
        from torch._subclasses.fake_tensor import FakeTensorMode

        return FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=False)

    def dim(self, size: int | str) -> Any:
        """An int as it is, or the symbolic integer of that name (at least 2 while tracing; 1 is checked by tests)."""
        if isinstance(size, int):
            return size
        if size not in self._dims and "/" in size:  # one rank's tokens of T: T/8 is ceil(T / 8)
            whole, ranks = size.split("/")
            self._dims[size] = (self.dim(whole) + int(ranks) - 1) // int(ranks)
            self._names[self._dims[size].node.expr] = size
        if size not in self._dims:
            from torch._dynamo.source import ConstantSource
            from torch.fx.experimental.symbolic_shapes import DimDynamic

            hint = 1009 + 2 * len(self._dims)  # distinct, larger than any model dimension in small tests
            symbol = self.env.create_symbol(hint, ConstantSource(size), dynamic_dim=DimDynamic.DYNAMIC)
            self._dims[size] = self.env.create_symintnode(symbol, hint=hint, source=ConstantSource(size))
            self._names[symbol] = size
        return self._dims[size]

    def tensor(self, shape: Iterable[int | str], dtype: torch.dtype) -> torch.Tensor:
        key = (tuple(shape), dtype)
        if key not in self._tensors:
            with self.mode:
                self._tensors[key] = torch.empty([self.dim(size) for size in key[0]], dtype=dtype)
        return self._tensors[key]

    def result(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operator on fake tensors. Equal calls give the same object, so equal layers are inferred once."""

        def freeze(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return tuple(freeze(item) for item in value)
            if isinstance(value, torch.Tensor):
                return ("tensor", id(value))  # kept alive by this cache, so the id stays its own
            return (type(value), repr(value))

        key = (target, freeze(args), tuple((name, freeze(value)) for name, value in kwargs.items()))
        if key not in self._results:
            with self.mode:
                self._results[key] = (self._intern(target(*args, **kwargs)), args, kwargs)
        return self._results[key][0]

    def _intern(self, value: Any) -> Any:
        """One tensor for all equal ones: else a layer would never have the arguments that the layer before it had."""
        if isinstance(value, (list, tuple)):
            return type(value)(self._intern(item) for item in value)
        if not isinstance(value, torch.Tensor):
            return value
        numbers = (*value.shape, *value.stride(), value.storage_offset())
        key = (value.dtype, *(n if isinstance(n, int) else n.node.expr for n in numbers))
        return self._interned.setdefault(key, value)

    def name(self, size: Any) -> int | str:
        """The inverse of :meth:`dim`; other expressions are printed with the symbols' names."""
        if isinstance(size, (int, str)):
            return size
        expression = size.node.expr
        if expression.is_Integer:
            return int(expression)
        if expression not in self._names and len(expression.args) == 2 and expression.args[1].is_Integer:
            self._know_part(int(expression.args[1]))
        if expression in self._names:
            return self._names[expression]
        text = str(expression)
        for symbol, name in self._names.items():
            text = re.sub(rf"\b{symbol}\b", name, text)
        return text.replace(" ", "")

    def _know_part(self, ranks: int) -> None:
        """Have names for one rank's part of each symbol, which operators compute for themselves."""
        if ranks > 1:
            for name in [name for name in self._dims if "/" not in name]:
                self.dim(f"{name}/{ranks}")


@dataclass(frozen=True)
class Declared:
    """A value of which no more is known than what was written down: in place of a fake tensor, as far as running goes.

    Symbols and expressions of them stand as their text. ``strides``: None for a contiguous tensor.
    """

    shape: tuple[int | str, ...]
    dtype: torch.dtype
    strides: tuple[int | str, ...] | None = None

    def is_contiguous(self) -> bool:
        return self.strides is None

    def stride(self) -> tuple[int | str, ...]:
        assert self.strides is not None, "strides of a contiguous value follow from its shape"
        return self.strides


class DeclaredShapes(Shapes):
    """Shapes of a program that is run and never changed: its values are :class:`Declared`, and nothing is inferred."""

    def tensor(self, shape: Iterable[int | str], dtype: torch.dtype) -> Any:
        return Declared(tuple(shape), dtype)

    def result(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        raise AssertionError("a program that was read to be run cannot be changed: parse it with Program.from_text")


class Program:
    """One functional FX graph and what belongs to it; see the module's docstring."""

    def __init__(self, name: str, *, mesh: dict[str, int] | None = None, shapes: Shapes | None = None):
        self.name = name
        self.graph = fx.Graph()
        self.inputs: dict[str, Input] = {}
        self.weights: dict[str, Weight] = {}
        self.mesh = dict(mesh or {})
        self.constants: dict[str, int] = {}
        """Facts of the model that the runtime needs: ``context_length``, ``vocab_size``, ``num_layers``, ..."""
        self.history: list[PassReport] = []
        self.shapes = shapes or Shapes()
        self._weight_nodes: dict[str, fx.Node] = {}

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[fx.Node]:
        """The operator nodes in order."""
        return [node for node in self.graph.nodes if node.op == "call_function"]

    @property
    def output(self) -> fx.Node:
        """The value that the program returns, the logits of a model; the first one if there are several."""
        return next(iter(self.outputs.values()))

    @property
    def outputs(self) -> dict[str, fx.Node]:
        """All values that the program returns: ``logits``, then by its name whatever else was asked for."""
        result: Any = next(node for node in reversed(self.graph.nodes) if node.op == "output").args[0]
        return {LOGITS: result} if isinstance(result, fx.Node) else dict(result)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model: that of its largest weight. What stands beside integers has a dtype of its own."""
        floating = [w for w in self.weights.values() if w.dtype.is_floating_point and not is_quantized(w.recipe)]
        return max(floating, key=lambda w: (len(w.shape) > 1, math.prod(w.shape))).dtype if floating else torch.float32

    def calls(self, *targets: Target) -> list[fx.Node]:
        """The nodes that call one of ``targets``, in order."""
        return [node for node in self.graph.nodes if node.op == "call_function" and node.target in targets]

    def count(self, target: Target | str) -> int:
        """How often an operator occurs; by overload or by name such as ``"graphsrt::silu_mul"``."""
        if isinstance(target, str):
            return sum(
                target_name(n.target).split(".")[:2] == target.replace("::", ".").split(".")[:2] for n in self.nodes
            )
        return len(self.calls(target))

    def weight_of(self, value: Any) -> Weight | None:
        """The weight that a node stands for, or None."""
        if isinstance(value, fx.Node) and value.op == "get_attr":
            return self.weights[str(value.target)]
        return None

    def shape(self, node: fx.Node) -> tuple[int | str, ...]:
        """This rank's shape of a value, symbols by name."""
        return self.shape_of(node.meta["val"])

    def shape_of(self, value: torch.Tensor) -> tuple[int | str, ...]:
        """The shape of a fake tensor of this program, symbols by name."""
        return tuple(self.shapes.name(size) for size in value.shape)

    def __str__(self) -> str:
        from graphsrt.printer import print_program

        return print_program(self)

    @staticmethod
    def from_text(text: str) -> Program:
        """Parse complete program text; ``Program.from_text(str(p))`` prints and runs as ``p`` does."""
        from graphsrt.printer import parse_program

        return parse_program(text)

    def with_history(self, history: Iterable[PassReport]) -> Program:
        """This program, nothing of it copied, with another history: to look at, not to change."""
        same = copy.copy(self)
        same.history = [report.copy() for report in history]
        return same

    # -- building ------------------------------------------------------------------------------------------------

    def set_outputs(self, outputs: Mapping[str, fx.Node]) -> None:
        """Say what the program returns: ``logits`` first. A value may be returned under several names."""
        assert next(iter(outputs)) == LOGITS, list(outputs)
        value: Any = outputs[LOGITS] if len(outputs) == 1 else dict(outputs)
        last = next(iter(reversed(self.graph.nodes)), None)
        if last is not None and last.op == "output":
            last.args = (value,)
        else:
            self.graph.output(value)

    @property
    def kv_pools(self) -> dict[str, Input]:
        """The memory of cached keys and values by name: none before attention is paged, one for each KV shape after."""
        return {name: item for name, item in self.inputs.items() if item.role == "kv_pool"}

    def add_input(self, name: str, item: Input) -> fx.Node:
        """Declare an input; its placeholder goes with the others before the first operator."""
        self.inputs[name] = item
        return self._declare("placeholder", name, self.shapes.tensor(item.shape, item.dtype))

    def add_weight(self, name: str, weight: Weight) -> fx.Node:
        """Declare a weight and return the node that stands for it (one per weight)."""
        if name in self.weights:
            raise ValueError(f"the program has a weight {name} already")
        self.weights[name] = weight
        return self.weight_node(name)

    def weight_node(self, name: str) -> fx.Node:
        """The node that stands for a declared weight."""
        node = self._weight_nodes.get(name)
        if node is None or node.graph is not self.graph or node._erased:
            weight = self.weights[name]
            node = self._declare("get_attr", name, self.shapes.tensor(weight.shape, weight.dtype))
            if weight.placement is not None:
                node.meta["placement"] = weight.placement
        return node

    def _declare(self, op: str, name: str, val: torch.Tensor) -> fx.Node:
        last = next(iter(reversed(self.graph.nodes)), None)
        if last is not None and last.op in ("placeholder", "get_attr"):
            place = self.graph.inserting_after(last)
        else:
            first = next((n for n in self.graph.nodes if n.op not in ("placeholder", "get_attr")), self.graph._root)
            place = self.graph.inserting_before(first)
        with place:
            node = self.graph.create_node(op, name)
        node.name = name
        node.meta = {"val": val, "module": "", "made_by": ()}
        if op == "get_attr":
            self._weight_nodes[name] = node
        return node

    def call(
        self,
        target: Target,
        *args: Any,
        name: str,
        before: fx.Node | None = None,
        like: fx.Node | None = None,
        **kwargs: Any,
    ) -> fx.Node:
        """Append (or insert ``before`` a node) a call; ``like`` gives module path, source line and provenance."""
        place = self.graph.inserting_before(before) if before is not None else self.graph.inserting_before(self._end())
        with place:
            node = self.graph.create_node("call_function", target, args, kwargs)
        node.name = self.fresh_name(name)
        meta = like.meta if like is not None else {}
        node.meta = {
            "module": meta.get("module", ""),
            "source": meta.get("source", ""),
            "made_by": meta.get("made_by", ()),
        }
        if like is not None:
            node.meta["origin"] = (like,)
        return node

    def _end(self) -> fx.Node:
        last = next(iter(reversed(self.graph.nodes)), self.graph._root)
        return last if last.op == "output" else self.graph._root

    def fresh_name(self, name: str) -> str:
        """``name``, or with the smallest suffix ``_1``, ``_2`` … that no value or weight bears."""
        taken = self._taken
        candidate, count = name, 0
        while candidate in taken:
            count += 1
            candidate = f"{name}_{count}"
        taken.add(candidate)
        return candidate

    @property
    def _taken(self) -> set[str]:
        # Rebuilt when a pass starts (see forget_names): names of erased nodes are then free again.
        names = self.__dict__.get("_names_cache")
        if names is None:
            names = {node.name for node in self.graph.nodes} | set(self.weights) | set(self.inputs)
            self.__dict__["_names_cache"] = names
        return names

    def forget_names(self) -> None:
        """Let names of erased nodes be used again."""
        self.__dict__.pop("_names_cache", None)

    def rename(self, node: fx.Node, name: str) -> None:
        """Give a node another name, made unique."""
        self._taken.discard(node.name)
        node.name = self.fresh_name(name)

    def replace(self, old: fx.Node, new: fx.Node, *, keep_name: bool = True) -> None:
        """Let ``new`` take the place of ``old`` for all users and erase ``old``; ``new`` inherits its name."""
        old.replace_all_uses_with(new, propagate_meta=False)
        name = old.name
        self.graph.erase_node(old)
        self._taken.discard(name)
        if keep_name:
            self.rename(new, name)

    def remove_dead(self) -> int:
        """Erase operators without effect and weights without users; returns how many operators went."""
        removed = 0
        for node in reversed(list(self.graph.nodes)):
            if node.op == "call_function" and not node.users and not is_mutating(node.target):
                self.graph.erase_node(node)
                removed += 1
            elif node.op == "get_attr" and not node.users:
                self.graph.erase_node(node)
                self.weights.pop(str(node.target), None)
        self.forget_names()
        return removed

    # -- shapes ---------------------------------------------------------------------------------------------------

    def infer(self, nodes: Iterable[fx.Node] | None = None) -> None:
        """Compute ``val`` of the given nodes in order (default: all, since strides change downstream of a rewrite)."""
        for node in self.graph.nodes if nodes is None else nodes:
            if node.op != "call_function":
                continue
            try:
                node.meta["val"] = self.evaluate(node, lambda argument: argument.meta["val"])
            except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:
                shapes = ", ".join(f"{a.name}{list(self.shape(a))}" for a in node.all_input_nodes if _is_tensor(a))
                raise CompileError(
                    explain(
                        f"{target_name(node.target)} does not accept its arguments: {str(error).splitlines()[0]}",
                        where=f"{node.name} {where(node)}",
                        got=shapes,
                    )
                ) from error

    def evaluate(self, node: fx.Node, value: Callable[[fx.Node], Any]) -> Any:
        """Run one node's operator on fake values."""
        args, kwargs = map_arguments(node, value)
        assert callable(node.target)
        if node.target is operator.getitem:
            return args[0][args[1]]
        return self.shapes.result(node.target, args, kwargs)

    # -- whole ----------------------------------------------------------------------------------------------------

    def copy(self) -> Program:
        """An independent program; fake values and the symbols are shared."""
        other = Program(self.name, mesh=self.mesh)
        other.inputs = dict(self.inputs)
        other.weights = {name: copy.copy(weight) for name, weight in self.weights.items()}
        other.constants = dict(self.constants)
        other.history = [report.copy() for report in self.history]
        other.shapes = self.shapes
        mapping: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            args, kwargs = map_arguments(node, lambda argument: mapping[argument])
            twin = other.graph.create_node(node.op, node.target, args, kwargs)
            twin.name = node.name
            twin.meta = dict(node.meta)
            mapping[node] = twin
            if node.op == "get_attr":
                other._weight_nodes[str(node.target)] = twin
        return other

    def localized(self, rank: int, axis: str = "tp") -> Program:
        """A copy in one rank's terms: recipes name the slices that it reads, placements are gone."""
        ranks = self.mesh.get(axis, 1)
        if not 0 <= rank < ranks:
            raise ValueError(explain(f"rank {rank} is not on the {axis} axis", expected=f"0 to {ranks - 1}"))
        local = self.copy()
        local.constants = {**self.constants, "rank": rank}
        for weight in local.weights.values():
            weight.recipe = localize(weight.recipe, rank, weight.shape[0] if weight.shape else 1)
            weight.placement = None
        for node in local.graph.nodes:
            node.meta.pop("placement", None)
        return local

    def lint(self) -> None:
        """Structure that must hold after every pass; raises CompileError naming the node."""
        self._lint_order()
        self.graph.lint()
        seen: set[str] = set()
        started = False
        for node in self.graph.nodes:
            self._lint_writes(node)
            if node.name in seen:
                raise CompileError(f"two values are called {node.name}")
            seen.add(node.name)
            if node.op == "get_attr" and node.target not in self.weights:
                raise CompileError(f"{node.name} stands for a weight that the program does not declare")
            if node.op in ("get_attr", "placeholder") and started:
                raise CompileError(f"{node.name}: inputs and weights must stand before the first operator")
            started = started or node.op == "call_function"
        self.output  # noqa: B018  (raises StopIteration for a graph without output)

    def _lint_order(self) -> None:
        computed: set[fx.Node] = set()
        for node in self.graph.nodes:
            for used in node.all_input_nodes:
                if used not in computed:
                    raise CompileError(
                        explain(
                            f"{node.name} uses {used.name} before it is computed"
                            if used.graph is self.graph and not used._erased
                            else f"{node.name} uses {used.name}, which is not in the program",
                            where=f"{node.name} {where(node)}".strip(),
                            expected="every value after the values that it is computed from",
                        )
                    )
            computed.add(node)

    def _lint_writes(self, node: fx.Node) -> None:
        """The KV pool is the only memory that a program writes."""
        if node.op != "call_function" or not is_mutating(node.target) or node.target is aten.detach_.default:
            return
        given = arguments(node)
        for argument in node.target._schema.arguments:  # type: ignore[union-attr]
            written = given[argument.name]
            if argument.alias_info is None or not argument.alias_info.is_write or not isinstance(written, fx.Node):
                continue
            if written.op == "placeholder" and self.inputs[written.name].role == "kv_pool":
                continue
            raise CompileError(
                explain(
                    f"in-place write: {target_name(node.target)} writes into {written.name}",
                    where=f"{node.name} {where(node)}".strip(),
                    expected="operators without side effects; only the KV pool is ever written",
                    hint=f"use the operator that returns a new value instead of {target_name(node.target)}",
                )
            )


# -- nodes ----------------------------------------------------------------------------------------------------------


def map_arguments(node: fx.Node, value: Callable[[fx.Node], Any]) -> tuple[Any, Any]:
    """``(args, kwargs)`` of a node with every node inside replaced by ``value(node)``."""
    return fx.node.map_arg((node.args, node.kwargs), value)  # type: ignore[return-value]


def target_name(target: Any) -> str:
    """``aten.add.Tensor``, ``graphsrt.rope``, ``getitem``: the operator as the text names it."""
    if target is operator.getitem:
        return "getitem"
    name = str(target)
    return name.removesuffix(".default")


def target_from_name(name: str) -> Target:
    """The inverse of :func:`target_name`."""
    if name == "getitem":
        return operator.getitem
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    except AttributeError:
        if ops.import_operators():
            return target_from_name(name)
        raise CompileError(
            explain(
                f"unknown operator {name}",
                hint="define it with graphsrt.ops.define in a module that is imported, not in the script itself",
            )
        ) from None


def is_mutating(target: Any) -> bool:
    """True for operators that write memory (KV pool); they are kept though nobody uses their result."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def arguments(node: fx.Node) -> dict[str, Any]:
    """The node's arguments by the names of the operator's schema, defaults filled in."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {str(i): a for i, a in enumerate(node.args)}
    bound = {}
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.name in node.kwargs:
            bound[argument.name] = node.kwargs[argument.name]
        elif index < len(node.args) and not argument.kwarg_only:
            bound[argument.name] = node.args[index]
        else:
            bound[argument.name] = argument.default_value if argument.has_default_value() else None
    return bound


def where(node: fx.Node) -> str:
    """``(module path, file:line)`` of a node, as far as known."""
    parts = [part for part in (node.meta.get("module"), node.meta.get("source")) if part]
    return f"({', '.join(parts)})" if parts else ""


def layer_of(path: str) -> int | None:
    """The number of the layer in a dotted path: ``layers.3.mlp`` -> 3."""
    match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", path)
    return int(match.group(1)) if match else None


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def walk(value: Any) -> Iterator[fx.Node]:
    """The nodes inside a nested argument."""
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from walk(item)


__all__ = [
    "Input", "NearMiss", "PassReport", "Program", "Shapes", "Site", "Weight", "arguments", "aten", "is_mutating",
    "layer_of", "ops", "target_from_name", "target_name", "walk", "where",
]  # fmt: skip
