"""The parts that a buffer is built from, as xtuner has them: items, storage backends and replay policies.

They are for users who have backends or policies of their own. The config's buffers use the database directly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from replaybuf.xtuner.queries import Query


@dataclass
class StorageItem:
    """A group in a storage backend: its rollouts (`item`), its number, its place in insertion order, and its state."""

    item: list[Any]
    uid: int
    timestamp_id: int
    task_name: str
    status: Any
    staleness: int


class StorageBackend(ABC):
    """Where groups are kept. Subclass it for a storage of your own; `DatabaseStorage` is replaybuf's."""

    @abstractmethod
    async def put(self, item: StorageItem) -> int:
        """Store a group under a new uid and timestamp_id, whatever it has for them, and return the uid."""

    @abstractmethod
    async def get(self, query: Query) -> list[StorageItem]:
        """Return the groups that match, without consuming them."""

    @abstractmethod
    async def count(self, query: Query) -> int:
        """Return the number of groups that match."""

    @abstractmethod
    async def delete(self, uids: list[int]) -> None:
        """Remove the groups with these uids, those that are there."""

    @abstractmethod
    async def update(self, items: list[StorageItem]) -> None:
        """Replace status, staleness and rollouts of the groups with the uids of these; their order stays."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return all groups, in a form that can be pickled."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""


class ReplayPolicy(ABC):
    """In what order groups are drawn from a storage backend."""

    @abstractmethod
    async def put(self, item: StorageItem, storage_backend: StorageBackend) -> None:
        """Store a group, or don't."""

    @abstractmethod
    async def get(self, count: int, query: Query, storage_backend: StorageBackend) -> list[list[Any]]:
        """Take up to `count` groups that match out of the storage."""

    async def count(self, query: Query, storage_backend: StorageBackend) -> int:
        """Return the number of groups that match."""
        return await storage_backend.count(query)


class _Ordered(ReplayPolicy):
    """Takes the first groups in an order."""

    #: The policy of replaybuf with the same order. A DatabaseStorage that has it draws by itself, in one transaction.
    same_as: str

    async def put(self, item: StorageItem, storage_backend: StorageBackend) -> None:
        if item.item:
            await storage_backend.put(item)

    async def get(self, count: int, query: Query, storage_backend: StorageBackend) -> list[list[Any]]:
        if count <= 0:
            return []
        first = sorted(await storage_backend.get(query), key=self._place)[:count]
        if first:
            await storage_backend.delete([one.uid for one in first])
        return [one.item for one in first]

    @staticmethod
    @abstractmethod
    def _place(item: StorageItem) -> Any: ...


class FIFOReplayPolicy(_Ordered):
    """Oldest first."""

    same_as = "fifo"

    @staticmethod
    def _place(item: StorageItem) -> Any:
        return item.timestamp_id


class StalenessReplayPolicy(_Ordered):
    """Most stale first, then oldest."""

    same_as = "staleness"

    @staticmethod
    def _place(item: StorageItem) -> Any:
        return (-item.staleness, item.timestamp_id)
