"""The numbers that limits look at, as groups come and go."""

from __future__ import annotations

import pytest

from replaybuf import Status
from replaybuf.rollouts.rollout import ASIDE
from replaybuf.rules.limits import Level

OTHERS = [status for status in Status if status not in (Status.COMPLETED, *ASIDE)]


def test_a_completed_group_that_is_put_counts_for_the_capacity_and_for_the_rate() -> None:
    assert Level(5, 3, 7, 2).joined_by(Status.COMPLETED) == Level(6, 4, 8, 2)


@pytest.mark.parametrize("status", OTHERS)
def test_a_group_of_another_status_is_buffered_and_counts_for_nothing_else(status: Status) -> None:
    assert Level(5, 3, 7, 2).joined_by(status) == Level(6, 3, 7, 2)


@pytest.mark.parametrize("status", ASIDE)
def test_what_is_not_trained_on_takes_no_room(status: Status) -> None:
    assert Level(5, 3, 7, 2).joined_by(status) == Level(5, 3, 7, 2)


def test_what_is_replaced_makes_room_and_stays_counted_for_the_rate() -> None:
    assert Level(5, 3, 7, 2).without([Status.COMPLETED, Status.FAILED, Status.ARCHIVED]) == Level(4, 2, 7, 2)
