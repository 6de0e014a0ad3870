"""What a peer is asked to do. It runs in the peer's own environment: only numpy and the standard library here."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import fields

#: The groups that are measured, by size: arrays and lists of them.
SIZES = {"1K": "1 KB", "100K": "100 KB", "2M": "2 MB"}
KINDS = ("arrays", "lists")
#: Room for the fields of a rollout that are no tensors, for peers that keep tensors of equal shapes only.
REST_BYTES = 640

Group = list[dict[str, Any]]


def make(size: str, kind: str) -> Group:
    """Return a new group of a size and kind, the same in all environments."""
    if size == "1K":
        return fields.small(as_lists=kind == "lists")
    of_kind = fields.lists if kind == "lists" else fields.arrays
    return of_kind(100 if size == "100K" else 2000)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a peer keeps its groups: a folder of its own, a PostgreSQL database if it wants one, and for a second
    process the address of the server that the first one has started."""

    folder: str
    url: str = ""
    address: str = ""


class Adapter(ABC):
    """A peer. All of it is awaited by one task; `address` is what a second process needs in `Place`."""

    #: How many groups it takes at once; of 2 MB, a quarter of it.
    batch = 64
    #: Whether several processes may use it.
    shared = True

    def __init__(self, place: Place) -> None:
        self.place = place
        self.address = "-"

    async def open(self) -> None:  # noqa: B027
        """Create what is kept in `place`, or open what is there."""

    async def close(self) -> None:  # noqa: B027
        """Close it; a server ends."""

    def prepare(self, group: Group) -> Any:
        """Return a group as the peer's users have it at hand. It isn't measured."""
        return group

    @abstractmethod
    async def put(self, prepared: Sequence[Any]) -> None:
        """Put groups as fast as the peer allows; as safe as it makes them when this returns."""

    async def put_one(self, prepared: Any) -> None:
        """Put one group, alone."""
        await self.put([prepared])

    @abstractmethod
    async def take(self, count: int) -> Sequence[Any]:
        """Return and remove the oldest groups, which are there, as users would go on with them."""

    async def ready(self, count: int) -> bool:
        """Return whether `take(count)` has something to return; for peers whose take would wait, or fail."""
        return True

    async def wait_for_one(self) -> None:
        """Take a group as soon as another process has put it."""
        await self.take(1)

    def settle(self) -> None:  # noqa: B027
        """Do what was put off, as part of the work that is measured: SQLite's log is copied back."""

    def tokens(self, group: Any) -> int:
        """Return the sum of a taken group's tokens, by which it is known to be whole; a floor that can't returns 0."""
        return sum(int(np.asarray(rollout["tokens"]).sum()) for rollout in group)


def stacked(group: Group) -> dict[str, np.ndarray[Any, Any]]:
    """Return each field of a group's rollouts as one array: those of tokens stacked, all others as JSON in bytes.

    For peers that keep tensors. It needs rollouts of equal lengths.
    """
    columns = {name: np.stack([np.asarray(rollout[name]) for rollout in group]) for name in fields.TOKEN_FIELDS}
    rest = np.zeros((len(group), REST_BYTES), np.uint8)
    for row, rollout in zip(rest, group, strict=True):
        data = json.dumps({name: value for name, value in rollout.items() if name not in columns}).encode()
        row[: len(data)] = np.frombuffer(data, np.uint8)
    return columns | {"rest": rest}


def unstacked(columns: dict[str, np.ndarray[Any, Any]], *, as_lists: bool) -> Group:
    """Return the group of which `stacked` made these columns."""
    rest = columns["rest"]
    group = [json.loads(rest[row].tobytes().rstrip(b"\0")) for row in range(len(rest))]
    for name in fields.TOKEN_FIELDS:
        values = columns[name].tolist() if as_lists else columns[name]
        for rollout, value in zip(group, values, strict=True):
            rollout[name] = value
    return group
