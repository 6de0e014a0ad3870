"""A batch is divided among tasks by their weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.errors import InputError
from replaybuf.produce import batch_sizes

WEIGHTS = st.dictionaries(st.text("abc", min_size=1), st.floats(0, 1e308), min_size=1).filter(
    lambda one: any(one.values())
)


@given(WEIGHTS, st.integers(0, 5000))
def test_the_sizes_add_up_and_are_within_one_of_the_shares(weights: dict[str, float], size: int) -> None:
    sizes = batch_sizes(weights, size)
    total = math.fsum(weight / max(weights.values()) for weight in weights.values())
    assert sum(sizes.values()) == size
    for task, weight in weights.items():
        assert abs(sizes[task] - size * (weight / max(weights.values()) / total)) < 1 + 1e-6


def test_what_rounding_leaves_goes_to_those_that_lost_most_the_first_of_equal_ones() -> None:
    assert batch_sizes({"a": 1, "b": 1, "c": 1}, 8) == {"a": 3, "b": 3, "c": 2}
    assert batch_sizes({"a": 0.2, "b": 0.8, "c": 0}, 8) == {"a": 2, "b": 6, "c": 0}
    assert batch_sizes({"a": 3, "b": 1}, 0) == {"a": 0, "b": 0}


@pytest.mark.parametrize("weights", [{}, {"a": 0}, {"a": -1, "b": 2}, {"a": math.inf}, {"a": math.nan}, {"a": "1"}, 3])
def test_weights_that_mean_nothing_are_refused(weights: Any) -> None:
    with pytest.raises(InputError):
        batch_sizes(weights, 4)


@pytest.mark.parametrize("size", [-1, 1.5, None])
def test_sizes_that_mean_nothing_are_refused(size: Any) -> None:
    with pytest.raises(InputError):
        batch_sizes({"math": 1}, size)
