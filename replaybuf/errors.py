"""Every error that replaybuf raises on purpose.

All share the base `ReplayBufError`; the docstring of a class is its message when none is given. Where Python has a
built-in error for the same thing (ValueError, TimeoutError, ...), the class also derives from it, so that code which
doesn't know replaybuf catches it too. Errors of database drivers are translated where they are raised
(`storage.sql.engine.driver_errors`), with the original as `__cause__` and without passwords.

Where one class covers several situations, an error's `reason` names the one: a key of its class's `REASONS`, or "".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar


class ReplayBufError(Exception):
    """Something went wrong in replaybuf."""

    #: What each `reason` means; that is the message when none is given.
    REASONS: ClassVar[Mapping[str, str]] = {
        "ranks": "Another rank of the process group failed, or didn't answer in time; the step can't go on here.",
    }

    def __init__(self, message: str | None = None, *, reason: str = "") -> None:
        assert reason in ("", *self.REASONS), reason
        super().__init__(message or self.REASONS.get(reason) or (self.__doc__ or "").strip())
        #: Which of `REASONS` it is, for programs; empty for anything else.
        self.reason = reason


def reason_of(error: object) -> str:
    """Return the `reason` of an error of replaybuf, and "" of any other."""
    return error.reason if isinstance(error, ReplayBufError) else ""


class InputError(ReplayBufError, ValueError):
    """An argument has a value that can't be used."""

    REASONS: ClassVar[Mapping[str, str]] = {
        "not picklable": "A buffer can't be pickled; pickle its config, and build a buffer from it in each process.",
    }


class ConfigError(ReplayBufError, ValueError):
    """The configuration can't work."""


class MissingDriverError(ConfigError, ImportError):
    """A package that this configuration needs is not installed."""


class QueryError(ReplayBufError, ValueError):
    """The query is not understood.

    `place` is where in the query the mistake is, for example `$and[1].staleness.$gt`.
    """

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(f"{place}: {message}" if place else message)
        self.place = place


class RolloutError(ReplayBufError, ValueError):
    """The rollouts given to put lack something that it needs, or hold a value that can't be stored.

    The message names the path of such a value in the rollout.
    """


class GroupError(ReplayBufError):
    """Some groups of a batch can't be used; `uids` names them.

    Raised by a consumer in the block of a lease, it is a failed delivery of these groups alone.
    """

    def __init__(self, message: str | None = None, *, uids: int | Iterable[int] = ()) -> None:
        super().__init__(message)
        self.uids = frozenset(uids if isinstance(uids, Iterable) else [uids])


class PartlyStoredError(ReplayBufError):
    """Some of several groups were refused, and the others are stored.

    `results` has for each, in order, its uid, None where nothing was to be stored, or the error that refused it.
    """

    results: Sequence[int | BaseException | None] = ()


class DecodeError(ReplayBufError, ValueError):
    """A stored payload can't be read: it is damaged, or was written for another rollout type."""


class ClosedError(ReplayBufError, RuntimeError):
    """The buffer is closed; build a new one to go on."""


class NotReadyError(ReplayBufError, TimeoutError):
    """The time to wait is over and the groups asked for are not there; nothing was taken."""

    #: The Diagnosis of why they aren't, where one was made; its `reason` is for programs.
    diagnosis: Any = None


class FullError(ReplayBufError, TimeoutError):
    """There is no room for the group, or the rate limit holds it back; it was not stored."""

    #: The Diagnosis of why there isn't, where one was made.
    diagnosis: Any = None


class ConflictError(ReplayBufError, RuntimeError):
    """A group that was to be replaced is no longer in the buffer; nothing was stored."""


class LeaseLostError(ReplayBufError, RuntimeError):
    """The lease is over: its time ran out, and its groups were given back or to another consumer."""


class FencedError(ReplayBufError, RuntimeError):
    """The buffer was restored since it was opened here, and this is of the run before.

    A process ends, unless it should join the restored run: then it builds a new buffer. With the reason
    "commits lost", `restore(step)` goes back to a step that is there; a new buffer accepts what is there.
    """

    REASONS: ClassVar[Mapping[str, str]] = {
        "commits lost": "The database goes on without transactions that this process saw committed: a standby that "
        "lacks them took over.",
    }


class ProduceError(ReplayBufError, RuntimeError):
    """The groups of a batch can't be made: the prompts are at their end, or the agent loop fails again and again.

    `summary` is the ProduceSummary of what was produced until then; None outside a production.
    """

    REASONS: ClassVar[Mapping[str, str]] = {
        "exhausted": "No prompt is left in the dataset, and none is in flight: the batch can't be made."
    }

    summary: Any = None


class CheckpointError(ReplayBufError, LookupError):
    """There is no such step checkpoint."""


class StorageError(ReplayBufError):
    """The database refused or failed; nothing of the operation was stored, unless `in_doubt` says otherwise."""

    REASONS: ClassVar[Mapping[str, str]] = {
        "disk full": "The disk is full; what was committed before is safe.",
        "too large": "The group is larger than a row of the database may be; nothing was stored.",
        "network filesystem": "The SQLite file is on a network file system, where its log is unsafe.",
        "not a database": "The file is not a replaybuf database, or it is damaged.",
        "schema": "The database was made by another version of replaybuf.",
        "forked": "This buffer is in the memory of the process that was forked: use a file or a server, or build one "
        "here.",
    }

    #: Whether it isn't known if the operation was committed.
    in_doubt = False


class UnreachableError(StorageError, ConnectionError):
    """The database server can't be reached.

    `in_doubt` is true if it isn't known whether the operation was committed: the server's answer was lost, and the
    server could not be asked again in time. Otherwise nothing was stored.
    """

    REASONS: ClassVar[Mapping[str, str]] = {
        "no connection left": "The server has as many connections as it allows.",
        "pool busy": "All connections of the buffer were in use for too long.",
        "credentials": "A certificate, or the password, of a new connection can't be had at the moment.",
        "no primary": "None of the servers that the URL names is the one that it asks for, at the moment.",
        "commit unanswered": "A commit had no answer in time, perhaps as it waits for a synchronous standby that isn't "
        "there. If the primary has it, it would lose it if it is lost itself before a standby has it.",
    }


class AccessError(StorageError, PermissionError):
    """The database refused the user, the password or the write."""

    REASONS: ClassVar[Mapping[str, str]] = {
        "not admitted": "The server refuses the user, or the password, of a new connection: it may be being changed.",
        "only standbys": "All servers that the URL names are standbys, until one is promoted.",
    }


class LockedError(StorageError, TimeoutError):
    """Another process held the database's write lock for longer than the lock timeout."""


class PayloadStoreError(StorageError, OSError):
    """The place where payloads are kept can't be reached, or refuses; nothing of the operation was stored."""


class SnapshotError(ReplayBufError, RuntimeError):
    """The snapshot can't be resumed from."""

    REASONS: ClassVar[Mapping[str, str]] = {
        "missing": "There is no snapshot in this folder.",
        "not empty": "A snapshot can be resumed only into an empty buffer.",
        "mismatch": "The snapshot was written with another schema or policy.",
    }


class FileError(ReplayBufError, ValueError):
    """The file can't be read or written, or not as rollouts; the message says where in it, and what was wrong."""

    REASONS: ClassVar[Mapping[str, str]] = {
        "exists": "There is a file of this name already; it was left as it is.",
    }


class FragmentError(ReplayBufError, ValueError):
    """A fragment does not follow the ones before it; it was not stored.

    `expected` is the index that would have been right, or the session of
    the store.
    """

    REASONS: ClassVar[Mapping[str, str]] = {
        "gap": "The fragment leaves a gap.",
        "duplicate": "The fragment is there already.",
        "session": "The fragment's session is over, or hasn't begun.",
    }

    def __init__(self, message: str | None = None, *, reason: str = "", expected: int = 0) -> None:
        super().__init__(message, reason=reason)
        self.expected = expected
