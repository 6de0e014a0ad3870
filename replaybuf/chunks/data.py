"""Fragments, chunks and selections, and how each is written as a group of the store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
