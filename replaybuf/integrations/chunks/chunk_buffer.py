"""The chunk buffer, which joins consecutive fragments into chunks, and its config.

A put stores a fragment, or the chunk that it completes in place of the other fragments, and moves the worker's cursor,
in one transaction that does nothing if another process has moved the cursor since it was read. So a fragment is stored
once, a chunk is made once, and a process may die, or a call be cancelled, at any time.

Fragments and selections are ARCHIVED groups of tasks of their own: they are never drawn, and neither `len` nor the
capacity counts them.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, NoReturn, Self, TypeVar

import msgpack  # type: ignore[import-untyped]
from pydantic import Field

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.common.checks import Tags, check_task_name, check_timeout, check_whole
from replaybuf.config import ReplayBufferConfig
from replaybuf.errors import ConfigError, ConflictError, InputError, NotReadyError, ReplayBufError
from replaybuf.integrations.chunks.fragments import Chunk, Fragment, Selection
from replaybuf.rules.policies import LowestPriorityPolicy, ReplayPolicy
from replaybuf.storage.values import Cursor, NewGroup, StorageItem
from replaybuf.values.rollouts.rollout import Status

T = TypeVar("T")

_LONGEST_SECONDS = 5.0


class ModelState(NamedTuple):
    """The session and version of the model; a later one is greater."""

    session: int
    version: int


class WorkerProgress(NamedTuple):
    """The progress of a worker in a session: where its unfinished chunk starts, and the index of its next fragment."""

    session: int
    start: int
    next: int


class ChunkBuffer:
    """Joins fragments of workers into chunks of `fragments_per_chunk` consecutive ones, for the trainer to draw.

    A layer over a `ReplayBuffer`, `buffer`, with the same guarantees: puts are committed when they return, a draw goes
    to one taker, calls are safe to cancel, any number of processes share a database. Built by a `ChunkBufferConfig`.

    A worker's chunks start at the index of its first fragment in the session, and then every `fragments_per_chunk`.
    The version of a chunk is the lowest of its fragments' versions; it is too stale, and never drawn, when the model's
    version is more than `max_staleness` ahead of it.

    Sessions are increasing numbers, begun by `advance`.
    """

    def __init__(self, buffer: ReplayBuffer, config: ChunkBufferConfig) -> None:
        self.buffer = buffer
        self.name, self._size, self._max_staleness = config.name, config.fragments_per_chunk, config.max_staleness
        self._fragments, self._selections = f"{self.name}.fragments", f"{self.name}.prepared"  # tasks
        self._cleared_session = -1  # the last session for which this object has removed the groups of older ones

    async def __aenter__(self) -> Self:
        await self.buffer.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the store. Idempotent."""
        await self.buffer.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.buffer!r})"

    def __len__(self) -> int:
        """Return the number of chunks, without those that a fetch has leased. Blocks for the time of one query."""
        return len(self.buffer)

    def __bool__(self) -> bool:
        """Return True, also for an empty buffer."""
        return True

    # Putting

    async def put(self, data: Any, *, worker: str, index: int, session: int, version: int) -> None:
        """Store a fragment, and make the chunk that it completes, if any; both are committed when this returns.

        `data` is a value that the codec can write: numpy arrays, dicts, lists, numbers, texts, bytes. `index` is the
        fragment's position among those of the worker, `session` the training session, `version` the version of the
        generating model. The very first fragment begins its session, with the model at the fragment's version.

        After a failed or cancelled put, the fragment may or may not be stored: put it again.

        Raises FragmentError for a fragment out of sequence, and changes nothing: a "duplicate" has an index below the
        expected one, a "gap" one above it, and with a "session" problem its session is over or hasn't begun. Also
        raises InputError, RolloutError, StorageError, and FullError as a put of the buffer; then nothing is stored.
        """
        fragment = Fragment(data, worker, index, session, version)
        while not await self._put(fragment):
            pass

    async def forget(self, worker: str) -> int:
        """Remove the unfinished fragments of a restarted worker; its next one may have any index.

        Return the number removed.
        """
        check_task_name(worker, "worker")
        while True:
            cursor, _ = await self._read_worker(worker)
            rows = await self._find_unfinished(worker, payloads=False)
            if await self._move(cursor, None):
                return await self._remove(rows)

    async def expected(self, worker: str) -> int | None:
        """Return the expected index of a worker's next fragment, or None if any is accepted."""
        check_task_name(worker, "worker")
        if (state := await self._read_state()) is None:
            return None
        _, progress = await self._read_worker(worker, state.session)
        return progress and progress.next

    async def _put(self, fragment: Fragment) -> bool:
        """Store a fragment, or the chunk that it completes. Return False if another process has moved the worker."""
        state, worker = await self._state_for(fragment), fragment.worker
        if fragment.session != state.session:
            raise fragment.error("session", state.session)
        cursor, progress = await self._read_worker(worker, state.session)
        progress = progress or WorkerProgress(state.session, fragment.index, fragment.index)
        if fragment.index != progress.next:
            raise fragment.error("duplicate" if fragment.index < progress.next else "gap", progress.next)
        next_index = fragment.index + 1
        if next_index - progress.start < self._size:
            tags: Tags = {"worker": worker, "session": state.session, "index": fragment.index}
            group = await self._prepare([fragment.rollout()], self._fragments, tags=tags)
            return await self._move(cursor, progress._replace(next=next_index), group)
        rows = await self._find_unfinished(worker, session=state.session) if progress.start < fragment.index else []
        next_progress = WorkerProgress(state.session, next_index, next_index)
        by_index = {(row.tags or {})["index"]: row.item for row in rows}  # of two with an index, the later one
        items = [by_index.get(index) for index in range(progress.start, fragment.index)]
        if all(items):
            rollouts = [*(item[0] for item in items if item), fragment.rollout()]
            return await self._move(cursor, next_progress, await self._prepare_chunk(rollouts, state, worker, rows))
        is_stored = await self._move(cursor, next_progress)
        if is_stored:
            await self._remove(rows)
            await self._count_damaged()
        return is_stored

    async def _prepare_chunk(
        self, fragments: list[dict[str, Any]], state: ModelState, worker: str, rows: list[StorageItem]
    ) -> NewGroup:
        version = min(fragment["version"] for fragment in fragments)
        # The store computes the staleness of the chunk from the model steps.
        completed = {"status": Status.COMPLETED.value, "seq_staleness": 0}
        return await self._prepare(
            [{**fragment, **completed, "response_model_steps": [fragment["version"]]} for fragment in fragments],
            self.name,
            tags={"worker": worker, "session": state.session, "start": fragments[0]["index"], "version": version},
            replaces=[row.uid for row in rows],
            priority=float(version),
            current_train_step=state.version + 1,
        )

    async def _prepare(self, rollouts: list[dict[str, Any]], task_name: str, **options: Any) -> NewGroup:
        group, _ = await self.buffer.putting.prepare(rollouts, task_name, **options)
        assert group is not None
        return group

    async def _count_damaged(self) -> None:
        """Count a chunk that isn't made as a dropped group of a task of its own, by the put of an expired group."""
        rollout = {"status": Status.COMPLETED.value, "seq_staleness": 1}
        await self.buffer.put([rollout], f"{self.name}.damaged", stale_threshold=1, expired_groups_retryable=False)

    # Workers

    async def _read_worker(self, worker: str, session: int | None = None) -> tuple[Cursor, WorkerProgress | None]:
        """Return the cursor of a worker, and its progress in the session; None if it has put nothing in it."""
        cursor, progress = await self._read(f"worker/{worker}", WorkerProgress)
        return cursor, progress if progress and progress.session == session else None

    async def _read(self, name: str, kind: type[T]) -> tuple[Cursor, T | None]:
        """Return one of the buffer's cursors and its value, or None if it has none."""
        cursor = await self.buffer.cursors.read(f"replaybuf:{self.name}.{name}")
        return cursor, kind(*msgpack.unpackb(cursor.value)) if cursor.value else None

    async def _find_unfinished(self, worker: str, *, payloads: bool = True, **tags: int) -> list[StorageItem]:
        """Return the unfinished fragments of a worker, in the order of their puts."""
        query = {"task_name": self._fragments, "tags.worker": worker} | {f"tags.{name}": tags[name] for name in tags}
        return [row async for row in self.buffer.find(query, payloads=payloads)]

    async def _remove(self, rows: list[StorageItem]) -> int:
        return await self.buffer.delete({"uid": {"$in": [row.uid for row in rows]}}) if rows else 0

    async def _move(self, cursor: Cursor, progress: WorkerProgress | None, new: NewGroup | None = None) -> bool:
        """Move a worker's cursor and store a group, in one transaction. Return False if another has moved it."""
        value, position = (b"", 0) if progress is None else (msgpack.packb(progress), progress.next)
        moved = replace(cursor, position=position, value=value)
        try:
            return await (self.buffer.cursors.move(moved) if new is None else self.buffer.cursors.put(new, moved))
        except ConflictError:  # another process has removed the fragments of a chunk
            return False

    # The model

    async def advance(self, version: int, *, session: int | None = None) -> int:
        """Move the model to a version (of a session; default: the store's). Return the number of chunks removed.

        A `session` above the store's begins: unfinished fragments, chunks and the selection of older sessions are
        removed, and so are chunks more than `max_staleness` versions behind. Idempotent, so that every rank may call
        it: a version that the store has reached or passed changes nothing. Raises InputError if the session is over, or
        isn't known yet.
        """
        version = check_whole(version, "version")
        session = None if session is None else check_whole(session, "session")
        if session is None and await self._read_state() is None:
            raise InputError(f"no fragment of {self.name} was put yet, so its session isn't known: give session=")
        state = await self._advance(session, version)
        if session is not None and session < state.session:
            raise InputError(f"session {session} is over: {self.name} is in session {state.session}")
        return await self._clear(state)

    async def _state_for(self, fragment: Fragment) -> ModelState:
        """Return the model's state; the very first fragment begins its session."""
        state = await self._read_state() or await self._advance(fragment.session, fragment.version)
        if self._cleared_session < state.session:
            # The process that began the session may have died before this, which precedes any fragment of the session.
            await self._clear(state)
        return state

    async def _read_state(self) -> ModelState | None:
        """Return the session and version of the model, or None before the first fragment."""
        _, state = await self._read("state", ModelState)
        return state

    async def _advance(self, session: int | None, version: int) -> ModelState:
        """Move the model to a session and version, unless it has reached or passed them. Return its state."""
        while True:
            cursor, state = await self._read("state", ModelState)
            target = ModelState(state.session if session is None and state else session or 0, version)
            if state is not None and target <= state:
                return state
            if await self.buffer.cursors.move(replace(cursor, position=target.version, value=msgpack.packb(target))):
                return target

    async def _clear(self, state: ModelState) -> int:
        """Remove the groups of older sessions, and the chunks that are too stale. Return the number of chunks."""
        condition = {"tags.session": {"$lt": state.session}}
        await self.buffer.delete({"task_name": {"$in": [self._fragments, self._selections]}, **condition})
        removed = await self.buffer.delete({"task_name": self.name, **condition})
        expired = await self.buffer.refresh_staleness(
            task_stale_thresholds={self.name: None if self._max_staleness is None else self._max_staleness + 1},
            current_train_step=state.version + 1,
            expired_groups_retryable_by_task={self.name: False},
            statuses=[Status.COMPLETED],
        )
        self._cleared_session = state.session
        return removed + expired[self.name]

    # Drawing

    async def fetch(self, n: int, *, timeout: float | None) -> Selection:
        """Draw `n` chunks by the policy, as soon as there are enough; each is drawn up to `max_times_sampled` times.

        Afterwards `prepared()` returns this selection in every process. It is stored before the draw is acknowledged,
        so nothing is lost if this process dies within the call, or the call is cancelled: either the chunks come back,
        when their lease has ended, and the draw doesn't count, though `prepared()` may already return the
        selection; or the draw counts, and `prepared()` returns the selection.

        Raises NotReadyError (a TimeoutError), with the reason, after `timeout` seconds (None: never); then nothing was
        drawn. Raises InputError for more chunks than the capacity.
        """
        n = check_whole(n, "n", least=1)
        deadline = time.monotonic() + check_timeout(timeout)
        while (selection := await self._draw(n, max(0.0, deadline - time.monotonic()))) is None:
            pass
        return selection

    async def prepared(self, *, after: int | None = None, timeout: float | None = 0) -> Selection:
        """Return the selection of the last `fetch` of any process; with `after`, wait for one with a higher number.

        Raises NotReadyError (a TimeoutError) if there is none within `timeout` seconds (None: for ever).
        """
        last_number = -1 if after is None else check_whole(after, "after")
        limit = check_timeout(timeout)
        deadline = time.monotonic() + limit
        query = {"task_name": self._selections, "uid": {"$gt": last_number}}
        while True:
            version = self.buffer.waits.version()
            for item in [item async for item in self.buffer.find(query, order_by="-uid", limit=1)]:
                if item.error is not None:
                    raise ReplayBufError(f"selection {item.uid} of {self.name} can't be read: {item.error}")
                return Selection.of(item)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                moment = "yet" if after is None else f"after selection {after}"
                raise NotReadyError(f"after {limit:g} s: nothing was fetched {moment} from {self.name}")
            await self.buffer.check_fence()
            await self.buffer.waits.changed(min(remaining, _LONGEST_SECONDS), version)

    async def _draw(self, n: int, timeout: float) -> Selection | None:
        """Draw and store a selection. Return None if some of the chunks were obsolete, and removed instead."""
        async with self.buffer.lease_batch({self.name: n}, at_least=n, timeout=timeout) as lease:
            chunks = [Chunk.of(item) for item in lease.items[self.name]]
            state = await self._read_state()
            if state is not None and any(self._is_obsolete(chunk, state) for chunk in chunks):
                await lease.give_back()
                await self._clear(state)
                return None
            rollouts, session = [chunk.rollout() for chunk in chunks], max(chunk.session for chunk in chunks)
            number = await self.buffer.put(rollouts, self._selections, tags={"session": session}, key="selection")
            assert number is not None  # there is at least one chunk
        return Selection(number, tuple(chunks))

    def _is_obsolete(self, chunk: Chunk, state: ModelState) -> bool:
        """Return whether a chunk is of a session that is over, or too stale."""
        is_stale = self._max_staleness is not None and chunk.version < state.version - self._max_staleness
        return chunk.session < state.session or (chunk.session == state.session and is_stale)


class ChunkBufferConfig(ReplayBufferConfig[Any]):
    """A ReplayBufferConfig for chunks, which are its groups, with other defaults.

    `name` distinguishes several chunk buffers in one database (`replaybuf ls URL --buffer chunks`). Beyond `capacity`
    the chunks of the lowest version, which is their priority, are evicted; a chunk is removed by its draw number
    `max_times_sampled`. All processes that open the same name should have the same rules.
    """

    env_prefix: ClassVar[str] = "REPLAYBUF_CHUNKS_"

    fragments_per_chunk: int = Field(ge=1, le=100_000)
    """The number of consecutive fragments of a worker in a chunk."""

    max_staleness: int | None = Field(default=None, ge=0, lt=2**53 - 1)
    """A chunk is removed when the model is more than this many versions ahead of it."""

    name: str = Field(default="chunks", min_length=1, max_length=150)
    policy: str | ReplayPolicy | type[ReplayPolicy] = "uniform"
    remover: str | ReplayPolicy | type[ReplayPolicy] = LowestPriorityPolicy
    # A fetch leases its chunks for the time of a write: its failure isn't the chunks' fault.
    max_deliveries: int = 0
    rollout_type: type = dict

    def build(self) -> ChunkBuffer:  # type: ignore[override]
        """Return the chunk buffer that this config describes; it connects at first use. Raises ConfigError."""
        return ChunkBuffer(super().build(), self)

    def build_sync(self) -> NoReturn:
        """Raise ConfigError: a chunk buffer has coroutines only, which `replaybuf.buffer.sync.run` runs."""
        raise ConfigError("a chunk buffer has no calls that block: run those of build() by replaybuf.buffer.sync.run")
