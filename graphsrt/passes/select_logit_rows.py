"""select_logit_rows: logits are computed for the rows that somebody samples from, not for every prompt token.

    logits = linear(norm, lm_head)  →  logits = linear(index_select(norm, 0, logit_rows), lm_head)

The selection moves up from what is returned through everything that treats rows alone (pointwise operators, norms,
linears, slices and collectives along other dimensions) and whose rows nobody else wants, and stops below whatever mixes
or makes tokens: of the last layer, only queries, keys and values are computed for all tokens.

Needs: page_attention (a step that knows which rows end a sequence).
Leaves: an input ``logit_rows [R]``, and logits ``[R, V]``, as well as rows of other results.
Numerics: exact.  Source: ours; SGLang and vLLM prune the last hidden states in their logits processors, llama.cpp the
last layer.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from graphsrt import ops
from graphsrt.placement import R
from graphsrt.program import Input, NearMiss, Program, arguments, aten

_PAGED = (ops.radix_attention, ops.radix_latent_attention)
_ROWWISE = {
    aten.linear.default, ops.int8_linear, ops.int4_linear, aten.to.dtype, ops.rms_norm, ops.glu, ops.all_reduce,
}  # fmt: skip
_ROWWISE_ALONG_OTHER_DIMS = {aten.slice.Tensor, ops.all_gather, aten.softmax.int}


def select_logit_rows(program: Program, *, near_misses: list[NearMiss] | None = None) -> int:
    """Select rows as early as possible; 1 if the program now does, 0 if it did already or has no paged attention."""
    if "logit_rows" in program.inputs or not program.calls(*_PAGED):
        return 0
    result = next(iter(reversed(program.graph.nodes)))
    chosen = {result}  # what is wanted for the chosen rows alone
    for node in reversed(program.nodes):
        if node.users and chosen.issuperset(node.users) and _row_arguments(program, node):
            chosen.add(node)
    rows = program.add_input("logit_rows", Input(("R",), torch.int64, "forward_batch.logit_rows"))
    if "placement" in program.output.meta:
        rows.meta["placement"] = R
    cuts = [  # all of them before the first edit, after which an operator may have an argument of other rows
        (node, users)
        for node in program.nodes
        if node not in chosen and (users := [user for user in node.users if _reads_rows(program, user, node, chosen)])
    ]
    for node, users in cuts:
        _select(program, node, rows, users)
    program.infer()
    return 1


def _reads_rows(program: Program, user: fx.Node, value: fx.Node, chosen: set[fx.Node]) -> bool:
    return user in chosen and (user.op == "output" or value in _row_arguments(program, user))


def _select(program: Program, value: fx.Node, rows: fx.Node, users: list[fx.Node]) -> None:
    order = {node: index for index, node in enumerate(program.graph.nodes)}
    first = min(users, key=order.__getitem__)  # not earlier: it must not stand between operators that belong together
    chosen = program.call(
        aten.index_select.default, value, 0, rows, name=f"{value.name}.rows", before=first, like=value
    )
    chosen.meta["made_by"] = (*value.meta.get("made_by", ()), "select_logit_rows")
    if "placement" in value.meta:
        chosen.meta["placement"] = value.meta["placement"]
    for user in users:
        user.replace_input_with(value, chosen)


def _row_arguments(program: Program, node: fx.Node) -> list[fx.Node]:
    """The arguments with rows of tokens, if the operator treats each row alone and the program computes all of them."""
    if node.op != "call_function" or program.shape(node)[:1] != ("T",):
        return []
    pointwise = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
    rowwise = pointwise or node.target in _ROWWISE
    if node.target in _ROWWISE_ALONG_OTHER_DIMS:
        rowwise = arguments(node)["dim"] != 0
    if not rowwise:
        return []
    with_rows = [a for a in node.all_input_nodes if program.shape(a)[:1] == ("T",)]
    if pointwise and any(len(program.shape(a)) != len(program.shape(node)) for a in with_rows):
        return []  # broadcast: its first dimension is not that of the result
    return with_rows if all(a.op == "call_function" for a in with_rows) else []


def _expected(program: Program) -> int:
    return int(bool(program.calls(*_PAGED)) and "logit_rows" not in program.inputs)


select_logit_rows.expect = _expected  # type: ignore[attr-defined]
