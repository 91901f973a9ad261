"""recognize_latent_attention: keys and values that are expanded from one latent for all heads stay unexpanded.

    kv = view(linear(latent, w_kv_b), [-1, H, N + V]);  k = cat([kv[…, :N], expand(k_rope)]);  v = kv[…, N:]
    attention(cat([q_nope, q_rope]), k, v, layer_id=3, scale=…)
    → latent_attention(q_nope, q_rope, latent, k_rope, w_kv_b, layer_id=3, scale=…)

It is found from the attention's own arguments: values and a part of the keys are slices of one linear over something
that has no heads, the rest of the keys is one vector for all heads. What was found is run against the expansion of the
operator before it is believed. The latent is whatever that linear reads, so norms and factors before it are its own.

Needs: normalize.  Leaves: ``graphsrt::latent_attention``, whose latents alone need to be remembered.
Numerics: exact.  Source: DeepSeek-V2 (arXiv:2405.04434), 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from graphsrt import ops
from graphsrt.ops_latent import expand_latent
from graphsrt.passes.behaviour import disagreement
from graphsrt.program import NearMiss, Program, arguments, aten

_MOVES = {aten.transpose.int, aten.permute.default, aten.view.default, aten.unsqueeze.default, aten.squeeze.dim}
"""Operators that only say in which order dimensions come."""
_KEPT = ("layer_id", "scale", "sliding_window", "softcap", "sinks")
"""What an attention says beside its queries, keys and values, and latent attention can say as well."""


@dataclass(frozen=True)
class _Latent:
    """What an attention's keys and values are made of."""

    linear: fx.Node
    k_rope: fx.Node
    own_size: int
    queries: tuple[fx.Node, fx.Node] | None
    """The two parts of the queries where they are put together as the keys are."""


def recognize_latent_attention(
    program: Program,
    *,
    limit: int | None = None,
    near_misses: list[NearMiss] | None = None,
    sites: list[fx.Node] | None = None,
) -> int:
    """Rewrite every latent attention, or the first ``limit``; the count is of attentions."""
    fired = 0
    for node in program.calls(ops.attention):
        if limit is not None and fired >= limit:
            break
        found = _latent(program, node)
        if isinstance(found, _Latent):
            reason = _disagreement(program, node, found)
            if reason is None:
                made = _replace(program, node, found)
                fired += 1
                if sites is not None:
                    sites.append(made)
                continue
        else:
            reason = found
        if near_misses is not None and reason:
            near_misses.append(NearMiss(node.name, node.meta.get("module", ""), reason))
    program.remove_dead()
    return fired


def _expected(program: Program) -> int:
    """Attentions whose keys are put together from parts of which one is the same for all heads."""
    return sum(_shared_part(program, node) is not None for node in program.calls(ops.attention))


recognize_latent_attention.expect = _expected  # type: ignore[attr-defined]
recognize_latent_attention.required = False  # type: ignore[attr-defined]


def _behind(node: Any, *targets: Any) -> Any:
    """The first value behind a chain of moves (and of ``targets``) that is none itself."""
    while node.target in _MOVES or node.target in targets:
        node = node.args[0]
    return node


def _shared_part(program: Program, attention: fx.Node) -> tuple[Any, int] | None:
    """The keys' ``cat``, and which of its two parts is expanded from one vector for all heads."""
    keys = _behind(arguments(attention)["k"])
    if keys.target is not aten.cat.default or keys.args[1] != keys.meta["val"].dim() - 1 or len(keys.args[0]) != 2:
        return None
    heads = program.shape(arguments(attention)["k"])[1]
    for index, part in enumerate(keys.args[0]):
        part = _behind(part)
        if part.target is aten.expand.default and heads in program.shape(part):
            one = program.shape(part.args[0])
            if sorted(map(str, one)) == sorted(["1", "T", str(one[-1])]):
                return keys, index
    return None


def _latent(program: Program, attention: fx.Node) -> _Latent | str:
    """The latent that keys and values are expanded from, or why there is none ("" where it is nothing of the kind)."""
    shared = _shared_part(program, attention)
    if shared is None:
        return ""
    keys, index = shared
    args = arguments(attention)
    heads, kv_heads = program.shape(args["q"])[1], program.shape(args["k"])[1]
    own: Any = keys.args[0][1 - index]
    own_size, size = (int(x.meta["val"].shape[-1]) for x in (own, args["v"]))
    linear, other = (_behind(x, aten.slice.Tensor) for x in (own, args["v"]))
    unknown = [name for name, value in args.items() if value is not None and name not in ("q", "k", "v", *_KEPT)]
    if unknown:
        return f"attention has {' and '.join(unknown)}, which latent attention does not carry"
    if index == 0:
        return "the part of the keys that all heads share comes before each head's own"
    if linear is not other or linear.target is not aten.linear.default:
        return f"keys come from {linear.name} and values from {other.name}, not both from one linear"
    if heads != kv_heads:
        return f"{kv_heads} KV heads serve {heads} query heads"
    weight = program.weight_of(arguments(linear)["weight"])
    if weight is None or arguments(linear)["bias"] is not None:
        return f"{linear.name} has {'a computed weight' if weight is None else 'a bias'}"
    rows, width = weight.shape
    if rows != int(heads) * (own_size + size):
        return f"{linear.name} has {rows} rows, expected {heads} heads of {own_size} + {size}"
    k_rope = _behind(keys.args[0][index]).args[0]
    kept, expanded = width + int(k_rope.meta["val"].shape[-1]), int(heads) * (own_size + size)
    if kept >= expanded:
        return f"a token's latent takes {kept} numbers, its expanded keys and values no more than {expanded}"
    queries: Any = _behind(args["q"])
    whole = queries.target is aten.cat.default and [p.meta["val"].shape[-1] for p in queries.args[0]] == [
        part.meta["val"].shape[-1] for part in keys.args[0]
    ]
    return _Latent(linear, k_rope, own_size, tuple(queries.args[0]) if whole else None)


def _disagreement(program: Program, attention: fx.Node, found: _Latent) -> str | None:
    """Run the model's own expansion on numbers and compare with the operator's, bitwise."""
    args = arguments(attention)
    linear = arguments(found.linear)
    values = {"latent": linear["input"], "k_rope": found.k_rope, "w_kv_b": linear["weight"]}
    outputs = [args["k"], args["v"]]
    if found.queries is not None:
        values |= {"q_nope": found.queries[0], "q_rope": found.queries[1]}
        outputs.append(args["q"])
    literals: dict[str, Any] = {"heads": int(program.shape(args["q"])[1]), "own_size": found.own_size}
    literals["swapped"] = tuple(program.shape(part)[1] == "T" for part in found.queries or ())
    return disagreement(program, outputs, values, literals, _expanded, scales=(1.0,))


def _expanded(
    latent: torch.Tensor, k_rope: torch.Tensor, w_kv_b: torch.Tensor, heads: int, own_size: int,
    swapped: tuple[bool, ...], **queries: torch.Tensor,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Keys, values and, where their parts are given, queries; ``swapped``: which of them have their heads first."""
    keys, values = expand_latent(
        latent.reshape(-1, latent.shape[-1]), k_rope.reshape(-1, k_rope.shape[-1]), w_kv_b, heads, own_size
    )
    parts = [part.transpose(0, 1) if first else part for part, first in zip(queries.values(), swapped)]
    return (keys, values, torch.cat(parts, -1)) if parts else (keys, values)


def _replace(program: Program, attention: fx.Node, found: _Latent) -> fx.Node:
    args = arguments(attention)
    module = attention.meta.get("module", "")

    def call(target: Any, *given: Any, role: str) -> fx.Node:
        name = f"{module}.{role}" if module else role
        node = program.call(target, *given, name=name, before=attention, like=attention)
        program.infer([node])
        return node

    def flat(x: fx.Node, role: str) -> fx.Node:
        """``[T, width]`` without a batch or head of one."""
        shape = program.shape(x)
        if shape[0] == "T" and len(shape) == 2:
            return x
        if x.target in _MOVES and program.shape(x.args[0]) == ("T", shape[-1]):  # type: ignore[arg-type]
            return x.args[0]  # type: ignore[return-value]
        return call(aten.view.default, x, [-1, shape[-1]], role=role)

    def tokens_first(x: fx.Node, role: str) -> fx.Node:
        return x if program.shape(x)[0] == "T" else call(aten.transpose.int, x, 0, 1, role=role)

    if found.queries is not None:
        q_nope, q_rope = (tokens_first(x, role) for x, role in zip(found.queries, ("q_nope", "q_rope")))
    else:
        end = int(program.shape(args["q"])[2])
        q_nope = call(aten.slice.Tensor, args["q"], 2, 0, found.own_size, role="q_nope")
        q_rope = call(aten.slice.Tensor, args["q"], 2, found.own_size, end, role="q_rope")
    linear = arguments(found.linear)
    keywords = {name: args[name] for name in _KEPT if args[name] is not None}
    made = program.call(
        ops.latent_attention, q_nope, q_rope, flat(linear["input"], "latent"), flat(found.k_rope, "k_rope"),
        linear["weight"], name=attention.name, before=attention, like=attention, **keywords,
    )  # fmt: skip
    made.meta["made_by"] = (*made.meta["made_by"], "recognize_latent_attention")
    program.infer([made])
    program.replace(attention, made)
    return made
