"""xtuner's interfaces: items, storage backends and replay policies, for users with their own; and all uses of xtuner.

Buffers built by configs use the database directly. Of the installed xtuner, its rollouts, its statuses, the bases of
its configs and the release of sessions are used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeAlias

from replaybuf import query as ours
from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import MissingDriverError, QueryError, UnsupportedError
from replaybuf.query.nodes import SCALAR_OPERATORS
from replaybuf.rollouts.rollout import Status
from replaybuf.rules.policies import FIFOPolicy, Order, StalenessPolicy, in_order
from replaybuf.storage.values import StorageItem as OurItem

_DATA = "xtuner.v1.data_proto.rl_data"
_SESSIONS = "xtuner.v1.rl.rollout.trace_store"
_BUFFERS = "xtuner.v1.rl.replay_buffer"

#: The file written by xtuner's own buffer.
THEIR_FILE = "replay_buffer.pth"


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "xtuner":
            why = "which is not installed: get it from https://github.com/InternLM/xtuner and pip install it"
        else:
            why = f"and can't import {name}: {error}"
        raise MissingDriverError(f"replaybuf.xtuner works with xtuner, {why}") from error


def rollout_class() -> type[Any]:
    """Return xtuner's RolloutState. Raises MissingDriverError."""
    found: type[Any] = _module(_DATA).RolloutState
    return found


def their_status(status: Enum) -> Any:
    """Return the member of xtuner's Status that corresponds to one of ours; one of theirs is returned as it is."""
    return _module(_DATA).Status(status.value)


async def release(groups: Sequence[list[Any]]) -> None:
    """Release the resources of rollouts (sessions of the trace store, Ray objects), and reset them to EXPIRED.

    One call for all groups, since their sessions are released by one remote call.
    """
    if not groups:
        return
    await _module(_SESSIONS).release_and_discard_rollout_groups(list(groups))
    expired = their_status(Status.EXPIRED)
    for group in groups:
        for rollout in group:
            rollout.status = expired


def config_class(name: str) -> type[Any]:
    """Return xtuner's config class of this name, or `object` if xtuner isn't installed."""
    if find_spec("xtuner") is None:
        return object
    found: type[Any] = getattr(_module(_BUFFERS), name)
    return found


@dataclass
class StorageItem:
    """A group in a storage backend: its rollouts (`item`), its uid, its position in insertion order, and its state."""

    item: list[Any]
    uid: int
    timestamp_id: int
    task_name: str
    status: Any
    staleness: int


class StorageBackend(ABC):
    """Interface of storages. Subclass it for your own; `DatabaseStorage` is replaybuf's."""

    @abstractmethod
    async def put(self, item: StorageItem) -> int:
        """Store a group under a new uid and timestamp_id, in place of those in the item, and return the uid."""

    @abstractmethod
    async def get(self, query: Query) -> list[StorageItem]:
        """Return the groups that match, without consuming them."""

    @abstractmethod
    async def count(self, query: Query) -> int:
        """Return the number of groups that match."""

    @abstractmethod
    async def delete(self, uids: list[int]) -> None:
        """Remove the groups with these uids; missing ones are ignored."""

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
    """Interface of policies: the order in which groups are drawn from a storage backend."""

    @abstractmethod
    async def put(self, item: StorageItem, storage_backend: StorageBackend) -> None:
        """Store a group, or decide not to."""

    @abstractmethod
    async def get(self, count: int, query: Query, storage_backend: StorageBackend) -> list[list[Any]]:
        """Take up to `count` groups that match out of the storage."""

    async def count(self, query: Query, storage_backend: StorageBackend) -> int:
        """Return the number of groups that match."""
        return await storage_backend.count(query)


class _Ordered(ReplayPolicy):
    """Takes the first groups in an order."""

    order: Order
    #: replaybuf's policy with this order. A DatabaseStorage with this policy draws by itself, in one transaction.
    same_as: str

    async def put(self, item: StorageItem, storage_backend: StorageBackend) -> None:
        if item.item:
            await storage_backend.put(item)

    async def get(self, count: int, query: Query, storage_backend: StorageBackend) -> list[list[Any]]:
        if count <= 0:
            return []
        first = in_order(await storage_backend.get(query), self.order)[:count]
        if first:
            await storage_backend.delete([one.uid for one in first])
        return [one.item for one in first]


class FIFOReplayPolicy(_Ordered):
    """Oldest first."""

    order, same_as = FIFOPolicy.order, FIFOPolicy.name


class StalenessReplayPolicy(_Ordered):
    """Most stale first, then oldest."""

    order, same_as = StalenessPolicy.order, StalenessPolicy.name


class QueryNode(ABC):  # noqa: B024
    """A part of a query."""


class ConditionNode(QueryNode):
    """A condition on one field of a `StorageItem`."""

    def __init__(self, field: str, op: str, value: Any) -> None:
        self.field, self.op, self.value = field, op, value


class ScalarNode(ConditionNode):
    """`field op value`, where op is one of $eq $ne $gt $gte $lt $lte."""


class SetNode(ConditionNode):
    """The field is ($in) or is not ($not_in) one of the values."""


class BetweenNode(ConditionNode):
    """`lower <= field <= upper`. Raises QueryError, a ValueError, when lower is greater."""

    def __init__(self, field: str, lower: Any, upper: Any) -> None:
        if lower > upper:
            raise QueryError(f"$between needs its lower bound first, got {lower!r:.50} and {upper!r:.50}", field)
        super().__init__(field, "$between", [lower, upper])
        self.lower, self.upper = lower, upper


class LogicNode(QueryNode):
    """All ($and) or at least one ($or) of the conditions hold."""

    def __init__(self, relation: str, conditions: Sequence[QueryNode]) -> None:
        self.relation, self.conditions = relation, list(conditions)


Query: TypeAlias = Mapping[Any, Any] | QueryNode


def parse_query(expr: Query) -> QueryNode:
    """Parse a query. Raises QueryError, a ValueError."""
    if isinstance(expr, QueryNode):
        return expr
    if not isinstance(expr, Mapping):
        raise QueryError(f"expected a query, a dict such as {{'staleness': {{'$lt': 5}}}}, got {type(expr).__name__}")
    conditions = [node for key, operand in expr.items() for node in _entry(key, operand)]
    return conditions[0] if len(conditions) == 1 else LogicNode("$and", conditions)


def _entry(key: Any, operand: Any) -> list[QueryNode]:
    if key in ("$and", "$or"):
        if not isinstance(operand, list):
            raise QueryError(f"expected a list of queries, got {type(operand).__name__}", str(key))
        return [LogicNode(key, [parse_query(one) for one in operand])]
    if not isinstance(operand, Mapping):
        return [ScalarNode(key, "$eq", operand)]
    return [_condition(key, op, value) for op, value in operand.items()]


def _condition(field: str, op: Any, value: Any) -> ConditionNode:
    place = f"{field}.{op}"
    if op in SCALAR_OPERATORS:
        return ScalarNode(field, op, value)
    if op in ("$in", "$not_in"):
        if not isinstance(value, list | tuple):
            raise QueryError("expected a list of values", place)
        return SetNode(field, op, value)
    if op == "$between":
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise QueryError("expected a list of two values, the lower and the upper bound", place)
        return BetweenNode(field, *value)
    raise QueryError(
        f"there is no operator {op!r:.50}; valid: {', '.join(SCALAR_OPERATORS)}, $in, $not_in, $between", place
    )


def as_ours(query: Query) -> ours.Query:
    """Convert a query (a dict, our nodes or xtuner's) into one for a replaybuf buffer."""
    if isinstance(query, Mapping):
        return {key: [*map(as_ours, value)] if key in ("$and", "$or") else value for key, value in query.items()}
    node: Any = query
    if hasattr(node, "conditions"):
        return {node.relation: [*map(as_ours, node.conditions)]}
    if hasattr(node, "lower"):  # xtuner's own has no value
        return {node.field: {"$between": [node.lower, node.upper]}}
    return {node.field: {node.op: node.value}}


# Maximum number of uids in one $in.
_UIDS = 500


class DatabaseStorage(StorageBackend):
    """The groups of a replaybuf buffer, for replay policies of your own: `ReplayBuffer(MyPolicy(), storage)`.

    `get` reads all groups that match, and removing them is another transaction: two processes may get the same groups.
    replaybuf's own policies, named in a config, draw in one transaction and read only the groups they return.
    """

    def __init__(self, buffer: ReplayBuffer[Any]) -> None:
        self.buffer = buffer

    async def put(self, item: StorageItem) -> int:
        return await self.buffer.put(item.item, item.task_name, status=item.status) or 0

    async def get(self, query: Query) -> list[StorageItem]:
        return [_as_theirs(one) async for one in self.buffer.find(as_ours(query))]

    async def count(self, query: Query) -> int:
        return await self.buffer.count_where(as_ours(query))

    async def delete(self, uids: list[int]) -> None:
        for first in range(0, len(uids), _UIDS):
            await self.buffer.delete({"uid": {"$in": list(uids[first : first + _UIDS])}})

    async def update(self, items: list[StorageItem]) -> None:
        """Raise UnsupportedError: stored rollouts are immutable; `refresh_staleness` updates status and staleness."""
        raise UnsupportedError(
            "update() can't replace the rollouts of a group that is in the database; put it anew, or set its status "
            "with storage.buffer.update(query, status=...)"
        )

    def __len__(self) -> int:
        return len(self.buffer)

    def state_dict(self) -> dict[str, Any]:
        return self.buffer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.buffer.load_state_dict(state)


def _as_theirs(one: OurItem) -> StorageItem:
    return StorageItem(one.item, one.uid, one.timestamp_id, one.task_name, their_status(one.status), one.staleness)
