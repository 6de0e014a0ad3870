"""The figures of a load, and when it has failed."""

from __future__ import annotations

from typing import Any

import pytest

from replaybuf.cli.bench.load import BenchSettings, GroupMaker, parse_group
from replaybuf.cli.bench.report import ledger_of, passed, quantiles
from replaybuf.cli.bench.run import Outcome
from replaybuf.errors import InputError


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
    settings = BenchSettings("", "", rollouts=3, tokens=50)
    made = [GroupMaker(settings, worker).make() for worker in (0, 1) for _ in range(1)]
    made += [one for maker in [GroupMaker(settings, 2)] for one in (maker.make(), maker.make())]
    assert [len(group) for group in made] == [3, 3, 3, 3]
    assert {len(rollout.response_ids) for group in made for rollout in group} == {50}
    assert len({rollout.rollout_id for group in made for rollout in group}) == 12


@pytest.mark.parametrize("text", ["", "8", "8x", "x4000", "0x10", "8x4000x2", "8x4000000"])
def test_what_is_no_group_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_group(text)


@pytest.mark.parametrize(
    "settings",
    [
        {"workers": 0},
        {"seconds": 0.0},
        {"take": 64, "most": 63},
    ],
)
def test_what_could_measure_nothing_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        BenchSettings("", "", **settings).check()


@pytest.mark.parametrize(
    ("put", "taken", "left", "lost", "doubled"),
    [([1, 2, 3], [1, 2], [3], 0, 0), ([1, 2, 3], [1], [3], 1, 0), ([1, 2], [1, 2], [2], 0, 1), ([], [], [], 0, 0)],
)
def test_the_ledger_finds_what_was_lost_and_doubled(
    put: list[int], taken: list[int], left: list[int], lost: int, doubled: int
) -> None:
    outcome = Outcome(BenchSettings("", ""), "", left=left)
    outcome.reports["worker"].put, outcome.reports["trainer"].taken = put, taken
    found = ledger_of(outcome)
    assert (found["lost"], found["doubled"], found["balanced"]) == (lost, doubled, not (lost or doubled))


def test_quantiles_are_by_nearest_rank() -> None:
    found = quantiles([n / 1000 for n in range(100, 0, -1)])
    assert found == {
        "count": 100,
        "mean_ms": pytest.approx(50.5),
        "p50_ms": 51,
        "p90_ms": 91,
        "p99_ms": 100,
        "max_ms": 100,
    }
