"""Reverb's client: the tables of one database, for synchronous callers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from replaybuf.buffer.sync import SyncReplayBuffer
from replaybuf.common.checks import check_list, check_whole, shown
from replaybuf.common.redact import redact
from replaybuf.errors import ConfigError, InputError
from replaybuf.integrations.reverb.selectors import priority_of, weight_of
from replaybuf.integrations.reverb.table import Table
from replaybuf.storage.values import UNSET, StorageItem, Unset, missing_checkpoint
from replaybuf.values.rollouts.rollout import Status


class SampleInfo(NamedTuple):
    """An item as it was sampled.

    `key` identifies it in updates and deletions. `probability` is that of its selection among `table_size` items; 1 for
    selectors that aren't random. `times_sampled` includes this sample.
    """

    key: int
    probability: float
    table_size: int
    priority: float
    times_sampled: int


class ReplaySample(NamedTuple):
    """A sampled item: its info, and its data as inserted."""

    info: SampleInfo
    data: Any


#: The default timeout of a sample in seconds, the same as of a put.
SAMPLE_TIMEOUT = 600.0

_DATA = "data"


class Client:
    """Inserts into the tables of a database, and samples from them, without a server.

    `tables` are the tables' definitions, which every process must pass. Calls may be made by any thread, and block. A
    pickled client consists of its url and its tables.
    """

    def __init__(self, url: str, tables: Iterable[Table]) -> None:
        given = check_list(tables, "tables")
        definitions = [table for table in given if isinstance(table, Table)]
        self._url, self._tables = url, {table.name: table for table in definitions}
        if not given or len(self._tables) < len(given):
            raise ConfigError("tables must be a list of at least one table, each of another name")
        self._buffers = {table.name: table.config(url).build_sync() for table in definitions}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._url, list(self._tables.values()))

    def __repr__(self) -> str:
        return f"Client({redact(self._url)!r}, tables={', '.join(self._tables)})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all waits with ClosedError, and release the database. Idempotent."""
        for buffer in self._buffers.values():
            buffer.close()

    def buffer(self, table: str) -> SyncReplayBuffer[Any]:
        """Return the buffer with the items of a table, for features that Reverb lacks: leases, queries, tags, metrics.

        The name of the table is that of the buffer's only task. Raises InputError if there is no such table.
        """
        if not isinstance(table, str) or table not in self._buffers:
            raise InputError(f"there is no table {shown(table)}; there are {', '.join(self._tables)}")
        return self._buffers[table]

    def insert(
        self, data: Any, priorities: Mapping[str, float], *, timeout: float | Unset | None = UNSET
    ) -> dict[str, int]:
        """Store an item with the same data in each of these tables, one after the other. Return its keys, by table.

        `data` is a number, a text, an array or tensor, or nested lists, tuples and dicts of them; the table's option
        `types` names the classes of named tuples in it. Each item is committed by itself. If a table has no room within
        `timeout` seconds (by default its `put_timeout`), FullError is raised, and the tables before it keep their
        items.
        """
        if not isinstance(priorities, Mapping) or not priorities:
            raise InputError(f"priorities must be a dict with the priority for each table, got {shown(priorities)}")
        buffers = {table: self.buffer(table) for table in priorities}
        weights = {name: weight_of(priority, self._tables[name].exponent) for name, priority in priorities.items()}
        keys: dict[str, int] = {}
        for name, buffer in buffers.items():
            row = {_DATA: data}
            uid = buffer.put([row], name, priority=weights[name], status=Status.COMPLETED, timeout=timeout)
            assert uid is not None
            keys[name] = uid
        return keys

    def sample(
        self, table: str, num_samples: int = 1, *, timeout: float | None = SAMPLE_TIMEOUT
    ) -> Iterator[list[ReplaySample]]:
        """Yield `num_samples` samples, each a list of one, as Reverb does for items from `insert`.

        Each sample is drawn at the time of its iteration, from all current items, so an item may come more than once.
        `sample_batch` returns different items, in one transaction. Raises NotReadyError if no item is available within
        `timeout` seconds.
        """
        self.buffer(table)
        return (self.sample_batch(table, 1, timeout=timeout, at_least=1) for _ in range(num_samples))

    def sample_batch(
        self,
        table: str,
        num_samples: int,
        *,
        timeout: float | None = SAMPLE_TIMEOUT,
        at_least: int | None = None,
    ) -> list[ReplaySample]:
        """Sample `num_samples` different items, in one transaction.

        Waits until there are that many, or `at_least` as many, for up to `timeout` seconds (None: for ever); then
        raises NotReadyError, with the reason. With a timeout of 0 it returns the available ones. With a `Prioritized`
        sampler each call reads the priorities of all items.
        """
        batch = self.buffer(table).sample({table: num_samples}, timeout=timeout, at_least=at_least, beta=1)
        size = _table_size(batch[table])
        return [_sample(item, size, self._tables[table]) for item in batch[table]]

    def mutate_priorities(
        self, table: str, updates: Mapping[int, float] | None = None, deletes: Iterable[int] | None = None
    ) -> None:
        """Set the priorities of items of a table by key, then remove some; missing keys are ignored."""
        buffer = self.buffer(table)
        if not isinstance(updates, Mapping | None):
            raise InputError(f"updates must be a dict of priorities by key, got {shown(updates)}")
        if updates:
            exponent = self._tables[table].exponent
            buffer.update_priorities({key: weight_of(priority, exponent) for key, priority in updates.items()})
        if deletes is not None and (keys := check_list(deletes, "deletes")):
            buffer.delete({"task_name": table, "uid": {"$in": keys}})

    def reset(self, table: str) -> None:
        """Remove all items of a table.

        The rate limiter keeps its error, which stays within its range; Reverb's is reset to 0.
        """
        self.buffer(table).delete({"task_name": table})

    def checkpoint(self, step: int | None = None) -> int:
        """Make a checkpoint of all tables, one after the other. Return its step: by default one more than the last.

        It takes milliseconds, and blocks no other call. The last three are kept (`keep_checkpoints` of the options).
        """
        step = 1 + max(self._steps(), default=0) if step is None else step
        for buffer in self._buffers.values():
            buffer.checkpoint(step)
        return step

    def restore(self, step: int | None = None) -> int:
        """Restore all tables exactly to a checkpoint, by default the last one of all. Return its step.

        Other processes that have the tables open are fenced off: their calls raise FencedError until they reopen them.
        Raises CheckpointError.
        """
        steps = self._steps()
        step = max(steps, default=0) if step is None else check_whole(step, "step")
        if step not in steps:  # of one that was killed some tables have it, and none is to be restored
            raise missing_checkpoint(step, sorted(steps))
        for buffer in self._buffers.values():
            buffer.restore(step)
        return step

    def _steps(self) -> set[int]:
        """Return the steps of which all tables have a checkpoint."""
        steps = [{checkpoint.step for checkpoint in buffer.checkpoints()} for buffer in self._buffers.values()]
        return set.intersection(*steps)


def _sample(item: StorageItem[Any], table_size: int, table: Table) -> ReplaySample:
    assert item.probability is not None
    info = SampleInfo(
        key=item.uid,
        probability=item.probability if table.sampler.is_random else 1.0,
        table_size=table_size,
        priority=priority_of(item.priority, table.exponent),
        times_sampled=item.times_sampled,
    )
    return ReplaySample(info, item.item[0][_DATA])


def _table_size(items: Sequence[StorageItem[Any]]) -> int:
    """Return the number N of items at the draw, from an item's weight, which is 1 / (N p)."""
    for item in items:
        share = (item.weight or 0.0) * (item.probability or 0.0)
        if 0 < share < math.inf:
            return round(1 / share)
    return len(items)  # priorities so far apart that p underflows to 0 for all of them
