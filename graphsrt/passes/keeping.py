"""What must survive every pass: where values come from, their dtypes, their layers, and the checkpoint's tensors.

The runner calls this after each pass. Nothing here knows a pass; everything compares the program before and after.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.fx as fx

from graphsrt import ops
from graphsrt.check_placements import _same_sizes
from graphsrt.check_rules import Refused
from graphsrt.errors import CompileError, explain
from graphsrt.program import Program, arguments, aten, target_name, where

_WRITES = {ops.radix_attention: "k", ops.rope_kv_write: "k", ops.radix_latent_attention: "latent"}
"""Operators that remember tokens, and the argument with what they remember."""
_ATTENTION = (ops.attention, ops.latent_attention, *_WRITES)
_CASTS = {aten.to.dtype, aten._to_copy.default, aten.to.dtype_layout}


# -- provenance -------------------------------------------------------------------------------------------------------


def record_provenance(
    program: Program, before: Program, known: dict[fx.Node, str], name: str, rule: str
) -> list[fx.Node]:
    """Write ``from_nodes`` and ``rule`` into what a pass made, and return these nodes in order.

    ``known``: the nodes that were there before the pass, with their names. CompileError if a node forgets its module,
    its source line or the passes that made it.
    """
    old = {node.name: node for node in before.graph.nodes}
    names = {node.name for node in program.graph.nodes}
    made = []
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        twin = old.get(known.get(node, node.name))
        if node in known:
            assert twin is not None, node.name
            _check_remembers(node, [twin], name)
            if known[node] != node.name:
                node.meta["from_nodes"] = (known[node],)
            node.meta.pop("origin", None)
            continue
        origins = _origins(node, known)
        if origins:
            _check_remembers(node, [old[origin] for origin in origins[:1]], name)
        elif twin is not None:
            _check_remembers(node, [twin], name)
        else:
            _check_placed(node, name)
        origins = _with_what_went(origins or _origins_of_inputs(node, known), old, names)
        node.meta.pop("origin", None)
        if name not in node.meta["made_by"] and origins == (node.name,):
            continue  # emitted anew, as it was
        node.meta["from_nodes"] = origins
        if not _same_file(node.meta.get("rule", ""), rule):  # a rewrite names the very spelling that matched
            node.meta["rule"] = rule
        made.append(node)
    return made


def _same_file(one: str, other: str) -> bool:
    return one.rpartition(":")[0] == other.rpartition(":")[0]


def _origins(node: fx.Node, known: dict[fx.Node, str]) -> tuple[str, ...]:
    """Names before the pass of the values that a node says it comes from, through others that the pass made."""
    found: dict[str, None] = {}
    stack, seen = list(reversed(node.meta.get("origin", ()))), {node}
    while stack:
        origin = stack.pop()
        if origin in known:
            found[known[origin]] = None
        elif origin not in seen:
            seen.add(origin)
            stack += reversed(origin.meta.get("origin", ()))
    return tuple(found)


def _origins_of_inputs(node: fx.Node, known: dict[fx.Node, str]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for used in node.all_input_nodes:
        if used in known:
            found[known[used]] = None
        else:
            found |= dict.fromkeys(used.meta.get("from_nodes", ()))
    return tuple(found)


def _with_what_went(origins: tuple[str, ...], old: dict[str, fx.Node], names: set[str]) -> tuple[str, ...]:
    """The origins, and the operators before them that the pass removed along with them."""
    found = dict.fromkeys(origins)
    stack = [old[name] for name in origins if name in old]
    while stack:
        for used in stack.pop().all_input_nodes:
            if used.op == "call_function" and used.name not in found and used.name not in names:
                found[used.name] = None
                stack.append(used)
    return tuple(found)


def _check_remembers(node: fx.Node, origins: Iterable[fx.Node], name: str) -> None:
    for origin in origins:
        made_by = tuple(node.meta.get("made_by", ()))
        forgotten = [maker for maker in origin.meta.get("made_by", ()) if maker not in made_by]
        lost = [key for key in ("module", "source") if origin.meta.get(key) and not node.meta.get(key)]
        if forgotten:
            lost.append(f"that {', '.join(forgotten)} made it")
        if lost:
            _refuse(node, origin, lost, name)


def _check_placed(node: fx.Node, name: str) -> None:
    """A new value that says nothing of where it comes from, though its arguments know."""
    if node.meta.get("module") or node.meta.get("source"):
        return
    for used in node.all_input_nodes:
        lost = [key for key in ("module", "source") if used.meta.get(key)]
        if lost:
            _refuse(node, used, lost, name)


def _refuse(node: fx.Node, origin: fx.Node, lost: list[str], name: str) -> None:
    words = {"module": "its module", "source": "its line in the model's code"}
    raise CompileError(
        explain(
            f"{name} loses where a value comes from: {node.name} does not know "
            f"{' and '.join(words.get(key, key) for key in lost)}",
            where=node.name,
            expected=f"what {origin.name} knows {where(origin)}".strip(),
            hint="make nodes with program.call(…, like=NODE), and leave node.meta of the others as it is",
        )
    )


# -- meaning ----------------------------------------------------------------------------------------------------------


def check_kept(program: Program, before: Program, made: list[fx.Node], numerics: str) -> None:
    """Dtypes of values, the layers of attentions, and sizes of checkpoint tensors are what they were."""
    _check_dtypes(program, before)
    if numerics != "close":
        _check_casts(before, made)
    _check_layers(program, before)
    _check_sizes(program, before)


def _check_dtypes(program: Program, before: Program) -> None:
    old = {node.name: node.meta.get("val") for node in before.graph.nodes if node.op == "call_function"}
    for node in program.nodes:
        one, other = old.get(node.name), node.meta.get("val")
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.dtype != other.dtype:
            raise CompileError(
                explain(
                    f"the dtype of {node.name} changed",
                    where=f"{node.name} {where(node)}".strip(),
                    expected=str(one.dtype),
                    got=str(other.dtype),
                    hint="a value of another dtype needs another name",
                )
            )


def _check_casts(before: Program, made: list[fx.Node]) -> None:
    """A new cast to fewer digits is a change of the numbers, unless it takes the place of one."""
    old = {node.name: node for node in before.nodes}
    for node in made:
        value = node.meta.get("val")
        if node.target not in _CASTS or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        given = node.all_input_nodes[0].meta["val"].dtype
        if not given.is_floating_point or torch.finfo(value.dtype).eps <= torch.finfo(given).eps:
            continue
        replaced = [old[name] for name in node.meta.get("from_nodes", ()) if name in old]
        if any(_rounds(o, value.dtype) for o in replaced):
            continue
        raise CompileError(
            explain(
                f"{node.name} rounds {node.all_input_nodes[0].name} from {given} to {value.dtype}",
                where=f"{node.name} {where(node)}".strip(),
                expected="no new rounding",
                hint='a pass that means to round says numerics="close" (an attribute of a function)',
            )
        )


def _rounds(node: fx.Node, dtype: torch.dtype) -> bool:
    """Whether a value of fewer digits is made from one of more, by whatever spelling of a cast."""
    inputs = [used.meta.get("val") for used in node.all_input_nodes]
    wide = [x for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point()]
    value = node.meta.get("val")
    eps = torch.finfo(dtype).eps
    return getattr(value, "dtype", None) == dtype and any(torch.finfo(x.dtype).eps < eps for x in wide)


def _check_layers(program: Program, before: Program) -> None:
    """An attention keeps its layer number; keys of a layer of a pool are written once, and before any is read."""
    old = {n.name: arguments(n)["layer_id"] for n in before.calls(*_ATTENTION)}
    writers: dict[tuple[fx.Node, int], str] = {}
    for node in program.calls(*_ATTENTION):
        args = arguments(node)
        layer, wanted = args["layer_id"], old.get(node.name)
        place = f"{node.name} {where(node)}".strip()
        if wanted is not None and layer != wanted:
            what = f"{target_name(node.target)} of layer {wanted} became one of layer {layer}"
            raise CompileError(explain(what, where=place, expected=f"layer_id={wanted}", got=f"layer_id={layer}"))
        if node.target not in _WRITES:
            continue
        pool, at = args["kv_pool"], layer if args["kv_layer"] is None else args["kv_layer"]
        if args[_WRITES[node.target]] is None:
            if (pool, at) not in writers:
                what = f"keys of layer {at} are read and nothing before has written them"
                raise CompileError(explain(what, where=place, expected=f"an operator that writes layer {at} of {pool}"))
            continue
        if (pool, at) in writers:
            what = f"keys of layer {at} are written twice"
            wanted = "a layer_id of its own" if args["kv_layer"] is None else f"a kv_layer of {pool.name} of its own"
            raise CompileError(explain(what, where=place, expected=wanted, got=writers[pool, at]))
        writers[pool, at] = node.name


def _check_sizes(program: Program, before: Program) -> None:
    """A recipe reads each checkpoint tensor as what it was before: a transpose too many shows in its sizes."""
    sizes: dict[tuple[str, int], tuple[int, str]] = {}
    for stage in (before, program):
        for name, weight in stage.weights.items():
            try:
                _same_sizes(weight.recipe, weight, sizes, name)
            except Refused as refusal:
                users = ", ".join(user.name for user in program.weight_node(name).users)
                place = f"{name}, read by {users}" if users else name
                raise CompileError(
                    explain(refusal.what, where=place, expected=refusal.expected, got=refusal.got)
                ) from None
