"""What errors of PostgreSQL and its driver mean, and how long and how often operations are tried again."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import asyncpg
import pytest
from asyncpg.exceptions import InternalClientError
from sqlalchemy import make_url

from replaybuf.errors import AccessError, LockedError, ReplayBufError, StorageError, UnreachableError
from replaybuf.storage.sql.engine import outage as module
from replaybuf.storage.sql.engine.database import Access
from replaybuf.storage.sql.engine.driver_errors import (
    CommitUnansweredError,
    is_conflict,
    is_lost,
    is_refusal,
    translated,
)
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
    monkeypatch.setattr(module._random, "uniform", lambda _low, high: high)
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
    late_error = UnreachableError("no answer in time")
    late_error.__cause__ = TimeoutError()
    errors = iter([UnreachableError("the disk of the server is full")])
    patience = await given_up(Outage("here", 3), lambda: next(errors, late_error))
    assert "the disk of the server is full" in str(patience.given_up("; nothing of it was stored"))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (AccessError("no", reason="not admitted"), "not admitted"),
        (AccessError("two of them", reason="only standbys"), "only standbys"),
        (UnreachableError("none", reason="no primary"), "no primary"),
        (UnreachableError("full", reason="no connection left"), "no connection left"),
        (UnreachableError("later", reason="credentials"), "credentials"),
        (UnreachableError("away"), ""),
    ],
)
async def test_what_is_given_up_has_the_reason_of_its_last_error(
    clock: Clock, error: StorageError, reason: str
) -> None:
    """And its class, by which a program catches it, as at the opening of a buffer."""
    patience = await given_up(Outage("here", 3), lambda: error)
    raised = patience.given_up("; nothing of it was stored")
    assert (type(raised), raised.reason) == (type(error), reason)


async def test_an_outage_changes_no_numbers_of_a_seeded_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do processes with the same seed try again in step."""
    state = random.getstate()
    outage = Outage("here", 60)
    outage.cut_retries()
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.0)
    await Patience(outage).wait(UnreachableError("away"))
    assert random.getstate() == state


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


# What an error means: for callers, for who tries again, and for the puts of a batch


#: When an attempt that failed with an error is made again: always, before there was a connection, or never.
ALWAYS, BEFORE, NEVER = (True, True), (False, True), (False, False)

#: An error; its kind for callers and its reason; when the attempt is made again.
MEANINGS: list[tuple[BaseException, type[ReplayBufError], str, tuple[bool, bool]]] = [
    (asyncpg.AdminShutdownError("x"), UnreachableError, "", ALWAYS),
    (asyncpg.CrashShutdownError("x"), UnreachableError, "", ALWAYS),
    (asyncpg.CannotConnectNowError("x"), UnreachableError, "", ALWAYS),
    (asyncpg.IdleInTransactionSessionTimeoutError("x"), UnreachableError, "", ALWAYS),
    (asyncpg.TooManyConnectionsError("x"), UnreachableError, "no connection left", ALWAYS),
    (asyncpg.ConnectionDoesNotExistError("x"), UnreachableError, "", ALWAYS),
    (asyncpg.ConnectionFailureError("x"), UnreachableError, "", ALWAYS),
    (InternalClientError("x"), UnreachableError, "", ALWAYS),
    (ConnectionResetError("x"), UnreachableError, "", ALWAYS),
    (TimeoutError(110, "the network's"), UnreachableError, "", ALWAYS),
    (asyncpg.InvalidPasswordError("x"), AccessError, "not admitted", ALWAYS),
    (TimeoutError(), UnreachableError, "", BEFORE),
    (CommitUnansweredError(), UnreachableError, "commit unanswered", BEFORE),
    (asyncpg.InsufficientPrivilegeError("x"), AccessError, "", NEVER),
    (asyncpg.ReadOnlySQLTransactionError("x"), AccessError, "", NEVER),
    (asyncpg.InvalidCatalogNameError("x"), UnreachableError, "", NEVER),
    (asyncpg.DiskFullError("x"), StorageError, "disk full", NEVER),
    (asyncpg.LockNotAvailableError("x"), LockedError, "", NEVER),
]
#: An error; whether it is a conflict, or else about a row or a batch that is too large for the server's limits.
OF_ROWS: list[tuple[BaseException, bool]] = [
    (asyncpg.SerializationError("x"), True),
    (asyncpg.DeadlockDetectedError("x"), True),
    (asyncpg.UniqueViolationError("x"), True),
    (asyncpg.NotNullViolationError("x"), False),
    (asyncpg.UntranslatableCharacterError("x"), False),
    (asyncpg.DataError("x"), False),
    (asyncpg.QueryCanceledError("x"), False),
]


def translation(error: BaseException) -> ReplayBufError:
    with pytest.raises(ReplayBufError) as caught, translated(Access(make_url("postgresql+asyncpg://host/runs"))):
        raise error
    assert caught.value.__cause__ is error
    return caught.value


@pytest.mark.parametrize(("error", "kind", "reason", "again"), MEANINGS, ids=lambda error: type(error).__name__)
def test_each_error_has_its_kind_and_is_tried_again_or_not(
    error: BaseException, kind: type[ReplayBufError], reason: str, again: tuple[bool, bool]
) -> None:
    """No row is tried by itself after these: a batch whose outcome isn't known would be stored twice."""
    ours = translation(error)
    assert (type(ours), ours.reason) == (kind, reason)
    assert (is_lost(ours, connected=True), is_lost(ours, connected=False)) == again
    assert not is_conflict(ours)
    assert not is_refusal(ours)


@pytest.mark.parametrize(("error", "conflict"), OF_ROWS, ids=lambda error: type(error).__name__)
def test_a_conflict_is_tried_again_on_the_same_connection_and_refused_rows_one_by_one(
    error: BaseException, conflict: bool
) -> None:
    ours = translation(error)
    assert (is_conflict(ours), is_refusal(ours)) == (conflict, not conflict)
    assert not is_lost(ours, connected=True)


def test_what_is_too_large_is_refused_by_itself() -> None:
    assert is_refusal(StorageError("the row has 2 GB", reason="too large"))
    assert not is_refusal(StorageError("the disk is full", reason="disk full"))
