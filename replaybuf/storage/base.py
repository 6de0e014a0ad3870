"""The contract of a storage backend.

A backend keeps groups, and answers for their metadata, by the rules that it was made with (`replaybuf.rules`). It knows
nothing of how a group gets its status or of how long anyone waits: `ReplayBuffer` does that. Queries arrive parsed
(`replaybuf.query`), orders as `replaybuf.rules.policies` terms. `replaybuf.testing.contract` is the test suite that every
backend passes, third-party ones included.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from replaybuf.codec.payload import Codec
from replaybuf.errors import CheckpointError, FencedError, LeaseLostError
from replaybuf.progress import OnProgress
from replaybuf.query import Node
from replaybuf.rollouts.rollout import Status
from replaybuf.rollouts.staleness import ExpiryRule
from replaybuf.rules.limits import Rules
from replaybuf.rules.policies import Order
from replaybuf.rules.tallies import Tally

Tags = dict[str, str | int | float | bool | None]


class Unset:
    """The type of UNSET: a value that was not given, where None means something."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset()


@dataclass(slots=True)
class NewGroup:
    """A group on its way into the store, already normalised and checked by the rules of put.

    `train_step` is the step that the rollouts' staleness was computed for, or None where they brought their own or
    where some of them expired. `key` makes the put repeatable: a group of the same task and key is replaced.
    `replaces` are the uids of groups that leave in the same transaction; all of them have to be there, or, with a
    `lease`, have to be held by it. With `stays_leased` the lease goes on to hold the new group in their place.
    `tags` stay the caller's: a backend keeps a copy and hands out copies, and `{}` is stored as None.
    """

    task_name: str
    status: Status
    staleness: int
    rollouts: Sequence[Any]
    created_at: float
    train_step: int | None = None
    priority: float = 1.0
    tags: Tags | None = None
    key: str | None = None
    replaces: tuple[int, ...] = ()
    lease: Leased | None = None
    stays_leased: bool = False


@dataclass(slots=True)
class StorageItem:
    """A stored group with its metadata.

    `uid` identifies it and is never used again, `timestamp_id` is its place in insertion order; neither changes.
    `staleness` is in train steps, `times_sampled` counts the draws of the group (this one included, where it was
    drawn), `created_at` is in seconds since the epoch, `reward` the mean of its rollouts (None where none has one),
    `error` says why a group was set aside as FAILED, `deliveries` how often it was leased without being acknowledged,
    `item` is the group: the list of its rollouts, or an empty list where the payload can't be decoded. `probability` is
    the one with which it was drawn, and `weight` its importance weight, where a draw was asked for them.
    """

    uid: int
    timestamp_id: int
    task_name: str
    status: Status
    staleness: int
    priority: float
    times_sampled: int
    created_at: float
    reward: float | None
    tags: Tags | None = None
    key: str | None = None
    error: str | None = None
    deliveries: int = 0
    item: list[Any] = field(default_factory=list)
    probability: float | None = None
    weight: float | None = None


@dataclass(frozen=True, slots=True)
class Draw:
    """What to draw: up to `sizes[task]` groups of each task, of one status, narrowed by `where`.

    With `whole` it is all of them or nothing. With `probabilities` each group has its `probability` p, and N p as its
    `weight`, where N is the number of groups of its task and status.
    """

    sizes: Mapping[str, int]
    status: Status = Status.COMPLETED
    where: Node | None = None
    whole: bool = False
    probabilities: bool = False


@dataclass(frozen=True, slots=True)
class Leased:
    """Groups that are leased: the token that stands for the lease, when it ends, and the groups by task.

    Tokens grow: a later lease has a higher one. `until` is in seconds since the epoch, by the store's clock. `epoch` is
    the number of restores before it.
    """

    token: int
    until: float
    items: dict[str, list[StorageItem]]
    epoch: int = 0


def lost_to_others(lease: Leased, count: int) -> LeaseLostError:
    """The error for groups that a lease should hold, and doesn't."""
    return LeaseLostError(
        f"{count} of the groups of lease {lease.token} were given back or passed to others when its time was over; "
        "nothing was changed. Lease for longer (seconds=), or leave the heartbeat on"
    )


def check_epoch(lease: Leased, epoch: int) -> None:
    """Raise FencedError for a lease of before the last restore."""
    if lease.epoch != epoch:
        raise FencedError(
            f"lease {lease.token} is of the run before the buffer was restored; nothing was changed: its groups are as "
            "they were at the checkpoint"
        )


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a prompt ledger is in its dataset.

    `value` is what the dataset needs to go on from there, encoded; `position` is the number of prompts that were drawn,
    for people; `version` is the number of moves, 0 for a cursor that doesn't exist yet. `epoch` is the number of
    restores before it was read: a restore takes cursors back, and then the same versions come again.
    """

    name: str
    version: int = 0
    position: int = 0
    value: bytes = b""
    epoch: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A step checkpoint: the train step, when it was made (seconds since the epoch), what it holds."""

    step: int
    created_at: float
    groups: int
    bytes: int


def missing_checkpoint(step: int, steps: list[int]) -> CheckpointError:
    """The error for a step that has no checkpoint, where these have."""
    there = f"there are those of the steps {', '.join(map(str, steps))}" if steps else "no checkpoint was made"
    return CheckpointError(f"there is no checkpoint of step {step}; {there}")


@dataclass(frozen=True, slots=True)
class Changes:
    """What an update sets; UNSET leaves a field as it is."""

    status: Status | Unset = UNSET
    priority: float | Unset = UNSET
    tags: Tags | Unset | None = UNSET


@dataclass(frozen=True, slots=True)
class Refresh:
    """One staleness refresh: the step, the groups that it is for, and each task's rule."""

    train_step: int
    rules: Mapping[str, ExpiryRule]
    statuses: tuple[Status, ...]


class StorageBackend(ABC):
    """Where groups are kept. Every coroutine is safe to cancel: either it had its whole effect or none.

    `durable` says whether what was put outlives the process, `codec` reads and writes the payloads, `rules` say what is
    drawn and evicted, and how much the buffer holds.
    """

    codec: Codec
    rules: Rules

    durable: bool = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    async def open(self) -> None:  # noqa: B027
        """Get ready; called before any other method. Creates what isn't there yet."""

    async def close(self) -> None:  # noqa: B027
        """Let go of all resources. Puts that wait to be committed are committed first.

        Whoever waits in `changed` is woken: the buffer then raises ClosedError in all waits.
        """

    @abstractmethod
    async def put(self, group: NewGroup) -> int:
        """Store a group and return its uid. When it returns, the group is committed.

        What goes beyond the capacity is evicted in the same transaction, by the remover's order: the group itself too,
        when it comes first in it. The tags are copied, and `{}` is stored as None.

        Raises EncodeError for values that can't be stored, FullError when the limits leave no room, ConflictError when
        a group that it replaces isn't there, and LeaseLostError when its lease doesn't hold it any more; then nothing
        is stored.
        """

    @abstractmethod
    async def take(self, draw: Draw) -> dict[str, list[StorageItem]] | None:
        """Draw groups in the sampler's order, in one transaction; by the rules they leave, stay, or are archived.

        No two takers get the same draw of a group. No more are drawn than the limits allow. With `draw.whole` the
        answer is None, and nothing was drawn, unless every task has as many as wanted. A group whose payload can't be
        decoded is set aside (status FAILED, with the reason in `error`) and the next one is drawn in its place. When
        the call is cancelled, the groups are in the store as if nothing had been drawn.
        """

    @abstractmethod
    async def lease(self, draw: Draw, seconds: float) -> Leased | None:
        """As `take`, but the groups are only hidden: until the lease is acknowledged, given back, or over.

        When it is over, its groups are back as they were, and the delivery counts. A group that was delivered
        `max_deliveries` times is set aside as FAILED instead.
        """

    @abstractmethod
    async def acknowledge(self, lease: Leased, uids: Sequence[int]) -> None:
        """Groups of a lease have been consumed: by the rules they leave, stay, or are archived.

        All of them or none. Raises LeaseLostError when one of them isn't held by this lease any more.
        """

    @abstractmethod
    async def give_back(self, lease: Leased, uids: Sequence[int], *, counts: bool, reason: str = "") -> int:
        """Give those of these groups back that the lease still holds; how many.

        `counts` says whether the delivery counts towards `max_deliveries`, as one that failed for this reason.
        """

    @abstractmethod
    async def extend(self, lease: Leased, uids: Sequence[int], seconds: float) -> float:
        """Let the lease of these groups end in `seconds` from now; when that is.

        Raises LeaseLostError when one of them isn't held by this lease any more.
        """

    @abstractmethod
    def find(self, query: Node, *, order: Order, limit: int | None = None) -> AsyncIterator[StorageItem]:
        """Read the groups that match, without consuming them. Holds no lock or transaction between items."""

    async def get(self, query: Node, *, order: Order, limit: int | None = None) -> list[StorageItem]:
        """As `find`, as a list."""
        return [item async for item in self.find(query, order=order, limit=limit)]

    @abstractmethod
    async def count(self, query: Node, *, at_most: int | None = None) -> int:
        """How many groups match; counting stops at `at_most`."""

    @abstractmethod
    async def tallies(self) -> dict[tuple[str, Status, Tally], int]:
        """What was counted, by task and status; what was never counted is left out, or 0."""

    @abstractmethod
    async def histogram(self, field: str) -> dict[tuple[str, Status], dict[int, int]]:
        """How many groups of each task and status have each value of `staleness` or `times_sampled`. Reads all."""

    @abstractmethod
    async def delete(self, query: Node) -> int:
        """Remove the groups that match; how many."""

    @abstractmethod
    async def update(self, query: Node, changes: Changes) -> int:
        """Change the metadata of the groups that match; how many. Staleness, uid and order stay."""

    @abstractmethod
    async def update_priorities(self, priorities: Mapping[int, float]) -> int:
        """Set the priorities of groups by uid, leased ones included; how many of them are there."""

    @abstractmethod
    async def refresh(self, refresh: Refresh) -> dict[str, int]:
        """Give all groups of the tasks and statuses the staleness of the train step and apply the expiry rules.

        Returns the number of groups of each task that expired. Groups that aren't retryable are removed and counted as
        dropped. One transaction.
        """

    @abstractmethod
    async def count_lost(self, task_name: str, status: Status, why: Tally) -> None:
        """Count a put that was not stored: DROPPED (which counts as put, too) or REFUSED."""

    @abstractmethod
    def version(self) -> int:
        """A number that is another one after every change that this store has noticed."""

    @abstractmethod
    async def changed(self, timeout: float, since: int) -> None:
        """Return soon after groups were committed by anyone, or after `timeout` seconds at the latest.

        At once when that happened after `version()` was `since`: callers ask for the version, look for groups, and wait
        when there are none, and what is committed between looking and waiting isn't missed. It may also return early
        without a change: callers look and wait again.
        """

    # Checkpoints

    async def check_fence(self) -> None:  # noqa: B027
        """Raise FencedError when another storage has restored the buffer since this one was opened."""

    @abstractmethod
    async def checkpoint(self, step: int, keep: int | None) -> Checkpoint:
        """Keep the buffer as it is now under this train step, in the place of an older checkpoint of the same step.

        All but the `keep` checkpoints made last are dropped (None: none is). Payloads aren't copied.
        """

    @abstractmethod
    async def restore(self, step: int, *, keep_new: bool) -> Checkpoint:
        """Make the buffer what it was at the checkpoint of this step. Raises CheckpointError when there is none.

        Groups that are leased, now or then, are as if they had been given back. With `keep_new` groups that were put
        since stay, with the staleness that they have and as if they had never been drawn, unless they have left the
        store altogether; groups that they have replaced since stay away; archived ones that were drawn are completed
        again; and cursors stay where they are. Whoever has opened the buffer before, other than this storage, is fenced
        off: FencedError.
        """

    @abstractmethod
    async def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints there are, in the order in which they were made."""

    @abstractmethod
    async def drop_checkpoint(self, step: int) -> None:
        """Forget a checkpoint. Raises CheckpointError when there is none of this step."""

    # Prompts

    @abstractmethod
    async def cursor(self, name: str) -> Cursor:
        """A cursor as it is now."""

    @abstractmethod
    async def claim(self, groups: Sequence[NewGroup], cursor: Cursor, seconds: float) -> Leased | None:
        """Move a cursor and put groups that are leased from the beginning, in one transaction.

        `cursor.version` and `cursor.epoch` are those of the cursor before the move. Where it has others by now,
        somebody else has moved it, or this storage has restored the buffer: nothing is done then, and the answer is
        None.
        """

    @abstractmethod
    def __len__(self) -> int:
        """The number of groups, without leased and archived ones; can be called inside and outside an event loop."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything in the store as a dict of plain values and bytes; any backend can load it. Blocks the caller."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` gave into this store, which must be empty. Blocks the caller.

        Raises NotEmptyError when it isn't, SnapshotMismatchError for a dict of another version.
        """

    async def save(self, path: str, about: Mapping[str, str], progress: OnProgress | None = None) -> None:
        """Write a consistent snapshot to the SQLite file `path`, over what is there, while others go on writing.

        `about` is kept in the snapshot; `resume` compares it. `progress` is called now and then, in any thread. This
        version goes through `state_dict`.
        """
        from replaybuf.storage.sql.copies.snapshot import write_state

        await asyncio.to_thread(write_state, path, self.state_dict(), about, self.codec, progress)

    async def resume(self, path: str, expected: Mapping[str, str], progress: OnProgress | None = None) -> None:
        """Load the snapshot at `path` into this store, all of it or nothing.

        Raises NotEmptyError when the store isn't empty, SnapshotMismatchError when the snapshot's `about` differs from
        `expected`, and SnapshotError when it isn't whole. `progress` is called now and then, in any thread. This
        version goes through `load_state_dict`.
        """
        from replaybuf.storage.sql.copies.snapshot import load_file_state

        self.load_state_dict(await asyncio.to_thread(load_file_state, path, expected, self.codec, progress))
