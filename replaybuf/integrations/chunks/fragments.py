"""Fragments, chunks and selections, as values read from groups of the store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from replaybuf.common.checks import check_task_name, check_whole
from replaybuf.errors import FragmentError, InputError
from replaybuf.storage.values import StorageItem
from replaybuf.values.rollouts.rollout import Status

#: Why a fragment is not stored.
Problem = Literal["gap", "duplicate", "session"]

# Characters; keys have at most 200, and also hold numbers.
_MAX_WORKER = 150


@dataclass(frozen=True, slots=True)
class Fragment:
    """A fragment to be stored."""

    data: Any
    worker: str
    index: int
    session: int
    version: int

    def __post_init__(self) -> None:
        check_task_name(self.worker, "worker")
        if len(self.worker) > _MAX_WORKER:
            raise InputError(f"worker has {len(self.worker)} characters; the limit is {_MAX_WORKER}")
        for name in ("index", "session", "version"):
            object.__setattr__(self, name, check_whole(getattr(self, name), name))

    def rollout(self) -> dict[str, Any]:
        """Return the fragment as the rollout of a group that is never drawn."""
        return {"status": Status.ARCHIVED.value, "index": self.index, "version": self.version, "data": self.data}

    def error(self, kind: Problem, expected: int) -> FragmentError:
        """Return the error for a fragment out of sequence; `expected` is the index, or the session, of the store."""
        worker, index, session = self.worker, self.index, self.session
        explanation = {
            "duplicate": (
                f" was put already, and the next one is {expected}: a put that is repeated does no harm; for a worker "
                f"that begins again call forget({worker!r})"
            ),
            "gap": (
                f" leaves a gap: the next one is {expected}; put that first, or call forget({worker!r}) to begin the "
                "next chunk here"
            ),
            "session": (
                f": that session is over, the store is in session {expected}; start the worker in that one"
                if session < expected
                else f": that session hasn't begun, the store is in session {expected}; the trainer begins it by "
                "advance(version, session=)"
            ),
        }[kind]
        text = f"fragment {index} of worker {worker!r} in session {session}{explanation}"
        return FragmentError(text, reason=kind, expected=expected)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Consecutive fragments of one worker, as put.

    `start` is the index of the first one, `versions` are their model versions. The chunk's `version` is the lowest of
    these. `times_sampled` counts its draws, this one included. `uid` is that of its group.
    """

    uid: int
    worker: str
    session: int
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
            session=tags["session"],
            start=tags["start"],
            version=tags["version"],
            versions=tuple(rollout["version"] for rollout in item.item),
            times_sampled=item.times_sampled,
            fragments=[rollout["data"] for rollout in item.item],
        )

    def rollout(self) -> dict[str, Any]:
        """Return the chunk as one rollout of a selection."""
        return {"status": Status.ARCHIVED.value, **{field.name: getattr(self, field.name) for field in fields(self)}}


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
        chunks = (Chunk(**{name: value for name, value in row.items() if name != "status"}) for row in item.item)
        return cls(item.uid, tuple(chunks))
