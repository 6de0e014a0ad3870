"""Leases of synchronous callers."""

from __future__ import annotations

from types import TracebackType
from typing import Generic

from replaybuf.buffer.lease import Lease, Leasing
from replaybuf.storage.values import Leased, R, StorageItem
from replaybuf.sync.loop import end, run
from replaybuf.sync.mirror import as_it_is, mirrored


class SyncLease(Generic[R]):
    """A `Lease` without `await`: `batch` has the groups by task, `items` has them with their metadata.

    A separate thread sends heartbeats while this process lives, however long the caller works on the groups.
    """

    def __init__(self, lease: Lease[R]) -> None:
        self.asynchronous = lease

    def __repr__(self) -> str:
        return f"<SyncLease {self.token}: {len(self.open)} groups open>"

    @property
    def seconds(self) -> float:
        """How long the lease lasts after its last heartbeat."""
        return self.asynchronous.seconds

    @property
    def token(self) -> int:
        """The fencing token: a later lease has a higher one."""
        return self.asynchronous.token

    @property
    def until(self) -> float:
        """When the lease ends unless it is extended, in seconds since the epoch by the store's clock."""
        return self.asynchronous.until

    @property
    def handle(self) -> Leased:
        """What another process needs to go on with this lease (`adopt`): open groups, without rollouts; picklable."""
        return self.asynchronous.handle

    @property
    def items(self) -> dict[str, list[StorageItem[R]]]:
        """The groups by task, with their metadata."""
        return self.asynchronous.items

    @property
    def batch(self) -> dict[str, list[list[R]]]:
        """The groups by task."""
        return self.asynchronous.batch

    @property
    def counts(self) -> dict[str, int]:
        """The number of groups by task."""
        return self.asynchronous.counts

    @property
    def open(self) -> frozenset[int]:
        """The uids of the groups that aren't settled yet."""
        return self.asynchronous.open

    @property
    def lost(self) -> bool:
        """Whether the heartbeat has found that open groups aren't ours any more; `Lease.lost` says when it does."""
        return self.asynchronous.lost

    acknowledge = mirrored(Lease[R].acknowledge, run)
    finish = mirrored(Lease[R].finish, run)
    save = mirrored(Lease[R].save, run)
    give_back = mirrored(Lease[R].give_back, run)
    extend = mirrored(Lease[R].extend, run)
    beat = mirrored(Lease[R].beat, run)
    stop = mirrored(Lease[R].stop, as_it_is)


class SyncLeasing(Generic[R]):
    """The result of `lease_batch`: use it with `with`, or `begin()` a lease to be settled by hand."""

    def __init__(self, leasing: Leasing[R]) -> None:
        self.asynchronous = leasing

    def begin(self) -> SyncLease[R]:
        """Draw the groups and return their lease, which the caller settles."""

        async def begin() -> Lease[R]:
            return await self.asynchronous

        return SyncLease(run(begin()))

    def __enter__(self) -> SyncLease[R]:
        return SyncLease(run(self.asynchronous.__aenter__()))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leaving = self.asynchronous.__aexit__(kind, error, trace)
        if kind is None:
            run(leaving)  # acknowledged, or an error says why not
        else:
            end(leaving)  # given back, or back when the lease ends
