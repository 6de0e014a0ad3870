"""Groups that fill: puts of their rollouts one by one, until the last one has come, or the time is over.

The last rollout isn't stored by itself: the others are read, and the whole group is put in place of them, so that its
draws cost as much as those of a group that was put at once. If another process was faster, that starts again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from replaybuf.errors import (
    ClosedError,
    ConflictError,
    DecodeError,
    FullError,
    PayloadStoreError,
    ReplayBufError,
    StorageError,
)
from replaybuf.storage.sql.statements.counts import read_levels
from replaybuf.storage.sql.statements.parts import LastRolloutError, newest_step, overdue, read_parts
from replaybuf.storage.sql.statements.put import drop
from replaybuf.storage.sql.statements.rows import read_rows
from replaybuf.storage.sql.tasks.group_commit import GroupCommit
from replaybuf.storage.sql.tasks.heartbeats import Presence
from replaybuf.storage.sql.tasks.transactions import Encoding, Transactions
from replaybuf.storage.values import NewGroup, Part, StorageItem
from replaybuf.values.rollouts.normalise import Normalised, normalise, normalise_fit
from replaybuf.values.rollouts.segments import entries_of, flat, segmented
from replaybuf.values.rollouts.staleness import NO_RULE
from replaybuf.values.rollouts.statuses import Status

#: Overdue rollouts whose names are read at a time.
_ROLLOUTS_AT_ONCE = 512
#: How long overdue groups are completed at a time, and until one that can't be read is tried again, in seconds.
_LONGEST_SECONDS, _RETRY_SECONDS = 0.5, 30.0
#: In the place of that moment: the group is tried again when its task has room.
_WHEN_THERE_IS_ROOM = 0.0
#: How often a last rollout is put again because the others weren't there any more: another process was faster.
#: Each time it waits so much longer.
_MOST_RACES, _RACE_SECONDS = 30, 0.005

_logger = logging.getLogger("replaybuf.filling")


class Filling:
    """Puts rollouts of groups that fill, and the groups when they are full."""

    def __init__(
        self, transactions: Transactions, encoding: Encoding, commits: GroupCommit, presence: Presence
    ) -> None:
        self._thread, self._transactions, self._encoding = transactions.thread, transactions, encoding
        self._commits, self._presence = commits, presence
        self._reading = asyncio.Lock()
        self._retry_at: dict[str | int, float] = {}  # by name, of overdue groups that couldn't be completed

    async def put(self, new: NewGroup) -> int | None:
        """Store a rollout of a group, or the whole group if it is the last one.

        Return the uid of what was stored, or None for a group that is dropped because it is too old.

        Raises ConflictError for a place that is taken, or a group that is complete, and FullError if the limits leave
        no room for the group.
        """
        assert new.part is not None
        refused: ReplayBufError | None = None
        for race in range(_MOST_RACES):
            await asyncio.sleep(_RACE_SECONDS * race)
            [outcome] = await self._commits.put([new])
            if isinstance(outcome, int):
                return outcome
            if not isinstance(outcome, LastRolloutError):
                raise outcome
            items = await self._thread.run(partial(self._read, outcome.uids))
            if (read := len(items)) < (stored := len(outcome.uids)):
                refused = StorageError(
                    f"{stored} rollouts of group {new.part.name!r:.200} are stored, and {read} of them can be read, "
                    "so that it can't be completed, and nothing was stored: see what `replaybuf doctor` finds"
                )
                continue
            try:
                return await self._complete(new.part, items, new)
            except ConflictError as error:
                refused = error
        assert refused is not None
        raise refused

    async def drop(self, group: NewGroup) -> None:
        """Record a group that isn't stored, and remove the groups that it would replace (database's thread)."""
        rows = await self._transactions.write(lambda tx: drop(tx, group))
        self._presence.count_put(group)
        if group.dropped is not None:
            group.dropped += [*await self._encoding.decode_removed(rows), group.as_dropped()]

    async def _read(self, uids: Sequence[int]) -> list[StorageItem]:
        """Return stored rollouts (database's thread). Many groups may get their last one at the same time."""
        async with self._reading:
            read = partial(read_rows, condition="g.uid {in:uids}", payloads=True, uids=uids)
            return await self._encoding.read(read, frozenset())

    async def give_up(self, now: float, seconds: float) -> bool:
        """Complete the groups whose first rollout came longer ago than this, without those that are missing.

        They are drawable, or FAILED if too few are completed (database's thread). One without room is tried again when
        there is some; one whose rollouts can't be read, perhaps by this process alone, after a while. Return whether
        there may be more, after half a second.
        """
        after: tuple[float, int] | None = (0.0, 0)
        until, overdue_names, full_tasks = time.monotonic() + _LONGEST_SECONDS, set[str | int](), set[str]()
        while after is not None:
            find = partial(overdue, before=now - seconds, after=after, limit=_ROLLOUTS_AT_ONCE)
            tasks_by_name, after = await self._transactions.read(find)
            overdue_names.update(tasks_by_name)
            for name, task in tasks_by_name.items():
                retry_at = self._retry_at.get(name, -1.0)
                if time.monotonic() < retry_at:
                    continue
                if task in full_tasks:
                    continue
                if retry_at == _WHEN_THERE_IS_ROOM and await self._lacks_room(task):
                    full_tasks.add(task)
                    continue
                try:
                    await self._give_up(name, seconds)
                except ClosedError:
                    return False
                except ConflictError as error:
                    _logger.debug("another process was faster to complete group %r: %s", name, error)
                except FullError as error:
                    full_tasks.add(task)  # others of the task needn't be read
                    self._postpone(name, error, _WHEN_THERE_IS_ROOM)
                except (DecodeError, StorageError) as error:
                    if not isinstance(error, DecodeError | PayloadStoreError) and error.reason != "too large":
                        raise
                    self._postpone(name, error, time.monotonic() + _RETRY_SECONDS)
                if time.monotonic() > until:
                    return True
        self._retry_at = {name: moment for name, moment in self._retry_at.items() if name in overdue_names}
        return False

    async def _give_up(self, name: str | int, seconds: float) -> None:
        uids = list(await self._transactions.read(partial(read_parts, name=name)))
        items = await self._read(uids)
        if items and items[0].part is not None:
            part = items[0].part
            part.train_step = await self._transactions.read(partial(newest_step, uids=uids))
            await self._complete(part, items, reason=f"{len(items)} of {part.size} rollouts came in {seconds:g} s")

    def _postpone(self, name: str | int, error: Exception, retry_at: float) -> None:
        level = logging.DEBUG if name in self._retry_at else logging.WARNING
        _logger.log(level, "group %r can't be completed yet, and is tried again: %s", name, error)
        self._retry_at[name] = retry_at

    async def _lacks_room(self, task: str) -> bool:
        levels = await self._transactions.read(lambda tx: read_levels(tx, [task]))
        return self._transactions.scope.rules.limits.insertable(levels[task], Status.COMPLETED) == 0

    async def _complete(
        self, part: Part, items: Sequence[StorageItem], last: NewGroup | None = None, reason: str | None = None
    ) -> int | None:
        """Put a group in place of its stored rollouts, and of the last one, if it came.

        Return its uid, or None if it is dropped by the rules of puts. If enough rollouts are completed, the group has
        only these, and the others are a FAILED group.
        """
        rollouts = {_index(part, item): item.item[0] for item in items}
        if last is not None:
            [rollouts[part.index]] = entries_of(last.rollouts, last.segments)
        ordered, kind = [rollouts[place] for place in sorted(rollouts)], self._encoding.codec.rollout_type
        normal, fit, unfit = await normalise_fit(ordered, kind, part.least, None, part.train_step, part.rule)
        group = self._new_group(part, fit, normal, items, last)
        group.part, group.parts = part, tuple(item.uid for item in items)
        if unfit:
            failed = await normalise(flat(unfit), kind, None, None, NO_RULE)
            group.rest = self._new_group(part, unfit, failed, items, last)
        elif reason is not None and (normal.status != Status.COMPLETED or len(fit) < part.least):
            group.status, group.error = Status.FAILED, reason
        if normal.dropped:
            await self._thread.run(partial(self.drop, group))
            return None
        [outcome] = await self._commits.put([group])
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _new_group(
        self, part: Part, entries: list[Any], normal: Normalised, items: Sequence[StorageItem], last: NewGroup | None
    ) -> NewGroup:
        rollouts, segments = segmented(entries)
        tags: dict[str, Any] = {}
        for item_tags in (*(item.tags for item in items), None if last is None else last.tags):
            tags |= item_tags or {}
        return NewGroup(
            part.task_name,
            normal.status,
            normal.staleness,
            rollouts,
            time.time(),
            train_step=normal.train_step,
            priority=max(item.priority for item in items) if last is None else last.priority,
            tags=tags,
            worker=self._transactions.scope.worker if last is None else last.worker,
            put_step=part.train_step,
            fields=normal.fields,
            fetched=None if last is None else last.fetched,
            dropped=None if last is None else last.dropped,
            segments=segments,
        )


def _index(part: Part, item: StorageItem) -> int:
    """Return the index of a stored rollout in its group. Raises DecodeError if it can't be read."""
    if item.part is None or not item.item:
        raise DecodeError(
            f"group {part.name!r:.200}: its rollout with the uid {item.uid} can't be read ({item.error}); delete it "
            "(`delete` in Python, `replaybuf rm`), and put another in its place"
        )
    return item.part.index
