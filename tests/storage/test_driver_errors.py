"""What the errors of PostgreSQL and its driver mean: for callers, for who tries again, and for the puts of a batch."""

from __future__ import annotations

import asyncpg
import pytest
from asyncpg.exceptions import InternalClientError
from sqlalchemy import make_url

from replaybuf.errors import AccessError, LockedError, ReplayBufError, StorageError, UnreachableError
from replaybuf.storage.sql.engine.database import Access
from replaybuf.storage.sql.engine.driver_errors import (
    CommitUnansweredError,
    OtherServerError,
    is_conflict,
    is_lost,
    is_refusal,
    translated,
)

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
    (OtherServerError(), UnreachableError, "", ALWAYS),
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


@pytest.mark.parametrize(("error", "kind", "reason", "again"), MEANINGS, ids=lambda one: type(one).__name__)
def test_each_error_has_its_kind_and_is_tried_again_or_not(
    error: BaseException, kind: type[ReplayBufError], reason: str, again: tuple[bool, bool]
) -> None:
    """No row is tried by itself after these: a batch whose outcome isn't known would be stored twice."""
    ours = translation(error)
    assert (type(ours), ours.reason) == (kind, reason)
    assert (is_lost(ours, connected=True), is_lost(ours, connected=False)) == again
    assert not is_conflict(ours)
    assert not is_refusal(ours)


@pytest.mark.parametrize(("error", "conflict"), OF_ROWS, ids=lambda one: type(one).__name__)
def test_a_conflict_is_tried_again_on_the_same_connection_and_refused_rows_one_by_one(
    error: BaseException, conflict: bool
) -> None:
    ours = translation(error)
    assert (is_conflict(ours), is_refusal(ours)) == (conflict, not conflict)
    assert not is_lost(ours, connected=True)


def test_what_is_too_large_is_refused_by_itself() -> None:
    assert is_refusal(StorageError("the row has 2 GB", reason="too large"))
    assert not is_refusal(StorageError("the disk is full", reason="disk full"))
