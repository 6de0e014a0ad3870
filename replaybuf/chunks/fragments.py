"""Fragments, chunks, selections, the model's state and workers' progress, as values read from groups of the store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from replaybuf.checks import MAX_STEP, Tags, check_task_name, whole
from replaybuf.errors import FragmentError, InputError
from replaybuf.rollouts.rollout import Status
from replaybuf.storage.values import StorageItem

#: Why a fragment is not stored; "stale" and "damaged" are chunks that can't be made.
Problem = Literal["gap", "duplicate", "session"]
DROPPED = ("gap", "duplicate", "session", "stale", "damaged")

#: A session: a number, or a text.
Session = int | str

# Keys have at most 200 characters, and also hold two numbers.
_MAX_WORKER = 150


@dataclass(frozen=True, slots=True)
class Fragment:
    """A fragment on its way into the store. `number` is that of its session there, once it is known."""

    data: Any
    worker: str
    index: int
    session: Session
    version: int
    number: int = -1

    def __post_init__(self) -> None:
        check_task_name(self.worker, "worker")
        if len(self.worker) > _MAX_WORKER:
            raise InputError(f"worker has {len(self.worker)} characters; the limit is {_MAX_WORKER}")
        for name in ("index", "version"):
            object.__setattr__(self, name, check_number(getattr(self, name), name))
        object.__setattr__(self, "session", check_session(self.session))

    def numbered(self, number: int) -> Self:
        """Return the fragment with the number of its session."""
        return replace(self, number=number)

    @property
    def key(self) -> str:
        return f"{self.number}/{self.index}/{self.worker}"

    @property
    def tags(self) -> Tags:
        return {"worker": self.worker, "session": self.number, "index": self.index, "version": self.version}

    def rollout(self) -> dict[str, Any]:
        return {"status": Status.ARCHIVED.value, "index": self.index, "version": self.version, "data": self.data}


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Consecutive fragments of one worker, as they were put.

    `start` is the index of the first one, `versions` are their model versions. The chunk's `version` is the lowest of
    them. `times_sampled` counts its draws, this one included. `uid` identifies it in the store.
    """

    uid: int
    worker: str
    session: Session
    start: int
    version: int
    versions: tuple[int, ...]
    times_sampled: int
    fragments: list[Any]

    @classmethod
    def of(cls, item: StorageItem) -> Chunk:
        """Return the chunk in a group of the store."""
        tags: Any = item.tags
        return cls(
            uid=item.uid,
            worker=tags["worker"],
            session=tags.get("session_name", tags["session"]),
            start=tags["start"],
            version=tags["version"],
            versions=tuple(rollout["version"] for rollout in item.item),
            times_sampled=item.times_sampled,
            fragments=[rollout["data"] for rollout in item.item],
        )

    def rollout(self) -> dict[str, Any]:
        """Return the chunk as one rollout of a selection."""
        names = ("uid", "worker", "session", "start", "version", "versions", "times_sampled", "fragments")
        return {"status": Status.ARCHIVED.value, **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The chunks of one `fetch`, in the order in which they were drawn. A later selection has a higher `number`."""

    number: int
    chunks: tuple[Chunk, ...]

    def __len__(self) -> int:
        return len(self.chunks)

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self.chunks)

    @classmethod
    def of(cls, item: StorageItem) -> Selection:
        """Return the selection in a group of the store."""
        chunks = (Chunk(**{name: value for name, value in r.items() if name != "status"}) for r in item.item)
        return cls(item.uid, tuple(chunks))


def chunk_rollouts(fragments: Sequence[StorageItem]) -> list[dict[str, Any]]:
    """Return the group of a chunk. The store computes its staleness from the model steps."""
    return [
        row.item[0]
        | {
            "status": Status.COMPLETED.value,
            "response_model_steps": [row.item[0]["version"]],
            "seq_staleness": 0,
        }
        for row in fragments
    ]


def check_number(number: Any, what: str, least: int = 0) -> int:
    """Check a whole number of at least `least`, below 2**53."""
    checked = whole(number)
    if checked is None or not least <= checked < MAX_STEP:
        raise InputError(f"{what} must be a whole number of at least {least}, below 2**53, got {number!r:.100}")
    return checked


def check_session(session: Any) -> Session:
    """Check a session: a whole number of at least 0, or a text."""
    return check_task_name(session, "session") if isinstance(session, str) else check_number(session, "session")


def fragment_error(fragment: Fragment, kind: Problem, expected: Session, *, over: bool = True) -> FragmentError:
    """Return the error for a fragment that doesn't follow the ones before it; `over` is that of its session."""
    return FragmentError(
        _describe(fragment, kind, expected, over),
        kind=kind,
        worker=fragment.worker,
        index=fragment.index,
        session=fragment.session,
        expected=expected,
    )


def _describe(fragment: Fragment, kind: Problem, expected: Session, over: bool) -> str:
    place = f"fragment {fragment.index} of worker {fragment.worker!r} in session {fragment.session!r}"
    if kind == "session" and over:
        return f"{place}: that session is over, the store is in session {expected!r}; start the worker in that one"
    if kind == "session":
        return (
            f"{place}: that session hasn't begun, the store is in session {expected!r}; start the worker in that one, "
            "or let the trainer begin the new one: advance(version, session=)"
        )
    if kind == "duplicate":
        return (
            f"{place} is there already: the next one is {expected}; after a put that was repeated this is no harm, and "
            f"for a worker that started anew call forget({fragment.worker!r})"
        )
    return (
        f"{place} leaves a gap: the next one is {expected}; put that first, or call forget({fragment.worker!r}) to "
        "start its next chunk here, or choose on_problem='drop'"
    )


# The number of sessions that are over whose names are kept, so that none of them begins again.
_ENDED = 1000


@dataclass(frozen=True, slots=True)
class ModelState:
    """The session and version of the model; `uids` are the groups that say so.

    `session` is the session's number, `name` its name if it is a text; `ended` are the texts that are over.
    """

    session: int
    version: int
    uids: tuple[int, ...] = ()
    name: str | None = None
    ended: tuple[str, ...] = ()

    @classmethod
    def of(cls, rows: Sequence[StorageItem]) -> ModelState | None:
        """Return the highest state of these groups, or None if there are none."""
        if not rows:
            return None
        last = max(rows, key=lambda row: (tag_of(row, "session"), tag_of(row, "version")))
        ended = tuple(last.item[0].get("ended", ())) if last.item else ()
        uids = tuple(row.uid for row in rows)
        name: Any = (last.tags or {}).get("name")
        return cls(tag_of(last, "session"), tag_of(last, "version"), uids, name, ended)

    @property
    def label(self) -> Session:
        """The session as its workers call it."""
        return self.session if self.name is None else self.name

    def is_over(self, label: Session) -> bool:
        """Return whether a session ended before this one."""
        if label == self.label:
            return False
        return label in self.ended if isinstance(label, str) else label <= self.session


def moved(state: ModelState | None, label: Session | None, version: int) -> ModelState | None:
    """Return the state after a move to a session (None: the present one) and version; None if nothing moves.

    Nothing moves to a session that is over, and to a version that is reached or passed.
    """
    if state is None:
        named = isinstance(label, str)
        return ModelState(0 if named or label is None else int(label), version, name=str(label) if named else None)
    if label is None or label == state.label:
        return None if state.version >= version else replace(state, version=version)
    if state.is_over(label):
        return None
    ended = state.ended if state.name is None else (*state.ended, state.name)[-_ENDED:]
    if isinstance(label, str):
        return ModelState(state.session + 1, version, name=label, ended=ended)
    return ModelState(label, version, ended=ended)


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """The progress of a worker: its next chunk, of `size` fragments, starts at `start`; `fragments` of it are there.

    `cursors` are the uids of the groups that say so. `made` is the last fragment of a chunk whose next cursor isn't
    written yet. `left` are obsolete groups of a delayed put.
    """

    start: int
    size: int
    cursors: tuple[int, ...] = ()
    fragments: tuple[StorageItem, ...] = ()
    made: StorageItem | None = None
    left: tuple[int, ...] = ()

    @property
    def next(self) -> int:
        """The index of the fragment that is expected next."""
        return self.start + len(self.fragments)

    @property
    def complete(self) -> bool:
        return len(self.fragments) >= self.size

    @property
    def uids(self) -> tuple[int, ...]:
        """All groups of the worker that its progress depends on."""
        made = () if self.made is None else (self.made.uid,)
        return (*self.cursors, *(row.uid for row in self.fragments), *made)


@dataclass(slots=True)
class WorkerRows:
    """The groups of one worker as they are read."""

    cursors: list[StorageItem] = field(default_factory=list)
    fragments: dict[int, StorageItem] = field(default_factory=dict)

    def progress(self, size: int) -> WorkerProgress | None:
        """Return the progress that they show, or None if there are none."""
        if not self.cursors and not self.fragments:
            return None
        start = max((tag_of(row, "start") for row in self.cursors), default=None)
        above = sorted(index for index in self.fragments if start is None or index >= start)
        if start is None or (above and above[0] != start):
            last = self.fragments[above[-1]]
            left = [self.fragments[index].uid for index in self.fragments if index != above[-1]]
            return WorkerProgress(above[-1] + 1, size, tuple(row.uid for row in self.cursors), (), last, tuple(left))
        fragments: list[StorageItem] = []
        while (index := start + len(fragments)) in self.fragments:
            fragments.append(self.fragments[index])
        left = [row.uid for index, row in self.fragments.items() if not start <= index < start + len(fragments)]
        at_start = [row for row in self.cursors if tag_of(row, "start") == start]
        cursors = tuple(row.uid for row in self.cursors)
        return WorkerProgress(start, tag_of(at_start[0], "size"), cursors, tuple(fragments), None, tuple(left))


def tag_of(row: StorageItem, name: str) -> Any:
    """Return a tag of a group of the ledger, all of which have some."""
    return (row.tags or {})[name]
