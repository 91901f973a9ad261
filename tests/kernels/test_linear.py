"""The CPU's kernel of linears against float64, over shapes that divide nothing."""

from __future__ import annotations

import pytest
import torch

from graphsrt.lowering.kernels import linear

ROWS = [*range(1, 14), 97, 200]
SHAPES = [(1, 1), (7, 9), (50, 577), (101, 1100), (24, 512), (25, 64), (3, 2048)]


@pytest.fixture(scope="module", autouse=True)
def library():
    return linear.load()


@pytest.fixture
def drawn():
    generator = torch.Generator().manual_seed(5)
    return lambda *shape: torch.randn(shape, generator=generator)


@pytest.mark.parametrize("dtype", linear.DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_products_are_those_of_float64(dtype, shape, biased, drawn):
    num_rows, width = shape
    w = drawn(num_rows, width).to(dtype)
    bias = drawn(num_rows).to(dtype) if biased else None
    for rows in ROWS:
        x = drawn(rows, width).to(dtype)
        terms = x.double().abs() @ w.double().abs().T + (0 if bias is None else bias.double().abs())
        wanted = x.double() @ w.double().T + (0 if bias is None else bias.double())
        # A float32 sum of n terms is off by n ulps of the sum of their magnitudes at most; then it is rounded once.
        bound = (width + 1) * 2.0**-24 * terms + torch.finfo(dtype).eps * wanted.abs()
        got = linear.dense_linear(x, w, bias)
        assert got.dtype == dtype and (got.double() - wanted).abs().sub(bound).max() <= 0


@pytest.mark.parametrize("dtype", linear.DTYPES)
def test_a_row_does_not_depend_on_the_others(dtype, drawn):
    x, w = drawn(200, 1100).to(dtype), drawn(77, 1100).to(dtype)
    alone = torch.cat([linear.dense_linear(row[None], w) for row in x])
    for rows in ROWS:
        assert torch.equal(linear.dense_linear(x[:rows], w), alone[:rows])
    x[1::2] = float("nan")
    assert torch.equal(linear.dense_linear(x, w)[::2], alone[::2])
    assert linear.dense_linear(x, w)[1::2].isnan().all()


def test_leading_dimensions_and_strides(drawn):
    x, w = drawn(40, 3, 4).permute(1, 2, 0), drawn(7, 40)
    torch.testing.assert_close(linear.dense_linear(x, w), x @ w.T, rtol=0, atol=1e-4)  # 40 terms in two orders
    assert linear.dense_linear(drawn(0, 40), w).shape == (0, 7)


def test_the_number_of_threads_changes_nothing(drawn):
    x, w = drawn(5, 700).bfloat16(), drawn(1000, 700).bfloat16()
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(linear.dense_linear(x, w))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results)


def test_what_does_not_fit_is_refused(drawn):
    with pytest.raises((ValueError, RuntimeError), match="one dtype"):
        linear.dense_linear(drawn(2, 8), drawn(3, 8).bfloat16())
    with pytest.raises((ValueError, RuntimeError), match=r"\[N, K\]"):
        linear.dense_linear(drawn(2, 8), drawn(3, 9))
