"""recognize_rope: rotary embedding written out becomes one operator with one table per distinct rope.

    add(mul(x, cos), mul(cat([neg(x[…, n:]), x[…, :n]]), sin))        x [H, T, D]
    → transpose(rope(transpose(x), positions, rotary_emb.table))      rope on [T, H, D]

The cosine and sine are traced back to the positions and to a vector of frequencies; what they compute is run against
the table's rows before it is believed. Transposes around it cancel. A rotation of the first channels only, put
together again with ``cat``, becomes a rotation with a narrower table.

Needs: normalize; frequencies that do not depend on the step (capture fixes them).
Leaves: ``graphsrt::rope`` on ``[T, heads, D]``; the tables are weights, shared by layers.
Numerics: exact.  Source: Su et al. 2021 (RoFormer); rotate-half layout of GPT-NeoX.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from graphsrt import ops
from graphsrt.program import NearMiss, Program, Weight, aten, map_arguments
from graphsrt.recipes import Const, RopeTable, rope_table


@dataclass(frozen=True)
class _Rotation:
    """``result = rope(x)``: the region's ends and what its cosine and sine are."""

    x: fx.Node
    result: fx.Node
    cos: fx.Node
    sin: fx.Node
    half: int


def recognize_rope(
    program: Program,
    *,
    limit: int | None = None,
    near_misses: list[NearMiss] | None = None,
    sites: list[fx.Node] | None = None,
) -> int:
    """Rewrite every rotation, or the first ``limit``; the count is of rotations, two to a layer."""
    fired = 0
    for neg in program.calls(aten.neg.default):
        if limit is not None and fired >= limit:
            break
        found = _rotation(neg)
        if isinstance(found, _Rotation):
            rotated, reason = _replace(program, found)
            if rotated is not None:
                fired += 1
                if sites is not None:
                    sites.append(rotated)
                continue
        else:
            reason = found
        if near_misses is not None and reason:
            near_misses.append(NearMiss(neg.name, neg.meta.get("module", ""), reason))
    program.remove_dead()
    return fired


def _expected(program: Program) -> int:
    """Rotations negate one half of a head: a slice, put back together by ``cat``."""
    return sum(
        any(user.target is aten.cat.default for user in node.users) and _is(node.args[0], aten.slice.Tensor)
        for node in program.calls(aten.neg.default)
    )


recognize_rope.expect = _expected  # type: ignore[attr-defined]
recognize_rope.required = False  # type: ignore[attr-defined]


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is target


def _rotation(neg: fx.Node) -> _Rotation | str:
    """The rotation that a negated half belongs to, or why it is none ("" where it is nothing of the kind)."""
    upper: Any = neg.args[0]
    cat: Any = next((u for u in neg.users if u.target is aten.cat.default), None)
    if not _is(upper, aten.slice.Tensor) or cat is None:
        return ""
    x = upper.args[0]
    parts = cat.args[0]
    last = x.meta["val"].dim() - 1
    size = x.meta["val"].shape[last]
    if len(parts) != 2 or parts[0] is not neg or not _is(parts[1], aten.slice.Tensor) or parts[1].args[0] is not x:
        return "the two halves of the rotation are not slices of one value"
    half = size // 2
    if tuple(upper.args[1:]) != (last, half, size) or tuple(parts[1].args[1:]) != (last, 0, half):
        return f"the rotation does not swap halves of {size} channels (interleaved rotation is not recognized)"
    for product in cat.users:
        total = next((u for u in product.users if u.target is aten.add.Tensor), None)
        if product.target is not aten.mul.Tensor or total is None:
            continue
        straight: Any = total.args[0] if total.args[1] is product else total.args[1]
        if not _is(straight, aten.mul.Tensor) or x not in straight.all_input_nodes:
            continue
        sin = product.args[1] if product.args[0] is cat else product.args[0]
        cos = straight.args[1] if straight.args[0] is x else straight.args[0]
        if isinstance(sin, fx.Node) and isinstance(cos, fx.Node):
            return _Rotation(x, total, cos, sin, half)
    return "the swapped halves are not multiplied by a sine and added to x times a cosine"


def _replace(program: Program, rotation: _Rotation) -> tuple[fx.Node | None, str | None]:
    """The operator that now rotates, or why nothing was done ("" or None where it is not worth a word)."""
    x, result = rotation.x, rotation.result
    given: Any
    leaves = _leaves([rotation.cos, rotation.sin])
    positions = [leaf for leaf in leaves if leaf.op == "placeholder"]
    weights = [program.weights[str(leaf.target)] for leaf in leaves if leaf.op == "get_attr"]
    if [p.name for p in positions] != ["positions"] or any(not isinstance(w.recipe, Const) for w in weights):
        names = [leaf.name for leaf in leaves]
        return None, f"cosine and sine depend on {names}, not on positions and fixed frequencies alone"
    frequencies = [w.recipe for w in weights if w.shape == (rotation.half,)]
    if len(frequencies) != 1:
        return None, f"expected one vector of {rotation.half} frequencies, found {len(frequencies)}"
    assert isinstance(frequencies[0], Const)
    recipe = RopeTable(frequencies[0].values, _scaling(rotation.cos), program.constants["context_length"])
    heads_first = program.shape(x)[1] == "T"
    if not heads_first and program.shape(x)[0] != "T":
        return None, f"x has shape {program.shape(x)}; expected tokens in one of the first two dimensions"
    reason = _disagreement(program, rotation, recipe, heads_first)
    if reason is not None:
        return None, reason
    table = _table(program, recipe, rotation.cos)
    given = x
    whole = _partial(result, x)
    if whole is not None:  # cat([rope(x[…, :r]), x[…, r:]]) is rope of all of x
        given, result = whole, next(iter(result.users))
    if heads_first and _swaps(given):
        given = given.args[0]
    elif heads_first:
        given = program.call(aten.transpose.int, given, 0, 1, name=f"{given.name}.swap", before=result, like=result)
        program.infer([given])
    rotated = _call(program, given, positions[0], table, result)
    _take_place(program, result, rotated, heads_first)
    return rotated, None


def _call(program: Program, x: fx.Node, positions: fx.Node, table: fx.Node, like: fx.Node) -> fx.Node:
    module = like.meta.get("module", "")
    node = program.call(
        ops.rope, x, positions, table, name=f"{module}.rope" if module else "rope", before=like, like=like
    )
    node.meta["made_by"] = (*like.meta.get("made_by", ()), "recognize_rope")
    program.infer([node])
    return node


def _take_place(program: Program, old: fx.Node, rotated: fx.Node, heads_first: bool) -> None:
    """Users of ``old`` that transpose it get the operator's result as it is; the others a transposed one."""
    for user in list(old.users):
        if heads_first and _swaps(user):
            user.replace_all_uses_with(rotated, propagate_meta=False)
    if heads_first and any(user.users or user.op == "output" for user in old.users):
        rotated = program.call(
            aten.transpose.int, rotated, 0, 1, name=f"{rotated.name}.transpose", before=old, like=old
        )
        program.infer([rotated])

    def is_live(user: fx.Node) -> bool:
        return user is not rotated and bool(user.users or user.op == "output")

    old.replace_all_uses_with(rotated, delete_user_cb=is_live, propagate_meta=False)


def _swaps(node: fx.Node) -> bool:
    return node.target is aten.transpose.int and set(node.args[1:]) == {0, 1}


def _partial(result: fx.Node, x: fx.Node) -> fx.Node | None:
    """The value of which ``x`` is the first channels, if the rest is put behind the rotated part again."""
    if len(result.users) != 1 or not _is(x, aten.slice.Tensor):
        return None
    cat: Any = next(iter(result.users))
    whole: Any = x.args[0]
    if cat.target is not aten.cat.default or len(cat.args[0]) != 2 or cat.args[0][0] is not result:
        return None
    rest, last = cat.args[0][1], whole.meta["val"].dim() - 1
    width, size = x.meta["val"].shape[last], whole.meta["val"].shape[last]
    good = _is(rest, aten.slice.Tensor) and rest.args[0] is whole and tuple(rest.args[1:]) == (last, width, size)
    return whole if good and tuple(x.args[1:]) == (last, 0, width) else None


def _row(node: fx.Node) -> fx.Node:
    """The cosine or sine ``[T, n]`` before each layer's own unsqueeze."""
    while node.target is aten.unsqueeze.default:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _leaves(roots: list[fx.Node]) -> list[fx.Node]:
    found: dict[fx.Node, None] = {}
    stack, seen = list(roots), set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op in ("placeholder", "get_attr"):
            found[node] = None
        stack += node.all_input_nodes
    return list(found)


def _scaling(cos: fx.Node) -> float:
    """The factor on the cosine (attention scaling of YaRN and longrope), 1.0 where there is none."""
    node = cos
    while node.target in (aten.unsqueeze.default, aten.to.dtype):
        node = node.args[0]  # type: ignore[assignment]
    factor = node.args[1] if node.target is aten.mul.Tensor else 1.0
    return float(factor) if isinstance(factor, (int, float)) else 1.0


def _table(program: Program, recipe: RopeTable, cos: fx.Node) -> fx.Node:
    """The weight that holds this rope's table: one for all layers and both of q and k."""
    dtype = cos.meta["val"].dtype
    for name, weight in program.weights.items():
        if weight.recipe == recipe and weight.dtype == dtype:
            return program.weight_node(name)
    name = program.fresh_name(f"{_row(cos).meta.get('module') or 'rope'}.table")
    return program.add_weight(name, Weight((recipe.max_positions, 2 * len(recipe.inv_freq)), dtype, recipe))


def _disagreement(program: Program, rotation: _Rotation, recipe: RopeTable, heads_first: bool) -> str | None:
    """Run the model's own cosine, sine and rotation on numbers and compare with the operator, bitwise."""
    signature = (recipe, heads_first, _row(rotation.cos), _row(rotation.sin), program.shape(rotation.x)[2:])
    if signature in program.__dict__.setdefault("_ropes_confirmed", set()):
        return None
    generator = torch.Generator().manual_seed(0)
    last = recipe.max_positions - 1
    positions = torch.cat(
        [torch.arange(min(16, last + 1)), torch.randint(0, last + 1, (15,), generator=generator), torch.tensor([last])]
    )
    tokens, size = len(positions), 2 * rotation.half
    dtype = rotation.x.meta["val"].dtype
    x = torch.randn(tokens, 3, size, generator=generator, dtype=torch.float64).to(dtype)
    known: dict[fx.Node, torch.Tensor] = {rotation.x: x.transpose(0, 1) if heads_first else x}

    def value(node: fx.Node) -> torch.Tensor:
        if node not in known:
            if node.op == "placeholder":
                known[node] = positions
            elif node.op == "get_attr":
                weight = program.weights[str(node.target)]
                assert isinstance(weight.recipe, Const)
                known[node] = (
                    torch.tensor(weight.recipe.values, dtype=torch.float64).to(weight.dtype).reshape(weight.shape)
                )
            else:
                args, kwargs = map_arguments(node, value)
                known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return known[node]

    got = value(rotation.result)
    table = rope_table(recipe).to(rotation.cos.meta["val"].dtype)
    want = ops.REFERENCE[ops.rope](x, positions, table)
    want = want.transpose(0, 1) if heads_first else want
    if got.shape != want.shape or not torch.equal(got, want):
        error = (got.double() - want.double()).abs().max().item() if got.shape == want.shape else "another shape"
        return f"looks like a rotation but computes something else (difference {error})"
    program.__dict__["_ropes_confirmed"].add(signature)
    return None
