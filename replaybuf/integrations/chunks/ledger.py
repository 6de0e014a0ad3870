"""The model's state and the progress of workers, as cursors, and the steps that move them.

A step stores a fragment, or the chunk that it completes in place of the other ones, and moves the worker's cursor, in
one transaction that does nothing if another process has moved the cursor since it was read. So a fragment is stored
once, a chunk is made once, and a process may die, or a call be cancelled, at any time.

Fragments and selections are ARCHIVED groups of tasks of their own: they are never drawn, and neither `len` nor the
capacity counts them.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import Any, Self

import msgpack  # type: ignore[import-untyped]

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.common.checks import Tags
from replaybuf.errors import ConflictError
from replaybuf.integrations.chunks.fragments import DROPPED, Fragment, Session
from replaybuf.storage.values import Cursor, NewGroup, StorageItem
from replaybuf.values.rollouts.rollout import Status

# The number of ended sessions whose names are kept, so that none of them begins again.
_ENDED = 1000


@dataclass(frozen=True, slots=True)
class ModelState:
    """The session and version of the model.

    `session` is the session's number, `name` its name if it is a text; `ended` are the names of ended sessions.
    Sessions are numbered in the order of their beginnings; a session named by a text gets the next number.
    """

    session: int
    version: int
    name: str | None = None
    ended: tuple[str, ...] = ()

    @property
    def label(self) -> Session:
        """The session as in the workers' puts: its name, or its number."""
        return self.session if self.name is None else self.name

    def is_over(self, label: Session) -> bool:
        """Return whether a session ended before this one."""
        if label == self.label:
            return False
        return label in self.ended if isinstance(label, str) else label <= self.session


def moved(state: ModelState | None, label: Session | None, version: int) -> ModelState | None:
    """Return the state after a move to a session (None: the current one) and version; None if the state doesn't change.

    It doesn't change for an ended session, or a version that was reached or passed.
    """
    if state is None:
        return ModelState(0, version, name=label) if isinstance(label, str) else ModelState(label or 0, version)
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
    """The progress of a worker in a session: its next chunk, of `size` fragments, starts at `start`.

    `versions` are the model versions of the chunk's fragments so far.
    """

    session: int
    start: int
    size: int
    versions: tuple[int, ...] = ()

    @classmethod
    def of(cls, cursor: Cursor, session: int) -> Self | None:
        """Return the progress that a cursor says, or None if it says none in this session."""
        found = cls(*msgpack.unpackb(cursor.value, use_list=False)) if cursor.value else None
        return found if found is not None and found.session == session else None

    @property
    def next(self) -> int:
        """The expected index of the next fragment."""
        return self.start + len(self.versions)


def tag_of(row: StorageItem, name: str) -> Any:
    """Return a tag of one of the ledger's groups, all of which have tags."""
    return (row.tags or {})[name]


class Ledger:
    """The state of the chunks of the task `name`; `size` fragments make a chunk.

    Chunks may be `max_staleness` versions behind the model; None for any number. `cleared` is the last session for
    which this object has removed the groups of older sessions.
    """

    def __init__(self, buffer: ReplayBuffer, name: str, size: int, max_staleness: int | None) -> None:
        self.buffer = buffer
        self.name = name
        self.size = size
        self.max_staleness = max_staleness
        self.cleared: int | None = None
        # Tasks.
        self.fragments = f"{name}.fragments"
        self.prepared = f"{name}.prepared"
        buffer.task_names.add(name)

    # The model

    async def state(self) -> ModelState | None:
        """Return the session and version of the model, or None before the first fragment."""
        return _state_in(await self._state_cursor())

    async def move(self, label: Session | None, version: int) -> ModelState:
        """Move the model to a session and version, unless it has reached or passed them. Return its state."""
        while True:
            cursor = await self._state_cursor()
            state = _state_in(cursor)
            new = moved(state, label, version)
            if new is None:
                assert state is not None
                return state
            if await self.buffer.cursors.move(replace(cursor, position=new.version, value=msgpack.packb(astuple(new)))):
                return new

    async def _state_cursor(self) -> Cursor:
        return await self.buffer.cursors.read(f"replaybuf:{self.name}.state")

    async def clear(self, state: ModelState) -> int:
        """Remove the groups of older sessions, and the chunks that are too stale. Return the number of chunks."""
        older = {"tags.session": {"$lt": state.session}}
        await self.buffer.delete({"task_name": {"$in": [self.fragments, self.prepared]}, **older})
        gone = await self.buffer.delete({"task_name": self.name, **older})
        threshold = None if self.max_staleness is None else self.max_staleness + 1
        expired = await self.buffer.refresh_staleness(
            task_stale_thresholds={self.name: threshold},
            current_train_step=state.version + 1,
            expired_groups_retryable_by_task={self.name: False},
            statuses=[Status.COMPLETED],
        )
        self.cleared = state.session
        return gone + expired[self.name]

    def is_obsolete(self, chunk: StorageItem, state: ModelState) -> bool:
        """Return whether a chunk is of a session that is over, or too stale."""
        session: int = tag_of(chunk, "session")
        return session < state.session or (session == state.session and self._is_stale(tag_of(chunk, "version"), state))

    def _is_stale(self, version: int, state: ModelState) -> bool:
        return self.max_staleness is not None and version < state.version - self.max_staleness

    # Workers

    async def cursor(self, worker: str) -> Cursor:
        """Return the cursor of a worker."""
        return await self.buffer.cursors.read(f"replaybuf:{self.name}.worker/{worker}")

    async def begin(self, worker: str, cursor: Cursor, progress: WorkerProgress | None) -> int | None:
        """Move a worker to other progress (None: as if it had put nothing), and remove its unfinished fragments.

        Return the number of these, or None, and change nothing, if another process has moved the cursor.
        """
        query = {"task_name": self.fragments, "tags.worker": worker}
        uids = [row.uid async for row in self.buffer.find(query, payloads=False)]
        if await self._move(cursor, progress) is None:
            return None
        return await self.buffer.delete({"uid": {"$in": uids}}) if uids else 0

    async def store(self, fragment: Fragment, state: ModelState, cursor: Cursor) -> Cursor | None:
        """Store a worker's next fragment, or the chunk that it completes. Return the worker's cursor after that.

        None, and nothing is changed, if another process has moved the cursor. If the first fragments of a chunk are too
        stale, they are removed, and the fresh ones after them begin the next chunk; a damaged chunk is only removed.
        """
        worker, session, after = fragment.worker, state.session, fragment.index + 1
        progress = WorkerProgress.of(cursor, session) or WorkerProgress(session, fragment.index, self.size)
        versions = (*progress.versions, fragment.version)
        if len(versions) < progress.size:
            return await self._move(cursor, replace(progress, versions=versions), await self._fragment(fragment, state))
        query = {"task_name": self.fragments, "tags.worker": worker, "tags.session": session}
        rows = [row async for row in self.buffer.find(query)] if progress.versions else []
        items = {tag_of(row, "index"): row.item for row in rows}
        others = [items.get(index) for index in range(progress.start, fragment.index)]
        fresh = len(versions) - max(
            (1 + at for at, one in enumerate(versions) if self._is_stale(one, state)), default=0
        )
        if all(others) and fresh == len(versions):
            rollouts = [*(item[0] for item in others if item), fragment.rollout()]
            chunk = await self._chunk(rollouts, state, worker, progress.start, [row.uid for row in rows])
            stored = await self._move(cursor, WorkerProgress(session, after, self.size), chunk)
            now = await self.state()
            if now is not None and now.session > session:  # which began too late to remove this chunk
                await self.clear(now)
            return stored
        kept = fresh if all(others) else 0
        following = WorkerProgress(
            session, after - kept, progress.size if kept else self.size, versions[len(versions) - kept :]
        )
        stored = await self._move(cursor, following, *([await self._fragment(fragment, state)] if kept else []))
        if stored is not None:
            left = [row.uid for row in rows if tag_of(row, "index") < following.start]
            await self.buffer.delete({"uid": {"$in": left}})
            await self.drop("stale" if all(others) else "damaged")
        return stored

    async def _move(self, cursor: Cursor, progress: WorkerProgress | None, *groups: NewGroup) -> Cursor | None:
        """Move a worker's cursor and store groups, in one transaction. Return it, or None if another has moved it."""
        value = b"" if progress is None else msgpack.packb(astuple(progress))
        after = replace(cursor, position=0 if progress is None else progress.next, value=value)
        try:
            is_moved = await self.buffer.cursors.put(groups, after)
        except ConflictError:  # somebody has removed the fragments of a chunk
            return None
        return replace(after, version=after.version + 1) if is_moved else None

    async def _fragment(self, fragment: Fragment, state: ModelState) -> NewGroup:
        tags: Tags = {"worker": fragment.worker, "session": state.session, "index": fragment.index}
        return await self._prepared([fragment.rollout()], self.fragments, tags=tags)

    async def _chunk(
        self, fragments: list[dict[str, Any]], state: ModelState, worker: str, start: int, replaces: list[int]
    ) -> NewGroup:
        version = min(one["version"] for one in fragments)
        tags: Tags = {"worker": worker, "session": state.session, "start": start, "version": version}
        # The store computes the staleness of the chunk from the model steps.
        completed = {"status": Status.COMPLETED.value, "seq_staleness": 0}
        return await self._prepared(
            [{**one, **completed, "response_model_steps": [one["version"]]} for one in fragments],
            self.name,
            tags=tags if state.name is None else {**tags, "session_name": state.name},
            replaces=replaces,
            priority=float(version),
            current_train_step=state.version + 1,
        )

    async def _prepared(self, rollouts: list[dict[str, Any]], task_name: str, **options: Any) -> NewGroup:
        group, _ = await self.buffer.putting.prepare(rollouts, task_name, **options)
        assert group is not None
        return group

    # Counting

    async def drop(self, problem: str) -> None:
        """Count a fragment or chunk that isn't stored in the store's tallies, by the put of an expired group."""
        rollout = {"status": Status.COMPLETED.value, "seq_staleness": 1}
        task = f"{self.name}.dropped.{problem}"
        await self.buffer.put([rollout], task, stale_threshold=1, expired_groups_retryable=False)

    async def dropped(self) -> dict[str, int]:
        """Return the counts by kind, over all processes; "stale" includes stored chunks that became too stale."""
        counts = {kind: await self.buffer.dropped(f"{self.name}.dropped.{kind}") for kind in DROPPED}
        counts["stale"] += await self.buffer.dropped(self.name)
        return counts


def _state_in(cursor: Cursor) -> ModelState | None:
    return ModelState(*msgpack.unpackb(cursor.value, use_list=False)) if cursor.value else None
