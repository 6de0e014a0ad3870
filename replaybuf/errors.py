"""Every error that replaybuf raises on purpose.

All share the base `ReplayBufError`; the docstring of a class is its message when none is given. Where Python has a
built-in error for the same thing (ValueError, TimeoutError, ...), the class also derives from it, so that code which
doesn't know replaybuf catches it too. Errors of database drivers are translated where they are raised
(`storage.sql.engine.errors`), with the original as `__cause__` and without passwords.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


class ReplayBufError(Exception):
    """Something went wrong in replaybuf."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (self.__doc__ or "").strip())


class InputError(ReplayBufError, ValueError):
    """An argument has a value that can't be used."""


class LeaseNotBegunError(InputError, AttributeError):
    """The result of lease_batch is used like a lease before it was begun."""


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
    """The rollouts given to put lack something that it needs."""


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


class EncodeError(RolloutError, TypeError):
    """A rollout holds a value that can't be stored; the message names its path in the rollout."""


class DecodeError(ReplayBufError, ValueError):
    """A stored payload can't be read: it is damaged, or was written for another rollout type."""


class ClosedError(ReplayBufError, RuntimeError):
    """The buffer is closed; build a new one to go on."""


class NotPicklableError(ReplayBufError, TypeError):
    """A buffer can't be pickled; pickle its config, and build a buffer from it in each process."""


class NotReadyError(ReplayBufError, TimeoutError):
    """The time to wait is over and the groups asked for are not there; nothing was taken."""

    #: The Diagnosis of why they aren't, where one was made; its `reason` is for programs.
    diagnosis: Any = None


class FullError(ReplayBufError, TimeoutError):
    """There is no room for the group, or the rate limit holds it back; it was not stored."""

    #: The Diagnosis of why there isn't, where one was made.
    diagnosis: Any = None
    #: Of several groups that were to be put together, the place of the one that has no room.
    place: int = 0


class ConflictError(ReplayBufError, RuntimeError):
    """A group that was to be replaced is no longer in the buffer; nothing was stored."""


class LeaseLostError(ReplayBufError, RuntimeError):
    """The lease is over: its time ran out, and its groups were given back or to another consumer."""


class FencedError(ReplayBufError, RuntimeError):
    """The buffer was restored since it was opened here, and this is of the run before.

    A process ends, unless it should join the restored run: then it builds a new buffer.
    """


class CommitsLostError(FencedError):
    """The database goes on without transactions that this process saw committed: a standby that lacks them took over.

    `restore(step)` goes back to a step that is there; a new buffer accepts what is there.
    """


class RankError(ReplayBufError, RuntimeError):
    """Another rank of the process group failed, or didn't answer in time; this one can't go on with the step."""


class ProduceError(ReplayBufError, RuntimeError):
    """The groups of a batch can't be made: the prompts are at their end, or the agent loop fails again and again.

    `summary` is the ProduceSummary of what was produced until then; None outside a production.
    """

    summary: Any = None


class PromptsExhaustedError(ProduceError):
    """No prompt is left in the dataset, and none is in flight: the batch can't be made."""


class CheckpointError(ReplayBufError, LookupError):
    """There is no such step checkpoint."""


class UnsupportedError(ReplayBufError, NotImplementedError):
    """What a replaced interface has and a database can't do, such as changing stored rollouts in place."""


class StorageError(ReplayBufError):
    """The database refused or failed; nothing of the operation was stored."""


class ForkedError(StorageError):
    """This buffer is in the memory of the process that was forked: use a file or a server, or build one here."""


class UnreachableError(StorageError, ConnectionError):
    """The database server can't be reached.

    `in_doubt` is true if it isn't known whether the operation was committed: the server's answer was lost, and the
    server could not be asked again in time. Otherwise nothing was stored.
    """

    in_doubt = False


class NoConnectionLeftError(UnreachableError):
    """The server has as many connections as it allows."""


class PoolBusyError(UnreachableError):
    """All connections of the buffer were in use for too long."""


class NotConnectedError(UnreachableError):
    """A certificate, or the password, of a new connection can't be had at the moment."""


class NoPrimaryError(UnreachableError):
    """None of the servers that the URL names is the one that it asks for, at the moment."""


class StandbyAwaitedError(UnreachableError):
    """A commit waits for a synchronous standby of the server that isn't there, or is far behind.

    With `in_doubt` it is the call's own commit: the primary has it, and it is lost if the primary is lost before a
    standby has it. Otherwise nothing was stored: the call waited for a lock of such a commit.
    """


class CutShortError(UnreachableError, ClosedError):
    """The buffer was closed while its server was out of reach."""


class AccessError(StorageError, PermissionError):
    """The database refused the user, the password or the write."""


class NotAdmittedError(AccessError, UnreachableError):
    """The server refuses the user, or the password, of a new connection: it may be that it is being changed."""


class OnlyStandbysError(AccessError):
    """All servers that the URL names are standbys, until one is promoted."""


class LockedError(StorageError, TimeoutError):
    """Another process held the database's write lock for longer than the lock timeout."""


class PayloadStoreError(StorageError, OSError):
    """The place where payloads are kept can't be reached, or refuses; nothing of the operation was stored."""


class DiskFullError(StorageError, OSError):
    """The disk is full; what was committed before is safe."""


class TooLargeError(StorageError, ValueError):
    """The group is larger than a row of the database may be; nothing was stored."""


class NetworkFilesystemError(StorageError):
    """The SQLite file is on a network file system, where its log is unsafe; use a local disk or PostgreSQL."""


class NotADatabaseError(StorageError):
    """The file is not a replaybuf database, or it is damaged."""


class SchemaError(StorageError):
    """The database was made by another version of replaybuf."""


class SnapshotError(ReplayBufError):
    """The snapshot can't be resumed from."""


class NotEmptyError(SnapshotError, RuntimeError):
    """A snapshot can be resumed only into an empty buffer."""


class MissingSnapshotError(SnapshotError, FileNotFoundError):
    """There is no snapshot in this folder."""


class SnapshotMismatchError(SnapshotError, ValueError):
    """The snapshot was written with another schema or policy."""


class FileError(ReplayBufError, ValueError):
    """The file can't be read, or not as rollouts; the message says where in it, and what was wrong."""


class FileEndsError(FileError):
    """The file ends in the middle of a row or a group; it was cut short."""


class FileThereError(ReplayBufError, FileExistsError):
    """There is a file of this name already; it was left as it is."""


class FragmentError(ReplayBufError, ValueError):
    """A fragment does not follow the ones before it; it was not stored.

    `kind` is "gap", "duplicate" or "session". `worker`, `index` and `session` are those of the fragment. `expected` is
    the index that would have been right, or the session of the store.
    """

    def __init__(
        self,
        message: str | None = None,
        *,
        kind: str = "",
        worker: str = "",
        index: int = 0,
        session: int | str = 0,
        expected: int | str = 0,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.worker = worker
        self.index = index
        self.session = session
        self.expected = expected
