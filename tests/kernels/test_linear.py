"""The CPU's kernel of linears against float64, over shapes that divide nothing."""

from __future__ import annotations

import pytest
import torch

from graphsrt.integer_weights import GROUP, from_int4, to_int4
from graphsrt.lowering.kernels import linear

ROWS = [*range(1, 14), 97, 200]
SHAPES = [(1, 1), (7, 9), (50, 577), (101, 1100), (24, 512), (25, 64), (3, 2048)]
SHAPES_4_BITS = [(1, 32), (7, 96), (50, 576), (101, 1120), (24, 512), (25, 64), (9, 4256)]


@pytest.fixture(scope="module", autouse=True)
def library():
    return linear.load(), linear.load_integers()


@pytest.fixture
def drawn():
    generator = torch.Generator().manual_seed(5)
    return lambda *shape: torch.randn(shape, generator=generator)


def int4_linear(*arguments):
    return torch.ops.graphsrt.int4_linear_kernel.default(*arguments)


def in_16_bits(x):
    """x in float64 as the kernel rounds it, and the most that it may be off."""
    groups = x.double().view(len(x), -1, GROUP)
    step = torch.exp2(groups.abs().amax(-1, keepdim=True).frexp().exponent.double() - 15)
    rounded = (groups / step).round().clamp(-(2**15), 2**15 - 1) * step
    return rounded.view(x.shape), (groups.abs().amax(-1, keepdim=True) * 2.0**-15).expand_as(groups).reshape(x.shape)


def uneven(drawn, rows, width):
    """Numbers whose groups have magnitudes of their own, up to a factor of 1000 apart."""
    magnitudes = 10 ** drawn(rows, width // GROUP, 1).clamp(-1.5, 1.5)
    return (drawn(rows, width // GROUP, GROUP) * magnitudes).view(rows, width)


def check_product(dtype, rows, shape, biased, drawn):
    num_rows, width = shape
    w, x = drawn(num_rows, width).to(dtype), drawn(rows, width).to(dtype)
    bias = drawn(num_rows).to(dtype) if biased else None
    terms = x.double().abs() @ w.double().abs().T + (0 if bias is None else bias.double().abs())
    wanted = x.double() @ w.double().T + (0 if bias is None else bias.double())
    # A float32 sum of n terms is off by n ulps of the sum of their magnitudes at most; then it is rounded once.
    bound = (width + 1) * 2.0**-24 * terms + torch.finfo(dtype).eps * wanted.abs()
    got = linear.dense_linear(x, w, bias)
    assert got.dtype == dtype and (got.double() - wanted).abs().sub(bound).max() <= 0


@pytest.mark.parametrize("dtype", linear.DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_products_are_those_of_float64(dtype, shape, biased, drawn):
    for rows in ROWS:
        check_product(dtype, rows, shape, biased, drawn)


# Rows that leave some over after eights and fours; columns of less than a vector, and of several blocks.
@pytest.mark.parametrize("shape", [*SHAPES, (1, 2), (48, 2048), (50, 578), (97, 4102), (200, 62)], ids=str)
@pytest.mark.parametrize("rows", [255, 256, 257, 262, 301])
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_many_rows_are_those_of_float64(rows, shape, biased, drawn):
    check_product(torch.bfloat16, rows, shape, biased, drawn)


def test_of_many_rows_each_is_its_own(drawn):
    """What is not a number stays in its row, or in the column that its weight is for."""
    x, w = drawn(262, 130).bfloat16(), drawn(53, 130).bfloat16()
    usual = linear.dense_linear(x, w)
    x[100, 7], w[50, 128] = float("nan"), float("inf")
    got = linear.dense_linear(x, w)
    mine = torch.ones_like(got, dtype=torch.bool)
    mine[100], mine[:, 50] = False, False
    assert torch.equal(got[mine], usual[mine]) and not got[~mine].isfinite().any()


# Columns: of one block of a kernel, of several, and of more than a single row is gone through at once.
@pytest.mark.parametrize("width, outputs, most", [(1100, 77, 200), (1024, 16, 200), (50, 9, 200), (33000, 21, 7)])
@pytest.mark.parametrize("dtype", linear.DTYPES)
def test_a_row_does_not_depend_on_the_others(dtype, width, outputs, most, drawn):
    given = linear.rows_for_onednn() if dtype is torch.bfloat16 else None
    x, w = drawn(most if given is None else min(most, given - 1), width).to(dtype), drawn(outputs, width).to(dtype)
    alone = torch.cat([linear.dense_linear(row[None], w) for row in x])
    for rows in {*ROWS, len(x)} & {*range(len(x) + 1)}:
        assert torch.equal(linear.dense_linear(x[:rows], w), alone[:rows])
    x[1::2] = float("nan")
    assert torch.equal(linear.dense_linear(x, w)[::2], alone[::2])
    assert linear.dense_linear(x, w)[1::2].isnan().all()


def test_leading_dimensions_and_strides(drawn):
    x, w = drawn(40, 3, 4).permute(1, 2, 0), drawn(7, 40)
    torch.testing.assert_close(linear.dense_linear(x, w), x @ w.T, rtol=0, atol=1e-4)  # 40 terms in two orders
    assert linear.dense_linear(drawn(0, 40), w).shape == (0, 7)
    bias = drawn(7)
    assert torch.equal(linear.dense_linear(drawn(3, 0), drawn(7, 0), bias), bias.expand(3, 7))


@pytest.mark.parametrize("bits", [4, 16])
def test_the_number_of_threads_changes_nothing(bits, drawn):
    x, w = drawn(5, 704).bfloat16(), drawn(1000, 704).bfloat16()
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(linear.dense_linear(x, w) if bits == 16 else int4_linear(x, *to_int4(w)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results)


def test_what_does_not_fit_is_refused(drawn):
    with pytest.raises((ValueError, RuntimeError), match="one dtype"):
        linear.dense_linear(drawn(2, 8), drawn(3, 8).bfloat16())
    with pytest.raises((ValueError, RuntimeError), match=r"\[N, K\]"):
        linear.dense_linear(drawn(2, 8), drawn(3, 9))


@pytest.mark.parametrize("dtype", linear.DTYPES)
@pytest.mark.parametrize("shape", SHAPES_4_BITS, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_products_with_4_bits_are_those_of_float64(dtype, shape, biased, drawn):
    num_rows, width = shape
    packed, pairs = to_int4(uneven(drawn, num_rows, width))
    w, offset = from_int4(packed, pairs).double(), pairs[..., 1].double().repeat_interleave(GROUP, 1)
    bias = drawn(num_rows).to(dtype) if biased else None
    plus = torch.zeros(num_rows).double() if bias is None else bias.double()
    for rows in ROWS:
        x = uneven(drawn, rows, width).to(dtype)
        rounded, off = in_16_bits(x)
        assert ((rounded - x.double()).abs() <= off).all()
        got = int4_linear(x, packed, pairs, bias)
        wanted = rounded @ w.T + plus
        # Products are exact. Each lane adds a term for each group and at most one in four more for the offsets; then
        # lanes and the bias are added, and from_int4 rounded once. Every such step is off by 2^-24 of all magnitudes.
        terms = rounded.abs() @ ((w - offset).abs() + offset.abs()).T + plus.abs()
        bound = (width / GROUP * 1.25 + 8) * 2.0**-24 * terms + torch.finfo(dtype).eps * wanted.abs()
        assert got.dtype == dtype and (got.double() - wanted).abs().sub(bound).max() <= 0
        exact = x.double() @ w.T + plus
        assert (got.double() - exact).abs().sub(bound + off @ w.abs().T * (1 + torch.finfo(dtype).eps)).max() <= 0


def test_bfloat16_within_a_128th_of_the_largest_is_not_rounded(drawn):
    x = drawn(6, 256).sign() * drawn(6, 256).abs().clamp(2.0**-6, 2)
    x[:, ::GROUP] = 1.99
    assert torch.equal(in_16_bits(x.bfloat16())[0], x.bfloat16().double())
    packed, pairs = to_int4(torch.eye(256))  # exact: 0 and 15 fifteenths, rounded to bfloat16
    one = from_int4(packed, pairs).diagonal()
    got = int4_linear(x.bfloat16().float(), packed, pairs)
    torch.testing.assert_close(got, x.bfloat16().float() * one, rtol=2.0**-24, atol=0)  # a sum of one term


@pytest.mark.parametrize("dtype", linear.DTYPES)
def test_with_4_bits_a_row_does_not_depend_on_the_others(dtype, drawn):
    x, (packed, pairs) = drawn(200, 4256).to(dtype), to_int4(drawn(77, 4256))
    alone = torch.cat([int4_linear(row[None], packed, pairs) for row in x])
    for rows in ROWS:
        assert torch.equal(int4_linear(x[:rows], packed, pairs), alone[:rows])
    x[1::4, -1], x[2::4, 40], x[3::4, 0] = float("nan"), float("inf"), -float("inf")
    for rows in (1, 2, 3, 4, 5, 200):
        got = int4_linear(x[:rows], packed, pairs)
        assert torch.equal(got[::4], alone[:rows:4])
        assert all(got[start::4].isnan().all() for start in (1, 2, 3))


def test_4_bits_with_the_smallest_and_largest_numbers(drawn):
    packed, pairs = to_int4(drawn(12, 160))
    w, bias = from_int4(packed, pairs).double(), drawn(12)
    assert torch.equal(int4_linear(torch.zeros(3, 160), packed, pairs, bias), bias.expand(3, 12))
    for scale in (2.0**-100, 2.0**100):  # powers of two: the same digits
        x = drawn(5, 160)
        assert torch.equal(int4_linear(x * scale, packed, pairs), int4_linear(x, packed, pairs) * scale)
    tiny = drawn(5, 160) * 2.0**-126
    got = int4_linear(tiny, packed, pairs).double()
    # x is rounded to multiples of 2^-126, and so may the result be where the processor has no smaller numbers.
    assert ((got - tiny.double() @ w.T).abs() <= 2.0**-127 * w.abs().sum(1) + 2.0**-126).all()


def test_4_bits_with_leading_dimensions_and_none(drawn):
    packed, pairs = to_int4(drawn(7, 96))
    x = drawn(96, 3, 4).permute(1, 2, 0)
    assert torch.equal(int4_linear(x, packed, pairs), int4_linear(x.reshape(12, 96), packed, pairs).view(3, 4, 7))
    assert int4_linear(drawn(0, 96), packed, pairs).shape == (0, 7)


def test_4_bits_that_do_not_fit_are_refused(drawn):
    packed, pairs = to_int4(drawn(7, 96))
    with pytest.raises((ValueError, RuntimeError), match="multiple of 32"):
        int4_linear(drawn(2, 90), packed, pairs)
    with pytest.raises((ValueError, RuntimeError), match="uint8"):
        int4_linear(drawn(2, 160), packed, pairs)
    with pytest.raises((ValueError, RuntimeError), match="scale and offset"):
        int4_linear(drawn(2, 96), packed, pairs.float())
    with pytest.raises((ValueError, RuntimeError), match="float32, bfloat16 or float16"):
        int4_linear(drawn(2, 96).double(), packed, pairs)
