"""The chunk buffer, which joins consecutive fragments into chunks, and its config."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from replaybuf.buffer import wait_reports
from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.buffer.sync.buffer import SyncBuffer, SyncReplayBuffer, face_of, mirrored
from replaybuf.buffer.sync.loop import end, run
from replaybuf.common.cancellation import to_its_end
from replaybuf.common.checks import ENTERED_ASYNC, check_seconds, check_task_name, check_timeout
from replaybuf.common.readable_config import ReadableConfig
from replaybuf.config import Password, ReplayBufferConfig
from replaybuf.errors import ConfigError, InputError, NotReadyError, ReplayBufError
from replaybuf.integrations.chunks.fragments import (
    Chunk,
    Fragment,
    OldestVersionPolicy,
    Problem,
    Selection,
    Session,
    check_number,
    check_session,
)
from replaybuf.integrations.chunks.ledger import Ledger, ModelState, WorkerProgress, tag_of
from replaybuf.storage.values import LEASE_SECONDS, LOCK_SECONDS, RECONNECT_SECONDS, Cursor
from replaybuf.values.rollouts.rollout import Status

OnProblem = Literal["error", "drop"]
BeginSessions = Literal["advance", "put"]

_LONGEST_SECONDS = 5.0
_REMEMBERED = 10_000  # the highest number of workers whose cursors are kept in memory

_logger = logging.getLogger("replaybuf.waits")


class ChunkBuffer:
    """Joins fragments of workers into chunks of `fragments_per_chunk` consecutive ones, for the trainer to draw.

    A layer over a `ReplayBuffer`, `buffer`, with the same guarantees: puts are committed when they return, a draw goes
    to one taker, calls are safe to cancel, any number of processes share a database. Usually built by
    `ChunkBufferConfig`.

    A worker's chunks start at the index of its first fragment in the session, and then every `fragments_per_chunk`.
    The version of a chunk is the lowest of its fragments' versions; it is too stale when the model's version is more
    than `max_staleness` ahead of it. If the first fragments of a chunk are too stale when it is complete, they are
    removed, and the chunk begins after them.

    Sessions are increasing numbers, or texts. `begin_sessions` selects the calls that begin a session: only `advance`,
    so that a worker with a wrong session does no harm; or also the put of its first fragment ("put").
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        *,
        name: str = "chunks",
        fragments_per_chunk: int,
        max_staleness: int | None = None,
        on_problem: OnProblem = "error",
        begin_sessions: BeginSessions = "advance",
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        if begin_sessions not in ("advance", "put"):
            raise ConfigError(f"begin_sessions must be 'advance' or 'put', got {begin_sessions!r:.100}")
        if on_problem not in ("error", "drop"):
            raise ConfigError(f"on_problem must be 'error' or 'drop', got {on_problem!r:.100}")
        self.buffer = buffer
        self.name = check_task_name(name, "name")
        size = check_number(fragments_per_chunk, "fragments_per_chunk", least=1)
        most = None if max_staleness is None else check_number(max_staleness, "max_staleness")
        self._ledger = Ledger(buffer, name, size, most)
        self._known: dict[str, Cursor] = {}  # of workers, as this process has written them last
        self._drops, self._begins = on_problem == "drop", begin_sessions == "put"
        self._lease_seconds = check_seconds(lease_seconds, "lease_seconds")

    if not TYPE_CHECKING:
        __enter__ = __exit__ = ENTERED_ASYNC

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

    async def put(self, data: Any, *, worker: str, index: int, session: Session, version: int) -> bool:
        """Store a fragment, and make the chunk that it completes, if any. Return False if it was dropped and counted.

        `data` is a value that the codec can write: numpy arrays, dicts, lists, numbers, texts, bytes. `index` is the
        fragment's position among those of the worker, `session` the training session (a number or a text), `version`
        the version of the generating model. The very first fragment begins its session, with the model at the
        fragment's version; later sessions are begun by `advance`, or with `begin_sessions="put"` by any fragment.

        When this returns True, the fragment and the chunk that it completed are committed. After a failed or cancelled
        put, the fragment may or may not be stored: put it again.

        A fragment out of sequence is a problem: a "duplicate" has an index below the expected one, a "gap" one above
        it, and with a "session" problem its session is over or hasn't begun. With `on_problem="error"` the put raises
        FragmentError and changes nothing. With "drop" the fragment is counted (`dropped`) and not stored. At a gap, the
        unfinished fragments before it are dropped instead, and the next chunk starts at this one.

        Also raises InputError, RolloutError and StorageError; then nothing is stored.
        """
        fragment = Fragment(data, worker, index, session, version)
        while True:
            state = await self._state_for(fragment)
            if fragment.session != state.label:
                return await self._refuse(fragment, "session", state.label, over=state.is_over(fragment.session))
            known = self._known.pop(worker, None)  # which saves a read, if no other process has moved it
            cursor = known or await self._ledger.cursor(worker)
            progress = WorkerProgress.of(cursor, state.session)
            if progress is None or progress.next == fragment.index:
                stored = await self._ledger.store(fragment, state, cursor)
                if stored is not None:
                    self._remember(worker, stored)
                    return True
            elif known is not None:
                continue
            elif fragment.index < progress.next:
                return await self._refuse(fragment, "duplicate", progress.next)
            elif not self._drops:
                raise fragment.error("gap", progress.next)
            else:
                begun = WorkerProgress(state.session, fragment.index, self._ledger.size)
                if await self._ledger.begin(worker, cursor, begun) is not None:
                    await self._ledger.drop("gap")

    def _remember(self, worker: str, cursor: Cursor) -> None:
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        self._known[worker] = cursor

    async def forget(self, worker: str) -> int:
        """Remove the unfinished fragments of a restarted worker; its next one may have any index.

        Return the number removed.
        """
        check_task_name(worker, "worker")
        while True:
            count = await self._ledger.begin(worker, await self._ledger.cursor(worker), None)
            if count is not None:
                return count

    async def expected(self, worker: str) -> int | None:
        """Return the expected index of a worker's next fragment, or None if any is accepted."""
        check_task_name(worker, "worker")
        state = await self._ledger.state()
        progress = state and WorkerProgress.of(await self._ledger.cursor(worker), state.session)
        return progress.next if progress else None

    async def dropped(self) -> dict[str, int]:
        """Return the number of problems of each kind since the beginning, over all processes.

        "gap", "duplicate" and "session" are counted by `put` with `on_problem="drop"`, "stale" counts chunks that were,
        or became, too stale, and "damaged" chunks with a fragment that can't be decoded.
        """
        return await self._ledger.dropped()

    # The model

    async def advance(self, version: int, *, session: Session | None = None) -> int:
        """Move the model to a version (of a session; default: the store's). Return the number of chunks removed.

        A `session` above the store's, or a new text, begins: unfinished fragments, chunks and the selection of older
        sessions are removed, and so are chunks more than `max_staleness` versions behind. Idempotent, so that every
        rank may call it: a version that the store has reached or passed changes nothing. Raises InputError if the
        session is over, or isn't known yet.
        """
        version = check_number(version, "version")
        label = None if session is None else check_session(session)
        if label is None and await self._ledger.state() is None:
            raise InputError(f"no fragment of {self.name} was put yet, so its session isn't known: give session=")
        state = await self._ledger.move(label, version)
        if label is not None and label != state.label:
            raise InputError(f"session {session!r} is over: {self.name} is in session {state.label!r}")
        return await self._ledger.clear(state)

    # Drawing

    async def fetch(self, n: int, *, timeout: float | None) -> Selection:
        """Draw `n` chunks uniformly at random, as soon as there are enough; each is drawn up to `max_reuse` times.

        Afterwards `prepared()` returns this selection in every process. It is stored before the draw is acknowledged,
        so nothing is lost if this process dies within the call, or the call is cancelled: either the chunks come back,
        after `lease_seconds` at the latest, and the draw doesn't count, though `prepared()` may already return the
        selection; or the draw counts, and `prepared()` returns the selection.

        Raises NotReadyError (a TimeoutError), with the reason, after `timeout` seconds (None: never); then nothing was
        drawn. Raises InputError for more chunks than `max_chunks`.
        """
        n = check_number(n, "n", least=1)
        limit = check_timeout(timeout)
        deadline = time.monotonic() + limit
        while True:
            try:
                if (selection := await self._draw(n, max(0.0, deadline - time.monotonic()))) is not None:
                    return selection
            except NotReadyError:
                there = await self.buffer.count(self.name, Status.COMPLETED)
                waiting = await self.buffer.count_where({"task_name": self._ledger.fragments})
                raise NotReadyError(
                    f"after {limit:g} s: {there} of {n} chunks are there in {self.name!r}, and {waiting} fragments "
                    "wait for the rest of theirs; nothing was drawn"
                ) from None

    async def prepared(self, *, after: int | None = None, timeout: float | None = 0) -> Selection:
        """Return the selection of the last `fetch` of any process; with `after`, wait for one with a higher number.

        Raises NotReadyError (a TimeoutError) if there is none within `timeout` seconds (None: for ever).
        """
        least = -1 if after is None else check_number(after, "after")
        limit = check_timeout(timeout)
        deadline = time.monotonic() + limit
        query = {"task_name": self._ledger.prepared, "uid": {"$gt": least}}
        report_at = time.monotonic() + wait_reports.REPORT_SECONDS
        while True:
            seen = self.buffer.waits.version()
            for item in [item async for item in self.buffer.find(query, order_by="-uid", limit=1)]:
                if item.error is not None:
                    raise ReplayBufError(f"selection {item.uid} of {self.name} can't be read: {item.error}")
                return Selection.of(item)
            remaining = deadline - time.monotonic()
            what = "nothing was fetched yet" if after is None else f"nothing was fetched after selection {after}"
            if remaining <= 0:
                raise NotReadyError(f"after {limit:g} s: {what} from {self.name}")
            if time.monotonic() >= report_at:
                _logger.warning("waiting for a selection: %s from %s", what, self.name)
                report_at = time.monotonic() + wait_reports.REPORT_SECONDS
            await self.buffer.check_fence()
            await self.buffer.waits.changed(seen, min(remaining, report_at - time.monotonic(), _LONGEST_SECONDS))

    async def _draw(self, n: int, timeout: float) -> Selection | None:
        """Draw and store a selection. Return None if some of the chunks were obsolete, and removed instead."""
        lease = await self.buffer.lease_batch({self.name: n}, at_least=n, timeout=timeout, seconds=self._lease_seconds)
        try:
            items = lease.items[self.name]
            state = await self._ledger.state()
            if state is not None and any(self._ledger.is_obsolete(item, state) for item in items):
                await lease.give_back()
                await self._ledger.clear(state)
                return None
            chunks = [Chunk.of(item) for item in items]
            session = max(int(tag_of(item, "session")) for item in items)
            number = await self.buffer.put(
                [chunk.rollout() for chunk in chunks], self._ledger.prepared, tags={"session": session}, key="selection"
            )
            assert number is not None  # there is at least one chunk
            await lease.acknowledge()
            return Selection(number, tuple(chunks))
        except BaseException:
            with contextlib.suppress(ReplayBufError):  # on failure, they come back when the lease ends
                await to_its_end(lease.give_back())
            raise
        finally:
            lease.stop()

    # Checking

    async def _refuse(self, fragment: Fragment, kind: Problem, expected: Session, *, over: bool = True) -> bool:
        """Count a fragment that isn't stored, and return False; or raise the error for it."""
        if not self._drops:
            raise fragment.error(kind, expected, over=over)
        await self._ledger.drop(kind)
        return False

    async def _state_for(self, fragment: Fragment) -> ModelState:
        """Return the model's state, which is moved to the fragment's session if the fragment begins that."""
        state, label = await self._ledger.state(), fragment.session
        if state is None or (self._begins and label != state.label and not state.is_over(label)):
            state = await self._ledger.move(label, fragment.version)
        if self._ledger.cleared is None or self._ledger.cleared < state.session:
            # The process that began the session may have died before this, which precedes any fragment of the session.
            await self._ledger.clear(state)
        return state


@face_of(ChunkBuffer)
class SyncChunkBuffer(SyncBuffer[ChunkBuffer]):
    """A `ChunkBuffer` whose calls block until they are done. Built by `ChunkBufferConfig(...).build_sync()`.

    Threads, processes and Ctrl-C are handled as in `SyncReplayBuffer`.
    """

    name: str

    @property
    def buffer(self) -> SyncReplayBuffer:
        """The underlying buffer."""
        return SyncReplayBuffer(self.asynchronous.buffer)

    close = mirrored(ChunkBuffer.close, end)
    put = mirrored(ChunkBuffer.put, run)
    forget = mirrored(ChunkBuffer.forget, run)
    expected = mirrored(ChunkBuffer.expected, run)
    dropped = mirrored(ChunkBuffer.dropped, run)
    advance = mirrored(ChunkBuffer.advance, run)
    fetch = mirrored(ChunkBuffer.fetch, run)
    prepared = mirrored(ChunkBuffer.prepared, run)


# Fields of the chunk buffer, not of the underlying store.
_OWN = ("name", "fragments_per_chunk", "max_staleness", "on_problem", "begin_sessions", "lease_seconds")


class ChunkBufferConfig(ReadableConfig):
    """The database of a chunk buffer, the size of chunks, and the rules for their removal.

    `url`, `seed`, `durability`, `compression`, `lock_timeout`, `reconnect_timeout`, `password` and
    `allow_network_filesystem` are those of ReplayBufferConfig; `name` (`chunks`) distinguishes several chunk buffers in
    one database (`replaybuf ls URL --buffer chunks`). All processes that open the same name should have the same rules.

    - `fragments_per_chunk`: the number of consecutive fragments of a worker in a chunk.
    - `max_chunks` (None): beyond it the chunks of the lowest version are evicted.
    - `max_staleness` (None): a chunk is removed when the model is more than this many versions ahead of it.
    - `max_reuse` (1): a chunk is removed by its n-th draw; 0 keeps it.
    - `on_problem` (`error`): a put of a fragment out of sequence raises FragmentError, or counts and drops it (`drop`).
    - `begin_sessions` (`advance`): a session is begun by `advance` only, or also by its first fragment (`put`): then
      one worker with a wrong session empties the buffer.
    - `lease_seconds` (as of leases): if a process dies within `fetch`, its chunks come back after this time.
    """

    env_prefix: ClassVar[str] = "REPLAYBUF_CHUNKS_"

    url: str
    name: str = Field(default="chunks", min_length=1, max_length=150)
    fragments_per_chunk: int = Field(ge=1, le=100_000)
    max_chunks: int | None = Field(default=None, ge=1)
    max_staleness: int | None = Field(default=None, ge=0, lt=2**53 - 1)
    max_reuse: int = Field(default=1, ge=0)
    on_problem: Literal["error", "drop"] = "error"
    begin_sessions: Literal["advance", "put"] = "advance"
    seed: int | None = None
    durability: Literal["normal", "full"] = "normal"
    compression: Literal["none", "zstd"] = "none"
    lock_timeout: float = Field(default=LOCK_SECONDS, gt=0, le=86_400)
    reconnect_timeout: float = Field(default=RECONNECT_SECONDS, ge=0, le=86_400)
    password: Password = None
    allow_network_filesystem: bool = False
    lease_seconds: float = Field(default=LEASE_SECONDS, gt=0, le=86_400)

    def build(self) -> ChunkBuffer:
        """Return the chunk buffer that this config describes; it connects at first use. Raises ConfigError."""
        return ChunkBuffer(self.store().build(), **{name: getattr(self, name) for name in _OWN})

    def build_sync(self) -> SyncChunkBuffer:
        """Return the chunk buffer as `build` does, for callers without `await`: the same calls, which block."""
        return SyncChunkBuffer(self.build())

    def store(self) -> ReplayBufferConfig[dict[str, Any]]:
        """Return the config of the underlying store, for a ReplayBuffer over the same groups."""
        shared = type(self).model_fields.keys() - {*_OWN, "max_chunks", "max_reuse"}
        return ReplayBufferConfig(
            name=self.name,
            policy="uniform",
            max_times_sampled=self.max_reuse,
            capacity=self.max_chunks,
            remover=OldestVersionPolicy,
            # A fetch leases its chunks for the time of a write: its failure isn't the chunks' fault.
            max_deliveries=0,
            rollout_type=dict,
            **{name: getattr(self, name) for name in shared},
        )
