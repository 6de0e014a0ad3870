"""The replay buffer without `await`."""

from __future__ import annotations

from typing import Generic

from replaybuf.buffer.cursors import Cursors
from replaybuf.buffer.lease import Lease
from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.rollouts.rollout_type import RolloutType
from replaybuf.rules.limits import Limits
from replaybuf.rules.policies import ReplayPolicy
from replaybuf.storage.values import R, StorageItem
from replaybuf.sync.items import Items
from replaybuf.sync.lease import SyncLease, SyncLeasing
from replaybuf.sync.loop import end, run
from replaybuf.sync.mirror import SyncBuffer, as_it_is, mirrored

_LEASE_BATCH = """Draw groups as `sample` does, but only hide them until the lease is acknowledged.

    with buffer.lease_batch({"math": 64}, timeout=600) as lease:
        train(lease.batch["math"])

Leaving the block acknowledges all open groups. An exception gives them back as a failed delivery, KeyboardInterrupt
without counting one. If this process dies, the groups come back `seconds` later; while it lives, a heartbeat in its own
thread extends the lease, however long the block takes. `heartbeat=False` leaves that to `lease.extend()`. A group is
set aside as FAILED after `max_deliveries` failed deliveries. Leaving the block raises LeaseLostError if the lease had
ended and the groups were passed on.

`lease_batch(...).begin()` instead of `with` gives a lease to be settled by hand.
"""


class SyncReplayBuffer(SyncBuffer[ReplayBuffer[R]], Generic[R]):
    """A `ReplayBuffer` whose calls block until they are done. Built by `ReplayBufferConfig(...).build_sync()`.

    The calls, their arguments, results and errors are those of `ReplayBuffer`. They may come from any number of
    threads, from forked processes, and from inside a running event loop, which they block meanwhile. Ctrl-C cancels
    the call that waits: either the caller has the groups or the store has them.

    `asynchronous` is the same buffer for coroutines; `replaybuf.sync.run` runs one that is given it.
    """

    @property
    def policy(self) -> ReplayPolicy:
        """The policy by which groups are drawn."""
        return self.asynchronous.policy

    @property
    def limits(self) -> Limits:
        """How many groups of a task the buffer holds, how often they are drawn, and at what rate."""
        return self.asynchronous.limits

    @property
    def durable(self) -> bool:
        """Whether groups outlive this process, and others can open the same buffer."""
        return self.asynchronous.durable

    @property
    def worker(self) -> str:
        """The name under which groups are put and drawn: that of `working_as`, else the config's, else "host:pid"."""
        return self.asynchronous.worker

    @property
    def rollout_type(self) -> RolloutType:
        """The class of the rollouts, and what is known of it."""
        return self.asynchronous.rollout_type

    @property
    def cursors(self) -> SyncCursors:
        """Small versioned values beside the groups, for places in datasets and the state that trainers publish."""
        return SyncCursors(self.asynchronous.cursors)

    close = mirrored(ReplayBuffer[R].close, end)

    put = mirrored(ReplayBuffer[R].put, run)
    get = mirrored(ReplayBuffer[R].get, run)
    take_batch = mirrored(ReplayBuffer[R].take_batch, run)
    sample = mirrored(ReplayBuffer[R].sample, run)
    lease_batch = mirrored(ReplayBuffer[R].lease_batch, SyncLeasing[R], returns="SyncLeasing[R]", doc=_LEASE_BATCH)
    adopt = mirrored(ReplayBuffer[R].adopt, SyncLease[R], returns="SyncLease[R]")
    is_ready = mirrored(ReplayBuffer[R].is_ready, run)
    wait_ready = mirrored(ReplayBuffer[R].wait_ready, run)
    why = mirrored(ReplayBuffer[R].why, run)

    delete = mirrored(ReplayBuffer[R].delete, run)
    update = mirrored(ReplayBuffer[R].update, run)
    update_priorities = mirrored(ReplayBuffer[R].update_priorities, run)
    refresh_staleness = mirrored(ReplayBuffer[R].refresh_staleness, run)

    find = mirrored(ReplayBuffer[R].find, Items[StorageItem[R]], returns="Items[StorageItem[R]]")
    count = mirrored(ReplayBuffer[R].count, run)
    count_statuses = mirrored(ReplayBuffer[R].count_statuses, run)
    count_where = mirrored(ReplayBuffer[R].count_where, run)
    tallies = mirrored(ReplayBuffer[R].tallies, run)
    levels = mirrored(ReplayBuffer[R].levels, run)
    dropped = mirrored(ReplayBuffer[R].dropped, run)
    metrics = mirrored(ReplayBuffer[R].metrics, run)

    import_from = mirrored(ReplayBuffer[R].import_from, run)
    export = mirrored(ReplayBuffer[R].export, run)
    to_pandas = mirrored(ReplayBuffer[R].to_pandas, run)
    to_dataset = mirrored(ReplayBuffer[R].to_dataset, run)

    check_fence = mirrored(ReplayBuffer[R].check_fence, run)
    checkpoint = mirrored(ReplayBuffer[R].checkpoint, run)
    restore = mirrored(ReplayBuffer[R].restore, run)
    checkpoints = mirrored(ReplayBuffer[R].checkpoints, run)
    drop_checkpoint = mirrored(ReplayBuffer[R].drop_checkpoint, run)

    save = mirrored(ReplayBuffer[R].save, run)
    resume = mirrored(ReplayBuffer[R].resume, run)
    state_dict = mirrored(ReplayBuffer[R].state_dict, as_it_is)
    load_state_dict = mirrored(ReplayBuffer[R].load_state_dict, as_it_is)


def _leased(lease: Lease[R] | None) -> SyncLease[R] | None:
    return None if lease is None else SyncLease(lease)


class SyncCursors:
    """`Cursors` without `await`."""

    def __init__(self, cursors: Cursors) -> None:
        self.asynchronous = cursors

    read = mirrored(Cursors.read, run)
    move = mirrored(Cursors.move, run)
    claim = mirrored(Cursors.claim, lambda claiming: _leased(run(claiming)), returns="SyncLease | None")
