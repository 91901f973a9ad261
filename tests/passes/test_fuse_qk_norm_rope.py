"""fuse_qk_norm_rope: norms of heads and rotations before an attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphsrt import ops
from graphsrt.passes.fuse_qk_norm_rope import fuse_qk_norm_rope
from graphsrt.passes.fuse_rope_kv_write import fuse_rope_kv_write
from graphsrt.program import Program
from graphsrt.testing import check, trace
from tests.support import captures, fusing

H, K, D, NORM = 6, 2, 8, {"eps": 3e-6, "cast": "before_weight", "offset": 0.0}


def made(
    dtype: torch.dtype = torch.float64, *, k_eps: float = 3e-6, order: str = "norm first", other: bool = False
) -> Program:
    """Queries and keys normed and rotated; ``order`` or another reader spoil it."""

    def block(q: Any, k: Any, v: Any, positions: Any, q_weight: Any, k_weight: Any, table: Any) -> Any:
        parts = []
        for x, weight, eps in ((q, q_weight, 3e-6), (k, k_weight, k_eps)):
            if order == "rope first":
                x = ops.rope(x, positions, table)
            normed = order != "no norm of k" or x is not k
            x = ops.rms_norm(x, weight, **{**NORM, "eps": eps}) if normed else x * weight
            parts.append(ops.rope(x, positions, table) if order != "no rope" else x)
        extra = parts[1].sum() if other else table.sum()  # every weight has a reader in every case
        return ops.attention(*parts, v, layer_id=0, scale=0.5) + extra

    inputs: dict[str, Any] = {"q": ("T", H, D), "k": ("T", K, D), "v": ("T", K, D), "positions": ("T",)}
    return trace(block, inputs=inputs, weights={"q_weight": (D,), "k_weight": (D,), "table": (37, 6)}, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_text(dtype: torch.dtype) -> None:
    program = made(dtype)
    done = check(fuse_qk_norm_rope, program, fires=1, tolerance=0, tokens=fusing.counts(1))
    kind = "bf16" if dtype == torch.bfloat16 else "f64"
    assert done.before.count("rms_norm(") == done.before.count("graphsrt.rope(") == 2
    assert done.after.splitlines()[:3] == [
        f"qk_norm_rope: ({kind}[T, 6, 8], {kind}[T, 2, 8]) = graphsrt.qk_norm_rope(q, k, q_weight, k_weight, "
        'positions, table, eps=3e-06, cast="before_weight", offset=0.0, interleaved=False)',
        f"rope: {kind}[T, 6, 8] = getitem(qk_norm_rope, 0)",
        f"rope_1: {kind}[T, 2, 8] = getitem(qk_norm_rope, 1)",
    ]


def test_near_misses() -> None:
    for options, reason in (
        ({"k_eps": 1e-5}, "q has eps=3e-06, k has eps=1e-05"),
        ({"order": "no norm of k"}, "k is not normed"),
        ({"order": "no rope"}, "q is not rotated, it comes from graphsrt.rms_norm"),
        ({"order": "rope first"}, "q is normed after its rotation"),
        ({"other": True}, "sum_1 reads rope_1 too"),
    ):
        check(fuse_qk_norm_rope, made(**options), fires=0, near_miss=reason)
    olmo = captures.before("fuse_qk_norm_rope", "olmo2")
    reason = "the norm of q runs over 24 channels of all heads, not over each head"
    check(fuse_qk_norm_rope, olmo, fires=0, near_miss=reason, tokens=(3,))


def test_rotations_that_are_taken() -> None:
    """Whichever fusion comes first says so to the other: norms come along only if they were joined before."""
    program = captures.before("fuse_qk_norm_rope", "qwen3")
    assert fuse_rope_kv_write(program) == 1
    program.remove_dead()
    program.lint()
    reason = "graphsrt.rope_kv_write has the rotations already, made by fuse_rope_kv_write: run it after this pass"
    check(fuse_qk_norm_rope, program, fires=0, near_miss=reason, tokens=(3,))


def test_models() -> None:
    """A site for each layer of Qwen3; none in a Llama, which norms neither queries nor keys."""
    done = check(fuse_qk_norm_rope, captures.before("fuse_qk_norm_rope", "qwen3"), fires=1, tokens=(3,), tolerance=0)
    assert "qk_norm_rope: (f64[T, 4/2, 16] S(1), f64[T, 2/2, 16] S(1)) = " in done.after
    misses: list[Any] = []
    assert fuse_qk_norm_rope(captures.before("fuse_qk_norm_rope", "llama"), near_misses=misses) == 0 and not misses


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    tokens=st.integers(1, 9), heads=st.integers(1, 5), kv=st.integers(1, 3), half=st.integers(1, 6),
    rest=st.integers(0, 3), eps=st.sampled_from([0.0, 1e-6, 1e-3]), interleaved=st.booleans(),
    cast=st.sampled_from(["before_weight", "after_weight"]), offset=st.sampled_from([0.0, 1.0]),
    dtypes=st.sampled_from([("float64", "float64"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]),
)  # fmt: skip
def test_is_norm_then_rope(tokens: int, heads: int, kv: int, half: int, rest: int, eps: float, interleaved: bool,
                           cast: str, offset: float, dtypes: tuple[str, str]) -> None:  # fmt: skip
    """The operator and its shape function against the operators that it takes the place of, bit for bit."""
    generator = torch.Generator().manual_seed(tokens * 31 + heads)

    def random(dtype: str, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))

    size = 2 * half + rest
    q, k = random(dtypes[0], tokens, heads, size), random(dtypes[0], tokens, kv, size)
    weights = [random(dtypes[1], size) for _ in range(2)]
    positions = torch.randint(0, 11, (tokens,), generator=generator)
    table = random(dtypes[0], 11, 2 * half)
    how: dict[str, Any] = {"eps": eps, "cast": cast, "offset": offset}
    got = ops.qk_norm_rope(q, k, *weights, positions, table, **how, interleaved=interleaved)
    for x, weight, found in zip((q, k), weights, got):
        want = ops.rope(ops.rms_norm(x, weight, **how), positions, table, interleaved=interleaved)
        assert torch.equal(found, want) and found.dtype == want.dtype
    faked = torch.ops.graphsrt.qk_norm_rope(
        *(t.to("meta") for t in (q, k, *weights, positions, table)), **how, interleaved=interleaved
    )
    assert [(f.shape, f.dtype) for f in faked] == [(g.shape, g.dtype) for g in got]


def test_engine() -> None:
    fusing.check_engine("fuse_qk_norm_rope", "qwen3")
