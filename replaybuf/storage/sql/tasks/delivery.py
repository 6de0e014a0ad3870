"""One take or lease: its transaction, the decoding of its groups, and its undo."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from replaybuf.errors import DecodeError
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.batches import BatchKey, remove_batch, train_step_of, write_batch
from replaybuf.storage.sql.statements.counts import set_aside
from replaybuf.storage.sql.statements.files import READING_SECONDS, keep_for_reading
from replaybuf.storage.sql.statements.lanes import KnownLanes
from replaybuf.storage.sql.statements.leases import begin_lease, hold, rows_of, unconsume, unhold
from replaybuf.storage.sql.statements.past import lock, newest, record
from replaybuf.storage.sql.statements.rows import GroupRow
from replaybuf.storage.sql.statements.take import by_home, consume, draw_behind_fence
from replaybuf.storage.sql.tasks.heartbeats import Presence
from replaybuf.storage.sql.tasks.transactions import Encoding, Transactions
from replaybuf.storage.values import Draw, Leased, StorageItem

_logger = logging.getLogger("replaybuf.draws")

#: Up to this size and number, groups are read in milliseconds.
BRIEF_BYTES = 1024 * 1024
BRIEF_GROUPS = 256
#: Decoding up to this long costs hardly more than a thread switch and back, with its waits for the GIL.
LIGHT_SECONDS = 0.002

_Decoded = tuple[dict[str, list[StorageItem]], dict[int, str]]


@dataclass(slots=True)
class Taken:
    """Drawn rows, and what the caller gets of them, for a draw without a lease with the token 0.

    `checkpoint` is the newest one at the draw, and `batch` the key of its record in the table of batches. `stay` has
    the uids of groups that are still in the buffer, where others may draw them, `apart` the rows of those whose
    payloads are kept apart.
    """

    rows: list[GroupRow]
    leased: Leased
    checkpoint: int = 0
    batch: BatchKey | None = None
    stay: Sequence[int] = ()
    apart: Sequence[GroupRow] = ()


@dataclass(slots=True)
class Draws:
    """State shared by the draws of an open buffer.

    The last `history` draws are kept in the record of batches (None: all). `group_bytes` and `group_seconds` are the
    payload size of a group and the time to decode one in the last draw, taken as estimates for the next.
    """

    transactions: Transactions
    encoding: Encoding
    presence: Presence
    history: int | None
    lanes: KnownLanes = field(default_factory=dict)
    group_bytes: float = math.inf
    group_seconds: float = math.inf


class Drawing:
    """Draws groups, and consumes them or, given `seconds`, leases them."""

    def __init__(self, draws: Draws, draw: Draw, seconds: float | None = None) -> None:
        self._draws = draws
        self._transactions = draws.transactions
        self._codec = draws.encoding.codec
        self._files = draws.encoding.files
        self._draw = replace(draw, sizes={task: size for task, size in draw.sizes.items() if size > 0})
        self._tasks = list(draw.sizes)
        self._seconds = seconds
        self._set_aside_uids: set[int] = set()
        self._has_news = False
        self._decoding_task: asyncio.Future[_Decoded] | None = None

    async def run(self) -> Taken | None:
        """Draw until every drawn group can be decoded (database's thread)."""
        try:
            while (taken := await self._take()) is not None:
                items, failed = await self._read(taken)
                if not failed:
                    taken.leased.items.update(items)
                    self._files.read({row.uid for row in taken.apart}.difference(taken.stay))
                    self._draws.presence.of(self._draw.worker).taken += len(taken.rows)
                    return taken
                # Rare: damage, or another rollout type. The draw is repeated without these groups.
                _logger.warning("%d groups are set aside as failed: %s", len(failed), next(iter(failed.values())))
                await self._transactions.thread.settle(partial(self._give_back, taken, failed))
                self._set_aside_uids.update(failed)
            return None
        finally:
            self._stop_decoding()

    async def _read(self, taken: Taken) -> _Decoded:
        """Return the drawn groups, and the errors of undecodable ones by uid; on an exception all are put back."""
        try:
            items, failed = await (self._decoding_task or self._fetch_and_decode(taken))
            if failed:
                await self._files.check_places(row for row in taken.rows if row.uid in failed)
        except BaseException:
            await self._transactions.thread.settle(partial(self._give_back, taken, {}))
            raise
        return items, failed

    async def _take(self) -> Taken | None:
        taken = await self._transactions.write(self._transact, brief=self._is_brief(), fenced=False, wakes=False)
        if self._has_news:
            self._transactions.committed()
        return taken

    def _is_brief(self) -> bool:
        """Return whether the draw takes milliseconds at most, assuming groups as large as the last ones."""
        groups = sum(self._draw.sizes.values())
        looks_at_others = self._draw.where is not None or self._draw.probabilities
        return groups <= BRIEF_GROUPS and groups * self._draws.group_bytes <= BRIEF_BYTES and not looks_at_others

    async def undo(self, taken: Taken) -> None:
        """Put back groups that never reached the caller; may be repeated after an error (database's thread)."""
        if taken.leased.items:
            self._draws.presence.of(self._draw.worker).taken -= len(taken.rows)
            self._files.unread(row.uid for row in taken.rows)
            taken.leased.items.clear()
        await self._give_back(taken, {})

    def _transact(self, tx: Transaction) -> Taken | None:
        rows, ended = draw_behind_fence(tx, self._draw, self._set_aside_uids, self._draws.lanes)
        # Removed groups matter only to puts that wait for room; groups set aside have become FAILED.
        makes_room = rows is not None and tx.scope.rules.limits.slows_puts
        self._has_news = ended or bool(self._set_aside_uids) or makes_room
        if rows is None:
            return None
        scope, step = tx.scope, train_step_of(self._draw, rows)
        token, until = (0, 0.0) if self._seconds is None else begin_lease(tx, self._seconds)
        leased = Leased(token, until, {}, scope.epoch, step, scope.database, self._draw.train_step)
        taken = Taken(rows, leased, newest(tx), apart=[row for row in rows if row.is_apart])
        if recorded := bool(rows) and self._draws.history != 0:
            taken.batch = write_batch(tx, self._draw, rows, step, token or None)
        if self._seconds is None:
            taken.stay = consume(tx, rows, step, drawn=recorded)
            keep_for_reading(tx, [row.uid for row in taken.apart], READING_SECONDS)
        else:
            taken.stay = hold(tx, rows, token, until, self._draw.worker)
        if recorded:
            record(tx, taken.stay)
        if tx.dialect.is_remote:  # decoded while the answer to COMMIT is awaited
            self._stop_decoding()
            self._decoding_task = asyncio.ensure_future(self._fetch_and_decode(taken))
        return taken

    def _stop_decoding(self) -> None:
        """Drop the decoding of a transaction that wasn't committed, or whose groups were returned."""
        if self._decoding_task is not None:
            self._decoding_task.cancel()
            self._decoding_task = None

    async def _give_back(self, taken: Taken, failed: dict[int, str]) -> None:
        def put_back(tx: Transaction) -> None:
            reasons, uids = failed, [row.uid for row in taken.rows]
            lock(tx, uids)  # so that a sweep, which goes by the batch and deletes payloads, has ended or skips them
            if taken.batch is not None:
                remove_batch(tx, taken.batch)
            if tx.scope.epoch != taken.leased.epoch:  # a restore has replaced the state of these groups
                return
            if self._seconds is None:
                reasons = unconsume(tx, taken.rows, taken.checkpoint) | failed
            else:
                unhold(tx, taken.leased, uids)
            if reasons:
                _fail(tx, reasons, self._draw.worker)

        await self._transactions.write(put_back)

    async def _fetch_and_decode(self, taken: Taken) -> _Decoded:
        """Return the groups, and the errors of undecodable ones by uid; light batches are decoded in this thread."""
        await self._files.fetch(taken.apart, self._draw.deferred)
        if not self._codec.runs_code and len(taken.rows) * self._draws.group_seconds <= LIGHT_SECONDS:
            return self._decode(taken)
        return await self._transactions.compute(self._decode, taken)

    def _decode(self, taken: Taken) -> _Decoded:
        rows, leased = taken.rows, self._seconds is not None
        began, deferral = time.thread_time(), self._files.deferral(self._draw.deferred)
        items: dict[str, list[StorageItem]] = {task: [] for task in self._tasks}
        failed: dict[int, str] = {}
        payload_bytes = sum([len(row.payload or b"") for row in rows])
        for row in rows:
            try:
                item = row.decode(self._codec, deferral)
            except DecodeError as error:
                failed[row.uid] = str(error)
                continue
            if deferral is not None:
                row.payload = None  # whose arrays the handles have; those of all groups needn't be there twice
            item.times_sampled += 1
            item.deliveries += leased
            if not leased and taken.leased.train_step is not None:
                item.trained_step = taken.leased.train_step
            items[row.task_name].append(item)
        if len(failed) < len(rows):
            self._draws.group_bytes = payload_bytes / len(rows)
            self._draws.group_seconds = (time.thread_time() - began) / len(rows)
        return items, failed


def _fail(tx: Transaction, reasons: dict[int, str], worker: str | None) -> None:
    """Set aside undecodable groups after they were put back."""
    rows = [row for row in rows_of(tx, list(reasons)) if row.lane == row.home.id]
    for home, members in by_home(rows):
        set_aside(tx, home, {row.uid: reasons[row.uid] for row in members}, worker)
