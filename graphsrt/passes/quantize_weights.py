"""quantize_weights: weights of linears become integers of 8 or 4 bits as they are loaded.

    y = linear(x, w, bias)  →  y = int8_linear(x, q, scales, bias)      to="int8"
                            →  y = int4_linear(x, q, pairs, bias)       to="int4", the head excepted, which has 8 bits

Only weights are rounded: to the nearest of 255 numbers that a scale of its row allows, or of 16 that a scale and an
offset of each group of 32 columns allow. The scale of 8 bits is that of the whole row even where a rank has a part of
it, and groups are whole, so the numbers are the same for every ``tp``. A weight that something else reads too (a tied
embedding) stays for that, beside its integers. What is left as it is: experts, whose weights are three-dimensional,
routers, and with 4 bits a linear whose columns, or a rank's part of them, are no whole groups.

Nothing happens unless ``quantize="int8"`` or ``"int4"`` of ``compile`` or ``trace`` asks for it.

Needs: merge_qkv, merge_gate_up, quantize_linears. Passes before this one see plain linears, so this stands after them;
those after it look at the values between linears alone.
Leaves: integers and scales as recipes over the plain matrices of the checkpoint, ``quantized(…)``.
Numerics: weights are rounded.
Source: rounding to nearest, as in LLM.int8() (arXiv:2208.07339) and llama.cpp's Q4_1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.fx as fx

from graphsrt import ops
from graphsrt.errors import CompileError, explain
from graphsrt.integer_weights import BLOCK, GROUP
from graphsrt.passes.demand_experts import only_routes
from graphsrt.passes.fp8_weights import stored_parts
from graphsrt.placement import Layout, R, Shard
from graphsrt.program import NearMiss, Program, Weight, arguments, aten
from graphsrt.recipes import FP8, Cat, Quantized, Recipe, ShardOf, Take

FORMATS = ("int8", "int4")


def quantize_weights(
    program: Program,
    *,
    to: str | None = None,
    skip: tuple[str, ...] = (),
    limit: int | None = None,
    near_misses: list[NearMiss] | None = None,
    sites: list[fx.Node] | None = None,
) -> int:
    """Quantise the weight of every linear, or of the first ``limit``; ``skip``: names of linears to leave out.

    CompileError for a model whose weights are stored in FP8.
    """
    if to is None:
        return 0
    if to not in FORMATS:
        raise ValueError(explain("weights are quantised to integers", expected=" or ".join(FORMATS), got=repr(to)))
    _check_plain(program)
    heads, fired, misses = _heads(program), 0, []
    made: dict[tuple[fx.Node, str], list[fx.Node]] = {}
    for linear in _linears(program):
        if limit is not None and fired >= limit:
            break
        given = arguments(linear)
        weight = program.weights[str(given["weight"].target)]
        form = "int8" if linear in heads else to
        reason = _why_not(program, linear, weight, form)
        if reason is not None or linear.name in skip:
            misses.append(NearMiss(linear.name, linear.meta.get("module", ""), reason or "it is left out"))
            continue
        key = given["weight"], form
        if key not in made:
            made[key] = [
                program.add_weight(f"{given['weight'].target}_{part}", new)
                for part, new in (_in_8_bits(weight) if form == "int8" else _in_4_bits(weight)).items()
            ]
        target = ops.int8_linear if form == "int8" else ops.int4_linear
        bias = [] if given["bias"] is None else [given["bias"]]
        new = program.call(
            target, given["input"], *made[key], *bias, name=f"{linear.name}.{form}", before=linear, like=linear
        )
        new.meta["made_by"] = (*linear.meta.get("made_by", ()), "quantize_weights")
        if "placement" in linear.meta:
            new.meta["placement"] = linear.meta["placement"]
        program.replace(linear, new)
        fired += 1
        if sites is not None:
            sites.append(new)
    if near_misses is not None:
        near_misses += misses
        for node in program.calls(ops.moe_experts):
            near_misses.append(NearMiss(node.name, node.meta.get("module", ""), "weights of experts stay as they are"))
    program.remove_dead()
    program.infer()
    return fired


def _expected(program: Program, to: str | None = None) -> int:
    return sum(not only_routes(program, linear) for linear in _linears(program)) if to else 0


quantize_weights.expect = _expected  # type: ignore[attr-defined]
quantize_weights.numerics = "close"  # type: ignore[attr-defined]
quantize_weights.changes_values = True  # type: ignore[attr-defined]


def _linears(program: Program) -> list[fx.Node]:
    """Linears over plain matrices."""
    found = []
    for linear in program.calls(aten.linear.default):
        weight = program.weight_of(arguments(linear)["weight"])
        if weight is not None and len(weight.shape) == 2 and weight.dtype.is_floating_point:
            found.append(linear)
    return found


def _check_plain(program: Program) -> None:
    for name, weight in program.weights.items():
        if weight.dtype == FP8 or stored_parts(weight.recipe):
            raise CompileError(
                explain("the weights of this model are stored in FP8, so they are not quantised again", where=name,
                        expected="a checkpoint of plain weights", got=str(FP8), hint="leave quantize= out")
            )  # fmt: skip


def _heads(program: Program) -> set[fx.Node]:
    """Linears that make the logits: the first ones upwards from them."""
    found, stack, seen = set(), [program.output], {program.output}
    while stack:
        node = stack.pop()
        if node.target in (aten.linear.default, ops.int8_linear, ops.int4_linear):
            found.add(node)
            continue
        above = [used for used in node.all_input_nodes if used not in seen]
        seen.update(above)
        stack += above
    return found


def _why_not(program: Program, linear: fx.Node, weight: Weight, form: str) -> str | None:
    if only_routes(program, linear):
        return "it says where tokens go"
    if form == "int8":
        return None
    place = weight.placement
    if isinstance(place, Shard) and place.dim == 1:
        if place.layout.granularity % GROUP:
            return f"a rank has {place.layout.local_size} of its columns, no whole groups of {GROUP}"
    elif weight.shape[1] % GROUP:
        return f"its {weight.shape[1]} columns are no whole groups of {GROUP}"
    return None


def _in_8_bits(weight: Weight) -> dict[str, Weight]:
    """The numbers, divided as the weight is, and the scales of their rows, which all ranks have of divided columns."""

    def numbers(x: Recipe) -> Recipe:
        return replace(x, x=numbers(x.x)) if isinstance(x, ShardOf) else Quantized(x, "int8")

    def scales(x: Recipe) -> Recipe:
        return scales(x.x) if isinstance(x, ShardOf) else Quantized(x, "int8_scales")

    in_columns = isinstance(weight.placement, Shard) and weight.placement.dim == 1
    place = R if in_columns else weight.placement
    return {
        "int8": Weight(weight.shape, torch.int8, _of_rows(weight.recipe, numbers), weight.placement),
        "scales": Weight(weight.shape[:1], torch.float32, _of_rows(weight.recipe, scales), place),
    }


def _in_4_bits(weight: Weight) -> dict[str, Weight]:
    """The numbers, packed as each rank has them, and scale and offset of each group."""
    rows, columns = weight.shape
    width = -(-columns // BLOCK) * BLOCK // 2
    packed = groups = weight.placement
    if isinstance(weight.placement, Shard) and weight.placement.dim == 1:
        layout = weight.placement.layout
        packed, groups = Shard(1, Layout.blocks(width * layout.ranks, layout.ranks)), Shard(1, layout.divide(GROUP))
    numbers = _of_rows(weight.recipe, lambda x: Quantized(x, "int4"))
    pairs = _of_rows(weight.recipe, lambda x: Quantized(x, "int4_pairs"))
    return {
        "int4": Weight((rows, width), torch.uint8, numbers, packed),
        "pairs": Weight((rows, columns // GROUP, 2), torch.bfloat16, pairs, groups),
    }


def _of_rows(recipe: Recipe, make: Callable[[Recipe], Recipe]) -> Recipe:
    """The same rows, in the same order, of what is made of the matrices that they are taken from."""
    match recipe:
        case ShardOf(x, 0) | Take(x, 0):
            return replace(recipe, x=_of_rows(x, make))  # type: ignore[call-arg]
        case Cat(parts, 0):
            return Cat(tuple(_of_rows(part, make) for part in parts), 0)
    return make(recipe)
