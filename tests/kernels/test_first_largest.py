"""The largest number of each row and its place, against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphsrt.lowering.kernels.first_largest import first_largest


def check(x: torch.Tensor) -> None:
    """The same number, its sign included, where numpy finds it."""
    numbers, places, finite = first_largest(x)
    wide = x.double().numpy()
    assert places.dtype == torch.int64 and places.tolist() == wide.argmax(-1).tolist()
    assert finite is bool(np.isfinite(numbers.numpy()).all())
    expected = np.take_along_axis(wide, places.numpy()[:, None], axis=-1)[:, 0]
    assert numbers.numpy().dtype == np.float64
    np.testing.assert_array_equal(numbers.numpy(), expected)
    np.testing.assert_array_equal(np.signbit(numbers.numpy()), np.signbit(expected))


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 31, 2047, 2048, 2049, 7001])  # around the blocks in which it searches
def test_is_the_first_of_the_largest(dtype, count):
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(9, count, generator=generator).to(dtype)  # 16 bits: many are equal
    x[1] = 0.0
    x[2] = -x[2].abs() - 1
    x[3] = -torch.inf
    x[4, count // 2], x[4, -1] = torch.inf, torch.inf
    x[5] = torch.finfo(dtype).min
    x[6] = torch.tensor([-0.0, 0.0]).to(dtype).repeat(count)[:count]  # equal
    x[7, count // 3 :] = x[7].max()
    check(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_16_bits(dtype):
    bits = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)[:, None]
    numbers, places, finite = first_largest(bits)
    assert not places.any() and not finite
    np.testing.assert_array_equal(numbers.numpy(), bits[:, 0].double().numpy())  # NaN where it should be


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_is_the_largest(dtype, sign):
    x = torch.full((3, 3000), torch.inf).to(dtype)
    for row, place in enumerate((0, 1234, 2999)):
        x[row, place:] = torch.tensor(np.copysign(np.nan, sign)).to(dtype)
    numbers, places, finite = first_largest(x)
    assert not finite and places.tolist() == [0, 1234, 2999] and numbers.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_need_not_lie_one_behind_the_other(dtype):
    x = torch.randn(6, 500, generator=torch.Generator().manual_seed(3)).to(dtype)
    for part in (x[:, 7:300], x[::2], x.T, x[:0]):
        check(part)


def test_the_number_of_threads_changes_nothing():
    x = torch.randn(40, 5000, generator=torch.Generator().manual_seed(4)).bfloat16()
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(first_largest(x))
    finally:
        torch.set_num_threads(before)
    (first, second) = results
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
