"""The groups stored besides chunks, and the operations on them, each of which is one transaction.

Every worker has its fragments that are in no chunk yet, and a *cursor*: a tiny group with the start index and the
number of fragments of its next chunk. Together they give the index that is expected next. A chunk is made in two steps,
because a put stores one group:

1. Put the chunk, in place of the cursor and of all its fragments except the last.
2. Put the next cursor, in place of the last fragment.

So a fragment without a cursor is the last one of an existing chunk, and its index gives the next cursor. A process that
reads all fragments of a chunk together with their cursor makes the chunk. Both steps name the groups that they replace,
so of several processes that try the same step, one succeeds and the others get a ConflictError. A process may die
between any two steps: the next process continues from there.

A put that was delayed for long may store groups below the cursor, which are ignored, and removed with the next chunk.

For a *forgotten* (restarted) worker there is a tiny group whose uid is part of the keys of its next chunks, so that a
chunk with the same start doesn't replace an earlier one.

The model's *state*, its session and version, is the highest of some tiny groups. A higher one replaces those that its
writer has read, so the state never goes back. Sessions are numbered in the order of their beginnings; a session named
by a text gets the next number, and the state has its name and the names of ended sessions.

All these groups are ARCHIVED: they are never drawn, and neither `len` nor the capacity counts them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.common.checks import Tags
from replaybuf.errors import ConflictError
from replaybuf.integrations.chunks.fragments import DROPPED, Fragment, Session
from replaybuf.storage.values import StorageItem
from replaybuf.values.rollouts.rollout import Status

# The number of ended sessions whose names are kept, so that none of them begins again.
_ENDED = 1000


@dataclass(frozen=True, slots=True)
class ModelState:
    """The session and version of the model; `uids` are the groups that store them.

    `session` is the session's number, `name` its name if it is a text; `ended` are the names of ended sessions.
    """

    session: int
    version: int
    uids: tuple[int, ...] = ()
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

    The chunk has `fragments` so far, without their data. `cursors` are the uids of its cursors. `made` is the last
    fragment of a chunk whose next cursor isn't written yet. `obsolete` are groups of a delayed put.
    """

    session: int
    start: int
    size: int
    cursors: tuple[int, ...] = ()
    fragments: tuple[StorageItem, ...] = ()
    made: StorageItem | None = None
    obsolete: tuple[int, ...] = ()

    @property
    def next(self) -> int:
        """The expected index of the next fragment."""
        return self.start + len(self.fragments)

    @property
    def end(self) -> int:
        """The index after the last fragment of the next chunk."""
        return self.start + self.size

    @property
    def uids(self) -> tuple[int, ...]:
        """The uids of its cursors and fragments."""
        made = () if self.made is None else (self.made.uid,)
        return (*self.cursors, *(row.uid for row in self.fragments), *made)


def tag_of(row: StorageItem, name: str) -> Any:
    """Return a tag of one of the ledger's groups, all of which have tags."""
    return (row.tags or {})[name]


# Maximum number of retries; every conflict, and every repeated read, means that another process made progress.
ATTEMPTS = 1000

_ARCHIVED = {"status": Status.ARCHIVED.value}


class Ledger:
    """The groups besides the chunks of the task `name`; `size` fragments make a chunk.

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
        self.cursors = f"{name}.cursors"
        self.forgotten = f"{name}.forgotten"
        self.state_task = f"{name}.state"
        self.prepared = f"{name}.prepared"
        buffer.task_names.add(name)

    # The model

    async def state(self) -> ModelState | None:
        """Return the session and version of the model, or None before the first fragment."""
        # Some of the groups may have been replaced meanwhile, but the highest only by a higher one.
        rows = await self._read({"task_name": self.state_task}, still_there=False)
        if not rows:
            return None
        last = max(rows, key=lambda row: (tag_of(row, "session"), tag_of(row, "version")))
        tags: Any = last.tags
        ended = tuple(last.item[0].get("ended", ())) if last.item else ()
        return ModelState(tags["session"], tags["version"], tuple(row.uid for row in rows), tags.get("name"), ended)

    async def move(self, label: Session | None, version: int) -> ModelState:
        """Move the model to a session and version, unless it has reached or passed them. Return its state."""
        for _ in range(ATTEMPTS):
            state = await self.state()
            new = moved(state, label, version)
            if new is None:
                assert state is not None
                return state
            tags: Tags = {"session": new.session, "version": new.version}
            if new.name is not None:
                tags = {**tags, "name": new.name}
            rollouts = [{**_ARCHIVED, "ended": list(new.ended)}] if new.ended else None
            await self._try_put(self.state_task, rollouts, tags=tags, replaces=state.uids if state else ())
        raise ConflictError(f"the state of {self.name} changes all the time; nothing was stored")

    async def clear(self, state: ModelState) -> int:
        """Remove the groups of older sessions, and the chunks that are too stale. Return the number of chunks."""
        older = {"tags.session": {"$lt": state.session}}
        # Fragments first, so that no more chunks can be made of them.
        beside = [self.fragments, self.cursors, self.prepared]
        await self.buffer.delete({"task_name": {"$in": beside}, **older})
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

    async def progress(self, worker: str, session: int) -> WorkerProgress | None:
        """Return the progress of a worker, or None if none is stored."""
        tasks = {"$in": [self.fragments, self.cursors]}
        rows = await self._read({"task_name": tasks, "tags.worker": worker, "tags.session": session}, payloads=False)
        if not rows:
            return None
        sizes = {tag_of(row, "start"): tag_of(row, "size") for row in rows if row.task_name == self.cursors}
        uids = tuple(row.uid for row in rows if row.task_name == self.cursors)
        fragments = {tag_of(row, "index"): row for row in rows if row.task_name == self.fragments}
        start = max(sizes, default=None)
        above = sorted(index for index in fragments if start is None or index >= start)
        made: StorageItem | None = None
        following: list[StorageItem] = []
        if start is None or (above and above[0] != start):
            made, start, size = fragments.pop(above[-1]), above[-1] + 1, self.size
        else:
            size = sizes[start]
            while (row := fragments.pop(start + len(following), None)) is not None:
                following.append(row)
        obsolete = tuple(row.uid for row in fragments.values())
        return WorkerProgress(session, start, size, uids, tuple(following), made, obsolete)

    async def all_there(self, uids: Sequence[int]) -> bool:
        """Return whether all these groups exist: then no chunk was made of them, and no new session has begun."""
        return await self.buffer.count_where({"uid": {"$in": list(uids)}}) == len(uids)

    async def begin(
        self, worker: str, session: int, index: int, instead: WorkerProgress | None = None, kept: int = 0
    ) -> WorkerProgress | None:
        """Store a cursor, so that the next chunk of a worker starts at `index`, in place of its progress so far.

        The last `kept` fragments stay: a chunk of the same size begins with them. Return None on a conflict.
        """
        size = instead.size if instead and kept else self.size
        tags: Tags = {"worker": worker, "session": session, "start": index, "size": size}
        fragments = instead.fragments[-kept:] if instead and kept else ()
        stay = {row.uid for row in fragments}
        replaces = tuple(uid for uid in (*instead.uids, *instead.obsolete) if uid not in stay) if instead else ()
        uid = await self._try_put(self.cursors, tags=tags, replaces=replaces)
        return None if uid is None else WorkerProgress(session, index, size, (uid,), fragments)

    async def store(self, fragment: Fragment, session: int, *, last: bool) -> int:
        """Store a fragment in the session of this number, and return its uid.

        The `last` one of a chunk is tagged, so that `unmade` finds it if its process dies before making the chunk.
        """
        worker, index, version = fragment.worker, fragment.index, fragment.version
        tags: Tags = {"worker": worker, "session": session, "index": index, "version": version, "last": last}
        rollout = {**_ARCHIVED, "index": index, "version": version, "data": fragment.data}
        uid = await self.buffer.put([rollout], self.fragments, tags=tags, key=f"{session}/{index}/{worker}")
        assert uid is not None  # the group isn't empty, and has no threshold
        return uid

    async def join(self, worker: str, session: int) -> WorkerProgress | None:
        """Make the next chunk of a worker if all its fragments are stored. Return the worker's progress."""
        for _ in range(ATTEMPTS):
            progress = await self.progress(worker, session)
            if progress is None:
                return None
            if progress.next >= progress.end:
                progress = await self._make(worker, session, progress)
            if progress is not None and progress.made is not None:
                progress = await self.begin(worker, session, progress.start, progress)
            if progress is not None:
                return progress
        raise ConflictError(f"the fragments of worker {worker!r} change all the time")

    async def unmade(self) -> list[tuple[str, int]]:
        """Return the workers, with their sessions, whose last fragment of a chunk is stored but not in the chunk."""
        rows = self.buffer.find({"task_name": self.fragments, "tags.last": True}, payloads=False)
        return sorted({(tag_of(row, "worker"), tag_of(row, "session")) async for row in rows})

    async def _make(self, worker: str, session: int, progress: WorkerProgress) -> WorkerProgress | None:
        """Put a chunk in place of its cursor and all fragments except the last; a damaged chunk is only removed.

        If its first fragments are too stale, they are removed, and the fresh ones after them begin the next chunk.
        Return the worker's progress, or None on a conflict, or if the session is over.
        """
        versions = [tag_of(row, "version") for row in progress.fragments]
        version = min(versions)
        state = await self.state() or ModelState(session, version)
        if state.session > session:  # a new session has begun, and these fragments aren't removed yet
            await self.clear(state)
            return None
        wanted = [row.uid for row in progress.fragments]
        there = {row.uid: row async for row in self.buffer.find({"uid": {"$in": wanted}})}
        if len(there) < len(wanted):  # another process has gone on
            return None
        problem, kept = "", 0
        if not all(row.item for row in there.values()):
            problem = "damaged"
        elif self._is_stale(version, state):
            problem, kept = "stale", [self._is_stale(one, state) for one in reversed(versions)].index(True)
        if problem:
            begun = await self.begin(worker, session, progress.next - kept, progress, kept)
            if begun is not None:
                await self.drop(problem)
            return begun
        *others, last = progress.fragments
        tags: Tags = {"worker": worker, "session": session, "start": progress.start, "version": version}
        # The store computes the staleness of the chunk from the model steps.
        rollouts = [
            there[uid].item[0] | {"status": Status.COMPLETED.value, "response_model_steps": [step], "seq_staleness": 0}
            for uid, step in zip(wanted, versions, strict=True)
        ]
        uid = await self._try_put(
            self.name,
            rollouts,
            tags=tags if state.name is None else {**tags, "session_name": state.name},
            replaces=(*progress.cursors, *(row.uid for row in others)),
            # The key makes the put idempotent: a cursor delayed for the life of a chunk could make the chunk again.
            # A forgotten worker may complete another chunk with the same start.
            key=f"{session}/{progress.start}/{await self._last_forgotten(worker)}/{worker}",
            priority=float(version),
            current_train_step=state.version + 1,
        )
        return (
            None
            if uid is None
            else WorkerProgress(session, progress.next, self.size, made=last, obsolete=progress.obsolete)
        )

    async def forget(self, worker: str) -> int:
        """Remove the cursor and fragments of a worker; return the number of fragments.

        Its later chunks have other keys. The group for these keys is put before the removal, for a chunk of the first
        fragments after it, and again afterwards, since a process may have made a chunk of the last ones meanwhile.
        """
        await self._try_put(self.forgotten, tags={"worker": worker}, key=worker, replaces=())
        await self.buffer.delete({"task_name": self.cursors, "tags.worker": worker})
        count = await self.buffer.delete({"task_name": self.fragments, "tags.worker": worker})
        await self._try_put(self.forgotten, tags={"worker": worker}, key=worker, replaces=())
        return count

    async def _last_forgotten(self, worker: str) -> int:
        """Return a number that changes whenever a worker is forgotten: the uid of its group for that, or 0."""
        found = self.buffer.find({"task_name": self.forgotten, "tags.worker": worker}, payloads=False)
        return max([row.uid async for row in found], default=0)

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

    # The store

    async def _try_put(
        self,
        task_name: str,
        rollouts: list[dict[str, Any]] | None = None,
        *,
        replaces: tuple[int, ...],
        **options: Any,
    ) -> int | None:
        """Put a group in place of others. Return its uid, or None on a conflict (one of the others is gone)."""
        group = [dict(_ARCHIVED)] if rollouts is None else rollouts
        try:
            return await self.buffer.put(group, task_name, replaces=replaces, **options)
        except ConflictError:
            return None

    async def _read(
        self, query: Mapping[str, Any], *, still_there: bool = True, payloads: bool = True
    ) -> list[StorageItem]:
        """Return all matching groups, in a consistent snapshot.

        `find` reads one group after the other. If afterwards no other group matches, and then all groups read still
        exist, they are exactly the groups at the time in between, because such groups never change. Without
        `still_there`, some of them may have been removed.
        """
        began = time.monotonic()
        for _ in range(ATTEMPTS):
            rows = [row async for row in self.buffer.find(query, payloads=payloads)]
            uids = [row.uid for row in rows]
            others = {"$and": [query, {"uid": {"$not_in": uids}}]}
            if await self.buffer.count_where(others) == 0 and (not still_there or await self.all_there(uids)):
                return rows
        raise ConflictError(f"{query} changed all the time for {time.monotonic() - began:.1f} s")
