from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphsrt.errors import GraphsrtError
from graphsrt.runtime.sampler import Sampling
from graphsrt.runtime.sampler import sample as sample_split
from graphsrt.runtime.sampling_params import SamplingParams, uniform_at
from graphsrt.runtime.split_logits import SplitLogits


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """Of logits in one piece."""
    min_p = torch.zeros_like(uniform) if min_p is None else min_p
    return sample_split(SplitLogits.of(logits), Sampling(temperature, top_k, top_p, min_p, uniform))


def direct(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Probabilities by the definition, one row at a time, in plain Python."""
    largest = max(logits)
    weights = [math.exp((x - largest) / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        total, reached, kept = sum(weights[i] for i in order), 0.0, []
        for i in order:
            kept.append(i)
            reached += weights[i]
            if reached >= top_p * total:
                break
        order = kept
    total = sum(weights[i] for i in order)
    return [weights[i] / total if i in order else 0.0 for i in range(len(logits))]


def repeat(row: list[float], temperature: float, top_k: int, top_p: float, uniform: torch.Tensor) -> torch.Tensor:
    count = len(uniform)
    return sample(
        torch.tensor(row).expand(count, -1),
        torch.full((count,), temperature, dtype=torch.float64),
        torch.full((count,), top_k),
        torch.full((count,), top_p, dtype=torch.float64),
        uniform,
    )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=1, max_size=9),
    st.sampled_from([0.3, 1.0, 2.5]),
    st.integers(0, 10),
    st.sampled_from([0.05, 0.37, 0.81, 1.0]),
    st.booleans(),
)
def test_frequencies_on_an_even_grid_are_the_probabilities(
    row: list[float], temperature: float, top_k: int, top_p: float, padded: bool
) -> None:
    grid = 2000
    uniform = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
    logits = row + [-math.inf] * 3 if padded else row
    tokens = repeat(logits, temperature, top_k, top_p, uniform)
    frequencies = (torch.bincount(tokens, minlength=len(logits)) / grid).tolist()
    expected = direct(row, temperature, top_k, top_p) + [0.0] * 3 * padded
    for token, (frequency, probability) in enumerate(zip(frequencies, expected)):
        assert abs(frequency - probability) <= 1.01 / grid, (token, frequency, probability)
        assert frequency == 0 or probability > 0


def test_rows_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    logits = torch.randn(24, 97)
    temperature = torch.tensor([0.0, 0.7, 1.0, 1e-6] * 6, dtype=torch.float64)
    top_k = torch.tensor([0, 5, 0, 1, 96, 1000] * 4)
    top_p = torch.tensor([1.0, 0.5, 1.0] * 8, dtype=torch.float64)
    uniform = torch.rand(24, dtype=torch.float64)
    together = sample(logits, temperature, top_k, top_p, uniform)
    assert together.dtype == torch.int64
    for i in range(24):
        one = slice(i, i + 1)
        assert sample(logits[one], temperature[one], top_k[one], top_p[one], uniform[one]) == together[i : i + 1]


def test_greedy_takes_the_first_of_equals_in_any_dtype() -> None:
    zero, one = torch.zeros(2), torch.ones(2)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        logits = torch.tensor([[1.0, 3.0, 3.0], [-math.inf, -math.inf, -5.0]], dtype=dtype)
        assert sample(logits, zero, zero.long(), one, zero).tolist() == [1, 2]


def test_extremes_of_the_random_number_never_leave_the_kept_set() -> None:
    uniform = torch.tensor([0.0, 1 - 2.0**-53, 1.0], dtype=torch.float64)
    row = [-math.inf, 0.0, -800.0, 0.0, -math.inf]  # exp(-800) is 0: no choice, though it is finite
    assert repeat(row, 1.0, 0, 1.0, uniform).tolist() == [1, 3, 3]
    assert repeat(row, 1.0, 0, 0.999, uniform).tolist() == [1, 3, 3]
    assert repeat(row, 1.0, 1, 1.0, uniform).tolist() == [1, 1, 1]
    assert repeat(row, 1e-300, 0, 1.0, uniform).tolist() == [1, 3, 3]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [1, 7, 64, 1000, 4099])
def test_greedy_is_the_first_largest(dtype: torch.dtype, width: int) -> None:
    """With many equal ones, of few different numbers; both zeros are equal."""
    source = torch.Generator().manual_seed(width)
    logits = torch.randint(-3, 3, (9, width), generator=source).to(dtype)
    logits[3] = -math.inf
    logits[3, width // 2] = torch.finfo(dtype).min
    logits[4] = -0.0
    logits[4, width // 3] = 0.0
    zero = torch.zeros(9)
    got = sample(logits, zero, zero.long(), torch.ones(9), zero)
    assert got.tolist() == np.argmax(logits.double().numpy(), axis=1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("where", [0, 8, 1023, 1024])
def test_no_nan_is_overlooked(dtype: torch.dtype, sign: float, where: int) -> None:
    logits = torch.randn(2, 1025).to(dtype)
    logits[1, where] = math.copysign(math.nan, sign)
    zero = torch.zeros(2)
    with pytest.raises(GraphsrtError, match=r"logit row 1(?s:.*)1 NaN of 1025"):
        sample(logits, zero, zero.long(), torch.ones(2), zero)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_a_bad_row_is_an_error_that_names_it(temperature: float, bad: float | None) -> None:
    logits = torch.randn(3, 5)
    logits[1, 2] = bad if bad is not None else 0.0
    if bad is None:
        logits[1] = -math.inf
    found = "1 NaN of 5" if bad is not None and math.isnan(bad) else "a maximum of"
    with pytest.raises(GraphsrtError, match=f"logit row 1(?s:.*){found}"):
        sample(logits, torch.full((3,), temperature), torch.zeros(3, dtype=torch.long), torch.ones(3), torch.zeros(3))


def test_no_rows() -> None:
    none = torch.zeros(0)
    assert sample(torch.zeros(0, 5), none, none.long(), none, none).shape == (0,)


def test_random_numbers_are_even_and_depend_on_seed_and_index_only() -> None:
    numbers = uniform_at(np.repeat(np.arange(200, dtype=np.uint64), 200), np.tile(np.arange(200), 200))
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert len(np.unique(numbers)) == len(numbers)
    # 40000 numbers in 50 bins: chi-squared has mean 49 and deviation 9.9; the value is fixed, the bound six deviations.
    counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
    assert ((counts - 800) ** 2 / 800).sum() < 49 + 60
    grid = numbers.reshape(200, 200)
    for shift in (1, 2):  # no seed is the neighbour of another, shifted
        assert abs(np.corrcoef(grid[shift:, :-shift].ravel(), grid[:-shift, shift:].ravel())[0, 1]) < 0.03
    assert uniform_at(2**64 - 1, 3)[0] == uniform_at([5, 2**64 - 1], [0, 3])[1]
    # SplitMix64's published first output for state 0 is 0xE220A8397B1DCDAF; our start is its hash, the rest the same.
    state, golden, mask = 0xE220A8397B1DCDAF, 0x9E3779B97F4A7C15, 2**64 - 1
    z = (state + 3 * golden) & mask
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
    assert uniform_at(0, 2)[0] == ((z ^ z >> 31) >> 11) / 2**53


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1, got 0"),
        ({"temperature": -1.0}, "temperature must be finite"),
        ({"temperature": math.nan}, "temperature must be finite"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\]"),
        ({"top_p": 1.5}, r"top_p must lie in \(0, 1\]"),
        ({"top_k": -1}, "top_k must be an integer of at least 0"),
        ({"seed": 1.5}, "seed must be an integer or None"),
        ({"stop": ""}, "stop must be a non-empty string"),
        ({"stop": ["a", 3]}, "stop must be a non-empty string"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be non-negative"),
        ({"min_p": 1.5}, r"min_p must lie in \[0, 1\]"),
        ({"min_p": math.nan}, r"min_p must lie in \[0, 1\]"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be finite and above 0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty must be finite and above 0"),
        ({"presence_penalty": math.nan}, "presence_penalty must be finite"),
        ({"frequency_penalty": "1"}, "frequency_penalty must be finite"),
        ({"logit_bias": [3]}, "logit_bias must map token ids to numbers"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias must map token ids to finite numbers, got '3': 1.0"),
        ({"logit_bias": {3: -math.inf}}, r"got 3: -inf \(-1e9 bans a token\)"),
        ({"logprobs": -1}, "logprobs must be None or an integer of at least 0"),
        ({"prompt_logprobs": True}, "prompt_logprobs must be None or an integer of at least 0"),
        ({"min_new_tokens": 9, "max_new_tokens": 4}, r"min_new_tokens \(9\) is above max_new_tokens \(4\)"),
    ],
)
def test_sampling_params_refuse(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**changes)


def test_sampling_params_normalise() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[1, 2], seed=-1)
    assert params.stop == ("x",) and params.stop_token_ids == (1, 2)
    assert SamplingParams(stop=["x", "y"]).stop == ("x", "y")
