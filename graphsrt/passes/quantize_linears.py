"""quantize_linears: linears whose weight is stored in FP8 multiply in FP8.

    y = linear(x, dequant_fp8(w, s))
    → scale = fp8_scale(x); q = quantize_fp8(x, scale); y = fp8_linear(q, scale, w, s)

How the input is rounded is the checkpoint's word: with a scale of its own for each token, or for each block of columns,
or with one that was found beforehand. Linears over one input share its rounded form. A scale over a divided width is
the maximum over ranks, so that all ranks round alike; blocks are scaled where they lie, unless a rank holds parts of
them: then their scales are maxima over ranks too.

What stays a linear is multiplied as it is: a matrix whose scheme rounds no inputs, and one that is no longer rows and
columns of stored matrices. Its numbers are those of the checkpoint all the same, times their scales.

Needs: merge_qkv, merge_gate_up. Passes before this one see FP8 matrices as any others, so scales are divided, cut and
merged with them; this is why it stands after them.
Leaves: every weight that was stored in FP8, read by ``fp8_linear``.
Numerics: inputs are rounded to FP8.
Source: Micikevicius et al. 2022; blocks: DeepSeek-V3 (arXiv:2412.19437).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from graphsrt import ops
from graphsrt.passes.fp8_weights import Format, columns, format_of, numbers, scales, stored_parts
from graphsrt.placement import Partial, Placement, R, Shard
from graphsrt.program import NearMiss, Program, Weight, arguments, aten


def quantize_linears(
    program: Program,
    *,
    axis: str = "tp",
    limit: int | None = None,
    near_misses: list[NearMiss] | None = None,
    sites: list[fx.Node] | None = None,
) -> int:
    """Quantise every linear over stored matrices, or the first ``limit``."""
    writer = _Writer(program, axis)
    fired = 0
    for linear in _stored_linears(program):
        if limit is not None and fired >= limit:
            break
        reason = _why_not(program, linear)
        if reason is None:
            made = writer.quantize(linear)
            fired += 1
            if sites is not None:
                sites.append(made)
        elif near_misses is not None:
            near_misses.append(NearMiss(linear.name, linear.meta.get("module", ""), reason))
    program.remove_dead()
    program.infer()
    return fired


def _stored_linears(program: Program) -> list[fx.Node]:
    """Linears with a weight that is stored in FP8, by a scheme that rounds inputs as well."""
    found = []
    for linear in program.calls(aten.linear.default):
        weight = program.weight_of(arguments(linear)["weight"])
        if weight is not None and any(part.inputs != "plain" for part in stored_parts(weight.recipe)):
            found.append(linear)
    return found


quantize_linears.expect = lambda program: len(_stored_linears(program))  # type: ignore[attr-defined]
quantize_linears.numerics = "close"  # type: ignore[attr-defined]
quantize_linears.changes_values = True  # type: ignore[attr-defined]


def _why_not(program: Program, linear: fx.Node) -> str | None:
    args = arguments(linear)
    if format_of(program.weights[str(args["weight"].target)].recipe) is None:
        return "its weight is made of matrices in several formats, or was changed after it was multiplied by its scales"
    if isinstance(args["input"].meta.get("placement"), Partial):
        return "its input is a sum that is not complete"
    return None


class _Writer:
    """Writes the operators; remembers which values and weights it has rounded already."""

    def __init__(self, program: Program, axis: str):
        self.program, self.axis = program, axis
        self.rounded: dict[tuple[fx.Node, Format, fx.Node | None], tuple[fx.Node, fx.Node]] = {}
        self.weights: dict[str, tuple[fx.Node, fx.Node]] = {}

    def quantize(self, linear: fx.Node) -> fx.Node:
        args = arguments(linear)
        name = str(args["weight"].target)
        weight = self.program.weights[name]
        form = format_of(weight.recipe)
        assert form is not None
        places = self._block_numbers(weight, form)
        q, x_scale = self._round(args["input"], linear, form, places)
        w, w_scale = self._weights(name, weight)
        options: dict[str, Any] = {} if not form.block else {"block": form.block}
        if places is not None:
            options["columns"] = places
        bias = [] if args["bias"] is None else [args["bias"]]
        new = self._call(
            ops.fp8_linear, q, x_scale, w, w_scale, *bias, name=f"{linear.name}.fp8", linear=linear,
            place=linear.meta.get("placement"), out_dtype=linear.meta["val"].dtype, **options,
        )  # fmt: skip
        self.program.replace(linear, new)
        return new

    def _weights(self, name: str, weight: Weight) -> tuple[fx.Node, fx.Node]:
        if name not in self.weights:
            # the matrix under its own name goes when nobody reads it any more
            self.weights[name] = (
                self._add(f"{name}_fp8", numbers(weight)),
                self._add(f"{name}_scale", scales(weight)),
            )
        return self.weights[name]

    def _block_numbers(self, weight: Weight, form: Format) -> fx.Node | None:
        made = columns(weight, form.block) if form.block else None
        if made is None:
            return None
        known = (name for name, other in self.program.weights.items() if other == made)
        name = next(known, None)
        return self._add(f"blocks_of_{form.block}", made) if name is None else self.program.weight_node(name)

    def _add(self, name: str, weight: Weight) -> fx.Node:
        unique, number = name, 1
        while unique in self.program.weights:
            number += 1
            unique = f"{name}_{number}"
        return self.program.add_weight(unique, weight)

    def _round(self, x: fx.Node, linear: fx.Node, form: Format, places: fx.Node | None) -> tuple[fx.Node, fx.Node]:
        """``x`` in FP8, and its scale."""
        if (x, form, places) not in self.rounded:
            scale = self._input_scale(linear, form) if form.inputs == "static" else self._scale(x, linear, form, places)
            options: dict[str, Any] = {}
            if form.inputs == "block":
                options = {"block": form.block} if places is None else {"block": form.block, "columns": places}
            q = self._call(
                ops.quantize_fp8, x, scale, name=f"{x.name}.fp8", linear=linear, place=x.meta.get("placement"),
                **options,
            )  # fmt: skip
            self.rounded[x, form, places] = q, scale
        return self.rounded[x, form, places]

    def _input_scale(self, linear: fx.Node, form: Format) -> fx.Node:
        path = str(arguments(linear)["weight"].target).removesuffix(".weight")
        place = None if "placement" not in linear.meta else R
        assert form.input_scale is not None
        return self._add(f"{path}.input_scale", Weight((1, 1), torch.float32, form.input_scale, place))

    def _scale(self, x: fx.Node, linear: fx.Node, form: Format, places: fx.Node | None) -> fx.Node:
        """The scale of the values themselves; of a divided row, completed over the ranks."""
        place = x.meta.get("placement")
        last = x.meta["val"].dim() - 1
        over_width = isinstance(place, Shard) and place.dim == last
        options: dict[str, Any] = {} if form.largest is None else {"largest": form.largest}
        if form.inputs == "block":
            options["block"] = form.block
        incomplete = over_width and (form.inputs == "token" or places is not None)
        if places is not None and form.inputs == "block":
            options |= {"columns": places, "num_blocks": -(-place.layout.size // form.block)}  # type: ignore[union-attr]
        if incomplete:
            place = Partial("max")
        elif over_width:
            place = Shard(last, place.layout.divide(form.block))  # type: ignore[union-attr]
        name = f"{x.name}.scale"
        scale = self._call(ops.fp8_scale, x, name=name, linear=linear, place=place, **options)
        if incomplete:
            scale = self._call(
                ops.all_reduce, scale, name=f"{name}.all_reduce", linear=linear, place=R, axis=self.axis, op="max"
            )
        return scale

    def _call(
        self, target: Any, *args: Any, name: str, linear: fx.Node, place: Placement | None, **options: Any
    ) -> fx.Node:
        node = self.program.call(target, *args, name=name, before=linear, like=linear, **options)
        node.meta["made_by"] = (*linear.meta.get("made_by", ()), "quantize_linears")
        if place is not None:
            node.meta["placement"] = place
        self.program.infer([node])
        return node
