"""What is said of a load's limit follows from its figures."""

from __future__ import annotations

from typing import Any

import pytest

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
