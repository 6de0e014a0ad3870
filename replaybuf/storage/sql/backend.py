"""The operations on a buffer in a database: one implementation for SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from replaybuf.common.progress import OnProgress, in_pieces
from replaybuf.errors import ClosedError
from replaybuf.rules.circumstances import Circumstances
from replaybuf.rules.policies import Order
from replaybuf.rules.query import Node
from replaybuf.rules.transitions import LaneName, Tally
from replaybuf.storage.reports import EventKind
from replaybuf.storage.sql.copies.snapshot import copy_from, copy_to
from replaybuf.storage.sql.copies.snapshot_file import snapshot_file
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.wait_facts import read_circumstances
from replaybuf.storage.sql.lifecycle import Store
from replaybuf.storage.sql.statements import leases, ledger, matching, put
from replaybuf.storage.sql.statements.annotate import annotate, check_annotations
from replaybuf.storage.sql.statements.buffer_facts import Tallied, read_histograms, read_tallies
from replaybuf.storage.sql.statements.checkpoints import drop_checkpoint, make_checkpoint, read_checkpoints
from replaybuf.storage.sql.statements.counts import read_fenced_tallies
from replaybuf.storage.sql.statements.fence import check_fence
from replaybuf.storage.sql.statements.new_rows import EncodedGroup
from replaybuf.storage.sql.statements.parts import list_parts
from replaybuf.storage.sql.statements.refresh import refresh_staleness
from replaybuf.storage.sql.tasks import transactions
from replaybuf.storage.sql.tasks.delivery import BRIEF_GROUPS, Drawing, Taken
from replaybuf.storage.values import (
    ByGroup,
    Changes,
    Checkpoint,
    Cursor,
    Draw,
    FillingGroup,
    Leased,
    NewGroup,
    Refresh,
    StorageItem,
)
from replaybuf.values.rollouts.rollout import Status

UIDS = ("uid", "timestamp_id")
#: A search in the order of uids lists so many groups at a time.
FOUND_AT_ONCE = 10_000
_NOT_COUNTED = (Status.ARCHIVED, Status.FILLING)


class SQLStorage(Store):
    """The groups of a buffer in a SQLite file, a SQLite database in memory, or a PostgreSQL database.

    `ReplayBuffer` decides the status of a group and how long a caller waits. Queries arrive parsed
    (`replaybuf.rules.query`), orders as terms (`replaybuf.rules.policies`). Every coroutine is safe to cancel: it has
    either its whole effect or none. All calls with a lease raise LeaseLostError for a lease of another database.
    """

    def __len__(self) -> int:
        """Return the number of groups but leased, archived and filling ones; callable in and outside event loops."""
        counts = self.group_counts()
        return sum(n for (_, status, name), n in counts.items() if name == Tally.SIZE and status not in _NOT_COUNTED)

    def group_counts(self) -> Tallied:
        """Return the numbers of groups, buffered and leased ones apart, by task and status; callable as `len` is."""
        tallies = self._run_blocking(lambda: self.transactions.read(lambda tx: read_tallies(tx, self.name)))
        return {name: n for name, n in tallies.items() if n and name[2] in (Tally.SIZE, Tally.LEASED)}

    # Putting and taking

    async def put(self, group: NewGroup) -> int | None:
        """Store a group and return its uid; it is committed then. Rules and errors are those of `ReplayBuffer.put`.

        A rollout of a group that fills is stored by itself, the last one with the others, as a group. None: that group
        was too old, and isn't retryable. The tags are copied, and `{}` is stored as None. Groups beyond the capacity
        are evicted in the same transaction, in the remover's order, even the new group when it comes first. Raises
        LeaseLostError when the lease no longer holds a group to be replaced; then nothing is stored.
        """
        await self.open()
        if group.part is not None:
            return await self.filling.put(group)
        [outcome] = await self.commits.put([group])
        if isinstance(outcome, BaseException):
            try:
                raise outcome
            finally:
                del outcome  # its traceback has this frame, and would keep the group
        return outcome

    async def put_many(self, groups: Sequence[NewGroup]) -> list[int | BaseException]:
        """Store groups in as few transactions as their sizes allow; return the uid or the error of each.

        Each group is stored as by `put`; a refused one doesn't affect the others.
        """
        await self.open()
        return await self.commits.put(groups) if groups else []

    async def drop(self, group: NewGroup) -> None:
        """Record a group that isn't stored, and remove the groups that its put would replace.

        An expired group counts as put and as dropped, a FILTERED or FAILED one as put and as pruned. One transaction.
        Removed groups are appended to `group.dropped`, as by `put`, and then this one. Raises ConflictError and
        LeaseLostError like `put`; then nothing is removed or counted.
        """
        await self._run(lambda: self.filling.drop(group))

    async def refuse(self, group: NewGroup) -> None:
        """Count a group as refused for lack of room."""
        await self._write(put.refuse, group, wakes=False)

    async def take(self, draw: Draw) -> dict[str, list[StorageItem]] | None:
        """Draw groups in the sampler's order, in one transaction; by the rules they are removed, kept, or archived.

        Kept and archived groups record the train step of the draw as their `trained_step`. No two takers get the same
        draw of a group. The limits bound the number drawn. Unless every task has `draw.at_least` groups, None is
        returned and nothing drawn. A group whose payload can't be decoded is set aside (status FAILED, with the reason
        in `error`) and the next one is drawn in its place. When the call is cancelled, the store is as if nothing had
        been drawn.
        """
        taken = await self._draw(draw)
        return None if taken is None else taken.leased.items

    async def lease(self, draw: Draw, seconds: float) -> Leased | None:
        """Draw like `take`, but only hide the groups until the lease is acknowledged, given back, or expires.

        The lease records the train step of the draw. When it expires, its groups can be drawn again, and the delivery
        counts. A group that was delivered `max_deliveries` times is set aside as FAILED instead.
        """
        taken = await self._draw(draw, seconds)
        return None if taken is None else taken.leased

    async def _draw(self, draw: Draw, seconds: float | None = None) -> Taken | None:
        await self.open()
        drawing = Drawing(self.draws, draw, seconds)
        return await self.thread.run(drawing.run, undo=drawing.undo)

    async def acknowledge(self, lease: Leased, uids: Sequence[int]) -> None:
        """Consume groups of a lease: by the rules they are removed, kept, or archived; `trained_step` is the lease's.

        All of them or none. Groups already acknowledged under this token, or replaced, are skipped. Raises
        LeaseLostError when the lease has ended and no longer holds one of the others, and before its end when one of
        them is back in the store or under another lease without having been acknowledged (`passed_on`).
        """
        await self._write(leases.acknowledge, lease, uids, brief=len(uids) <= BRIEF_GROUPS)

    async def give_back(self, lease: Leased, uids: Sequence[int], *, failed: str | None = None) -> int:
        """Release those of the groups that the lease still holds; return their number.

        `failed` is the reason of a failed delivery, which counts towards `max_deliveries`.
        """
        brief = len(uids) <= BRIEF_GROUPS

        async def work() -> int:
            write = partial(leases.give_back, lease=lease, uids=uids, reason=failed)
            given_back = await self.transactions.write(write, brief=brief)
            for holder, number in given_back.items() if failed is not None else ():
                self.presence.of(holder).failures += number
            return given_back.total()

        return await self._run(work)

    async def extend(self, lease: Leased, uids: Sequence[int], seconds: float, *, shortens: bool = False) -> float:
        """Renew the lease of these groups to `seconds` from now, or keep a later end unless it `shortens` it; return
        the end.

        Groups that the lease no longer holds are skipped before its end, since other holders of its token may have
        acknowledged or released them; after its end LeaseLostError is raised for them. If it holds none of them, its
        end stays.
        """
        brief = len(uids) <= BRIEF_GROUPS
        return await self._write(leases.extend, lease, uids, seconds, shortens, brief=brief, wakes=False)

    # Reading

    async def find(
        self,
        query: Node,
        *,
        order: Order,
        limit: int | None = None,
        deferred: frozenset[str] = frozenset(),
        payloads: bool = True,
    ) -> AsyncIterator[StorageItem]:
        """Yield the groups that match, without consuming them. Holds no lock or transaction between items.

        In the order of uids they are searched for in pages, up to the last uid at the first page; in another order all
        are listed first, with some 100 bytes of memory each.

        Arrays in the fields `deferred` are replaced by handles, which load them later. Without `payloads` only the
        metadata is read, and the items have no rollouts.
        """
        size_of = itemgetter(1) if payloads else lambda _: 0
        async for page in self._find_pages(query, order, limit):
            for piece in in_pieces(page, size_of, transactions.PIECE_GROUPS, transactions.PIECE_BYTES):
                uids = [uid for uid, _ in piece]
                if payloads:
                    read = partial(matching.read_matching, uids=uids, query=query, payloads=True)
                    for item in await self._run(partial(self.encoding.read, read, deferred)):
                        yield item
                else:
                    for row in await self._read(matching.read_matching, uids, query, payloads):
                        yield row.item([])

    async def _find_pages(self, query: Node, order: Order, limit: int | None) -> AsyncIterator[list[tuple[int, int]]]:
        """Yield pages of the uids of the groups that match, each with the size of its payload."""
        if order and (order[0].field not in UIDS or order[0].descending):
            yield await self._read(matching.find_uids, query, order, limit)
            return
        after, last = 0, None
        while limit is None or limit > 0:
            size = FOUND_AT_ONCE if limit is None else min(limit, FOUND_AT_ONCE)
            page, last = await self._read(matching.find_page, query, after, last, size)
            if page:
                yield page
            if len(page) < size:
                return
            after, limit = page[-1][0], None if limit is None else limit - size

    async def filling_groups(self, task_name: str) -> dict[str | int, FillingGroup]:
        """Return the groups of a task that fill, by name."""
        by_name: dict[str | int, FillingGroup] = {}
        for uid, part in (await self._read(list_parts, task_name)).items():
            group = by_name.setdefault(part.name, FillingGroup(task_name, part.size, part.least, {}))
            group.uids[part.index] = uid
        return by_name

    async def count(self, query: Node, *, at_most: int | None = None) -> int:
        """Return the number of groups that match; counting stops at `at_most`."""
        return await self._read(matching.count_groups, query, at_most)

    async def tallies(self) -> Tallied:
        """Return the tallies by task and status; unused ones are left out, or 0."""
        return await self._read(read_tallies, self.name, single=True)

    async def histograms(self, fields: Iterable[str]) -> dict[str, dict[LaneName, dict[int, int]]]:
        """Return the number of groups by `staleness` or `times_sampled`, for each task and status. Reads all groups."""
        return await self._read(read_histograms, self.name, fields)

    # Changing

    async def delete(self, query: Node) -> int:
        """Remove the groups that match; return the number removed."""
        return await self._write(matching.delete_groups, query)

    async def update(self, query: Node, changes: Changes) -> int:
        """Change the metadata of the groups that match; return their number. Staleness, uid and order don't change."""
        return await self._write(matching.update_groups, query, changes)

    async def requeue(self, query: Node) -> dict[Status, int]:
        """Make failed, filtered and expired groups that match drawable again (`matching.requeue_groups`)."""
        return await self._write(matching.requeue_groups, query)

    async def update_priorities(self, priorities: Mapping[int, float]) -> int:
        """Set the priorities of groups by uid, leased ones included; return the number of groups found."""
        return await self._write(matching.update_priorities, priorities)

    async def annotate(self, annotations: ByGroup, step: int | None) -> int:
        """Write annotations of groups for the last draw of each; return their number (`statements.annotate`)."""
        checked = await asyncio.to_thread(check_annotations, annotations)
        return await self._write(annotate, checked, step, wakes=False)

    async def refresh(self, refresh: Refresh) -> dict[str, int]:
        """Set the staleness of all groups of the tasks and statuses for the train step, and apply the expiry rules.

        Returns the number of expired groups by task. Groups that aren't retryable are removed and counted as dropped,
        also when they were EXPIRED before, and appended to `refresh.dropped`, as by `put`. One transaction.
        """
        counts, rows = await self._write(refresh_staleness, refresh, alone=True)
        if refresh.dropped is not None and rows:
            refresh.dropped.extend(await self._run(lambda: self.encoding.decode_removed(rows)))
        return counts

    # Checkpoints

    async def check_fence(self) -> None:
        """Raise FencedError when another process has restored the buffer since it was opened here."""
        await self._run(lambda: self.transactions.read(check_fence, single=True, fenced=True))

    async def fenced_tallies(self) -> Tallied:
        """Return the tallies, in one statement. Raises FencedError as `check_fence` does."""
        return await self._run(lambda: self.transactions.read(read_fenced_tallies, single=True, fenced=True))

    async def checkpoint(self, step: int, keep: int | None) -> Checkpoint:
        """Make a checkpoint of the buffer at this train step, replacing an older one of the same step.

        All but the last `keep` checkpoints are dropped (None keeps all). Payloads aren't copied.
        """
        return await self._write(make_checkpoint, step, keep, time.time(), alone=True, wakes=False)

    async def restore(self, step: int, *, keep_new: bool) -> Checkpoint:
        """Restore the buffer to its checkpoint of this step. Raises CheckpointError when there is none.

        Groups leased now or at the checkpoint become drawable. With `keep_new`, groups put since the checkpoint are
        kept with their present staleness, as if never drawn, unless they have been removed; groups that they replaced
        are not restored; archived ones that were drawn are COMPLETED again; and cursors aren't moved. All other
        processes that opened the buffer before are fenced off: FencedError.
        """
        return await self._run(lambda: self.transactions.restore(step, keep_new=keep_new))

    async def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints in the order in which they were made."""
        return await self._read(read_checkpoints)

    async def drop_checkpoint(self, step: int) -> None:
        """Drop a checkpoint. Raises CheckpointError when there is none of this step."""
        await self._write(drop_checkpoint, step)

    # Cursors: small versioned values stored with the groups, such as positions in datasets

    async def cursor(self, name: str) -> Cursor:
        """Return the current value and version of a cursor."""
        return await self._read(ledger.read_cursor, name, single=True)

    async def move_cursor(self, cursor: Cursor) -> bool:
        """Write a cursor if its version and epoch are unchanged (compare-and-swap); return whether it was written.

        Otherwise another process has moved the cursor since it was read, or has restored the buffer.
        """
        return await self._write(ledger.move_cursor, cursor, brief=True)

    async def prompts(self, name: str, known: int) -> Sequence[Sequence[Any]]:
        """Return the statistics of prompts that changed since a version of their cursor (`statements.ledger`).

        Since -1: all, in pages, between which others have the database's thread.
        """
        if known >= 0:
            return await self._read(ledger.read_changed, name, known)
        states, after = list[Sequence[Any]](), -1
        while page := await self._read(ledger.read_page, name, after):
            states += page
            after = page[-1][0]
        return states

    async def claim(
        self, groups: Sequence[NewGroup], cursor: Cursor, seconds: float, epochs: Mapping[int, int] | None = None
    ) -> Leased | None:
        """Move a cursor like `move_cursor`, and store groups already leased to the caller, in one transaction.

        Returns None, and changes nothing, when the cursor can't be moved. `epochs` has the epoch of each prompt that is
        drawn by an order, by its place in the dataset.
        """

        def claimed(tx: Transaction, encoded: list[EncodedGroup]) -> Taken | None:
            result = put.claim(tx, encoded, cursor, seconds, epochs)
            if result is None:
                return None
            rows, token, until = result
            return Taken(rows, Leased(token, until, {}, tx.scope.epoch, database=tx.scope.database))

        async def undo(taken: Taken) -> None:  # the next claim or lease gets these prompts
            uids = [row.uid for row in taken.rows]
            await self.transactions.write(lambda tx: leases.unhold(tx, taken.leased, uids))

        async def work() -> Taken | None:
            taken = await self.encoding.write(groups, claimed)
            for new in groups:
                self.presence.of(new.worker)
            if taken is not None:
                try:
                    items = await self.encoding.decode(taken.rows)
                except BaseException:
                    await self.thread.settle(partial(undo, taken))
                    raise
                for item in items:
                    item.times_sampled, item.deliveries = 1, 1
                    taken.leased.items.setdefault(item.task_name, []).append(item)
            return taken

        taken = await self._run(work, undo=undo)
        return None if taken is None else taken.leased

    async def put_with_cursor(self, groups: Sequence[NewGroup], cursor: Cursor, event: EventKind | None = None) -> bool:
        """Move a cursor like `move_cursor`, and put groups like `put`, all in one transaction, with an event.

        Returns False, and changes nothing, when the cursor can't be moved. Raises the `put` error of the first group
        that can't be stored; then nothing is stored or moved.
        """

        def put_with_cursor(tx: Transaction, encoded: list[EncodedGroup]) -> list[EncodedGroup] | None:
            return encoded if put.put_with_cursor(tx, encoded, cursor, event) else None

        async def work() -> bool:
            stored = await self.encoding.write(groups, put_with_cursor)
            self.presence.count_puts(stored or ())
            return stored is not None

        return await self._run(work)

    # Waiting

    def version(self) -> int:
        """Return a counter of the changes noticed by this process."""
        self.begin()
        return self.watch.version()

    async def changed(self, timeout: float, since: int) -> None:
        """Return soon after groups were committed by anyone, or after `timeout` seconds at the latest.

        Returns at once when `version()` is no longer `since`: callers read the version, try to draw, and then wait, so
        that a commit in between isn't missed. Spurious wake-ups are possible: callers try again and wait again. No
        statement is sent for it: what callers read then is `fenced_tallies`, or else they check the fence.
        """
        await self.open()
        await self.watch.wait(timeout, since)

    async def flush(self) -> None:
        """Write reported events and published waits now, as before an exit. Raises no database error."""
        if self.is_running and not self._access.read_only:
            with suppress(ClosedError):
                await self.thread.run(self.presence.flush)

    async def circumstances(self) -> Circumstances:
        """Return the facts about the buffer from which the reason of a wait is diagnosed, but for its query."""
        return await self._read(read_circumstances, self.name)

    # Copies of the whole buffer

    async def save(self, folder: Path, about: Mapping[str, str], progress: OnProgress | None = None) -> Path:
        """Write a consistent snapshot into a folder, over an older one, without blocking writers. Return its file.

        `about` is stored in the snapshot; `resume` compares it. `progress` is called from time to time, in any thread.
        """
        file = await asyncio.to_thread(snapshot_file, folder, make=True)
        await self._run(lambda: copy_to(self.engine, self.transactions.scope, str(file), about, progress))
        return file

    async def resume(self, folder: Path, expected: Mapping[str, str], progress: OnProgress | None = None) -> None:
        """Load the snapshot in a folder into this buffer, wholly or not at all.

        Raises SnapshotError when the buffer isn't empty, or when the snapshot's `about` differs from
        `expected`, or it is incomplete. `progress` is called from time to time, in any thread.
        """

        file = await asyncio.to_thread(snapshot_file, folder)
        await self._run(lambda: self._resume(str(file), expected, progress))

    async def _resume(self, path: str, expected: Mapping[str, str], progress: OnProgress | None = None) -> None:
        await copy_from(self.engine, self.transactions.scope, path, expected, progress)
        self.watch.committed()
