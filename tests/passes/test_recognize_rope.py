"""recognize_rope: rotations written out become one operator with one table."""

from __future__ import annotations

import pytest

from graphsrt import ops
from graphsrt.passes.recognize_rope import recognize_rope
from graphsrt.program import aten
from graphsrt.recipes import RopeTable
from graphsrt.testing import check
from tests.support import captures

NAME = "recognize_rope"
CASTS = 1e-5  # cosine and sine are float32 in both; products are associated differently where a cast lies between


def test_text() -> None:
    done = check(recognize_rope, captures.before(NAME, "llama"), fires=2, tolerance=CASTS)
    assert "aten.cos(" in done.before and "aten.neg(" in done.before
    assert "aten.cos(" not in done.after and "aten.transpose" not in done.after
    at = "layers.0.self_attn"
    assert (
        f"{at}.rope: f64[T, 4, 16] = graphsrt.rope({at}.view, positions, rotary_emb.table)\n"
        f"{at}.rope_1: f64[T, 2, 16] = graphsrt.rope({at}.view_1, positions, rotary_emb.table)\n"
        f"{at}.attention: f64[T, 4, 16] = graphsrt.attention({at}.rope, {at}.rope_1, {at}.view_2, "
        "layer_id=0, scale=0.25)"
    ) in done.after


@pytest.mark.parametrize(("family", "width"), [("phi3", 6), ("gpt_neox", 6), ("gemma2", 16)])
def test_one_table(family: str, width: int) -> None:
    """Phi-3 and GPT-NeoX rotate half of their 12 channels: a narrower table, and nothing is cut and put together."""
    done = check(recognize_rope, captures.before(NAME, family, layers=2), fires=4, tolerance=CASTS, tokens=(1, 7))
    tables = {name: w for name, w in done.program.weights.items() if isinstance(w.recipe, RopeTable)}
    assert [w.shape for w in tables.values()] == [(64, width)]
    assert len(done.program.calls(ops.rope)) == 4 and not done.program.calls(aten.cat.default)


def test_other_frequencies_are_confirmed() -> None:
    """A rotation with its sine scaled is none: structure alone would have taken it for one."""
    program = captures.before(NAME, "llama")
    sine = program.calls(aten.sin.default)[0]
    scaled = program.call(aten.mul.Tensor, sine, 1.25, name="scaled", before=sine.next, like=sine)
    program.infer([scaled])
    for user in list(sine.users):
        if user is not scaled:
            user.replace_input_with(sine, scaled)
    check(recognize_rope, program, fires=0, near_miss="looks like a rotation but computes something else")


def test_not_halves() -> None:
    program = captures.before(NAME, "llama")
    for neg in program.calls(aten.neg.default):
        cat = next(iter(neg.users))
        first, second = cat.all_input_nodes
        cat.args = ([second, first], cat.args[1])
    check(recognize_rope, program, fires=0, near_miss="the two halves of the rotation are not slices of one value")
