"""What a sharded program costs: bytes of a rank against its share, and collectives against the fewest possible.

Written against the final graph alone, with nothing of ``shard_tensor_parallel``: a matrix that stays whole and a
collective too many are found by looking.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from math import prod

import torch.fx as fx

from graphsrt import ops
from graphsrt.dump import weight_bytes
from graphsrt.placement import Partial, Shard
from graphsrt.program import Program, Weight, aten, target_name

_PRODUCTS = (aten.linear.default, aten.addmm.default, aten.matmul.default)
SMALL = 4
"""Values of a token in a collective that is not counted: the sums of a norm over a divided width."""


@dataclass
class Audit:
    """``faults`` in words; empty for a program that is divided as well as it can be."""

    bytes_per_rank: int
    total_bytes: int
    whole_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes on every rank of what stays whole: norms, routers, latents, tables, biases; and of padding and replicas."""
    collectives: dict[str, int] = field(default_factory=dict)
    """Layer (or "ends") -> collectives in it; small ones under "small"."""
    faults: list[str] = field(default_factory=list)


def audit(final: Program, captured: Program) -> Audit:
    """Compare the final program with the captured one."""
    ranks = final.mesh.get("tp", 1)
    total = sum(map(weight_bytes, captured.weights.values()))
    result = Audit(sum(map(weight_bytes, final.weights.values())), total)
    if ranks == 1:
        return result
    _bytes(final, ranks, result)
    _collectives(final, _budgets(captured), result)
    return result


def _bytes(program: Program, ranks: int, result: Audit) -> None:
    whole: dict[str, int] = defaultdict(int)
    left: list[str] = []
    for name, weight in program.weights.items():
        size = weight_bytes(weight)
        if isinstance(weight.placement, Shard):
            extra = size - size * weight.placement.layout.size // (weight.placement.layout.local_size * ranks)
            if weight.placement.layout.local_size >= weight.placement.layout.size > 1:
                result.faults.append(f"{name} {list(weight.shape)} is held whole, as replicas")
            if extra:
                whole["padding and replicas"] += extra
        elif _is_matrix(weight):
            users = _readers(program.weight_node(name))
            if isinstance(weight.placement, Partial):  # a bias of every expert, added on one rank
                whole["norms and biases"] += size
            elif any(_is_router(user) for user in users):
                whole["routers"] += size
            elif all(_makes_latent(user) for user in users):
                whole["latent projections"] += size
            elif "rope" in target_name(users[0].target) or _is_computed(weight) or _is_indexed(users):
                whole["tables"] += size
            elif all(_is_latent(program, user) for user in users):
                whole["latents"] += size
            elif all(_is_bottleneck(user) or _feeds_bottlenecks(user) for user in users):
                whole["bottlenecks"] += size
            else:
                left.append(f"{name} {list(weight.shape)}")
                whole["matrices"] += size
        else:
            whole["norms and biases"] += size
    result.whole_bytes = dict(whole)
    if left:
        refused = {miss.reason for report in program.history for miss in report.near_misses
                   if report.name == "shard_tensor_parallel"}  # fmt: skip
        why = f" ({' / '.join(sorted(refused)[:3])})" if refused else ""
        result.faults.append(f"{len(left)} matrices stay whole: {', '.join(left[:3])}{why}")


def _readers(weight: fx.Node) -> list[fx.Node]:
    """Who uses a weight, through casts of it."""
    found = []
    for user in weight.users:
        found += _readers(user) if user.target is aten.to.dtype else [user]
    return found


def _is_matrix(weight: Weight) -> bool:
    return sum(size > 1 for size in weight.shape) > 1 and weight.dtype.is_floating_point


def _is_indexed(users: list[fx.Node]) -> bool:
    """A buffer of sines and cosines whose rows are picked by position: every rank reads a few numbers of it."""
    return all(user.target is aten.index.Tensor for user in users)


def _is_computed(weight: Weight) -> bool:
    """Made from no checkpoint tensor: a rotary table, a constant."""
    from graphsrt.recipes import leaves

    return not any(leaves(weight.recipe))


def _is_router(node: fx.Node) -> bool:
    """Whether the linear's result decides which experts a token goes to: it reaches a top-k or a choice of experts
    before it reaches another linear."""
    stack, seen = [node], set()
    while stack:
        value = stack.pop()
        for user in value.users:
            name = target_name(user.target)
            if "topk" in name or "moe" in name or "experts" in name:
                return True
            if user in seen or user.target in (aten.linear.default, ops.attention) or user.op != "call_function":
                continue
            seen.add(user)
            stack.append(user)
    return False


def _is_latent(program: Program, node: fx.Node) -> bool:
    """Whether a linear makes what divided heads share: all that reads its result, through norms and rope, is latent
    attention or a linear that is divided by its output."""
    if node.target is not aten.linear.default:
        return False
    stack, seen = [node], {node}
    while stack:
        value = stack.pop()
        for user in value.users:
            if user in seen or user.target is ops.radix_latent_attention:
                continue
            seen.add(user)
            if user.target is aten.linear.default:
                weight = program.weight_of(user.args[1])
                if weight is None or not isinstance(weight.placement, Shard) or weight.placement.dim != 0:
                    return False
                continue
            if user.op != "call_function" or user.target in ops.COLLECTIVES or user.target in ops.ATTENTIONS:
                return False
            stack.append(user)
    sums = [value for value in seen if value.target in (aten.add.Tensor, ops.add_rms_norm, ops.add_layer_norm)]
    return all(used in seen for value in sums for used in value.all_input_nodes if used.op == "call_function")


def _makes_latent(node: fx.Node) -> bool:
    """Whether a linear makes a latent of latent attention, which every rank needs whole, as a replicated KV head is:
    its result goes to the attention through two more products at most, and through no collective."""
    stack, seen = [(node, 0)], set()
    while stack:
        value, products = stack.pop()
        for user in value.users:
            if "latent_attention" in target_name(user.target):
                return True
            more = products + (user.target in _PRODUCTS or user.target is aten.bmm.default)
            if user.op == "call_function" and user.target not in ops.COLLECTIVES and more < 3 and user not in seen:
                seen.add(user)
                stack.append((user, more))
    return False


NARROW = 4
"""How many times narrower a bottleneck is than what it reads and gives back, at least."""


def _is_bottleneck(node: fx.Node) -> bool:
    """Whether a whole linear is one of a pair E → w → E with w much smaller than E: the sum of E numbers of each token
    that dividing them would take costs more than to read them."""
    if node.target is not aten.linear.default:
        return False
    read, made = _sizes(node.args[0])[-1], _sizes(node)[-1]  # type: ignore[arg-type]
    if read > made:
        return made * NARROW <= read and any(_sizes(after)[-1] == read for after in _next_linears(node))
    behind, seen = [node.args[0]], set()
    while behind:
        value = behind.pop()
        if not isinstance(value, fx.Node) or value in seen or value.target in (*ops.COLLECTIVES, *ops.ATTENTIONS):
            continue
        seen.add(value)
        if value.target is aten.linear.default:
            if _sizes(value)[-1] * NARROW <= _sizes(value.args[0])[-1] == made:  # type: ignore[arg-type]
                return True
        else:
            behind += value.all_input_nodes
    return False


def _feeds_bottlenecks(node: fx.Node) -> bool:
    """Whether a linear's result goes into bottlenecks only, between their two linears: Gemma's inputs of each layer."""
    after = _next_linears(node)
    return bool(after) and all(_sizes(one)[-1] > _sizes(one.args[0])[-1] and _is_bottleneck(one) for one in after)  # type: ignore[arg-type]


def _next_linears(node: fx.Node) -> list[fx.Node]:
    """The linears that read a linear's result without another one between."""
    found: dict[fx.Node, None] = {}
    stack, seen = [node], {node}
    while stack:
        for user in stack.pop().users:
            if user in seen or user.op != "call_function" or user.target in ops.ATTENTIONS:
                continue
            seen.add(user)
            if user.target is aten.linear.default:
                found[user] = None
            else:
                stack.append(user)
    return list(found)


def _sizes(node: fx.Node) -> list[int]:
    val = node.meta.get("val")
    val = val[0] if isinstance(val, tuple) else val
    return [size if isinstance(size, int) else -1 for size in getattr(val, "shape", ())]


def layer_of(node: fx.Node) -> str:
    """``layers.3`` of the module path that made a value; "ends" outside of the layers."""
    found = re.match(r"((?:[A-Za-z_]+\.)*?[A-Za-z_]+\.\d+)(?:\.|$)", node.meta.get("module", ""))
    return found.group(1) if found else "ends"


def _collectives(program: Program, budgets: dict[str, int], result: Audit) -> None:
    counts: dict[str, int] = defaultdict(int)
    for node in program.nodes:
        if node.target not in ops.COLLECTIVES:
            continue
        per_token = prod(s for s in _sizes(node) if s > 0)
        if per_token <= SMALL:
            counts["small"] += 1
        else:
            # One that is fused with what follows stands in the next layer: what it completes is of its own.
            counts[layer_of(node.all_input_nodes[0])] += 1
    result.collectives = dict(counts)
    for layer, count in counts.items():
        if layer == "small":
            continue
        budget = budgets.get(layer, 2)
        if count > budget:
            result.faults.append(f"{count} collectives in {layer}, {budget} would do")


def _budgets(captured: Program) -> dict[str, int]:
    """The fewest large collectives of each layer: one for an attention, one more where an MLP reads what it made; as
    many again for each attention that reads what the one before it made, where a layer has several or runs again.

    Seen in the captured graph: linears and experts of a layer that read attention's result through another linear are a
    second step; those that do not are completed together with attention's own. "ends": embedding and logits.
    """
    budgets = {"ends": 2}
    after: dict[fx.Node, int] = {}  # value -> attention and linears of its layer on the longest way to it
    layers: dict[fx.Node, str] = {}
    behind: dict[fx.Node, dict[str, int]] = {}  # value -> layer -> attentions of it in a row on the way to the value
    attentions: dict[str, int] = defaultdict(int)
    for node in captured.graph.nodes:
        if node.op != "call_function":
            continue
        layer = layers[node] = layer_of(node)
        depth = max((after.get(n, 0) for n in node.all_input_nodes if layers.get(n) == layer), default=0)
        name = target_name(node.target)
        rows = [behind.get(n, {}) for n in node.all_input_nodes]
        row = {key: max(one.get(key, 0) for one in rows) for one in rows for key in one}
        if "attention" in name:
            depth = 1
            row[layer] = row.get(layer, 0) + 1
            attentions[layer] = max(attentions[layer], row[layer])
        elif depth >= 1 and (node.target in _PRODUCTS or "moe" in name):
            depth += 1
        after[node], behind[node] = depth, row
        if layer != "ends":
            # attention, its own linear (2), then the pair of an MLP (3, 4): one more collective
            budgets[layer] = max(budgets.get(layer, 1), 2 if depth >= 3 else 1)
    return {layer: budget * max(attentions[layer], 1) for layer, budget in budgets.items()}
