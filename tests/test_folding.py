"""The folded view: what is identical is shown once, what differs in anything is not folded."""

from __future__ import annotations

import pytest
import torch

from graphsrt import ops
from graphsrt.folding import fold, slices_text
from graphsrt.placement import Heads, Layout, Partial, R, Shard
from graphsrt.program import Input, PassReport, Program, Weight, aten
from graphsrt.recipes import Cat, Ckpt, OnOwner, ShardOf, ShardStart, Transpose


def stack(kinds: list[float], *, tables: dict[int, str] | None = None, tp: int = 1) -> Program:
    """A layer per entry: linear, a constant that tells its kind, residual. ``tables``: the addend of each layer."""
    p = Program("toy", mesh={"tp": tp} if tp > 1 else {})
    x = p.add_input("x", Input(("T", 32), torch.bfloat16, "tokens"))
    place = Shard(1, Layout.blocks(32 * tp, tp)) if tp > 1 else None
    names = dict.fromkeys((tables or {}).values())
    shared = {name: p.add_weight(name, Weight((32,), torch.bfloat16, Ckpt(name))) for name in names}
    h = p.call(aten.mul.Tensor, x, 2.0, name="embed")
    for layer, kind in enumerate(kinds):
        path = f"layers.{layer}"
        recipe = Ckpt(f"model.{path}.up.weight")
        weight = Weight((32, 32), torch.bfloat16, ShardOf(recipe, 0, place.layout) if place else recipe)
        weight.placement = Shard(0, place.layout) if place else None
        w = p.add_weight(f"model.{path}.up.weight", weight)
        up = p.call(aten.linear.default, h, w, name=f"{path}.up")
        if place:
            up.meta["placement"] = place
        kept = p.call(aten.mul.Tensor, up, kind, name=f"{path}.mul")
        if tables:
            kept = p.call(aten.add.Tensor, kept, shared[tables[layer]], name=f"{path}.shift")
        h = p.call(aten.add.Tensor, h, kept, name=f"{path}.add")
        h.meta["made_by"] = ("first", "fuse_add")
    p.graph.output(p.call(aten.neg.default, h, name="norm"))
    p.infer()
    return p


def headers(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip().startswith("# ")]


def test_identical_layers_fold_into_the_first():
    p = stack([1.0] * 4)
    p.history.append(PassReport("fuse_add"))
    assert (
        fold(p)
        == """\
# after fuse_add   toy
def step(x: bf16[T, 32]):

  embed: bf16[T, 32] = mul(x, 2.0)

  # layers.0   (layers 1–3 identical)
  weights:
    up.weight: bf16[32, 32] = ckpt("…up.weight")
  up:  bf16[T, 32] = linear(embed, up.weight)
  mul: bf16[T, 32] = mul(up, 1.0)
  add: bf16[T, 32] = add(embed, mul)           # fuse_add

  norm: bf16[T, 32] = neg(layers.3.add)

  return norm
"""
    )


def test_alternating_layers_fold_as_a_group():
    assert headers(fold(stack([1.0, 2.0] * 3))) == [
        "# toy", "# layers 0–1 repeat as layers 2–5, 2 at a time", "# layers.0", "# layers.1",
    ]  # fmt: skip


def test_a_group_folds_inside_and_a_rest_stays():
    assert headers(fold(stack([1.0, 1.0, 2.0] * 2 + [1.0]))) == [
        "# toy", "# layers 0–2 repeat as layers 3–5, 3 at a time", "# layers.0   (layer 1 identical)", "# layers.2",
        "# layers.6",
    ]  # fmt: skip


def test_nothing_folds_where_every_layer_differs():
    text = fold(stack([1.0, 2.0, 3.0]))
    assert headers(text) == ["# toy", "# layers.0", "# layers.1", "# layers.2"]
    assert "add(layers.0.add, mul)" in text


@pytest.mark.parametrize("count", [2, 4])
def test_layers_that_differ_only_in_a_shared_value_are_not_identical(count):
    tables = {layer: ("local", "global")[layer % 2] for layer in range(count)}
    shown = headers(fold(stack([1.0] * count, tables=tables)))
    assert "# layers.0" in shown and "# layers.1" in shown
    same = dict.fromkeys(range(count), "local")
    assert "identical" in fold(stack([1.0] * count, tables=same))


@pytest.mark.parametrize("change", ["recipe", "dtype", "placement", "made_by", "layer_id"])
def test_any_difference_keeps_a_layer_apart(change):
    p = stack([1.0] * 3)
    weight = p.weights["model.layers.1.up.weight"]
    node = next(n for n in p.nodes if n.name == "layers.1.up")
    if change == "recipe":
        weight.recipe = Ckpt("model.layers.0.up.weight")
    elif change == "dtype":
        weight.dtype = torch.float32
    elif change == "placement":
        node.meta["placement"] = R
    elif change == "made_by":
        node.meta["made_by"] = ("other",)
    else:
        q = p.call(aten.view.default, node, [-1, 4, 8], name="layers.1.q", before=node.next)
        p.call(ops.attention, q, q, q, name="layers.1.attention", before=q.next, layer_id=0, scale=1.0)
        p.infer()
    assert headers(fold(p)) == ["# toy", "# layers.0", "# layers.1", "# layers.2"]


def test_layer_id_counts_as_the_number_of_the_layer():
    p = stack([1.0] * 3)
    for layer in range(3):
        node = next(n for n in p.nodes if n.name == f"layers.{layer}.up")
        q = p.call(aten.view.default, node, [-1, 4, 8], name=f"layers.{layer}.q", before=node.next)
        p.call(ops.attention, q, q, q, name=f"layers.{layer}.attention", before=q.next, layer_id=layer, scale=1.0)
    p.infer()
    assert headers(fold(p)) == ["# toy", "# layers.0   (layers 1–2 identical)"]


def test_a_value_named_after_the_layer_before_does_not_part_a_layer():
    p = stack([1.0] * 4)
    for layer in range(1, 4):
        node = next(n for n in p.nodes if n.name == f"layers.{layer}.mul")
        p.call(aten.neg.default, node, name=f"layers.{layer - 1}.late", before=node.next)
    p.infer()
    assert headers(fold(p)) == ["# toy", "# layers.0", "# layers.1   (layers 2–3 identical)"]


def test_one_layer_and_one_rank():
    p = stack([1.0, 1.0], tp=2)
    text = fold(p, layer=1)
    assert headers(text) == ["# toy   {tp: 2}", "# layers.1"]
    assert 'up.weight: bf16[64/2, 32] S(0) = shard(ckpt("…up.weight"), dim=0, layout=64/2)' in text
    assert "up:  bf16[T, 64/2] S(1) = linear(layers.0.add, up.weight)" in text
    local = fold(p, layer=1, rank=1)
    assert headers(local)[0] == "# toy   {tp: 2}   rank 1"
    assert "up.weight: bf16[32, 32] = model.layers.1.up.weight[32:64, :]" in local
    assert "up:  bf16[T, 32] = linear" in local
    with pytest.raises(ValueError, match="no layer 7; its layers are layers 0–1"):
        fold(p, layer=7)
    with pytest.raises(ValueError, match="rank 2 is not one of the 2 ranks"):
        fold(p, rank=2)


def test_colour_and_width_only_when_asked():
    p = stack([1.0] * 3)
    assert "\x1b" not in fold(p) and "\x1b[" in fold(p, color=True)
    narrow = fold(p, width=24)
    assert max(len(line) for line in narrow.splitlines()) == 24 and "…" in narrow
    plain = [line.replace("\x1b[0m", "") for line in fold(p, color=True, width=24).splitlines()]
    for code in ("\x1b[1;36m", "\x1b[33m", "\x1b[2m"):
        plain = [line.replace(code, "") for line in plain]
    assert plain == narrow.splitlines()


def test_what_a_rank_reads():
    even, padded = Layout.blocks(8, 2), Layout.blocks(3, 2)
    cases = [
        (Ckpt("w"), "w", "w"),
        (ShardOf(Ckpt("w"), 1, even), "w[:, 0:4]", "w[:, 4:8]"),
        (ShardOf(Ckpt("w"), 0, padded, "zero"), "w[0:2, :]", "cat([w[2:3, :], 0 · w[2:3, :]], dim=0)"),
        (ShardOf(Ckpt("w"), 0, padded), "w[0:2, :]", "cat([w[2:3, :], w[2:3, :]], dim=0)"),
        (ShardOf(Transpose(Ckpt("w"), 0, 1), 0, even), "transpose(w[:, 0:4], 0, 1)", "transpose(w[:, 4:8], 0, 1)"),
        (Cat((ShardOf(Ckpt("a"), 0, even), Ckpt("b")), 0), "cat([a[0:4, :], b], dim=0)", "cat([a[4:8, :], b], dim=0)"),
        (ShardOf(Cat((Ckpt("a"),), 0), 0, even), "(cat([a], dim=0))[0:4, :]", "(cat([a], dim=0))[4:8, :]"),
        (ShardOf(ShardOf(Ckpt("w"), 0, even), 1, even), "w[0:4, 0:4]", "w[4:8, 4:8]"),
        (OnOwner(Ckpt("b")), "b", "0 · b"),
        (ShardStart(even), "0", "4"),
    ]  # fmt: skip
    for recipe, first, second in cases:
        assert (slices_text(recipe, 0, 2), slices_text(recipe, 1, 2)) == (first, second)
    kv = Heads.choose(4, 1, 2).kv.scale(8)
    assert slices_text(ShardOf(Ckpt("k"), 0, kv), 1, 2) == "k[0:8, :]"


def test_labels_and_partial_values():
    p = stack([1.0], tp=2)
    p.nodes[0].meta["placement"] = Partial()
    p.nodes[-1].meta["placement"] = R
    text = fold(p)
    assert "embed: bf16[T, 32] P(sum) = mul(x, 2.0)" in text and "norm: bf16[T, 32] R = neg(layers.0.add)" in text
