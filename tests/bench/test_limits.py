"""What is said of a load's limit follows from its figures."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.bench.counted import LEAST, MOST, RELATIVE_ERROR, Histogram, UidSums
from replaybuf.bench.loads import BenchSettings, GroupMaker, parse_group
from replaybuf.bench.results import limits_of, passed
from replaybuf.errors import InputError


def results(*, room: float = 0.0, groups: float = 0.0, busy: float | None = 0.5, due: float | None = None) -> Any:
    processes = {"workers": {"processors": 0.7}, "trainers": {"processors": 0.3}}
    return {
        "waits": {
            "for_room": {"part_of_time": room},
            "pauses": {"part_of_time": 0.0},
            "for_groups": {"part_of_time": groups},
        },
        "per_second": {"put": 100.0, "due": due},
        "machine": {"busy": busy, "processors": 2},
        "processes": processes,
        "database_meanwhile": {"samples": 100, "most_connections": 90, "waits": {"LWLock WALWrite": 150, "IO": 50}},
        "database_after": {"max_connections": 100},
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"room": 0.6}, "Workers waited for room 60% of their time"),
        ({"due": 101.0}, "the limit wasn't reached"),
        ({"due": 200.0, "busy": 0.97}, "Of 200.0 groups a second that were due, 100.0 were put. This machine's 2 proc"),
        ({"busy": 0.3}, "the database, its disk or the network was, or the number of workers"),
        ({"groups": 0.8}, "Trainers waited for groups 80% of their time"),
        ({}, "seen 2.0 at a time, in: LWLock WALWrite 75%, IO 25%"),
        ({}, "90 of 100 connections were in use"),
    ],
)
def test_the_limit_is_said(given: dict[str, Any], said: str) -> None:
    assert said in " ".join(limits_of(results(**given)))


@pytest.mark.parametrize(
    ("found", "ends_well"),
    [
        ({}, True),
        ({"errors": [{"count": 1}]}, False),
        ({"failed": ["worker 3: it was killed"]}, False),
        ({"notes": ["the database can't be read any more"]}, False),
        ({"ledger": {"balanced": False}}, False),
        ({"ledger": {"balanced": None}}, True),
    ],
)
def test_errors_deaths_and_lost_groups_fail_a_load(found: dict[str, Any], ends_well: bool) -> None:
    assert passed({"errors": [], "failed": [], "notes": [], "ledger": {"balanced": True}, **found}) == ends_well


def test_a_group_is_what_was_asked_for_and_no_two_are_the_same() -> None:
    settings = BenchSettings("", "", rollouts=3, tokens=50, extra=100)
    made = [GroupMaker(settings, worker).make() for worker in (0, 1) for _ in range(1)]
    made += [one for maker in [GroupMaker(settings, 2)] for one in (maker.make(), maker.make())]
    assert [len(group) for group in made] == [3, 3, 3, 3]
    assert {len(rollout.response_ids) for group in made for rollout in group} == {50}
    assert len({rollout.rollout_id for group in made for rollout in group}) == 12
    assert {len(group[0].extra_fields["extra"]) for group in made} == {100}


@pytest.mark.parametrize("text", ["", "8", "8x", "x4000", "0x10", "8x4000x2", "8x4000000"])
def test_what_is_no_group_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_group(text)


@pytest.mark.parametrize(
    "settings",
    [
        {"workers": 0, "trainers": 0},
        {"seconds": 0.0},
        {"take": 64, "capacity": 63},
        {"take": 64, "most": 63},
        {"workers": 0},
    ],
)
def test_what_could_measure_nothing_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        BenchSettings("", "", **settings).check()


# Histograms and ledgers: what is added up is what one process would have counted


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
