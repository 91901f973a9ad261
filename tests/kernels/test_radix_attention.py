"""The CPU attention kernel against the plain reference, over random pages, with every unused number poisoned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graphsrt.errors import CompileError
from graphsrt.lowering.kernels import build
from graphsrt.lowering.kernels.radix_attention import cpu, fp8, kv_write, radix_attention, reference

NUM_LAYERS, LAYER = 3, 1
# Largest error beside the float64 truth on inputs of about 1. bfloat16 keeps 8 bits: rounding the output costs 2^-9
# of values that stay below 4, and so does rounding the weights; rounding what is read is part of the inputs.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


@dataclass
class Case:
    """Arguments of one step; the pool holds NaN wherever no token of a sequence is cached."""

    q: Tensor
    k: Tensor
    v: Tensor
    kv_pool: Tensor
    req_to_token: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    out_cache_loc: Tensor

    def args(self) -> tuple[Tensor, ...]:
        return tuple(vars(self).values())

    def clone(self) -> Case:
        return Case(*(x.clone() for x in self.args()))


def make_case(
    seqs: list[tuple[int, int]],
    heads: tuple[int, ...] = (6, 3, 16),
    *,
    dtype: torch.dtype = torch.float64,
    pool_dtype: torch.dtype | None = None,
    padding: int = 0,
    window: int | None = None,
    chunk: int | None = None,
    seed: int = 0,
) -> Case:
    """``seqs``: (length with the new tokens, new tokens) of each. Slots are a random permutation; q, k, v are slices of
    one fused tensor. With a window or chunks, slots that no new token can see hold NaN too. ``heads``: H, K, D, and Dv
    where values have a head size of their own."""
    g = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads, head_size = heads[:3]
    value_size = heads[3] if len(heads) == 4 else head_size
    pool_dtype = pool_dtype or dtype
    total, rows = sum(n for n, _ in seqs), sum(e for _, e in seqs)
    num_slots = total + 29
    slots = torch.randperm(num_slots, generator=g)
    fused = torch.full((rows + padding, num_heads + 2 * num_kv_heads, head_size), torch.nan, dtype=torch.float64)
    fused[:rows] = torch.randn((rows, *fused.shape[1:]), generator=g, dtype=torch.float64)
    q, k, v = fused.to(dtype).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    v = torch.cat([v, v.flip(-1)], -1)[..., :value_size] if len(heads) == 4 else v
    row = [2, num_slots, num_kv_heads, head_size]
    if len(heads) == 4:
        row = [1, num_slots, num_kv_heads, head_size + value_size]
    pool = torch.full((NUM_LAYERS, *row), torch.nan, dtype=pool_dtype)
    req_to_token = torch.full((len(seqs) + 3, max(n for n, _ in seqs) + 5), -7, dtype=torch.int32)
    requests = torch.randperm(len(seqs) + 3, generator=g)[: len(seqs)]
    locations, used = [], 0
    for request, (length, extend) in zip(requests.tolist(), seqs):
        mine = slots[used : used + length]
        used += length
        req_to_token[request, :length] = mine.int()
        seen = mine[: length - extend]
        if window is not None:
            seen = seen[max(0, length - extend - window + 1) :]
        if chunk is not None:
            seen = seen[(length - extend) // chunk * chunk :]
        cached = torch.randn((row[0], len(seen), *row[2:]), generator=g, dtype=torch.float64)
        pool[LAYER][:, seen] = cached.to(pool_dtype)
        locations.append(mine[length - extend :])
    locations.append(torch.full((padding,), -1))
    starts = torch.tensor([0, *(e for _, e in seqs)]).cumsum(0)
    lengths = torch.tensor([n for n, _ in seqs])
    return Case(q, k, v, pool, req_to_token, requests, lengths, starts, torch.cat(locations))


def run(function, case: Case, **options: Any) -> Tensor:
    return function(**({**vars(case), "layer_id": LAYER, "scale": case.q.shape[2] ** -0.5} | options))


def truth(case: Case, **options: Any) -> Tensor:
    """The reference in float64 on the numbers as they are stored."""
    wide = case.clone()
    reference.kv_write(case.k, case.v, wide.kv_pool, case.out_cache_loc, LAYER)
    double = Case(*(x.double() if x.is_floating_point() else x for x in wide.args()))
    return run(reference.radix_attention, double, k=None, v=None, **options)


def check(case: Case, **options: Any) -> Tensor:
    expected = truth(case, **options)
    mine, theirs = case.clone(), case.clone()
    out = run(radix_attention, mine, **options)
    run(reference.radix_attention, theirs, **options)
    rows = int(case.query_start_loc[-1])
    assert out.dtype == case.q.dtype and out.shape == (*case.q.shape[:2], case.v.shape[2]) and out.is_contiguous()
    # Not assert_close: a NaN must fail whatever the expected value is.
    assert torch.isfinite(out).all()
    assert not out[rows:].any()
    assert (out.double() - expected).abs().max() <= TOLERANCE[case.q.dtype]
    torch.testing.assert_close(mine.kv_pool, theirs.kv_pool, rtol=0, atol=0, equal_nan=True)
    for name in ("q", "k", "v", "req_to_token", "out_cache_loc"):
        torch.testing.assert_close(getattr(mine, name), getattr(case, name), rtol=0, atol=0, equal_nan=True)
    return out


HEADS = [(6, 3, 16), (8, 2, 20), (4, 4, 64), (28, 4, 80), (8, 2, 128), (22, 2, 24)]
MIXED = [(70, 1), (9, 9), (133, 61), (1, 1), (300, 3)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_mixed_steps(heads, dtype):
    check(make_case(MIXED, heads, dtype=dtype, padding=3))


@pytest.mark.parametrize("group", range(1, 10))
@pytest.mark.parametrize("sizes", [(64,), (96,), (32, 64), (160, 32)], ids=str)
def test_groups_of_heads(group, sizes):
    """Any number of query heads for a KV head, in heads that pairs of bfloat16 are multiplied for, and windows that
    begin and end within a pair of tokens."""
    seqs = [*MIXED, (65, 1), (700, 1), (641, 1)]
    for window in (None, 37, 38, 300):
        case = make_case(seqs, (2 * group, 2, *sizes), dtype=torch.bfloat16, padding=1, window=window)
        check(case, sliding_window=window)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(8, 2, 24, 16), (6, 3, 16, 20), (4, 4, 20, 36), (28, 4, 192, 128)], ids=str)
def test_values_of_another_head_size(heads, dtype):
    """Keys beside values in one row of the pool: chunks, single tokens, a context that is split, a window, sinks."""
    check(make_case([*MIXED, (600, 1)], heads, dtype=dtype, padding=2))
    sinks = torch.linspace(-2, 3, heads[0], dtype=dtype)
    check(make_case(MIXED, heads, dtype=dtype, window=7), sliding_window=7, sinks=sinks)


def test_values_of_another_head_size_are_what_attention_means():
    """Beside PyTorch's own attention, which shares nothing with the reference."""
    case = make_case([(41, 41)], (6, 3, 20, 12))
    out = run(radix_attention, case)
    q, k, v = (x.transpose(0, 1) for x in (case.q, case.k, case.v))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert (out - want.transpose(0, 1)).abs().max() <= TOLERANCE[torch.float64]


def test_a_layer_that_reads_the_keys_of_another():
    """kv_layer is where keys lie in the pool; without k and v nothing is written, and they are read from there."""
    case = make_case(MIXED)
    wanted = run(radix_attention, case)  # writes layer LAYER
    before = case.kv_pool.clone()
    again = run(radix_attention, case, k=None, v=None, layer_id=17, kv_layer=LAYER)
    assert torch.equal(again, wanted)
    assert torch.equal(case.kv_pool.nan_to_num(9.0), before.nan_to_num(9.0))
    moved = make_case(MIXED)
    moved.kv_pool = moved.kv_pool.roll(1, 0)
    assert torch.equal(run(radix_attention, moved, layer_id=17, kv_layer=LAYER + 1), wanted)
    kv_write(case.k, case.v, case.kv_pool, case.out_cache_loc, 17, kv_layer=0)
    places = case.out_cache_loc
    assert torch.equal(case.kv_pool[0][:, places], case.kv_pool[LAYER][:, places])


@pytest.mark.parametrize("window", [1, 5, 64, 100, 1000])
@pytest.mark.parametrize("heads", [(6, 3, 16), (4, 4, 64), (22, 2, 24)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_sliding_window(window, heads, dtype):
    seqs = [(70, 1), (9, 9), (133, 61), (1, 1), (700, 1), (650, 3), (400, 130)]
    check(make_case(seqs, heads, dtype=dtype, padding=2, window=window), sliding_window=window)


@pytest.mark.parametrize("chunk", [1, 5, 64, 100, 1000])
@pytest.mark.parametrize("heads", [(6, 3, 16), (4, 4, 64), (22, 2, 24)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_chunks(chunk, heads, dtype):
    seqs = [(70, 1), (9, 9), (133, 61), (1, 1), (700, 1), (650, 3), (400, 130), (2 * chunk, 1), (2 * chunk + 1, 1)]
    out = check(make_case(seqs, heads, dtype=dtype, padding=2, chunk=chunk), chunk_size=chunk)
    first_of_a_chunk = out[-3]  # sees itself only
    case = make_case(seqs, heads, dtype=dtype, padding=2, chunk=chunk)
    own = case.v[-3].repeat_interleave(heads[0] // heads[1], 0)
    torch.testing.assert_close(first_of_a_chunk, own, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_alibi(heads, dtype):
    """Slopes from steep to none, of both signs; relative to the query, so a long context costs no precision."""
    slopes = torch.linspace(0.3, -0.02, heads[0], dtype=torch.float64)
    slopes[1] = 0.0
    case = make_case([*MIXED, (1500, 1)], heads, dtype=dtype, padding=3)
    plain, biased = check(case), check(case, alibi_slopes=slopes.float())
    assert (plain - biased)[:, 0].abs().max() > 0.3
    assert (plain - biased)[:, 1].abs().max() <= TOLERANCE[dtype]
    check(case, alibi_slopes=slopes.to(dtype), softcap=0.7, sliding_window=40)
    check(case, alibi_slopes=slopes.to(dtype), chunk_size=40)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("seqs", [MIXED, [(600, 1)]], ids=["mixed", "split"])
def test_softcap_and_sinks(seqs, size, dtype):
    case = make_case(seqs, (6, 3, size), dtype=dtype, padding=1)
    sinks = torch.tensor([3.0, 4.0, 5.0, 6.0, -torch.inf, 60.0], dtype=dtype)
    plain = check(case)
    capped = check(case, softcap=0.7)
    sunk = check(case, sinks=sinks)
    check(case, softcap=0.7, sinks=sinks.bfloat16(), sliding_window=40)
    assert (plain - capped).abs().max() > 0.05
    assert (plain - sunk)[:, [0, 1, 2, 3, 5]].abs().amax((0, 2)).min() > 1e-4
    assert (plain - sunk)[:, 4].abs().max() <= TOLERANCE[dtype]  # a sink of -inf is no sink


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", [(8, 2, 64), (28, 4, 128), (3, 3, 16), (9, 1, 20)], ids=str)
def test_long_context_is_split(heads, dtype):
    check(make_case([(2000, 1)], heads, dtype=dtype))
    check(make_case([(1999, 2)], heads, dtype=dtype, padding=1))


MIXABLE = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", MIXABLE, ids=str)
@pytest.mark.parametrize("pool_dtype", MIXABLE, ids=str)
def test_pool_of_another_dtype(dtype, pool_dtype):
    check(make_case(MIXED, (8, 2, 32), dtype=dtype, pool_dtype=pool_dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_float16_pool(dtype):
    check(make_case(MIXED, (8, 2, 32), dtype=dtype, pool_dtype=torch.float16))


FP8 = torch.float8_e4m3fn
SCALES = {"k_scale": torch.tensor([[0.013]]), "v_scale": torch.tensor([[0.27]])}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", [(8, 2, 64), (6, 3, 20), (28, 4, 128), (6, 3, 24, 16)], ids=str)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 40, "softcap": 5.0}], ids=["full", "window and cap"])
def test_fp8_pool(dtype, heads, options):
    """Against float64 on the numbers as they are stored; the bytes that are written are those of the reference."""
    case = make_case([*MIXED, (700, 1)], heads, dtype=dtype, pool_dtype=torch.float32, padding=3)
    case.kv_pool = case.kv_pool.mul(20).to(FP8)
    mine, theirs = case.clone(), case.clone()
    out = run(radix_attention, mine, **SCALES, **options)
    fp8.kv_write(case.k, case.v, theirs.kv_pool, case.out_cache_loc, LAYER, **SCALES)
    assert torch.equal(mine.kv_pool.view(torch.uint8), theirs.kv_pool.view(torch.uint8))
    wide = Case(*(x.double() if x.is_floating_point() else x for x in theirs.args()))
    expected = run(fp8.radix_attention, wide, k=None, v=None, **SCALES, **options)
    assert torch.isfinite(out).all() and not out[int(case.query_start_loc[-1]) :].any()
    # values reach 0.27 · 60, keys 0.013 · 60: relative to the largest, as inputs of about 1 are
    assert (out.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize("size", [64, 20], ids=["vectors", "single numbers"])
def test_every_fp8_number_is_read(size):
    """A token that sees itself alone gets its values back: subnormal, negative, the largest, NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    pool = torch.zeros(1, 2, 256, 1, size).to(FP8)
    pool[0, 1] = codes[:, None, None]
    table, one = torch.arange(256, dtype=torch.int32)[:, None], torch.ones(1, 1)
    out = radix_attention(
        torch.zeros(256, 1, size), None, None, pool, table, torch.arange(256), torch.ones(256, dtype=torch.int64),
        torch.arange(257), torch.full((256,), -1), layer_id=0, scale=1.0, k_scale=one, v_scale=one,
    )  # fmt: skip
    assert codes.float().isnan().sum() == 2
    torch.testing.assert_close(out[:, 0], codes.float()[:, None].expand(-1, size), rtol=0, atol=0, equal_nan=True)


def test_what_fp8_cannot_hold_saturates():
    k = torch.tensor([1e6, -1e6, float("inf"), float("nan"), 447.0, 1e-6, -0.0, 17.0]).view(1, 1, 8)
    pools = [torch.zeros(1, 2, 2, 1, 8).to(FP8) for _ in range(2)]
    scales = {"k_scale": torch.ones(1, 1), "v_scale": torch.full((1, 1), 0.5)}
    kv_write(k, k, pools[0], torch.tensor([1]), 0, **scales)
    fp8.kv_write(k, k, pools[1], torch.tensor([1]), 0, **scales)
    assert torch.equal(pools[0].view(torch.uint8), pools[1].view(torch.uint8))
    assert pools[0][0, 0, 1, 0, :3].float().tolist() == [448, -448, 448] and pools[0][0, 0, 1, 0, 3].float().isnan()


def test_one_token():
    out = check(make_case([(1, 1)], (6, 3, 16)))
    assert out.shape == (1, 6, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seqs", [MIXED, [(700, 1)]], ids=["mixed", "split"])
@pytest.mark.parametrize("heads", [(6, 3, 16), (6, 3, 64)], ids=str)
def test_large_logits_do_not_overflow(heads, seqs, dtype):
    case = make_case(seqs, heads, dtype=dtype)
    out, expected = run(radix_attention, case.clone(), scale=400.0), truth(case, scale=400.0)
    assert torch.isfinite(out).all()
    # Logits of about 5000 carry float32 errors of 5e-4, and so do the weights.
    assert (out.double() - expected).abs().max() <= 2e-2
    # Of such logits the largest takes all, and is as far from the next one as they are large.
    out, expected = run(radix_attention, case.clone(), scale=1e30), truth(case, scale=1e30)
    assert (out.double() - expected).abs().max() <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [0.0, -0.2])
def test_any_scale(scale, dtype):
    check(make_case([*MIXED, (600, 1)], (6, 3, 64), dtype=dtype), scale=scale)


def test_nothing_to_do():
    case = make_case([(4, 0), (6, 0)], padding=3)
    assert not run(radix_attention, case).any()
    empty = make_case([(4, 0)])
    assert run(radix_attention, empty).shape == (0, 6, 16)


def test_sequences_without_new_tokens_are_not_looked_at():
    case = make_case([(50, 1), (6, 0), (30, 30)])
    case.seq_lens[1], case.req_pool_indices[1] = 10**9, -5
    expected = run(radix_attention, make_case([(50, 1), (6, 0), (30, 30)]))
    assert torch.equal(run(radix_attention, case), expected)


def test_reads_only_without_k_and_v():
    case = make_case(MIXED, padding=2)
    expected = run(radix_attention, case)
    before = case.kv_pool.clone()
    out = run(radix_attention, case, k=None, v=None)
    assert torch.equal(out, expected)
    assert torch.equal(case.kv_pool.nan_to_num(9.0), before.nan_to_num(9.0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 37}], ids=["full", "window"])
def test_chunks_agree_with_one_shot(dtype: torch.dtype, options: dict[str, Any]):
    """The prompt in chunks of 1, 7, 100 … gives what one step gives."""
    length, heads = 331, (8, 2, 64)
    case = make_case([(length, length)], heads, dtype=dtype)
    pool = torch.full_like(case.kv_pool, torch.nan)
    whole = run(radix_attention, case, **options)
    parts, begin = [], 0
    for chunk in (1, 7, 100, 2, 64, 63, 1, 93):
        end = begin + chunk
        chunk_case = Case(
            case.q[begin:end],
            case.k[begin:end],
            case.v[begin:end],
            pool,
            case.req_to_token,
            case.req_pool_indices,
            torch.tensor([end]),
            torch.tensor([0, chunk]),
            case.out_cache_loc[begin:end],
        )
        parts.append(run(radix_attention, chunk_case, **options))
        begin = end
    assert begin == length
    assert (torch.cat(parts) - whole).abs().max() <= {torch.float64: 1e-14, torch.float32: 3e-6}[dtype]
    # Chunks above one token compute block by block in the same order: the same bits.
    assert torch.equal(parts[2], whole[8:108])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_batch_and_threads_do_not_matter(dtype):
    """Alone or in a batch, on one thread or two: the same bits."""
    seqs = [(900, 1), (40, 40), (513, 1), (200, 70), (64, 1), (300, 4)] + [(17, 1)] * 9
    case = make_case(seqs, (8, 2, 64), dtype=dtype, padding=2)
    together = run(radix_attention, case)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert torch.equal(run(radix_attention, case), together)
    finally:
        torch.set_num_threads(threads)
    for b in range(len(seqs)):
        begin, end = case.query_start_loc[b : b + 2].tolist()
        alone = Case(
            case.q[begin:end],
            case.k[begin:end],
            case.v[begin:end],
            case.kv_pool,
            case.req_to_token,
            case.req_pool_indices[b : b + 1],
            case.seq_lens[b : b + 1],
            torch.tensor([0, end - begin]),
            case.out_cache_loc[begin:end],
        )
        assert torch.equal(run(radix_attention, alone), together[begin:end]), seqs[b]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(6, 3, 16), (8, 2, 80)], ids=str)
def test_later_tokens_never_matter(dtype, heads):
    """A NaN in token 50 reaches tokens 50 and on only, and there it is not hidden."""
    case = make_case([(90, 90)], heads, dtype=dtype)
    expected = run(radix_attention, case.clone())
    for poisoned in (case.k, case.v):
        broken = case.clone()
        getattr(broken, "k" if poisoned is case.k else "v")[50] = torch.nan
        out = run(radix_attention, broken)
        assert torch.equal(out[:50], expected[:50])
        assert out[50:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "seqs", [[(20, 1)], [(900, 1)], [(90, 40)], [(1, 1)]], ids=["decode", "split", "extend", "one"]
)
def test_nan_is_not_hidden(seqs, dtype):
    for name in ("q", "k", "v"):
        for heads in ((6, 3, 16), (6, 3, 64)):
            case = make_case(seqs, heads, dtype=dtype)
            getattr(case, name)[-1] = torch.nan
            assert run(radix_attention, case)[-1].isnan().all()


def test_pool_with_gaps():
    """Layers of a larger pool, slots first: any strides with the last 1."""
    case = make_case(MIXED, (6, 3, 16))
    expected = run(radix_attention, case.clone())
    odd = torch.zeros(case.kv_pool.shape[2], NUM_LAYERS, 2, 3, 40, dtype=torch.float64)[..., 5:21]
    odd = odd.permute(1, 2, 0, 3, 4)
    odd.copy_(case.kv_pool)
    case.kv_pool = odd
    assert torch.equal(run(radix_attention, case), expected)


@pytest.mark.parametrize("module", [cpu, reference], ids=["cpu", "reference"])
@pytest.mark.parametrize("pool_dtype", TOLERANCE, ids=str)
def test_kv_write(module, pool_dtype):
    case = make_case([(40, 33)], dtype=torch.float32, padding=2)
    pool = torch.zeros_like(case.kv_pool, dtype=pool_dtype)
    module.kv_write(case.k, case.v, pool, case.out_cache_loc, 2)
    expected = torch.zeros_like(pool)
    for t in range(33):
        expected[2, 0, case.out_cache_loc[t]] = case.k[t].to(pool_dtype)
        expected[2, 1, case.out_cache_loc[t]] = case.v[t].to(pool_dtype)
    assert torch.equal(pool, expected)
    kv_write(case.k[:0], case.v[:0], pool, case.out_cache_loc[:0], 0)


def replace_at(x: Tensor, index: int, value: int) -> Tensor:
    x = x.clone()
    x.view(-1)[index] = value
    return x


WRONG = {
    "q heads": (lambda c: {"q": c.q[:, :5]}, "a multiple of 3 heads"),
    "q size": (lambda c: {"q": c.q[:, :, :8]}, "with keys of D = 8"),
    "q dims": (lambda c: {"q": c.q.flatten(1)}, r"\[T, H, D\]"),
    "q stride": (lambda c: {"q": c.q.repeat_interleave(2, 2)[:, :, ::2]}, "stride 1"),
    "q dtype": (lambda c: {"q": c.q.long()}, "float32, float64, bfloat16, float16"),
    "k rows": (lambda c: {"k": c.k[1:]}, r"cannot use k\n.*\[\d+, 3, 16\]"),
    "k alone": (lambda c: {"v": None}, "together"),
    "v dtype": (lambda c: {"v": c.v.float()}, "one dtype"),
    "pool dims": (lambda c: {"kv_pool": c.kv_pool[0]}, r"\[L, 2, S, K, D\]"),
    "pool half": (lambda c: {"kv_pool": c.kv_pool.half()}, "goes with"),
    "req_to_token dtype": (lambda c: {"req_to_token": c.req_to_token.long()}, "int32"),
    "seq_lens dtype": (lambda c: {"seq_lens": c.seq_lens.int()}, r"int64 \[2\]"),
    "indices length": (lambda c: {"req_pool_indices": c.req_pool_indices[:1]}, r"int64 \[2\]"),
    "loc length": (lambda c: {"query_start_loc": c.query_start_loc[:2]}, r"int64 \[3\]"),
    "loc start": (lambda c: {"query_start_loc": replace_at(c.query_start_loc, 0, 1)}, "start with 0"),
    "loc end": (lambda c: {"query_start_loc": replace_at(c.query_start_loc, 2, 99)}, "past the"),
    "loc order": (lambda c: {"query_start_loc": replace_at(c.query_start_loc, 1, -1)}, "decreases"),
    "seq too short": (lambda c: {"seq_lens": replace_at(c.seq_lens, 1, 4)}, r"sequence 1: seq_lens is 4, expected 5"),
    "seq too long": (lambda c: {"seq_lens": replace_at(c.seq_lens, 0, 10**6)}, "columns of req_to_token"),
    "request": (lambda c: {"req_pool_indices": replace_at(c.req_pool_indices, 0, 5)}, "rows of req_to_token"),
    "slot": (lambda c: {"req_to_token": torch.full_like(c.req_to_token, 10**6)}, "holds slot 1000000"),
    "negative slot": (lambda c: {"req_to_token": torch.full_like(c.req_to_token, -1)}, "holds slot -1"),
    "location": (lambda c: {"out_cache_loc": replace_at(c.out_cache_loc, 3, 10**6)}, r"out_cache_loc\[3\] is 1000000"),
    "location -2": (lambda c: {"out_cache_loc": replace_at(c.out_cache_loc, 3, -2)}, r"out_cache_loc\[3\] is -2"),
    "sinks": (lambda c: {"sinks": torch.zeros(5)}, r"contiguous \[6\]"),
    "slopes": (lambda c: {"alibi_slopes": torch.zeros(6).long()}, r"contiguous \[6\]"),
    "chunk": (lambda c: {"chunk_size": 0}, "at least 1"),
    "layer": (lambda c: {"layer_id": 3}, "expected 0 to 2"),
    "window": (lambda c: {"sliding_window": 0}, "at least 1"),
    "softcap": (lambda c: {"softcap": 0.0}, "positive"),
    "causal": (lambda c: {"causal": False}, "causal only"),
}


@pytest.mark.parametrize("change, message", WRONG.values(), ids=WRONG.keys())
def test_wrong_arguments(change, message):
    case = make_case([(20, 1), (9, 5)])
    before = case.kv_pool.clone()
    options = {"layer_id": LAYER, "scale": 0.25} | vars(case) | change(case)
    with pytest.raises(ValueError, match=message):
        radix_attention(**options)
    assert torch.equal(case.kv_pool.nan_to_num(9.0), before.nan_to_num(9.0))


TINY_SOURCE = """
#include <Python.h>
static PyModuleDef def = {PyModuleDef_HEAD_INIT, "tiny", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit_tiny() { return PyModule_Create(&def); }
"""


def test_build_cache(tmp_path: Path, monkeypatch):
    """Built once, rebuilt when damaged, and a failure says what the compiler said."""
    monkeypatch.setenv("GRAPHSRT_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "tiny.cpp"
    source.write_text(TINY_SOURCE)
    builds: list[str] = []
    real_build = build._build

    def counted(name: str, *args: Any) -> None:
        builds.append(name)
        real_build(name, *args)

    monkeypatch.setattr(build, "_build", counted)
    assert build.load_extension("tiny", source).__name__ == "tiny"
    (library,) = (tmp_path / "cache").rglob("tiny.so")
    build.load_extension("tiny", source)
    assert builds == ["tiny"]
    # A new file, not the mapped one: this process still has that open.
    cut = library.read_bytes()[:1000]
    library.unlink()
    library.write_bytes(cut)
    build.load_extension("tiny", source)
    assert builds == ["tiny"] * 2 and library.stat().st_size > 1000
    (tmp_path / "tiny.h").write_text("// included\n")
    build.load_extension("tiny", source)
    assert builds == ["tiny"] * 3
    source.write_text(TINY_SOURCE.replace("PyMODINIT_FUNC", "#error no such luck\n"))
    with pytest.raises(CompileError, match="no such luck"):
        build.load_extension("tiny", source)
    monkeypatch.setenv("CXX", "no-such-compiler --flag")
    with pytest.raises(CompileError, match=r"no C\+\+ compiler found[\s\S]*no-such-compiler"):
        build.load_extension("tiny", source)


def test_nothing_is_compiled_beforehand_that_is_here_already() -> None:
    from graphsrt.lowering.kernels import beforehand, first_largest, linear, replay, shared_rounds, team

    loaders = linear.load, linear.load_integers, first_largest.load, replay.load, shared_rounds.kernel, team.load
    for load in loaders:
        load()
    assert beforehand.start_building(1) == beforehand.start_building(2, integers=True) == []
