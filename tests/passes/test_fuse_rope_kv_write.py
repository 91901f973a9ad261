"""fuse_rope_kv_write: rotations before an attention over the pool, and the writing of its keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphsrt import ops
from graphsrt.errors import CompileError
from graphsrt.lowering.decompose import decompose
from graphsrt.passes.fuse_rope_kv_write import fuse_rope_kv_write
from graphsrt.passes.page_attention import page_attention
from graphsrt.passes.runner import run
from graphsrt.program import Program
from graphsrt.testing import check, check_ranks, step_text, trace
from tests.support import captures, fusing

H, K, D = 6, 2, 8


def made(spoil: str = "", dtype: torch.dtype = torch.float64) -> Program:
    """Paged attention of queries and keys that are rotated; ``spoil`` says what is not as it should be."""

    def block(q: Any, k: Any, v: Any, positions: Any, table: Any) -> Any:
        if spoil == "q twice":
            q = ops.rope(q, positions, table)
        q = q * 2 if spoil == "no rope of q" else ops.rope(q, positions, table)
        k = k if spoil == "no rope of k" else ops.rope(
            k, positions * 1 if spoil == "positions" else positions, table, interleaved=spoil == "interleaved"
        )  # fmt: skip
        out = ops.attention(q, k, v, layer_id=0, scale=0.5)
        out = out + k.sum() if spoil == "k read" else out + q if spoil == "q read" else out
        return out + table.sum()

    inputs: dict[str, Any] = {"q": ("T", H, D), "k": ("T", K, D), "v": ("T", K, D), "positions": ("T",)}
    program = trace(block, inputs=inputs, weights={"table": (37, 6)}, dtype=dtype)
    page_attention(program)
    return program


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_text(dtype: torch.dtype) -> None:
    done = check(fuse_rope_kv_write, made(dtype=dtype), fires=1, tolerance=0, tokens=fusing.counts(1))
    kind = "bf16" if dtype == torch.bfloat16 else "f64"
    assert done.before.count("graphsrt.rope(") == 2 and "radix_attention(rope, rope_1, v, kv_pool," in done.before
    assert done.after.splitlines()[:2] == [
        f"rope: {kind}[T, 6, 8] = graphsrt.rope_kv_write(q, k, v, positions, table, kv_pool, out_cache_loc, "
        "layer_id=0, interleaved=False)",
        f"attention: {kind}[T, 6, 8] = graphsrt.radix_attention(rope, None, None, kv_pool, req_to_token, "
        "req_pool_indices, seq_lens, query_start_loc, out_cache_loc, layer_id=0, scale=0.5)",
    ]


def test_near_misses() -> None:
    for spoil, reason in (
        ("no rope of q", "q is not rotated last, it comes from aten.mul.Tensor"),
        ("no rope of k", "k is not rotated last, it comes from k"),
        ("positions", "q has positions=positions, k has positions=mul"),
        ("interleaved", "q has interleaved=False, k has interleaved=True"),
        ("k read", "sum_1 reads rope_1 too"),
        ("q read", "add reads rope too"),
    ):
        check(fuse_rope_kv_write, made(spoil), fires=0, near_miss=reason)
    assert check(fuse_rope_kv_write, made("q twice"), fires=1).after.count("graphsrt.rope(") == 1


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "olmo2"])
def test_models(family: str) -> None:
    """A site for each layer; norms of heads come along where they were joined with the rotations."""
    before = captures.before("fuse_rope_kv_write", family)
    done = check(fuse_rope_kv_write, before, fires=1, tokens=fusing.counts(2), tolerance=0)
    assert ("q_weight=" in done.after) == (family == "qwen3") and "qk_norm_rope" not in done.after
    fusing.check_padding(before, done.program, fusing.counts(2))


def test_what_is_read_must_be_written_before() -> None:
    """The pool is memory that no edge of the graph shows: a write that goes, or comes too late, is refused."""

    def lose(program: Program) -> int:
        (node,) = program.calls(ops.rope_kv_write)
        rotated = program.call(ops.rope, node.args[0], *node.args[3:5], name="r", before=node, like=node)
        program.infer([rotated])
        program.replace(node, rotated)
        return 1

    def late(program: Program) -> int:
        lose(program)
        (attention,) = program.calls(ops.radix_attention)
        keys = attention.args[0].args[0]  # of the shape of queries: the pool is never asked
        after = next(iter(attention.users))
        program.call(ops.kv_write, keys, keys, attention.args[3], attention.args[8], name="w", before=after,
                     like=attention, layer_id=0)  # fmt: skip
        return 1

    for wrong in (lose, late):
        with pytest.raises(CompileError, match="keys of layer 0 are read and nothing before has written them"):
            run(made(), [fuse_rope_kv_write, wrong])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_lowering_takes_it_apart(family: str) -> None:
    """Without a kernel for it rotations are compiled, and the attention writes its keys as before the fusion."""
    fused = captures.stage("fuse_rope_kv_write", family)
    apart = decompose(fused, "cpu")
    text = step_text(apart)
    assert "rope_kv_write(" not in text and "kv_write(" not in text and "None, None, kv_pool" not in text
    assert check_ranks(fused, apart, tolerance=0) == 0 and decompose(apart, "cpu") is apart
    assert "rope_kv_write(" in step_text(decompose(fused, "cuda"))  # Triton's kernel does all of it


def test_taken_apart_where_no_attention_follows() -> None:
    """Keys that another operator reads first are written by themselves."""
    fused = check(fuse_rope_kv_write, made(), fires=1).program
    (attention,) = fused.calls(ops.radix_attention)
    more = fused.call(
        ops.kv_write, fused.graph.find_nodes(op="placeholder", target="k")[0],
        fused.graph.find_nodes(op="placeholder", target="v")[0], *(attention.args[i] for i in (3, 8)),
        name="again", before=attention, like=attention, layer_id=0,
    )  # fmt: skip
    fused.infer([more])
    apart = decompose(fused, "cpu")
    assert step_text(apart).count("graphsrt.kv_write(") == 2 and "None, None, kv_pool" in step_text(apart)
    assert check_ranks(fused, apart, tolerance=0) == 0


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    tokens=st.integers(1, 9), heads=st.integers(1, 3), kv=st.integers(1, 3), half=st.integers(1, 4),
    rest=st.integers(0, 3), values=st.integers(1, 9), interleaved=st.booleans(), normed=st.booleans(),
    dtypes=st.sampled_from([("float64", "float64"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"),
                            ("float32", "float8_e4m3fn")]),
)  # fmt: skip
def test_is_rope_then_write(tokens: int, heads: int, kv: int, half: int, rest: int, values: int, interleaved: bool,
                            normed: bool, dtypes: tuple[str, str]) -> None:  # fmt: skip
    """The operator and its shape function against the operators that it takes the place of, bit for bit."""
    generator = torch.Generator().manual_seed(tokens * 31 + heads)
    dtype, stored = (getattr(torch, name) for name in dtypes)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    size = 2 * half + rest
    one = values == size
    pools = [torch.zeros(3, 2, 16, kv, size) if one else torch.zeros(3, 1, 16, kv, size + values) for _ in range(2)]
    pools = [pool.to(stored) for pool in pools]
    q, k, v = random(tokens, heads * kv, size), random(tokens, kv, size), random(tokens, kv, values)
    slots = torch.randperm(16, generator=generator)[:tokens]
    slots[::3] = -1
    positions = torch.randint(0, 11, (tokens,), generator=generator)
    table = random(11, 2 * half)
    weights = {"q_weight": random(size), "k_weight": random(size)} if normed else {}
    how: dict[str, Any] = {"eps": 1e-5, "cast": "after_weight", "offset": 1.0} if normed else {}
    place: dict[str, Any] = {"layer_id": 2, "kv_layer": 1}
    if stored == torch.float8_e4m3fn:
        place |= {"k_scale": torch.full((1, 1), 0.25), "v_scale": torch.full((1, 1), 3.0)}
    got = ops.rope_kv_write(
        q, k, v, positions, table, pools[0], slots, **weights, **how, **place, interleaved=interleaved
    )
    turned = []
    for x, weight in ((q, weights.get("q_weight")), (k, weights.get("k_weight"))):
        x = x if weight is None else ops.rms_norm(x, weight, **how)
        turned.append(ops.rope(x, positions, table, interleaved=interleaved))
    ops.kv_write(turned[1], v, pools[1], slots, **place)
    assert torch.equal(got, turned[0]) and got.dtype == turned[0].dtype
    assert torch.equal(pools[0].double(), pools[1].double()) and (tokens == 1 or bool(pools[0][1].double().any()))
    assert not pools[0][[0, 2]].double().any()
    faked = torch.ops.graphsrt.rope_kv_write(
        *(t.to("meta") for t in (q, k, v, positions, table, pools[0], slots)), interleaved=interleaved, **how,
        **{name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in
           {**weights, **place}.items()},
    )  # fmt: skip
    assert (faked.shape, faked.dtype) == (got.shape, got.dtype)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_engine(family: str) -> None:
    fusing.check_engine("fuse_rope_kv_write", family)
