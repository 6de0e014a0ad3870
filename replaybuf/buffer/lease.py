"""Leases: groups that are hidden while somebody works on them, and come back when nobody does any more."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

from replaybuf.checks import check_reason, check_seconds, check_uids
from replaybuf.errors import ClosedError, FencedError, InputError, LeaseLostError, ReplayBufError
from replaybuf.storage.contract import StorageBackend
from replaybuf.storage.values import Leased, StorageItem

T = TypeVar("T")

_BEATS = 3

_logger = logging.getLogger("replaybuf.lease")


class Lease:
    """Groups on loan: `batch` has them by task, `items` the same with their metadata, `counts` how many.

    `token` is the fencing token: a later lease has a higher one. Each group is acknowledged (it has been consumed) or
    given back (it is drawn again), once. What is neither comes back when the lease's time is over: `seconds` after
    its last heartbeat; a thread of its own keeps it from being over while this process lives.
    """

    def __init__(self, storage: StorageBackend, leased: Leased, seconds: float, *, heartbeat: bool) -> None:
        self._storage = storage
        self._leased = leased
        self.seconds = seconds
        self._lost = False
        self._open = {item.uid for items in leased.items.values() for item in items}
        self._heart = _hearts.setdefault(storage, _Heart()) if heartbeat and self._open else None
        if self._heart is not None:
            self._heart.beat_for(self)

    def __repr__(self) -> str:
        return f"<Lease {self.token}: {len(self._open)} groups open>"

    @property
    def token(self) -> int:
        return self._leased.token

    @property
    def until(self) -> float:
        """When the lease is over, in seconds since the epoch by the store's clock, unless it is extended."""
        return self._leased.until

    @property
    def items(self) -> dict[str, list[StorageItem]]:
        return self._leased.items

    @property
    def batch(self) -> dict[str, list[list[Any]]]:
        return {task: [item.item for item in items] for task, items in self.items.items()}

    @property
    def counts(self) -> dict[str, int]:
        return {task: len(items) for task, items in self.items.items()}

    @property
    def open(self) -> frozenset[int]:
        """The uids that are neither acknowledged nor given back yet."""
        return frozenset(self._open)

    @property
    def lost(self) -> bool:
        """Whether the heartbeat has found the lease over, or the buffer restored: what is still open is in other hands.

        Known within a third of `seconds`. Without a heartbeat, settling or extending the lease tells.
        """
        return self._lost

    async def acknowledge(self, uids: Iterable[int] | None = None) -> None:
        """These groups, or all that are open, have been consumed: they leave the buffer, or wait for their next draw.

        All of them or none. Raises LeaseLostError when the time of the lease was over and they were given back, or
        leased to another consumer.
        """
        chosen = self._chosen(uids)
        await self._storage.acknowledge(self._leased, chosen)
        self.settle(chosen)

    async def give_back(self, uids: Iterable[int] | None = None, *, failed: str | None = None) -> int:
        """These groups, or all that are open, are drawn again, in their old place; how many were still held.

        `failed` says why their consumer could not use them, which counts towards `max_deliveries`.
        """
        chosen, reason = self._chosen(uids), check_reason(failed)
        count = await self._storage.give_back(self._leased, chosen, counts=reason is not None, reason=reason or "")
        self.settle(chosen)
        return count

    async def extend(self, seconds: float | None = None) -> None:
        """Let the lease be over in `seconds` (default: its own time) from now. Raises LeaseLostError."""
        await self._extend(self.seconds if seconds is None else check_seconds(seconds, "seconds"))

    async def _extend(self, seconds: float) -> None:
        leased, chosen = self._leased, sorted(self._open)
        if chosen:
            until = await self._storage.extend(leased, chosen, seconds)
            self._leased = replace(leased, until=until)

    def _chosen(self, uids: Iterable[int] | None) -> list[int]:
        chosen = sorted(self._open if uids is None else set(check_uids(uids, "uids")))
        if unknown := [uid for uid in chosen if uid not in self._open]:
            raise InputError(f"group {unknown[0]} is not open in this lease: settled before, or of another lease")
        return chosen

    def chosen(self, uids: Iterable[int]) -> Leased:
        """What stands for this lease in a put that replaces these groups of it. Raises InputError."""
        self._chosen(uids)
        return self._leased

    def settle(self, uids: Iterable[int], successor: int | None = None) -> None:
        """These groups are no longer held; a group that has replaced them may be, in their place."""
        if successor is not None:
            self._open.add(successor)
        self._open.difference_update(uids)
        if not self._open:
            self.stop()

    def stop(self) -> None:
        """Let the lease run out: no more heartbeats."""
        if self._heart is not None:
            self._heart.stop_for(self)


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Who is cancelled waits for its end first: this side has to know what the store has done.

    Only for what takes no longer than a transaction.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # which nobody will hear of
        raise


class _Heart:
    """Extends the leases of a storage from a thread of its own: a training step that blocks the loop doesn't stop it.

    A lease that nobody has any more, though it was never settled, runs out. The thread ends with the last lease.
    """

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all leases. In a forked process they are the parent's, whose thread extends them while it lives."""
        self._leases: weakref.WeakKeyDictionary[Lease, float] = weakref.WeakKeyDictionary()  # when to beat for each
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def beat_for(self, lease: Lease) -> None:
        """Extend a lease from now on."""
        with self._changed:
            self._leases[lease] = time.monotonic() + lease.seconds / _BEATS
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="replaybuf-heartbeat", daemon=True)
                self._thread.start()
            self._changed.notify()

    def stop_for(self, lease: Lease) -> None:
        with self._changed:
            self._leases.pop(lease, None)
            self._changed.notify()

    def _run(self) -> None:
        while (due := self._wait()) is not None:
            asyncio.run(self._beat(due))
            due.clear()  # nothing may keep them alive during the next wait

    def _wait(self) -> list[Lease] | None:
        """The leases that are to be extended now; None when there are none left."""
        with self._changed:
            while True:
                now = time.monotonic()
                beats = list(self._leases.items())  # one look: any of them may be dropped at any moment
                if due := [lease for lease, when in beats if when <= now]:
                    return due
                if not beats:
                    self._thread = None
                    return None
                first = min(when for _, when in beats)
                del beats
                self._changed.wait(first - now)

    async def _beat(self, due: Sequence[Lease]) -> None:
        await asyncio.gather(*map(self._extend, due))

    async def _extend(self, lease: Lease) -> None:
        try:
            await lease._extend(lease.seconds)
        except (LeaseLostError, FencedError, ClosedError) as error:
            _logger.debug("%r ends: %s", lease, error)
            lease._lost = not isinstance(error, ClosedError) and bool(lease._open)
            self.stop_for(lease)
            return
        except Exception as error:  # whatever it is, the other leases go on
            _logger.warning("%r could not be extended and will be tried again: %s", lease, error)
        with self._changed:
            if lease in self._leases:
                self._leases[lease] = time.monotonic() + lease.seconds / _BEATS


_hearts: weakref.WeakKeyDictionary[StorageBackend, _Heart] = weakref.WeakKeyDictionary()


def _forked() -> None:
    for heart in _hearts.values():
        heart.begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class Leasing:
    """What `lease_batch` returns: `async with` it, or `await` it for a lease to be settled by hand."""

    def __init__(self, begin: Callable[[], Awaitable[Lease]]) -> None:
        self._begin = begin
        self._lease: Lease | None = None
        self._entered = False

    def __await__(self) -> Generator[Any, None, Lease]:
        return self._begin().__await__()

    async def __aenter__(self) -> Lease:
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
                await lease.acknowledge()
                return
            # A consumer that was stopped says nothing against the groups; one that failed may have failed by them.
            failed = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else None
            # Then they come back when the time is over: also when the event loop was closed in the middle of the block.
            with contextlib.suppress(ReplayBufError, RuntimeError):
                await lease.give_back(failed=failed)
        finally:
            lease.stop()
