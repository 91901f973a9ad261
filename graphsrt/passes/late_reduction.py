"""Where partial sums are completed: once per value, as late as linearity allows.

    (R + P1) + P2 → R + all_reduce(P1 + P2)

Two branches on one residual (parallel attention and MLP, experts beside a shared expert, token and position embedding)
meet in additions. The additions are put in another order, so that the sums over ranks are taken of their sum. A partial
sum that meets no other is completed where it arises.

Source: linearity of the sum over ranks; the placement algebra is that of PyTorch's DTensor.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch
import torch.fx as fx

from graphsrt import ops
from graphsrt.placement import Partial, R
from graphsrt.program import Program, arguments, aten

_VIEWS = {aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.transpose.int}
_MADE_BY = "shard_tensor_parallel"


def flow(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """All values that partial sums ``roots`` reach through operators that are linear in them, additions included."""
    reached = set(roots)
    stack = list(reached)
    while stack:
        node = stack.pop()
        for user in node.users:
            if user not in reached and (_is_sum(user) or _passes(user, node)):
                reached.add(user)
                stack.append(user)
    return reached


def complete(program: Program, roots: Iterable[fx.Node], axis: str) -> None:
    """Insert the ``all_reduce`` of every partial sum; ``roots`` are the values that arise as such."""
    order = {node: index for index, node in enumerate(program.graph.nodes)}
    pending = set(roots)
    tips = {tip: root for root in pending if (tip := _tip(root)) is not None}
    sums = {node: None for node in program.graph.nodes if _is_sum(node)}
    for total in sums:
        if _only_user(total) and next(iter(total.users)) in sums:
            continue  # part of a larger sum
        terms = list(_terms(total, sums))
        partial = [term for term in terms if term in tips]
        if len(partial) < 2:
            continue
        whole = [term for term in terms if term not in tips]
        for term in partial:
            _mark_chain(tips[term], term)
            pending.remove(tips[term])
        _regroup(program, total, whole, partial, axis)
    for root in sorted(pending, key=lambda node: order[node]):
        _reduce(program, root, axis)


def _is_sum(node: fx.Node) -> bool:
    return (
        node.target is aten.add.Tensor
        and len(node.all_input_nodes) == 2
        and arguments(node)["alpha"] == 1
        and len({(a.meta["val"].dtype, tuple(map(str, a.meta["val"].shape))) for a in node.all_input_nodes}) == 1
    )


def _only_user(node: fx.Node) -> bool:
    return len(node.users) == 1


def _terms(total: fx.Node, sums: Container[fx.Node]) -> Iterable[fx.Node]:
    """The terms of a sum of sums, in order; a sum that is also used elsewhere is one term."""
    for argument in total.args[:2]:
        assert isinstance(argument, fx.Node)
        if argument in sums and _only_user(argument):
            yield from _terms(argument, sums)
        else:
            yield argument


def _passes(user: fx.Node, value: fx.Node) -> bool:
    """Whether ``user`` is linear in ``value`` alone, so that it may be applied before the sum over ranks is taken."""
    if user.target in _VIEWS or user.target is aten.neg.default:
        return True
    if user.target in (aten.mul.Tensor, aten.mul.Scalar):
        return user.args[0] is not user.args[1]
    if user.target in (aten.div.Tensor, aten.div.Scalar):
        return user.args[0] is value and user.args[1] is not value
    if user.target is aten.to.dtype:
        return torch.promote_types(value.meta["val"].dtype, user.meta["val"].dtype) == user.meta["val"].dtype
    return False


def _tip(root: fx.Node) -> fx.Node | None:
    """The last of a chain of single users by which a partial sum reaches an addition; None if it reaches none."""
    node = root
    while _only_user(node):
        user = next(iter(node.users))
        if user.op != "call_function" or not _passes(user, node):
            break
        node = user
    return node if _only_user(node) and _is_sum(next(iter(node.users))) else None


def _mark_chain(root: fx.Node, tip: fx.Node) -> None:
    node = root
    while node is not tip:
        node = next(iter(node.users))
        node.meta["placement"] = Partial()


def _regroup(program: Program, total: fx.Node, whole: list[fx.Node], partial: list[fx.Node], axis: str) -> None:
    """``total`` as the sum of its whole terms and of one completed sum of its partial ones."""

    def add(a: fx.Node, b: fx.Node, name: str) -> fx.Node:
        node = program.call(aten.add.Tensor, a, b, name=name, before=total, like=total)
        node.meta["made_by"] = (*total.meta.get("made_by", ()), _MADE_BY)
        return node

    term = partial[0]
    for other in partial[1:]:
        term = add(term, other, f"{total.name}.partial")
        term.meta["placement"] = Partial()
    reduced = _reduce(program, term, axis, before=total)
    if not whole:
        program.replace(total, reduced, keep_name=False)
        return
    rest = whole[0]
    for other in whole[1:]:
        rest = add(rest, other, f"{total.name}.whole")
        rest.meta["placement"] = R
    total.args = (rest, reduced)
    program.remove_dead()


def _reduce(program: Program, node: fx.Node, axis: str, before: fx.Node | None = None) -> fx.Node:
    """Sum a partial value over the ranks, once, for all of its users."""
    users = list(node.users)
    total = program.call(
        ops.all_reduce, node, axis=axis, name=f"{node.name}.all_reduce", before=before or node.next, like=node
    )
    made_by = node.meta.get("made_by", ())
    total.meta.update(placement=R, made_by=made_by if _MADE_BY in made_by else (*made_by, _MADE_BY))
    for user in users:
        user.replace_input_with(node, total)
    return total
