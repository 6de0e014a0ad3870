"""How long operations are tried again, how often, and what of it callers hear; by a clock of the test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from replaybuf.errors import AccessError, UnreachableError
from replaybuf.storage.sql.engine import outage as module
from replaybuf.storage.sql.engine.outage import Outage, OutcomeUnknownError, Patience, until_committed


class Clock:
    """The time, which passes only in pauses; and how long these were."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(Outage, "pause", lambda _outage, seconds: clock.pause(seconds))
    monkeypatch.setattr(module.random, "uniform", lambda _low, high: high)
    return clock


async def given_up(outage: Outage, error: Callable[[], Any]) -> Patience:
    """Wait again and again after errors until the time is over."""
    patience = Patience(outage)
    try:
        while True:
            await patience.wait(error())
    except TimeoutError:
        return patience


async def test_attempts_go_on_for_so_many_seconds_after_the_first_failure(clock: Clock) -> None:
    await given_up(Outage("here", 30), lambda: UnreachableError("away"))
    assert clock.now == 1030


async def test_pauses_grow_to_a_second_and_after_a_refused_password_to_eight(clock: Clock) -> None:
    await given_up(Outage("here", 100), lambda: UnreachableError("away"))
    assert clock.pauses[0] < 0.1
    assert max(clock.pauses) == 1
    clock.pauses.clear()
    await given_up(Outage("here", 100), lambda: AccessError("no", reason="not admitted"))
    assert max(clock.pauses) == 8


async def test_the_reason_that_is_told_is_not_that_the_time_was_over(clock: Clock) -> None:
    late = UnreachableError("no answer in time")
    late.__cause__ = TimeoutError()
    errors = iter([UnreachableError("the disk of the server is full")])
    patience = await given_up(Outage("here", 3), lambda: next(errors, late))
    assert "the disk of the server is full" in str(patience.given_up("; nothing of it was stored"))


def test_closing_leaves_each_operation_two_seconds_more(clock: Clock) -> None:
    outage = Outage("here", 60)
    assert outage.deadline(970) == 1030
    outage.cut_retries()
    assert outage.deadline(970) == 1002
    assert outage.deadline(941.5) == 1001.5
    clock.now = 1005
    assert outage.deadline(1005) == 1007


async def test_a_commit_under_way_has_its_time_though_the_store_is_being_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Closing waits for it: a caller that was told too early that it is in doubt couldn't have it undone either."""
    monkeypatch.setattr(module, "_CLOSING_SECONDS", 0.0)
    outage = Outage("here", 0)
    async with outage.bounded(0.0, time.monotonic() + 3600):
        outage.cut_retries()
        await asyncio.sleep(0.01)


async def test_a_write_in_doubt_is_made_again_only_if_it_was_not_committed() -> None:
    committed, calls = [False, True], []

    async def was_committed() -> bool:
        calls.append("asked")
        return committed.pop(0)

    async def write() -> None:
        calls.append("written")
        raise OutcomeUnknownError("the answer was lost", was_committed, None)

    attempt = until_committed(write)
    for _ in range(2):
        with pytest.raises(OutcomeUnknownError):
            await attempt()
    await attempt()
    assert calls == ["written", "asked", "written", "asked"]


async def test_what_waits_without_an_end_is_bounded_once_the_store_is_being_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CLOSING_SECONDS", 0.0)
    outage = Outage("here", 3600)
    waiting = asyncio.Event()

    async def wait() -> None:
        async with outage.bounded(None):
            waiting.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await waiting.wait()
    outage.cut_retries()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(task), 60)
    assert task.done()
