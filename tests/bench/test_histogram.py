"""Histograms and ledgers: what is added up is what one process would have counted."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from replaybuf.bench.counted import LEAST, MOST, RELATIVE_ERROR, Histogram, UidSums

LATENCIES = st.floats(min_value=LEAST, max_value=MOST * 0.99)
UIDS = st.lists(st.integers(min_value=1, max_value=2**63 - 1), max_size=30)


def filled(seconds: list[float]) -> Histogram:
    histogram = Histogram()
    for one in seconds:
        histogram.add(one)
    return histogram


@given(st.lists(LATENCIES), st.lists(LATENCIES))
def test_merging_is_exact(some: list[float], others: list[float]) -> None:
    merged = filled(some)
    merged.merge(filled(others))
    assert merged == filled([*some, *others])


@given(st.lists(LATENCIES, min_size=1), st.sampled_from([0.0, 0.5, 0.9, 0.99, 0.999, 1.0]))
def test_a_quantile_is_that_of_the_values_within_the_error(seconds: list[float], q: float) -> None:
    exact = sorted(seconds)[max(1, math.ceil(q * len(seconds) - 1e-9)) - 1]
    found = filled(seconds).quantile(q)
    assert found is not None
    assert abs(found - exact) <= exact * RELATIVE_ERROR * 1.001


@given(st.lists(st.sampled_from([-1.0, 0.0, LEAST / 2, MOST * 10]), min_size=1))
def test_what_is_out_of_range_counts_as_the_nearest(seconds: list[float]) -> None:
    histogram = filled(seconds)
    assert histogram.counts.total() == len(seconds)
    assert histogram.quantile(1.0) == max(0.0, *seconds, 0.0)


def test_no_latency_has_no_quantile() -> None:
    assert set(Histogram().figures().values()) == {None}


@given(UIDS, st.randoms())
def test_a_ledger_of_parts_is_that_of_the_whole(uids: list[int], chance: object) -> None:
    shuffled = [*uids]
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    half = len(uids) // 2
    assert UidSums().add(*shuffled[:half]) + UidSums().add(*shuffled[half:]) == UidSums().add(*uids)


@given(UIDS, UIDS)
def test_ledgers_are_equal_only_for_the_same_groups(some: list[int], others: list[int]) -> None:
    assert (UidSums().add(*some) == UidSums().add(*others)) == (Counter(some) == Counter(others))
