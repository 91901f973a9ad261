"""What fusions around a norm share: every form of the norm operators, and how one form grows into a larger one.

A norm may have a residual added before it, the residual's other term may be a sum over ranks, and the result may be
quantized. Each fusion adds one of the three; since all of them look at forms and not at names of operators, they find
one another's results whichever ran first.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch.fx as fx

from graphsrt import ops
from graphsrt.passes.joining import join
from graphsrt.program import Program, arguments, aten, target_name

Quantized = Literal["", "static", "dynamic"]


@dataclass(frozen=True)
class Form:
    """What a norm operator does besides the norm."""

    kind: str
    adds: bool = False
    reduces: bool = False
    quantizes: Quantized = ""

    @property
    def roles(self) -> tuple[str, ...]:
        """What its results are, in order."""
        normed = {"": ("normed",), "static": ("quantized",), "dynamic": ("quantized", "scale")}[self.quantizes]
        return (*normed, "total") if self.adds else normed


FORMS: dict[Any, Form] = {
    ops.rms_norm: Form("rms_norm"),
    ops.add_rms_norm: Form("rms_norm", adds=True),
    ops.all_reduce_add_rms_norm: Form("rms_norm", adds=True, reduces=True),
    ops.rms_norm_quant: Form("rms_norm", quantizes="dynamic"),
    ops.rms_norm_static_quant: Form("rms_norm", quantizes="static"),
    ops.add_rms_norm_quant: Form("rms_norm", adds=True, quantizes="dynamic"),
    ops.add_rms_norm_static_quant: Form("rms_norm", adds=True, quantizes="static"),
    ops.all_reduce_add_rms_norm_quant: Form("rms_norm", adds=True, reduces=True, quantizes="dynamic"),
    ops.all_reduce_add_rms_norm_static_quant: Form("rms_norm", adds=True, reduces=True, quantizes="static"),
    aten.layer_norm.default: Form("layer_norm"),
    ops.add_layer_norm: Form("layer_norm", adds=True),
    ops.all_reduce_add_layer_norm: Form("layer_norm", adds=True, reduces=True),
}
OPERATORS = {form: target for target, form in FORMS.items()}


def norms(program: Program, kind: str) -> list[fx.Node]:
    """The norms of one kind, in every form."""
    return program.calls(*(target for target, form in FORMS.items() if form.kind == kind))


def results(node: fx.Node) -> dict[str, fx.Node]:
    """The results of a norm that are used, by role."""
    roles = FORMS[node.target].roles
    if len(roles) == 1:
        return {roles[0]: node}
    return {roles[int(user.args[1])]: user for user in node.users}  # type: ignore[arg-type]


def given(node: fx.Node) -> dict[str, Any]:
    """A norm's arguments by name; what is normed is ``x`` whatever the operator calls it."""
    args = arguments(node)
    if node.target is aten.layer_norm.default:
        return {"x": args["input"], "weight": args["weight"], "bias": args["bias"], "eps": args["eps"]}
    return args


def residual_sum(node: fx.Node) -> fx.Node | None:
    """The addition of two values that a norm reads, if it reads one."""
    total = given(node)["x"]
    is_sum = isinstance(total, fx.Node) and total.target is aten.add.Tensor and len(total.all_input_nodes) == 2
    return total if is_sum else None


VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def why_no_sum(node: fx.Node) -> str | None:
    """Words for a norm before which nothing is added; None for one of heads, where nothing ever is."""
    value = given(node)["x"]
    if value.target in VIEWS:
        return None
    if value.target is operator.getitem:
        return f"the sum that it norms is a result of {value.args[0].name} already"
    if value.op != "call_function":
        return f"nothing is added before it: it norms {value.name}, which is given"
    return f"no residual is added before it: it norms the result of {target_name(value.target)}"


def why_no_residual(program: Program, total: fx.Node, norm: fx.Node) -> str | None:
    """None if the norm may take the addition over, else the reason."""
    args = arguments(total)
    one, other = args["self"], args["other"]
    if args["alpha"] != 1:
        return f"the residual is added {args['alpha']} times"
    if program.shape(one) != program.shape(other):
        return f"x {program.shape(one)} and residual {program.shape(other)} differ"
    dtypes = [value.meta["val"].dtype for value in (one, other)]
    if dtypes[0] != dtypes[1]:
        return f"x is {dtypes[0]}, the residual {dtypes[1]}"
    if norm.target is aten.layer_norm.default and len(arguments(norm)["normalized_shape"]) != 1:
        return f"the norm runs over {len(arguments(norm)['normalized_shape'])} dimensions"
    return used_between(total, norm)


def used_between(value: fx.Node, norm: fx.Node) -> str | None:
    """A value that the fused operator will make must not be read before the norm stands."""
    node = value.next
    while node is not norm and node.op != "root":
        if node in value.users:
            return f"{node.name} uses {value.name} before {norm.name} is computed"
        node = node.next
    return None


def taken(node: fx.Node) -> str:
    """Words for a norm that another fusion has made a part of something larger."""
    makers = [maker for maker in node.meta.get("made_by", ()) if maker.startswith("fuse_")]
    return f"{target_name(node.target)} has it already" + (f", made by {makers[-1]}" if makers else "")


def grow(
    program: Program,
    norm: fx.Node,
    args: dict[str, Any],
    made_by: str,
    *,
    absorbed: dict[str, fx.Node],
    covered: Iterable[fx.Node] = (),
    **more: Any,
) -> fx.Node:
    """Put a larger form in the place of ``norm``; returns its first result.

    ``more``: fields of :class:`Form` that change. ``args``: arguments that differ from the norm's. ``absorbed``: the
    values of before that become results, by role. ``covered``: the other operators that go. Nobody else may use these.
    """
    form = replace(FORMS[norm.target], **more)
    values = {**results(norm), **absorbed}
    return join(
        program, OPERATORS[form], {**given(norm), **args}, results=[values.get(role) for role in form.roles],
        covered=[norm, *results(norm).values(), *absorbed.values(), *covered], before=norm, made_by=made_by,
    )  # fmt: skip
