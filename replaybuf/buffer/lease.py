"""Leases: groups that are hidden while a consumer works on them, and drawable again if it disappears."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Generic, Unpack

from replaybuf.buffer.put_options import PutOptions
from replaybuf.buffer.putting import Putting
from replaybuf.buffer.tracing import of_uid, traced
from replaybuf.common import units
from replaybuf.common.cancellation import shielded
from replaybuf.common.checks import (
    check_list,
    check_reason,
    check_seconds,
    check_uids,
    check_whole,
    error_text,
)
from replaybuf.errors import (
    ClosedError,
    FencedError,
    GroupError,
    InputError,
    LeaseLostError,
    ReplayBufError,
)
from replaybuf.rules.query import SetNode
from replaybuf.storage.values import UNSET, Cursor, Leased, NewGroup, Part, R, StorageItem, Unset
from replaybuf.values.rollouts.segments import as_group

_logger = logging.getLogger("replaybuf.lease")

#: Renewals in the time of a lease.
_BEATS = 3


class Lease(Generic[R]):
    """Leased groups: `batch` has them by task, `items` has them with their metadata, `counts` has their number.

    `token` is the fencing token: a later lease has a higher one. Each group is settled once: acknowledged (it has been
    consumed), finished (its result is stored in its place) or given back (it can be drawn again). Groups that aren't
    settled can be drawn again when the lease ends, `seconds` after its last heartbeat. The database's thread sends
    heartbeats while this process lives.
    """

    def __init__(self, putting: Putting, leased: Leased, seconds: float, *, heartbeat: bool = True) -> None:
        self.storage = putting.storage
        self._putting = putting
        self._leased = leased
        self.seconds = seconds
        self._is_lost = False
        self._given_back_count = 0
        self._open_uids = {*leased.saved, *(item.uid for items in leased.items.values() for item in items)}
        self._added_parts: dict[int, dict[int, int]] = {}  # uids of finished rollouts, by group and index
        self._stop: Callable[[], None] | None = None
        if heartbeat and self._open_uids:
            self._stop = self.storage.run_in_background(partial(_renew, weakref.ref(self), seconds))

    def __repr__(self) -> str:
        return f"<Lease {self.token}: {len(self._open_uids)} groups open>"

    def _repr_html_(self) -> str:
        items = [item for of_task in self._leased.items.values() for item in of_task]
        headers = ("uid", "task", "status", "reward", "staleness", "rollouts", "open")
        rows = [
            (
                item.uid,
                item.task_name,
                str(item.status),
                item.reward,
                item.staleness,
                item.rollouts,
                item.uid in self._open_uids,
            )
            for item in items
        ]
        return units.html_table(repr(self)[1:-1], headers, rows)

    @property
    def token(self) -> int:
        return self._leased.token

    @property
    def until(self) -> float:
        """The end of the lease unless it is renewed, in seconds since the epoch by the store's clock."""
        return self._leased.until

    @property
    def handle(self) -> Leased:
        """The handle for `ReplayBuffer.adopt` in another process: the lease with its open groups, without rollouts.

        It can be pickled. Either process may settle the groups; heartbeats of both renew the same lease.
        """
        items = {
            task: [replace(item, item=[]) for item in items if item.uid in self._open_uids]
            for task, items in self.items.items()
        }
        kept = {item.uid for of_task in items.values() for item in of_task}
        is_part = self._leased.is_part or len(kept) < sum(map(len, self.items.values()))
        return replace(self._leased, items=items, is_part=is_part, saved=tuple(self._open_uids - kept))

    @property
    def items(self) -> dict[str, list[StorageItem[R]]]:
        return self._leased.items

    @property
    def batch(self) -> dict[str, list[list[R]]]:
        return {task: [item.item for item in items] for task, items in self.items.items()}

    @property
    def counts(self) -> dict[str, int]:
        return {task: len(items) for task, items in self.items.items()}

    @property
    def open(self) -> frozenset[int]:
        """The uids of the groups that aren't settled yet."""
        return frozenset(self._open_uids)

    @property
    def lost(self) -> bool:
        """Whether a heartbeat found the lease ended or the buffer restored: others may have the open groups.

        Detected within a third of `seconds`. Without a heartbeat, only settling or extending the lease detects it.
        """
        return self._is_lost

    @traced("replaybuf.acknowledge")
    async def acknowledge(self, uids: Iterable[int] | None = None, *, train_step: int | None = None) -> None:
        """Mark these groups, or all open ones, as consumed: they are removed, or kept for their next draw.

        `train_step` is the step trained on them, recorded with the draw and with kept groups. Default: the step that
        the draw named (`current_train_step`), or else the step of the latest refresh. Groups of one lease may be of
        several steps.

        All of them or none. Raises LeaseLostError if they were given back (the lease had ended, or another process that
        adopted it gave them back), also if another consumer has them now; and if this lease gave back all groups that
        were left. Groups already acknowledged by another process are skipped.
        """
        if uids is None and self._given_back_count and not self._open_uids:
            raise LeaseLostError(
                f"{self._given_back_count} groups of lease {self.token} were given back, and none is left: acknowledge "
                "before that, inside the block of the lease"
            )
        chosen, leased = self._check_open(uids), self._leased
        if train_step is not None:
            leased = replace(leased, named_step=check_whole(train_step, "train_step"))
        await self.storage.acknowledge(leased, chosen)
        self._settle(chosen)

    @traced("replaybuf.finish", of_uid)
    async def finish(
        self,
        items: Sequence[R],
        task_name: str,
        *,
        replaces: Iterable[int],
        timeout: float | Unset | None = UNSET,
        place: tuple[str, int] | None = None,
        **options: Unpack[PutOptions],
    ) -> int | None:
        """Store the result of groups of this lease in their place, in one transaction. Return its uid.

        `replaces` are the uids of the groups that the result was made from, which are removed. Options and rules are
        those of `ReplayBuffer.put`: a result that has expired and isn't retryable is dropped (None), as is an unfit one
        that isn't kept, and the groups are removed all the same. Raises the errors of `put`, and LeaseLostError if the
        lease no longer holds one of the groups; then nothing is stored. `place` is the name of a prompt ledger and the
        place in its dataset of the prompt to whose statistics the rewards are added.
        """
        chosen = self._check_replaced(replaces)
        return await self._store(items, task_name, chosen, options, timeout=timeout, place=place)

    @traced("replaybuf.save", of_uid)
    async def save(
        self, items: Sequence[R], task_name: str, *, replaces: Iterable[int], **options: Unpack[PutOptions]
    ) -> int | None:
        """Store a result as `finish` does, but keep the lease, which then holds the new group in place of the others.

        If this consumer dies, the new group can be drawn instead of them. It takes no room, so this never waits for
        room. A caller that is cancelled during the call still holds either the new group or the others.
        """
        chosen = self._check_replaced(replaces)
        return await shielded(self._store(items, task_name, chosen, options, stays_leased=True))

    async def _store(
        self,
        items: Sequence[Any],
        task_name: str,
        chosen: Sequence[int],
        options: PutOptions,
        *,
        timeout: float | Unset | None = UNSET,
        place: tuple[str, int] | None = None,
        stays_leased: bool = False,
    ) -> int | None:
        """Store the result of these groups, and their rollouts that were added, in their place; return its uid."""
        uid = await self._putting.put(
            items,
            task_name,
            replaces=chosen,
            lease=self._leased,
            timeout=timeout,
            stays_leased=stays_leased,
            parts=self._parts_of(chosen),
            place=place,
            **options,
        )
        if stays_leased and uid is not None:
            self._open_uids.add(uid)
        if as_group(items):
            self._settle(chosen)
        return uid

    async def add(self, uid: int, index: int, item: R, task_name: str, *, model_step: int | None = None) -> None:
        """Store a finished rollout of a group that is being generated by itself, at its index there.

        If this consumer dies, the next one of the group has it (`stored`). `finish` and `save` remove it in their
        transaction, since their group has it. Raises the errors of `put`, and LeaseLostError if the lease no longer
        holds the group; then nothing is stored.
        """
        self._check_open([uid])
        place = Part(uid, 0, 0, task_name=task_name, wanted=check_whole(index, "index"))
        part = await self._putting.put([item], task_name, lease=self._leased, prompt=place, model_step=model_step)
        assert part is not None
        self._added_parts.setdefault(uid, {})[index] = part

    async def stored(self, task_name: str) -> dict[int, dict[int, R]]:
        """Return the rollouts that earlier consumers of the open groups of a task have added, by uid and index."""
        filling = await self.storage.filling_groups(task_name)
        self._added_parts |= {
            uid: dict(group.uids) for uid, group in filling.items() if isinstance(uid, int) and uid in self._open_uids
        }
        parts = {part: (uid, index) for uid, added in self._added_parts.items() for index, part in added.items()}
        rollouts: dict[int, dict[int, R]] = {}
        if not parts:
            return rollouts
        query = SetNode("uid", "$in", tuple(parts))
        damaged: list[int] = []
        async for item in self.storage.find(query, order=()):
            uid, index = parts[item.uid]
            if item.item:
                rollouts.setdefault(uid, {})[index] = item.item[0]
            else:
                _logger.warning("rollout %d of group %d is generated again: %s", index, uid, item.error)
                damaged.append(item.uid)
                del self._added_parts[uid][index]
        if damaged:
            await self.storage.delete(SetNode("uid", "$in", tuple(damaged)))
        return rollouts

    def _parts_of(self, uids: Iterable[int]) -> list[int]:
        return [part for uid in uids for part in self._added_parts.get(uid, {}).values()]

    @traced("replaybuf.give_back")
    async def give_back(self, uids: Iterable[int] | None = None, *, failed: str | None = None) -> int:
        """Release these groups, or all open ones, to be drawn again in their old order. Return the number still held.

        `failed` is the reason why the consumer could not use them; the delivery then counts towards `max_deliveries`.
        A caller that is cancelled waits until they are released.
        """
        return await shielded(self._give_back(self._check_open(uids), check_reason(failed)))

    async def give_back_after(self, error: BaseException) -> None:
        """Release all open groups after an error of their consumer.

        A GroupError is a failed delivery of the groups that it names, any other Exception one of all groups, and a
        cancellation or an interrupt of none.
        """
        await shielded(self._give_back_after(error))

    async def _give_back_after(self, error: BaseException) -> None:
        failed = error_text(error) if isinstance(error, Exception) else None
        if named := _uids_named_by(error):
            if chosen := self._open_uids & named:
                await self.give_back(chosen, failed=failed)
            failed = None
        if self._open_uids:
            await self.give_back(failed=failed)

    async def _give_back(self, chosen: Sequence[int], reason: str | None) -> int:
        count = await self.storage.give_back(self._leased, chosen, failed=reason)
        self._settle(chosen)
        self._given_back_count += len(chosen)
        return count

    async def extend(self, seconds: float | None = None) -> None:
        """Renew the lease to end `seconds` from now (default: its own duration). Raises LeaseLostError."""
        await self._extend(self.seconds if seconds is None else check_seconds(seconds, "seconds"), shortens=True)

    async def beat(self) -> bool:
        """Renew the lease for its own duration (heartbeat), unless it ends later. Return False if it has ended."""
        try:
            await self._extend(self.seconds, shortens=False)
        except (LeaseLostError, FencedError, ClosedError) as error:
            _logger.debug("%r ends: %s", self, error)
            self._is_lost = not isinstance(error, ClosedError) and bool(self._open_uids)
            return False
        except Exception as error:  # of any kind: the other leases still need their heartbeats
            _logger.warning("%r could not be extended and will be tried again: %s", self, error)
        return True

    async def _extend(self, seconds: float, *, shortens: bool) -> None:
        leased, chosen = self._leased, sorted(self._open_uids)
        if chosen:
            until = await self.storage.extend(leased, chosen, seconds, shortens=shortens)
            self._leased = replace(leased, until=until)

    def _check_open(self, uids: Iterable[int] | None, name: str = "uids") -> list[int]:
        chosen = sorted(self._open_uids if uids is None else set(check_uids(uids, name)))
        if unknown := [uid for uid in chosen if uid not in self._open_uids]:
            raise InputError(f"group {unknown[0]} is not open in this lease: settled before, or of another lease")
        return chosen

    def _check_replaced(self, uids: Iterable[int]) -> list[int]:
        chosen = self._check_open(check_list(uids, "replaces"), "replaces")
        if not chosen:
            raise InputError("replaces is empty: name the groups of the lease that the new one was made from")
        return chosen

    def _settle(self, uids: Iterable[int]) -> None:
        """Record that these groups are no longer held."""
        self._open_uids.difference_update(uids)
        if not self._open_uids:
            self.stop()

    def stop(self) -> None:
        """Stop the heartbeats of this process; the lease expires unless another process has adopted it."""
        if self._stop is not None:
            self._stop()
            self._stop = None


async def _renew(lease_ref: weakref.ref[Lease[Any]], seconds: float) -> None:
    """Renew a lease until it ends. A garbage-collected one isn't renewed, and expires."""
    while True:
        await asyncio.sleep(seconds / _BEATS)
        if (lease := lease_ref()) is None or not await lease.beat():
            return
        del lease


class Leasing(Generic[R]):
    """The result of `lease_batch`: use it with `async with`, or `await` it for a lease to be settled by hand."""

    def __init__(self, begin: Callable[[], Awaitable[Lease[R]]]) -> None:
        self._begin = begin
        self._lease: Lease[R] | None = None
        self._entered = False

    def __await__(self) -> Generator[Any, None, Lease[R]]:
        return self._begin().__await__()

    async def __aenter__(self) -> Lease[R]:
        if self._entered:
            raise InputError("this lease was begun before; call lease_batch again for another")
        self._entered = True
        self._lease = await self._begin()
        return self._lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease = self._lease
        assert lease is not None
        try:
            if error is None:
                await shielded(lease.acknowledge(lease.open))
                return
            # On errors they are released when the lease ends, also if the event loop was closed inside the block.
            with contextlib.suppress(ReplayBufError, RuntimeError):
                await lease.give_back_after(error)
        finally:
            lease.stop()


def _uids_named_by(error: BaseException) -> frozenset[int]:
    """Return the uids that a GroupError names, or those in an exception group."""
    if isinstance(error, BaseExceptionGroup):
        return frozenset[int]().union(*map(_uids_named_by, error.exceptions))
    return error.uids if isinstance(error, GroupError) else frozenset()


class Cursors:
    """The cursors of a buffer: part of its checkpoints and snapshots, with fenced writes."""

    def __init__(self, putting: Putting) -> None:
        self._putting = putting

    async def read(self, name: str) -> Cursor:
        """Return the current cursor; its version is 0 if it was never written."""
        return await self._putting.storage.cursor(name)

    async def prompts(self, name: str, known: int) -> Sequence[Sequence[Any]]:
        """Return the statistics of prompts that changed since a version of their cursor; -1: all of them."""
        return await self._putting.storage.prompts(name, known)

    async def move(self, cursor: Cursor) -> bool:
        """Write a cursor that was read and changed. Return False if another process has moved it since."""
        return await self._putting.storage.move_cursor(cursor)

    async def put(self, new: NewGroup, cursor: Cursor) -> bool:
        """Move a cursor like `move`, and put a group that `Putting.prepare` has made, in one transaction.

        Waits for room as a put does.
        """
        putting = self._putting

        def store(new: NewGroup) -> Awaitable[bool]:
            return putting.storage.put_with_cursor([new], cursor)

        return await putting.fetching([new], lambda: putting.waits.put(new, putting.patience(UNSET), store))

    async def claim(
        self, groups: Sequence[NewGroup], cursor: Cursor, seconds: float, epochs: Mapping[int, int] | None = None
    ) -> Lease | None:
        """Move a cursor and store groups already leased to the caller, in one transaction.

        Return None if another process has moved the cursor since it was read. `epochs` has the epoch of each prompt
        that is drawn by an order, by its place in the dataset.
        """
        storage = self._putting.storage
        for new in groups:
            new.worker = new.worker or storage.worker
        claimed = await self._putting.fetching(groups, lambda: storage.claim(groups, cursor, seconds, epochs))
        return None if claimed is None else Lease(self._putting, claimed, seconds)
