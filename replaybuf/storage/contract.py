"""The contract of storage backends, by capabilities.

A backend keeps groups, and answers for their metadata, by the rules that it was made with (`replaybuf.rules`). It knows
nothing of how a group gets its status or of how long anyone waits: `ReplayBuffer` does that. Queries arrive parsed
(`replaybuf.query`), orders as terms (`replaybuf.rules.policies`).

Every backend is a `GroupStorage`; what else it can, it says by being a `LeaseStorage`, a `CheckpointStorage`, a
`CursorStorage` and a `CopyStorage`. `StorageBackend` is all of them. `replaybuf.testing` has a test suite for each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, TypeVar

from replaybuf.codec.payload import Codec
from replaybuf.errors import UnsupportedError
from replaybuf.progress import OnProgress
from replaybuf.query import Node
from replaybuf.rollouts.rollout import Status
from replaybuf.rules.limits import Rules
from replaybuf.rules.policies import Order
from replaybuf.rules.tallies import Tally
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
    def __len__(self) -> int:
        """The number of groups, without leased and archived ones; can be called inside and outside an event loop."""

    # Putting and drawing

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
    async def drop(self, group: NewGroup) -> None:
        """Take note of a group that expired before it could be stored: what a put of it would replace leaves.

        In one transaction; it counts as put and as dropped. Raises ConflictError and LeaseLostError as `put`; then
        nothing leaves, and nothing is counted.
        """

    @abstractmethod
    async def refuse(self, group: NewGroup) -> None:
        """Take note of a group for which there was no room: it counts as refused."""

    @abstractmethod
    async def take(self, draw: Draw) -> dict[str, list[StorageItem]] | None:
        """Draw groups in the sampler's order, in one transaction; by the rules they leave, stay, or are archived.

        No two takers get the same draw of a group. No more are drawn than the limits allow. With `draw.whole` the
        answer is None, and nothing was drawn, unless every task has as many as wanted. A group whose payload can't be
        decoded is set aside (status FAILED, with the reason in `error`) and the next one is drawn in its place. When
        the call is cancelled, the groups are in the store as if nothing had been drawn.
        """

    # Reading

    @abstractmethod
    def find(self, query: Node, *, order: Order, limit: int | None = None) -> AsyncIterator[StorageItem]:
        """Read the groups that match, without consuming them. Holds no lock or transaction between items."""

    @abstractmethod
    async def count(self, query: Node, *, at_most: int | None = None) -> int:
        """The number of groups that match; counting stops at `at_most`."""

    @abstractmethod
    async def tallies(self) -> dict[tuple[str, Status, Tally], int]:
        """What was counted, by task and status; what was never counted is left out, or 0."""

    @abstractmethod
    async def histogram(self, field: str) -> dict[tuple[str, Status], dict[int, int]]:
        """The number of groups with each value of `staleness` or `times_sampled`, by task and status. Reads all."""

    # Changing

    @abstractmethod
    async def delete(self, query: Node) -> int:
        """Remove the groups that match; return the number removed."""

    @abstractmethod
    async def update(self, query: Node, changes: Changes) -> int:
        """Change the metadata of the groups that match; return their number. Staleness, uid and order stay."""

    @abstractmethod
    async def update_priorities(self, priorities: Mapping[int, float]) -> int:
        """Set the priorities of groups by uid, leased ones included; return the number of those that are there."""

    @abstractmethod
    async def refresh(self, refresh: Refresh) -> dict[str, int]:
        """Give all groups of the tasks and statuses the staleness of the train step and apply the expiry rules.

        Returns the number of groups of each task that expired. Groups that aren't retryable are removed and counted as
        dropped. One transaction.
        """

    # Waiting

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


class LeaseStorage(ABC):
    """Draws that are only hidden, until whoever has them says what became of them."""

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
        """Give those of these groups back that the lease still holds; the number given back.

        `counts` says whether the delivery counts towards `max_deliveries`, as one that failed for this reason.
        """

    @abstractmethod
    async def extend(self, lease: Leased, uids: Sequence[int], seconds: float) -> float:
        """Let the lease of these groups end in `seconds` from now; return that time.

        Raises LeaseLostError when one of them isn't held by this lease any more.
        """


class CheckpointStorage(ABC):
    """Step checkpoints, and fences for those who don't know of a restore."""

    @abstractmethod
    async def check_fence(self) -> None:
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


class CursorStorage(LeaseStorage):
    """Small versioned values beside the groups: places in datasets, and prompts that are leased when one moves."""

    @abstractmethod
    async def cursor(self, name: str) -> Cursor:
        """A cursor as it is now."""

    @abstractmethod
    async def move_cursor(self, cursor: Cursor) -> bool:
        """Write a cursor, if it still has the version and the epoch that this one says; whether it was written.

        Otherwise somebody else has moved it since it was read, or this storage has restored the buffer.
        """

    @abstractmethod
    async def claim(self, groups: Sequence[NewGroup], cursor: Cursor, seconds: float) -> Leased | None:
        """Move a cursor, as `move_cursor`, and put groups that are leased from the beginning, in one transaction.

        None where the cursor can't be moved; then nothing is done.
        """


class CopyStorage(ABC):
    """Copies of all that is in the store. `replaybuf.storage.state_copies` makes files of state dicts."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything in the store as a dict of plain values and bytes; any backend can load it. Blocks the caller."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` gave into this store, which must be empty. Blocks the caller.

        Raises NotEmptyError when it isn't, SnapshotMismatchError for a dict of another version.
        """

    @abstractmethod
    async def save(self, path: str, about: Mapping[str, str], progress: OnProgress | None = None) -> None:
        """Write a consistent snapshot to the SQLite file `path`, over what is there, while others go on writing.

        `about` is kept in the snapshot; `resume` compares it. `progress` is called now and then, in any thread.
        """

    @abstractmethod
    async def resume(self, path: str, expected: Mapping[str, str], progress: OnProgress | None = None) -> None:
        """Load the snapshot at `path` into this store, all of it or nothing.

        Raises NotEmptyError when the store isn't empty, SnapshotMismatchError when the snapshot's `about` differs from
        `expected`, and SnapshotError when it isn't whole. `progress` is called now and then, in any thread.
        """


class StorageBackend(GroupStorage, CursorStorage, CheckpointStorage, CopyStorage):
    """All of it."""


def require(storage: GroupStorage, capability: type[C], call: str) -> C:
    """The storage as one of this capability, which `call` needs. Raises UnsupportedError."""
    if isinstance(storage, capability):
        return storage
    raise UnsupportedError(
        f"{call} needs a backend that is a {capability.__name__}, and {storage!r} is none; SQLStorage, "
        "MemoryStorage and PandasStorage are"
    )
