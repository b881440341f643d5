"""Sampling parameters are checked where they are made; the random numbers depend on seed and position alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from edgert.errors import RequestError
from edgert.sampling import SamplingParams, uniform
from scipy import stats


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("seed", -1),
        ("seed", 2**64),
        ("stop", ("",)),
        ("stop", (3,)),
        ("stop_token_ids", (-1,)),
        ("temperature", 10**400),
        ("top_p", 10**400),
        ("stop", None),
        ("stop", b"end"),
        ("stop_token_ids", 5),
        ("ignore_eos", "no"),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: value})


def test_one_stop_string_or_many() -> None:
    one: Any = "\n"
    assert SamplingParams(stop=one).stop == ("\n",)
    many: Any = ["a", "b"]
    assert SamplingParams(stop=many).stop == ("a", "b")


def test_without_a_seed_each_request_draws_its_own() -> None:
    assert SamplingParams(seed=5).seeded() == 5
    assert SamplingParams().seeded() != SamplingParams().seeded()


def test_the_numbers_are_uniform_reproducible_and_below_one() -> None:
    numbers = np.array([uniform(seed, position) for seed in range(20) for position in range(200)])
    assert numbers.dtype == np.float32
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert stats.kstest(numbers, "uniform").pvalue > 0.001
    assert len(set(numbers.tolist())) > 3990
    assert uniform(3, 7) == uniform(3, 7) != uniform(3, 8)
    assert uniform(2**64 - 1, 2**40) < 1


def test_the_first_numbers_are_pinned() -> None:
    """Seeds must mean the same in every version."""
    assert [round(float(uniform(42, position)), 6) for position in range(3)] == [0.820198, 0.368128, 0.876798]
