"""The contract of storage backends, by capabilities.

A backend keeps groups and their metadata, by the rules that it was created with (`replaybuf.rules`). It doesn't know
how a group gets its status or how long callers wait: that is for `ReplayBuffer`. Queries arrive parsed
(`replaybuf.query`), orders as terms (`replaybuf.rules.policies`).

Every backend is a `GroupStorage`; further capabilities are `LeaseStorage`, `CheckpointStorage`, `CursorStorage` and
`CopyStorage`. `StorageBackend` is all of them. `replaybuf.testing` has a test suite for each. A backend that other
processes look into may be a `PresenceStorage`, too; without that nobody is told who waits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from replaybuf.codec.payload import Codec
from replaybuf.errors import UnsupportedError
from replaybuf.progress import OnProgress
from replaybuf.query import Node
from replaybuf.rollouts.rollout import Status
from replaybuf.rules.circumstances import Circumstances, Wait
from replaybuf.rules.limits import Rules
from replaybuf.rules.policies import Order
from replaybuf.rules.tallies import Tally
from replaybuf.storage.presence import GaveUp, Waiting
from replaybuf.storage.values import (
    Changes,
    Checkpoint,
    Cursor,
    Draw,
    Leased,
    NewGroup,
    Refresh,
    StorageItem,
)

C = TypeVar("C")


class GroupStorage(ABC):
    """Where groups are kept. Every coroutine is safe to cancel: it has either its whole effect or none.

    `name` is that of the buffer, `durable` says whether groups outlive the process, `codec` reads and writes the
    payloads, `rules` say what is drawn and evicted, and how much the buffer holds.
    """

    codec: Codec
    rules: Rules

    name: str = "default"
    durable: bool = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    async def open(self) -> None:  # noqa: B027
        """Get ready; called before any other method. Creates what is missing."""

    async def close(self) -> None:  # noqa: B027
        """Release all resources. Puts that wait to be committed are committed first.

        Callers that wait in `changed` are woken; the buffer then raises ClosedError in all waits.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of groups, without leased and archived ones; callable inside and outside an event loop."""

    # Putting and drawing

    @abstractmethod
    async def put(self, group: NewGroup) -> int:
        """Store a group and return its uid. When it returns, the group is committed.

        Groups beyond the capacity are evicted in the same transaction, in the remover's order, even the new group when
        it comes first. The tags are copied, and `{}` is stored as None. With `group.dropped` all groups that leave are
        added to it as they were, as soon as that is certain: those replaced, and those evicted; one that can't be
        decoded has an `error`, and no rollouts.

        Raises EncodeError for values that can't be stored, FullError when the limits leave no room, ConflictError when
        a group to be replaced isn't there, and LeaseLostError when its lease no longer holds it; then nothing is
        stored.
        """

    @abstractmethod
    async def drop(self, group: NewGroup) -> None:
        """Record a group that isn't stored, and remove the groups that its put would replace.

        It expired before it could be stored, and counts as put and as dropped; or it is FILTERED or FAILED, and counts
        as put and as pruned. In one transaction. With `group.dropped`, the removed ones are added to it, as
        by `put`. Raises ConflictError and LeaseLostError like `put`; then
        nothing is removed or counted.
        """

    @abstractmethod
    async def refuse(self, group: NewGroup) -> None:
        """Count a group for which there was no room as refused."""

    @abstractmethod
    async def take(self, draw: Draw) -> dict[str, list[StorageItem]] | None:
        """Draw groups in the sampler's order, in one transaction; by the rules, they leave, stay, or are archived.

        The train step of the draw is kept with groups that stay or are archived, as their `trained_step`. No two takers
        get the same draw of a group. No more are drawn than the limits allow. Unless every task has
        as many as `draw.at_least` says, None is returned and nothing drawn. A group whose payload can't be decoded is
        set aside (status FAILED, with the reason in `error`) and the next one is drawn in its place. When the call is
        cancelled, the store is as if nothing had been drawn.
        """

    # Reading

    @abstractmethod
    def find(self, query: Node, *, order: Order, limit: int | None = None) -> AsyncIterator[StorageItem]:
        """Yield the groups that match, without consuming them. Holds no lock or transaction between items."""

    @abstractmethod
    async def count(self, query: Node, *, at_most: int | None = None) -> int:
        """Return the number of groups that match; counting stops at `at_most`."""

    @abstractmethod
    async def tallies(self) -> dict[tuple[str, Status, Tally], int]:
        """Return the tallies by task and status; those that never counted anything are left out, or 0."""

    @abstractmethod
    async def histogram(self, field: str) -> dict[tuple[str, Status], dict[int, int]]:
        """Return the number of groups by `staleness` or `times_sampled`, for each task and status. Reads all groups."""

    # Changing

    @abstractmethod
    async def delete(self, query: Node) -> int:
        """Remove the groups that match; return the number removed."""

    @abstractmethod
    async def update(self, query: Node, changes: Changes) -> int:
        """Change the metadata of the groups that match; return their number. Staleness, uid and order don't change."""

    @abstractmethod
    async def update_priorities(self, priorities: Mapping[int, float]) -> int:
        """Set the priorities of groups by uid, leased ones included; return the number of groups found."""

    @abstractmethod
    async def refresh(self, refresh: Refresh) -> dict[str, int]:
        """Set the staleness of all groups of the tasks and statuses for the train step, and apply the expiry rules.

        Returns the number of expired groups by task. Groups that aren't retryable are removed and counted as dropped,
        also when they were EXPIRED before; with `refresh.dropped` they are added to it, as by `put`. One transaction.
        """

    # Waiting

    @abstractmethod
    def version(self) -> int:
        """Return a number that changes with every change that this store has noticed."""

    @abstractmethod
    async def changed(self, timeout: float, since: int) -> None:
        """Return soon after groups were committed by anyone, or after `timeout` seconds at the latest.

        Returns at once when that happened after `version()` was `since`: callers ask for the version, look for groups,
        and wait when there are none, so that a commit between looking and waiting isn't missed. It may also return
        early without a change: callers look and wait again.
        """


class LeaseStorage(ABC):
    """Draws whose groups are only hidden until the consumer says what became of them.

    All calls with a lease raise LeaseLostError for one of another store, as far as that is known (`Leased.database`).
    """

    @property
    def identity(self) -> str | None:
        """What tells the store from any other, for its leases; None until it is known."""
        return None

    @abstractmethod
    async def lease(self, draw: Draw, seconds: float) -> Leased | None:
        """Draw like `take`, but only hide the groups until the lease is acknowledged, given back, or expires.

        The lease has the train step of the draw.

        When it expires, its groups are back, and the delivery counts. A group that was delivered `max_deliveries` times
        is set aside as FAILED instead.
        """

    @abstractmethod
    async def acknowledge(self, lease: Leased, uids: Sequence[int]) -> None:
        """Consume groups of a lease: by the rules, they leave, stay, or are archived; `trained_step` is the lease's.

        All of them or none. Groups that were acknowledged under this token before, or replaced, are passed over. Raises
        LeaseLostError when the lease has ended and doesn't hold one of the others, and before its end when one of them
        is there, or with another lease, without having been acknowledged (`count_passed_on`).
        """

    @abstractmethod
    async def give_back(self, lease: Leased, uids: Sequence[int], *, counts: bool, reason: str = "") -> int:
        """Give back those of these groups that the lease still holds; return their number.

        `counts` says whether the delivery counts towards `max_deliveries`, as one that failed for this reason.
        """

    @abstractmethod
    async def extend(self, lease: Leased, uids: Sequence[int], seconds: float) -> float:
        """Extend the lease of these groups to `seconds` from now; return the time when it ends.

        Before the lease's end those are passed over that it doesn't hold: other holders of its token may have settled
        them. Afterwards raises LeaseLostError for them.
        """


class CheckpointStorage(ABC):
    """Step checkpoints, and fences against storages that don't know of a restore."""

    @abstractmethod
    async def check_fence(self) -> None:
        """Raise FencedError when another storage has restored the buffer since this one was opened."""

    async def fenced_tallies(self) -> dict[tuple[str, Status, Tally], int]:
        """Return the tallies (`GroupStorage.tallies`). Raises FencedError as `check_fence` does.

        Waits call it whenever something has changed; a backend may read both at once.
        """
        await self.check_fence()
        return await cast(GroupStorage, self).tallies()

    @abstractmethod
    async def checkpoint(self, step: int, keep: int | None) -> Checkpoint:
        """Make a checkpoint of the buffer at this train step, replacing an older one of the same step.

        All but the last `keep` checkpoints are dropped (with None, none is). Payloads aren't copied.
        """

    @abstractmethod
    async def restore(self, step: int, *, keep_new: bool) -> Checkpoint:
        """Restore the buffer to its checkpoint of this step. Raises CheckpointError when there is none.

        Groups leased now or then are as if they had been given back. With `keep_new`, groups that were put since stay
        with their present staleness, as if they had never been drawn, unless they have left the store altogether;
        groups that they replaced are not restored; archived ones that were drawn are completed again; and cursors stay
        where they are. All other storages that opened the buffer before are fenced off: FencedError.
        """

    @abstractmethod
    async def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints in the order in which they were made."""

    @abstractmethod
    async def drop_checkpoint(self, step: int) -> None:
        """Drop a checkpoint. Raises CheckpointError when there is none of this step."""


class CursorStorage(LeaseStorage):
    """Small versioned values stored with the groups: places in datasets, and prompts leased when one moves."""

    @abstractmethod
    async def cursor(self, name: str) -> Cursor:
        """Return the present cursor of this name."""

    @abstractmethod
    async def move_cursor(self, cursor: Cursor) -> bool:
        """Write a cursor if its version and epoch are unchanged in the store; return whether it was written.

        Otherwise somebody else has moved it since it was read, or this storage has restored the buffer.
        """

    @abstractmethod
    async def claim(self, groups: Sequence[NewGroup], cursor: Cursor, seconds: float) -> Leased | None:
        """Move a cursor like `move_cursor`, and put groups that are leased from the beginning, in one transaction.

        Returns None, and does nothing, when the cursor can't be moved.
        """

    @abstractmethod
    async def put_behind(self, groups: Sequence[NewGroup], cursor: Cursor) -> bool:
        """Move a cursor like `move_cursor`, and put groups like `put`, all in one transaction. For imports.

        Returns False, and does nothing, when the cursor can't be moved. Raises what `put` raises, of the first group
        that can't be stored; then nothing is stored or moved.
        """


class CopyStorage(ABC):
    """Copies of the whole store. `replaybuf.storage.state_copies` makes files of state dicts."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the whole store as a dict of plain values and bytes, which any backend can load. Blocks the caller."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict` into this store, which must be empty. Blocks the caller.

        Raises NotEmptyError when it isn't, SnapshotMismatchError for a dict of another version.
        """

    @abstractmethod
    async def save(self, path: str, about: Mapping[str, str], progress: OnProgress | None = None) -> None:
        """Write a consistent snapshot to the SQLite file `path`, replacing it, while others go on writing.

        `about` is kept in the snapshot; `resume` compares it. `progress` is called from time to time, in any thread.
        """

    @abstractmethod
    async def resume(self, path: str, expected: Mapping[str, str], progress: OnProgress | None = None) -> None:
        """Load the snapshot at `path` into this store, wholly or not at all.

        Raises NotEmptyError when the store isn't empty, SnapshotMismatchError when the snapshot's `about` differs from
        `expected`, and SnapshotError when it isn't whole. `progress` is called from time to time, in any thread.
        """


class PresenceStorage(GroupStorage):
    """Lets others see who waits for what, and tells why."""

    @abstractmethod
    def announce(self, waiting: Waiting) -> None:
        """Show that a call waits, from now until it is withdrawn, with the `reason` that it has at each moment.

        Neither this nor `withdraw` and `give_up` waits, or raises an error of the store. Any thread may call them.
        """

    @abstractmethod
    def withdraw(self, waiting: Waiting) -> None:
        """Note that a call no longer waits."""

    @abstractmethod
    def give_up(self, gave_up: GaveUp) -> None:
        """Note that a wait of more than a second ended by its timeout, for whoever asks later, as far as it is kept."""

    @abstractmethod
    async def circumstances(self, wait: Wait) -> Circumstances:
        """Return what is known of the store, for whoever wants to know why this wait isn't over."""


class StorageBackend(GroupStorage, CursorStorage, CheckpointStorage, CopyStorage):
    """A backend with all capabilities."""


def require(storage: GroupStorage, capability: type[C], call: str) -> C:
    """Return the storage, typed as having the capability that `call` needs. Raises UnsupportedError."""
    if isinstance(storage, capability):
        return storage
    raise UnsupportedError(
        f"{call} needs a backend that is a {capability.__name__}, and {storage!r} is none; SQLStorage, "
        "MemoryStorage and PandasStorage are"
    )
