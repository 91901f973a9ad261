"""Program text: what is printed parses back to the same program, and what is wrong is refused where it is wrong."""

from __future__ import annotations

import math
import operator
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from graphsrt import ops
from graphsrt.capture import capture, meta_model
from graphsrt.errors import CompileError
from graphsrt.passes.normalize import normalize
from graphsrt.passes.recognize_gated_mlp import recognize_gated_mlp
from graphsrt.passes.recognize_rms_norm import recognize_rms_norm
from graphsrt.placement import Heads, Layout, Partial, R, Run, Shard
from graphsrt.printer import diff_text, literal_text, print_program, recipe_text
from graphsrt.program import Input, NearMiss, PassReport, Program, Weight, aten
from graphsrt.recipes import Cat, Ckpt, Const, OnOwner, RopeTable, ShardOf, ShardStart, Transpose
from graphsrt.text_parser import parse_literal

SIZES = dict(
    vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=0,
)  # fmt: skip
MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"head_dim": 8, "num_hidden_layers": 2}),
    "phi3": (Phi3Config, Phi3ForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
}


def assert_equal(one: Program, other: Program) -> None:
    """Everything that belongs to a program, compared without its text."""
    assert (one.name, one.mesh, one.constants) == (other.name, other.mesh, other.constants)
    assert list(one.inputs.items()) == list(other.inputs.items())
    assert list(one.weights.items()) == list(other.weights.items())
    assert one.history == other.history
    assert len(one.nodes) == len(other.nodes) and one.output.name == other.output.name

    def by_name(value):
        return repr(torch.fx.node.map_arg(value, lambda node: node.name))  # repr: NaN equals itself, -0.0 is not 0.0

    for a, b in zip(one.nodes, other.nodes):
        assert (a.name, a.target) == (b.name, b.target)
        assert by_name(a.args) == by_name(b.args) and by_name(dict(a.kwargs)) == by_name(dict(b.kwargs))
        for key, default in (("module", ""), ("source", ""), ("made_by", ()), ("placement", None)):
            assert a.meta.get(key, default) == b.meta.get(key, default), (a.name, key)
        if isinstance(a.meta["val"], torch.Tensor):
            assert one.shape(a) == other.shape(b) and a.meta["val"].dtype == b.meta["val"].dtype
    for node in one.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            twin = next(n for n in other.graph.nodes if n.name == node.name)
            assert twin.op == node.op and twin.meta.get("placement") == node.meta.get("placement")


def round_trip(program: Program) -> Program:
    text = str(program)
    parsed = Program.from_text(text)
    assert str(parsed) == text
    assert_equal(program, parsed)
    return parsed


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.bfloat16) for name in MODELS), ("llama", torch.float64)])
def test_captured_models_round_trip_at_every_stage(name, dtype):
    config, model_class, extra = MODELS[name]
    program = capture(meta_model(config(**{**SIZES, **extra}), model_class, dtype), context_length=64)
    round_trip(program)
    for run in (normalize, recognize_rms_norm, recognize_gated_mlp):
        before = program.copy()
        fired = run(program)
        program.history.append(PassReport(run.__name__, fired, None, len(before.nodes), len(program.nodes), 0.25))
        parsed = round_trip(program)
        assert bool(diff_text(before, program)) == bool(fired)
        assert diff_text(parsed, program) == ""
    recognised = recognize_rms_norm(Program.from_text(print_program(before)))  # a parsed program is a program
    assert recognised == 0


SPECIAL = [0.0, -0.0, 1e-05, 1e300, 5e-324, math.inf, -math.inf, math.nan, 0.08838834764831845]
UNEVEN = {
    "padded": Layout.blocks(10, 4),
    "replicated": Heads.choose(4, 2, 4).kv.scale(8),
    "padded_heads": Heads.choose(14, 2, 4).query.scale(8),
    "segmented": Layout.concat([Layout.blocks(32, 4), Layout.blocks(16, 4), Layout.blocks(16, 4)]),
}


def example() -> Program:
    """Every kind of recipe, placement, value and literal."""
    p = Program("hand made", mesh={"tp": 4})
    p.constants = {"context_length": 64, "vocab_size": 67}
    tokens = p.add_input("tokens", Input(("T",), torch.int64, "tokens"))
    pool = p.add_input("kv_pool", Input((2, 2, 32, 2, 8), torch.bfloat16, "kv_pool"))
    slots = p.add_input("forward_batch.out_cache_loc", Input(("T",), torch.int32, "forward_batch.out_cache_loc"))
    start_loc = p.add_input("starts", Input(("B", 2), torch.int32, "forward_batch.query_start_loc"))
    tokens.meta["placement"] = R
    pool.meta["placement"] = Shard(3, Layout.blocks(8, 4))
    even, vocabulary = Layout.blocks(64, 4), Layout.blocks(67, 4)
    values = tuple(1.5 if math.isnan(v) else v for v in SPECIAL)
    bf16 = torch.bfloat16
    recipes = {
        "embed": Weight((17, 32), bf16, ShardOf(Ckpt("embed"), 0, vocabulary, "zero"), Shard(0, vocabulary)),
        "start": Weight((1,), torch.int64, ShardStart(vocabulary), Partial()),
        "cat": Weight((32, 32), bf16, Cat((ShardOf(Ckpt("a"), 0, even), ShardOf(Ckpt("b"), 0, even)), 0),
                      Shard(0, Layout.concat([even, even]))),
        "bias": Weight((32,), bf16, OnOwner(Ckpt("bias")), Partial()),
        "conv1d": Weight((32, 16), bf16, ShardOf(Transpose(Ckpt("c"), 0, 1), 1, even), Shard(1, even)),
        "const": Weight((len(SPECIAL),), torch.float32, Const((len(SPECIAL),), values), R),
        "scalar": Weight((), torch.float32, Const((), (5.65625,))),
        "table": Weight((64, 8), torch.float32, RopeTable((1.0, 0.1, 0.01, 1e-3), 1.25, 64), R),
        'quoted "weight"': Weight((32,), torch.float8_e4m3fn, Ckpt('odd "name" \\ ·\n é')),
        "None": Weight((4,), torch.bool, Ckpt("none")),
        **{f"layers.0.{name}": Weight((layout.local_size, 32), bf16, ShardOf(Ckpt(name), 0, layout), Shard(0, layout))
           for name, layout in UNEVEN.items()},
    }  # fmt: skip
    w = {name: p.add_weight(name, weight) for name, weight in recipes.items()}
    h = p.call(ops.vocab_embedding, tokens, w["embed"], w["start"], name="embed_tokens")
    h.meta.update(placement=Partial(), made_by=("shard_tensor_parallel",), module="embed_tokens", source="m.py:1")
    r = p.call(ops.all_reduce, h, name="embed_sum", axis="tp", like=h)
    r.meta.update(placement=R, made_by=("shard_tensor_parallel", "a user's pass"), source="odd file · name.py:3")
    both = p.call(ops.add_rms_norm, r, r, w["bias"], name="layers.0.norm", eps=1e-05, cast="before_weight")
    both.meta.update(placement=(R, R), module="layers.0.norm")
    normed = p.call(operator.getitem, both, 0, name="layers.0.norm.item")
    normed.meta.update(placement=R)
    for name, layout in UNEVEN.items():
        out = p.call(aten.linear.default, normed, w[f"layers.0.{name}"], name=f"layers.0.{name}_proj")
        out.meta.update(placement=Shard(1, layout), module=f"layers.0.{name}_proj", source="m.py:2")
    k = p.call(aten.view.default, p.call(aten.slice.Tensor, normed, 1, 0, 16, name="sliced"), [-1, 2, 8], name="k")
    p.call(ops.kv_write, k, k, pool, slots, name="write", layer_id=0)
    c = p.call(aten.to.dtype, w["const"], torch.float64, name="f32")
    for index, value in enumerate(SPECIAL):
        c = p.call(aten.add.Tensor, c, value, name=f"add.{index}")
    m = p.call(aten.max.dim, c, 0, True, name="max")
    p.call(aten.to.dtype, p.call(operator.getitem, m, 0, name="max.item"), dtype=torch.bool, name="b")
    options = {"device": torch.device("cpu"), "dtype": torch.float8_e5m2, "layout": torch.strided}
    p.call(aten.zeros.default, (2, 3), **options, name="z")
    p.call(aten.clone.default, start_loc, memory_format=torch.contiguous_format, name="cloned")
    p.call(aten.index.Tensor, r, [None, w["start"]], name="picked")
    p.call(aten.cat.default, [r, r], -1, name="wide")
    p.call(aten.add.Tensor, tokens, True, alpha=2, name="return")
    p.infer()
    for node in p.nodes:
        node.meta.setdefault("placement", None)
    p.graph.output(r)
    miss = NearMiss("x", "layers.0", 'has "another" user\n# not a comment')
    p.history = [PassReport("normalize", 3, None, 10, 7, 1.5), PassReport("fuse", 0, 2, 7, 7, 0.0, [miss], ["a note"])]
    return p


def test_hand_made_program_round_trips():
    p = example()
    parsed = round_trip(p)
    assert repr(parsed.weights["const"].recipe.values[1]) == "-0.0"
    assert repr([node.args[1] for node in parsed.nodes if node.name.startswith("add.")]) == repr(SPECIAL)


def test_the_look_of_the_text():
    text = str(example())
    for line in (
        "program `hand made` {tp: 4}",
        "constants context_length=64, vocab_size=67",
        '  tokens: i64[T] R = input("tokens")',
        '  kv_pool: bf16[2, 2, 32, 8/4, 8] S(3) = input("kv_pool")',
        '  cat: bf16[128/4{0:16,64:80|16:32,80:96|32:48,96:112|48:64,112:128}, 32] S(0) = '
        'cat([shard(ckpt("a"), dim=0, layout=64/4, unowned="copy"), '
        'shard(ckpt("b"), dim=0, layout=64/4, unowned="copy")], dim=0)',
        '  conv1d: bf16[32, 64/4] S(1) = shard(transpose(ckpt("c"), 0, 1), dim=1, layout=64/4, unowned="copy")',
        '  bias: bf16[32] P(sum) = on_owner(ckpt("bias"))',
        '  table: f32[64, 8] R = rope_table(inv_freq=[1.0, 0.1, 0.01, 0.001], scaling=1.25, max_positions=64)',
        '  scalar: f32[] = const([], [5.65625])',
        '  layers.0.norm: (bf16[T, 32] R, bf16[T, 32] R) = graphsrt.add_rms_norm(embed_sum, embed_sum, bias, '
        'eps=1e-05, cast="before_weight")  # in layers.0.norm',
        '  layers.0.padded_proj: bf16[T, 10/4{0:3|3:6|6:9|9:10,~8:10}] S(1) = '
        'aten.linear(layers.0.norm.item, layers.0.padded)  # m.py:2',
        "  write: none = graphsrt.kv_write(k, k, kv_pool, forward_batch.out_cache_loc, layer_id=0)",
        "  return embed_sum",
        '  pass name="normalize", fired=3, expected=None, nodes_before=10, nodes_after=7, milliseconds=1.5',
    ):  # fmt: skip
        assert line in text.split("\n"), line


def test_text_without_history_is_the_same_for_two_runs():
    one, other = example(), example()
    other.history[0].milliseconds = 99.0
    assert print_program(one, history=False) == print_program(other, history=False)
    assert str(one) != str(other) and diff_text(one, other) == ""
    assert Program.from_text(print_program(one, history=False)).history == []


def test_a_value_that_does_not_fit_its_layout_prints_and_parses():
    p = example()
    node = next(n for n in p.nodes if n.name == "layers.0.padded_proj")
    node.meta["placement"] = Shard(1, Layout.blocks(64, 4))
    assert "bf16[T, 3?64/4] S(1)" in str(p)
    round_trip(p)


def test_a_program_in_the_middle_of_a_pass_prints():
    p = Program("p")
    x = p.add_input("x", Input(("T",), torch.int64, "tokens"))
    p.call(aten.neg.default, x, name="y")
    assert "  y: ? = aten.neg(x)" in str(p)
    p.graph.output(p.nodes[0])
    assert Program.from_text(str(p)).shape(Program.from_text(str(p)).output) == ("T",)


def test_printing_refuses_what_text_cannot_say():
    with pytest.raises(ValueError, match="cannot say"):
        literal_text(object())
    with pytest.raises(ValueError, match="no word for"):
        literal_text(torch.quint8)


GOOD = """program p {tp: 2}
constants vocab_size=8

inputs:
  x: bf16[T, 8] R = input("tokens")

weights:
  w: bf16[8/2, 8] S(0) = shard(ckpt("w"), dim=0, layout=8/2)

step:
  q_proj: bf16[T, 8/2] S(1) = aten.linear(x, w)  # by a, b
  o: bf16[T, 8/2] S(1) = aten.add.Tensor(q_proj, 1.0)
  return o
"""
BAD = [
    ("aten.linear(x, w)", "aten.linaer(x, w)", 11, ["unknown operator aten.linaer", "aten.linear"]),
    ("aten.add.Tensor", "aten.add.Tnesor", 12, ["unknown operator aten.add.Tnesor", "aten.add.Tensor"]),
    ("aten.add.Tensor", "nosuch", 12, ["unknown operator nosuch"]),
    ("Tensor(q_proj, 1.0)", "Tensor(q_prj, 1.0)", 12, ["no value is called q_prj before", "did you mean q_proj?"]),
    ("  o: bf16", "  q_proj: bf16", 12, ["two values are called q_proj"]),
    ("  w: bf16", "  x: bf16", 8, ["two values are called x"]),
    ("o: bf16[T, 8/2] S(1)", "o: bf16[T, 8]", 12, ["another type", "expected: bf16[T, 4]", "got:      bf16[T, 8]"]),
    ("o: bf16[T, 8/2] S(1)", "o: f32[T, 8/2] S(1)", 12, ["expected: bf16[T, 8/2] S(1)"]),
    ("o: bf16[T, 8/2] S(1)", "o: bf16[T, 8/2] S(5)", 12, ["S(5)", "no layout"]),
    ("o: bf16[T, 8/2] S(1)", "o: bf16(T) S(1)", 12, ["cannot be read"]),
    ("q_proj, 1.0)", "q_proj, 1.0", 12, ["syntax error", "')'", "the end of the line"]),
    ("q_proj, 1.0)", "q_proj, 1.0) x", 12, ["syntax error after the statement", "'x'"]),
    ("q_proj, 1.0)", "q_proj, alpha=1, 2)", 12, ["positional argument follows alpha="]),
    ("q_proj, 1.0)", "q_proj, 1.0, beta=1)", 12, ["does not accept its arguments"]),
    ("q_proj, 1.0)", "q_proj, ?)", 12, ["expected: a value", "'?'"]),
    ("q_proj, 1.0)", 'q_proj, "\\x")', 12, ["syntax error in a string"]),
    ("aten.linear(x, w)", "aten.linear(x, x, x, x)", 11, ["aten.linear does not accept"]),
    (" = aten.add", " aten.add", 12, ["' = ' after the type"]),
    ("  o: bf16", "  o bf16", 12, ["name: type = expression"]),
    ("layout=8/2", "layout=8/2{0:4|0:4}", 8, ["a layout that cannot be", "owned twice"]),
    ("8/2, 8] S(0)", "8/0, 8] S(0)", 8, ["cannot be read"]),
    ('ckpt("w")', "ckpt(3)", 8, ["name of ckpt is not str", "ckpt(name)"]),
    ('ckpt("w")', 'chkpt("w")', 8, ["unknown recipe chkpt", "rope_table"]),
    ("dim=0, layout", "dmi=0, layout", 8, ["shard does not have these arguments", "shard(x, dim, layout"]),
    ("dim=0, layout=8/2", "dim=0", 8, ["layout of shard is not layout", "nothing"]),
    ('= shard(ckpt("w"), dim=0, layout=8/2)', "= 3", 8, ["a weight is made by a recipe"]),
    ("  w: bf16[8/2, 8] S(0)", "  w: bf16[T, 8]", 8, ["a weight's shape is fixed"]),
    ('input("tokens")', "input(tokens)", 5, ["expected: a literal"]),
    ('input("tokens")', "output()", 5, ["syntax error in an input"]),
    ("program p", "model p", 1, ["not how a program begins", "program <name>"]),
    ("{tp: 2}", "{tp: -2}", 1, ["mesh axis tp has no size"]),
    ("  return o", "  return zzz", 13, ["no value is called zzz"]),
    ("  return o\n", "", 12, ["does not return anything"]),
    ("  return o", "  return o\n  y: bf16[T] = aten.neg(x)", 14, ["after the program's return"]),
    ("  return o", "  return o\nhistory:\n  note 3", 15, ["the history begins with a pass"]),
    ("  return o", '  return o\nhistory:\n  pass nome="x"', 15, ["does not have these fields"]),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "line", "facts"), BAD, ids=[f"{new[:24]}" for _, new, _, _ in BAD])
def test_a_damaged_text_is_refused_where_it_is_damaged(old, new, line, facts):
    assert old in GOOD
    with pytest.raises(CompileError) as caught:
        Program.from_text(GOOD.replace(old, new, 1))
    message = str(caught.value)
    for fact in (f"line {line}: ", *facts):
        assert fact in message, message


def test_text_by_hand_may_hold_comments_and_other_spacing():
    text = "# a comment\n" + GOOD.replace("8/2] S(1)", "8/2]  S(1)").replace("[T, 8]", "[T,8]") + "# the end\n"
    p = Program.from_text(text)
    assert p.nodes[0].meta["made_by"] == ("a", "b") and str(Program.from_text(str(p))) == str(p)
    with pytest.raises(CompileError, match="empty text"):
        Program.from_text("\n# nothing\n")


@st.composite
def layouts(draw):
    ranks, size = draw(st.integers(1, 5)), draw(st.integers(1, 40))
    kind = draw(st.sampled_from(["blocks", "heads", "concat", "scaled"]))
    if kind == "heads":
        kv = draw(st.integers(1, 6))
        heads = Heads.choose(kv * draw(st.integers(1, 4)), kv, ranks)
        return draw(st.sampled_from([heads.query, heads.kv]))
    if kind == "concat":
        return Layout.concat([Layout.blocks(draw(st.integers(1, 20)), ranks) for _ in range(draw(st.integers(1, 3)))])
    return Layout.blocks(size, ranks).scale(draw(st.integers(1, 8)))


names = st.text(max_size=8)
finite = st.floats(allow_nan=False)
recipes = st.recursive(
    st.builds(Ckpt, names)
    | st.builds(ShardStart, layouts())
    | st.lists(finite, max_size=4).map(lambda v: Const((len(v),), tuple(v)))
    | st.builds(RopeTable, st.lists(finite, max_size=3).map(tuple), finite, st.integers(1, 99)),
    lambda inner: (
        st.builds(ShardOf, inner, st.integers(0, 2), layouts(), st.sampled_from(["copy", "zero"]))
        | st.builds(Cat, st.lists(inner, min_size=1, max_size=3).map(tuple), st.integers(0, 1))
        | st.builds(Transpose, inner, st.integers(0, 1), st.integers(0, 1))
        | st.builds(OnOwner, inner)
    ),
    max_leaves=5,
)
literals = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | st.text() | st.sampled_from([torch.bfloat16, torch.bool]),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(layout=layouts(), recipe=recipes, weight_name=names.filter(lambda n: n and not {"`", "\n"} & {*n}), role=names)
def test_any_recipe_layout_and_name_round_trips(layout, recipe, weight_name, role):
    p = Program("p", mesh={"tp": layout.ranks})
    x = p.add_input("in", Input(("T",), torch.int64, role))
    weight = Weight((3, layout.local_size), torch.float32, recipe, Shard(1, layout))
    p.add_weight(weight_name if weight_name != "in" else "other", weight)
    p.graph.output(p.call(aten.neg.default, x, name="out.value"))
    p.infer()
    round_trip(p)
    assert Layout.of([[Run(*run) for run in rank] for rank in layout.runs]) == layout
    assert recipe_text(recipe, short=True)


@settings(max_examples=100, deadline=None)
@given(literals)
def test_any_literal_round_trips(value):
    text = literal_text(value)
    assert "\n" not in text
    parsed = parse_literal(text)
    assert parsed == value and type(parsed) is type(value) and literal_text(parsed) == text


def test_a_deep_program_prints_and_parses_quickly():
    p = Program("deep")
    x = p.add_input("x", Input(("T", 32), torch.bfloat16, "tokens"))
    for layer in range(126):
        for index in range(10):
            w = p.add_weight(f"layers.{layer}.{index}.weight", Weight((32, 32), torch.bfloat16, Ckpt("w")))
            x = p.call(aten.linear.default, x, w, name=f"layers.{layer}.{index}.linear")
            x = p.call(aten.add.Tensor, x, 1.0, name=f"layers.{layer}.{index}.add")
    p.infer()
    p.graph.output(x)
    started = time.perf_counter()
    text = str(p)
    printed = time.perf_counter()
    assert str(Program.from_text(text)) == text
    # Far above what either takes, so that a busy machine does not fail it; quadratic work would.
    assert printed - started < 2 and time.perf_counter() - printed < 15
