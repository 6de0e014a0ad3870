"""The state of the model, and the progress of each worker with its next chunk, as values read from their groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from replaybuf.chunks.data import Session
from replaybuf.storage.values import StorageItem

# The number of sessions that are over whose names are kept, so that none of them begins again.
_ENDED = 1000


@dataclass(frozen=True, slots=True)
class State:
    """The session and version of the model; `uids` are the groups that say so.

    `session` is the session's number, `name` its name if it is a text; `ended` are the texts that are over.
    """

    session: int
    version: int
    uids: tuple[int, ...] = ()
    name: str | None = None
    ended: tuple[str, ...] = ()

    @classmethod
    def of(cls, rows: Sequence[StorageItem]) -> State | None:
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


def moved(state: State | None, label: Session | None, version: int) -> State | None:
    """Return the state after a move to a session (None: the present one) and version; None if nothing moves.

    Nothing moves to a session that is over, and to a version that is reached or passed.
    """
    if state is None:
        named = isinstance(label, str)
        return State(0 if named or label is None else int(label), version, name=str(label) if named else None)
    if label is None or label == state.label:
        return None if state.version >= version else replace(state, version=version)
    if state.is_over(label):
        return None
    ended = state.ended if state.name is None else (*state.ended, state.name)[-_ENDED:]
    if isinstance(label, str):
        return State(state.session + 1, version, name=label, ended=ended)
    return State(label, version, ended=ended)


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a worker: its next chunk, of `size` fragments, starts at `start`; `fragments` of it are there.

    `cursors` are the uids of the groups that say so. `made` is the last fragment of a chunk whose next cursor isn't
    written yet. `left` are groups that a delayed put left behind.
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
class Rows:
    """The groups of one worker as they are read."""

    cursors: list[StorageItem] = field(default_factory=list)
    fragments: dict[int, StorageItem] = field(default_factory=dict)

    def progress(self, size: int) -> Progress | None:
        """Return the progress that they show, or None if there are none."""
        if not self.cursors and not self.fragments:
            return None
        start = max((tag_of(row, "start") for row in self.cursors), default=None)
        above = sorted(index for index in self.fragments if start is None or index >= start)
        if start is None or (above and above[0] != start):
            last = self.fragments[above[-1]]
            left = [self.fragments[index].uid for index in self.fragments if index != above[-1]]
            return Progress(above[-1] + 1, size, tuple(row.uid for row in self.cursors), (), last, tuple(left))
        fragments: list[StorageItem] = []
        while (index := start + len(fragments)) in self.fragments:
            fragments.append(self.fragments[index])
        left = [row.uid for index, row in self.fragments.items() if not start <= index < start + len(fragments)]
        at_start = [row for row in self.cursors if tag_of(row, "start") == start]
        cursors = tuple(row.uid for row in self.cursors)
        return Progress(start, tag_of(at_start[0], "size"), cursors, tuple(fragments), None, tuple(left))


def tag_of(row: StorageItem, name: str) -> Any:
    """Return a tag of a group of the ledger, all of which have some."""
    return (row.tags or {})[name]
