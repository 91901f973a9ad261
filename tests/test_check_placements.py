"""Programs that were sharded rightly pass; each is then broken in one way, and must be refused by the node's name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import getitem

import pytest
import torch
import torch.fx as fx

from graphsrt import ops
from graphsrt.check_placements import check_placements
from graphsrt.check_rules_attention import mismatch
from graphsrt.check_rules_views import view_options
from graphsrt.errors import CompileError
from graphsrt.placement import Heads, Layout, Partial, R, Run, Shard
from graphsrt.program import Input, Program, Weight, aten
from graphsrt.recipes import Cat, Ckpt, OnOwner, Recipe, ShardOf, ShardStart, Transpose

H, K, D, E, F, V, TP = 6, 3, 8, 40, 28, 21, 2
"""Three KV heads over two ranks: both padding and copies occur."""


def _weight(program: Program, name: str, shape: tuple[int, ...], recipe: Recipe, place: object) -> fx.Node:
    return program.add_weight(name, Weight(shape, torch.float64, recipe, place))  # type: ignore[arg-type]


def _call(program: Program, target: object, *args: object, name: str, place: object, **kwargs: object) -> fx.Node:
    node = program.call(target, *args, name=name, **kwargs)  # type: ignore[arg-type]
    program.infer()
    node.meta |= {"placement": place, "module": "layers.0", "source": "model.py:7"}
    return node


@cache
def _layouts() -> tuple[Layout, Layout, Layout, Layout]:
    heads = Heads.choose(H, K, TP)
    return heads.query, heads.kv, Layout.blocks(F, TP), Layout.blocks(V, TP)


def _block(paged: bool = False) -> Program:
    """A decoder with one block, sharded by hand, with merged projections and a padded vocabulary."""
    program = Program("block", mesh={"tp": TP})
    query, kv, mlp, vocab = _layouts()
    tokens = program.add_input("tokens", Input(("T",), torch.int64, "tokens"))
    positions = program.add_input("positions", Input(("T",), torch.int64, "positions"))
    tokens.meta["placement"] = positions.meta["placement"] = R

    def cut(name: str, dim: int, layout: Layout, unowned: str = "copy") -> Recipe:
        return ShardOf(Ckpt(name), dim, layout, unowned)

    q, k = query.scale(D), kv.scale(D)
    qkv = Layout.concat([q, k, k])
    gate_up = Layout.concat([mlp, mlp])
    embed = _weight(program, "embed", (vocab.local_size, E), cut("embed", 0, vocab), Shard(0, vocab))
    start = program.add_weight("start", Weight((1,), torch.int64, ShardStart(vocab), Shard(0, Layout.blocks(TP, TP))))
    norm = _weight(program, "norm.w", (E,), Ckpt("norm.w"), R)
    wqkv = _weight(
        program, "qkv.w", (qkv.local_size, E), Cat((cut("q", 0, q), cut("k", 0, k), cut("v", 0, k)), 0), Shard(0, qkv)
    )
    bqkv = _weight(
        program, "qkv.b", (qkv.local_size,), Cat((cut("qb", 0, q), cut("kb", 0, k), cut("vb", 0, k)), 0), Shard(0, qkv)
    )
    wo = _weight(program, "o.w", (E, q.local_size), cut("o", 1, q, "zero"), Shard(1, q))
    bo = _weight(program, "o.b", (E,), OnOwner(Ckpt("ob")), Partial("sum"))
    wgu = _weight(
        program, "gu.w", (gate_up.local_size, E), Cat((cut("g", 0, mlp), cut("u", 0, mlp)), 0), Shard(0, gate_up)
    )
    wd = _weight(program, "d.w", (E, mlp.local_size), cut("d", 1, mlp, "zero"), Shard(1, mlp))
    table = _weight(program, "table", (64, D), Ckpt("table"), R)
    head = _weight(program, "head", (vocab.local_size, E), cut("head", 0, vocab), Shard(0, vocab))

    e = _call(program, ops.vocab_embedding, tokens, embed, start, name="e", place=Partial("sum"))
    h = _call(program, ops.all_reduce, e, axis="tp", name="h", place=R)
    n = _call(program, ops.rms_norm, h, norm, eps=1e-6, cast="before_weight", name="n", place=R)
    x = _call(program, aten.linear.default, n, wqkv, bqkv, name="qkv", place=Shard(1, qkv))
    a, b = q.local_size, k.local_size
    parts = {
        "q": _call(program, aten.slice.Tensor, x, 1, 0, a, name="q", place=Shard(1, q)),
        "k": _call(program, aten.slice.Tensor, x, 1, a, a + b, name="k", place=Shard(1, k)),
        "v": _call(program, aten.slice.Tensor, x, 1, a + b, a + 2 * b, name="v", place=Shard(1, k)),
    }
    for name, layout in (("q", query), ("k", kv), ("v", kv)):
        shape = [-1, layout.local_size, D]
        parts[name] = _call(
            program, aten.view.default, parts[name], shape, name=f"{name}_heads", place=Shard(1, layout)
        )
    for name, layout in (("q", query), ("k", kv)):
        parts[name] = _call(
            program, ops.rope, parts[name], positions, table, name=f"{name}_rope", place=Shard(1, layout)
        )
    if paged:
        pool = program.add_input("kv_pool", Input((1, 2, "slots", kv.local_size, D), torch.float64, "kv_pool"))
        pool.meta["placement"] = Shard(3, kv)
        batch = []
        sizes: dict[str, tuple[int | str, ...]] = {"a": ("N", "C"), "b": ("B",), "c": ("B",), "d": ("B1",), "f": ("T",)}
        for name, size in sizes.items():
            batch.append(program.add_input(f"batch_{name}", Input(size, torch.int64, f"forward_batch.{name}")))
            batch[-1].meta["placement"] = R
        y = _call(program, ops.radix_attention, parts["q"], parts["k"], parts["v"], pool, *batch, name="attn",
                  place=Shard(1, query), layer_id=0, scale=0.5)  # fmt: skip
    else:
        y = _call(program, ops.attention, parts["q"], parts["k"], parts["v"], name="attn", place=Shard(1, query),
                  layer_id=0, scale=0.5)  # fmt: skip
    y = _call(program, aten.view.default, y, [-1, a], name="attn_flat", place=Shard(1, q))
    y = _call(program, aten.linear.default, y, wo, bo, name="o", place=Partial("sum"))
    y = _call(program, ops.all_reduce, y, axis="tp", name="o_sum", place=R)
    pair = _call(program, ops.add_rms_norm, y, h, norm, eps=1e-6, cast="before_weight", name="an", place=(R, R))
    m = _call(program, getitem, pair, 0, name="m", place=R)
    h2 = _call(program, getitem, pair, 1, name="h2", place=R)
    gu = _call(program, aten.linear.default, m, wgu, name="gu", place=Shard(1, gate_up))
    act = _call(program, ops.silu_mul, gu, name="act", place=Shard(1, mlp))
    d = _call(program, aten.linear.default, act, wd, name="d", place=Partial("sum"))
    ds = _call(program, ops.all_reduce, d, axis="tp", name="d_sum", place=R)
    out = _call(program, aten.add.Tensor, h2, ds, name="out", place=R)
    logits = _call(program, aten.linear.default, out, head, name="logits", place=Shard(1, vocab))
    whole = _call(program, ops.all_gather, logits, dim=1, axis="tp", size=TP, name="gathered", place=R)
    last = _call(program, aten.slice.Tensor, whole, 1, 0, V, name="vocabulary", place=R)
    program.graph.output(last)
    return program


def _node(program: Program, name: str) -> fx.Node:
    return next(node for node in program.graph.nodes if node.name == name)


def _recipe(program: Program, name: str, recipe: Recipe) -> None:
    program.weights[name].recipe = recipe


def _place(program: Program, name: str, place: object) -> None:
    if name in program.weights:
        program.weights[name].placement = place  # type: ignore[assignment]
    _node(program, name).meta["placement"] = place


def test_correct_programs_pass() -> None:
    check_placements(_block())
    check_placements(_block(paged=True))


def _drop(name: str) -> Callable[[Program], None]:
    def breaks(program: Program) -> None:
        node = _node(program, name)
        node.replace_all_uses_with(node.args[0], propagate_meta=False)  # type: ignore[arg-type]
        program.graph.erase_node(node)

    return breaks


def _double(program: Program) -> None:
    node = _node(program, "o_sum")
    twice = program.call(ops.all_reduce, node, axis="tp", name="twice", before=node.next)
    node.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice, propagate_meta=False)
    program.infer()
    twice.meta["placement"] = R


def _replicated_bias(program: Program) -> None:
    _recipe(program, "o.b", Ckpt("ob"))
    _place(program, "o.b", R)


def _copies_contracted(program: Program) -> None:
    recipe = program.weights["o.w"].recipe
    assert isinstance(recipe, ShardOf)
    _recipe(program, "o.w", ShardOf(recipe.x, 1, recipe.layout, "copy"))


def _other_unit_order(program: Program) -> None:
    query = _layouts()[0].scale(D)
    turned = Layout(tuple(reversed(query.runs)))
    _recipe(program, "o.w", ShardOf(Ckpt("o"), 1, turned, "zero"))
    _place(program, "o.w", Shard(1, turned))


def _bias_in_blocks(program: Program) -> None:
    """The bias of a merged projection cut in equal blocks, as if it were one plain matrix."""
    size = program.weights["qkv.b"].shape[0]
    layout = Layout.blocks(size * TP, TP)
    _recipe(program, "qkv.b", ShardOf(Ckpt("qkvb"), 0, layout))
    _place(program, "qkv.b", Shard(0, layout))


def _shard_of_cat(program: Program) -> None:
    size = program.weights["qkv.w"].shape[0]
    layout = Layout.blocks(size * TP, TP)
    _recipe(program, "qkv.w", ShardOf(Cat((Ckpt("q"), Ckpt("k"), Ckpt("v")), 0), 0, layout))


def _swap_slices(program: Program) -> None:
    q, k = _node(program, "q"), _node(program, "k")
    q.args, k.args = (q.args[0], 1, 16, 16 + 32), (k.args[0], 1, 0, 16)


def _kv_blocks(program: Program) -> None:
    kv = _layouts()[1]
    wrong = Layout(tuple(reversed(kv.runs)))
    qkv = Layout.concat([_layouts()[0].scale(D), wrong.scale(D), wrong.scale(D)])
    for name, weight in (("qkv.w", "qkv"), ("qkv.b", "qkvb")):
        parts = (ShardOf(Ckpt(f"{weight}q"), 0, _layouts()[0].scale(D)), *(
            ShardOf(Ckpt(f"{weight}{x}"), 0, wrong.scale(D)) for x in "kv"
        ))  # fmt: skip
        _recipe(program, name, Cat(parts, 0))
        _place(program, name, Shard(0, qkv))
    _place(program, "qkv", Shard(1, qkv))
    for name in ("k", "v"):
        _place(program, name, Shard(1, wrong.scale(D)))
        _place(program, f"{name}_heads", Shard(1, wrong))
    _place(program, "k_rope", Shard(1, wrong))


def _partial_plus_whole(program: Program) -> None:
    out = _node(program, "out")
    out.args = (_node(program, "h2"), _node(program, "d"))


def _nonlinear(program: Program) -> None:
    d_sum = _node(program, "d_sum")
    relu = program.call(aten.relu.default, _node(program, "d"), name="relu", before=d_sum)
    d_sum.args = (relu,)
    program.infer()
    relu.meta["placement"] = Partial("sum")


def _norm_over_shard(program: Program) -> None:
    node = _node(program, "attn_flat")
    mlp = program.add_weight("wide.w", Weight((node.meta["val"].shape[1],), torch.float64, Ckpt("wide"), R))
    norm = program.call(ops.rms_norm, node, mlp, eps=1e-6, cast="before_weight", name="wide", before=node.next)
    program.infer()
    norm.meta["placement"] = node.meta["placement"]
    _node(program, "o").replace_input_with(node, norm)


def _mixing_view(program: Program) -> None:
    node = _node(program, "q_heads")
    node.args = (node.args[0], [-1, 8, 4])
    program.infer([node])


def _start_off(program: Program) -> None:
    runs = _layouts()[3].runs
    moved = Layout.of([[Run(0, 10)], [Run(10, 10)]])
    assert moved.runs != runs
    _recipe(program, "start", ShardStart(moved))


def _gather_tokens(program: Program) -> None:
    node = _node(program, "gathered")
    node.kwargs = {**node.kwargs, "dim": 0}


def _pads_in_result(program: Program) -> None:
    node = _node(program, "vocabulary")
    node.args = (node.args[0], 1, 1, V + 1)


def _other_axis(program: Program) -> None:
    node = _node(program, "o_sum")
    node.kwargs = {"axis": "dp"}


def _halves(program: Program) -> None:
    """gate and up interleaved over ranks: each rank's halves hold other channels."""
    node = _node(program, "gu")
    layout = Layout.blocks(2 * F, TP)
    _recipe(program, "gu.w", ShardOf(Ckpt("gu"), 0, layout))
    _place(program, "gu.w", Shard(0, layout))
    node.meta["placement"] = Shard(1, layout)


def _whole_weight(program: Program) -> None:
    _recipe(program, "d.w", Transpose(Ckpt("d"), 0, 1))
    _place(program, "d.w", R)


def _wrong_record(program: Program) -> None:
    _place(program, "attn", R)


BROKEN: dict[str, tuple[Callable[[Program], None], str, str]] = {
    "all_reduce dropped before a norm": (_drop("h"), "n", "not complete"),
    "all_reduce dropped before an addition": (_drop("d_sum"), "out", "added once on every rank"),
    "all_reduce doubled": (_double, "twice", "may be summed"),
    "all_gather dropped": (_drop("gathered"), "vocabulary", "not what this gives"),
    "all_gather along another dim": (_gather_tokens, "gathered", "divided along the gathered dim"),
    "collective along another axis": (_other_axis, "o_sum", "another axis"),
    "bias on every rank": (_replicated_bias, "o", "once on every rank"),
    "copies contracted": (_copies_contracted, "o", "counted twice"),
    "other order of units": (_other_unit_order, "o", "different addresses"),
    "bias in equal blocks": (_bias_in_blocks, "qkv", "does not follow"),
    "a shard of a cat": (_shard_of_cat, "qkv.w", "not what the recipe reads"),
    "swapped slices": (_swap_slices, "q", "not one window"),
    "KV heads of another rank": (_kv_blocks, "attn", "another group"),
    "P + R": (_partial_plus_whole, "out", "added once on every rank"),
    "P into a nonlinearity": (_nonlinear, "relu", "not linear"),
    "norm over a divided width": (_norm_over_shard, "wide", "width that is divided"),
    "view that mixes heads": (_mixing_view, "q_heads", "not what this gives"),
    "vocabulary start": (_start_off, "e", "rank 1 takes ids from 10"),
    "pads in the result": (_pads_in_result, "vocabulary", "not whole"),
    "gate and up in blocks": (_halves, "act", "not one window"),
    "weight whole, input divided": (_whole_weight, "d", "the weight is whole"),
    "recorded placement": (_wrong_record, "attn", "not what this gives"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_program_is_refused_by_name(case: str) -> None:
    breaks, node, words = BROKEN[case]
    program = _block()
    breaks(program)
    with pytest.raises(CompileError) as caught:
        check_placements(program)
    assert words in str(caught.value)
    assert f"{node} " in f"{str(caught.value).partition('where:')[2].splitlines()[0].strip()} ", str(caught.value)


def test_error_says_where() -> None:
    program = _block()
    _drop("d_sum")(program)
    with pytest.raises(CompileError, match=r"out \(layers\.0, model\.py:7\)"):
        check_placements(program)


def test_pool_must_hold_the_keys() -> None:
    program = _block(paged=True)
    _place(program, "kv_pool", Shard(3, Layout(tuple(reversed(_layouts()[1].runs)))))
    with pytest.raises(CompileError, match=r"kv_pool hold different heads"):
        check_placements(program)


def test_unknown_operator() -> None:
    program = _block()
    node = _node(program, "act")
    odd = program.call(aten.tril.default, node, name="odd", before=node.next)
    program.infer()
    odd.meta["placement"] = node.meta["placement"]
    _node(program, "d").replace_input_with(node, odd)
    with pytest.raises(CompileError, match=r"(?s)no rule says.*odd"):
        check_placements(program)
    odd.args = (_node(program, "h"),)
    odd.meta["placement"] = R
    del odd.meta["val"]
    _node(program, "d").replace_input_with(odd, node)
    program.infer()
    check_placements(program)


def test_program_without_placements() -> None:
    program = Program("plain", mesh={"tp": 2})
    x = program.add_input("x", Input(("T", 4), torch.float64, "x"))
    relu = program.call(aten.relu.default, x, name="relu")
    program.graph.output(relu)
    program.infer()
    check_placements(program)
    extra = program.call(ops.all_reduce, relu, axis="tp", name="extra", before=relu.next)
    program.infer()
    with pytest.raises(CompileError, match="extra"):
        check_placements(program)
    program.graph.erase_node(extra)
    program.add_weight("w", Weight((2,), torch.float64, ShardOf(Ckpt("w"), 0, Layout.blocks(4, 2))))
    with pytest.raises(CompileError, match="differs from rank to rank"):
        check_placements(program)


@pytest.mark.parametrize("heads,kv_heads,ranks", [(4, 4, 2), (8, 2, 8), (9, 3, 8), (52, 52, 3), (28, 4, 8), (5, 1, 4)])
def test_heads_that_belong_together(heads: int, kv_heads: int, ranks: int) -> None:
    chosen = Heads.choose(heads, kv_heads, ranks)
    assert mismatch(chosen.query, chosen.kv) is None
    if kv_heads > 1 and len(set(chosen.kv.runs)) > 1:
        assert mismatch(chosen.query, Layout(tuple(reversed(chosen.kv.runs)))) is not None


def test_views_follow_addresses() -> None:
    heads = Layout.blocks(4, 2)
    assert list(view_options(("T", 2, 8), ("T", 16), Shard(1, heads))) == [Shard(1, heads.scale(8))]
    assert Shard(1, heads) in list(view_options(("T", 16), ("T", 2, 8), Shard(1, heads.scale(8))))
    assert list(view_options((1, "T", 2, 8), ("T", 16), Shard(2, heads))) == [Shard(1, heads.scale(8))]
    # [3 projections, heads, 8] flattened gives segments, not blocks
    flat = Layout.concat([heads.scale(8)] * 3)
    assert list(view_options(("T", 3, 2, 8), ("T", 48), Shard(2, heads))) == [Shard(1, flat)]
    assert Shard(2, heads) in list(view_options(("T", 48), ("T", 3, 2, 8), Shard(1, flat)))
    # blocks of a fused projection do not lie in whole heads of each of the three
    assert Shard(2, heads) not in list(view_options(("T", 48), ("T", 3, 2, 8), Shard(1, Layout.blocks(96, 2))))
