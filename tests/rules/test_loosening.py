"""What is said to do against a limit helps: the limits with that option let the groups be drawn, or be put."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from replaybuf.rollouts.statuses import Status
from replaybuf.rules.causes import to_draw, to_put
from replaybuf.rules.limits import Level, Limits

_OF_DRAWS = [
    (Limits(max_times_sampled=0, samples_per_insert=2, error_buffer=16), Level(48, 48, 48, 108)),
    (Limits(max_times_sampled=0, samples_per_insert=2, error_buffer=(-16, 60)), Level(48, 48, 48, 108)),
    (Limits(samples_per_insert=1), Level(40, 40, 48, 50)),
    (Limits(max_times_sampled=0, min_size=48, samples_per_insert=1, error_buffer=8), Level(48, 48, 48, 8)),
]


def changed(limits: Limits, advice: str) -> Limits:
    """Follow an advice."""
    error, ratio, number = limits.error_buffer, limits.samples_per_insert or 0, re.search(r"-?[\d.]+$", advice)
    to = float(number[0]) if number else 0.0
    options: dict[str, dict[str, Any]] = {
        "raise samples_per_insert": {"samples_per_insert": 1.5 * ratio},
        "lower samples_per_insert": {"samples_per_insert": ratio / 2},
        "lower min_size": {"min_size": 0},
        "raise the capacity": {"capacity": 2 * (limits.capacity or 0)},
        "raise error_buffer": {"error_buffer": to or 40},
        "lower the first number of error_buffer": {"error_buffer": (to, error[1]) if isinstance(error, tuple) else 0},
        "raise the second number of error_buffer": {"error_buffer": (error[0], 400) if isinstance(error, tuple) else 0},
    }
    return replace(limits, **options[advice.partition(" to ")[0]])


@pytest.mark.parametrize(("limits", "level"), _OF_DRAWS)
def test_what_is_said_of_a_draw_lets_more_be_drawn(limits: Limits, level: Level) -> None:
    """And enough of them where it is a number."""
    assert limits.drawable(level) < 24
    for advice in to_draw(limits, level, 24):
        assert changed(limits, advice).drawable(level) > limits.drawable(level), advice
        assert " to " not in advice or changed(limits, advice).drawable(level) == 24


@pytest.mark.parametrize(
    ("limits", "level"),
    [
        (Limits(max_times_sampled=0, samples_per_insert=2, error_buffer=16), Level(8, 8, 8, 0)),
        (Limits(samples_per_insert=1, error_buffer=(-4, 8)), Level(8, 8, 8, 0)),
        (Limits(capacity=8, on_full="block"), Level(8, 8, 8, 0)),
    ],
)
def test_what_is_said_of_a_put_lets_more_be_put(limits: Limits, level: Level) -> None:
    assert limits.insertable(level, Status.COMPLETED) == 0
    for advice in to_put(limits, level):
        assert (changed(limits, advice).insertable(level, Status.COMPLETED) or 0) > 0, advice


def test_what_is_not_valid_or_does_not_help_is_not_said() -> None:
    """Each group is drawn once, so samples_per_insert can't be 2; and while only min_size groups were put, it counts
    from there."""
    assert to_draw(*_OF_DRAWS[2], 24) == ["raise error_buffer to 26"]
    assert to_draw(*_OF_DRAWS[3], 24) == ["raise error_buffer to 32"]
    assert to_draw(Limits(min_size=8), Level(4, 4, 4), 2) == ["lower min_size"]
