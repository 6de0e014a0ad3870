"""Reverb's client: the tables of one database, for synchronous callers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

from replaybuf.buffer.sync import run
from replaybuf.common.checks import check_whole, shown
from replaybuf.common.redact import redact
from replaybuf.errors import ConfigError, InputError
from replaybuf.integrations.reverb.table import SAMPLE_TIMEOUT, ReplaySample, Table
from replaybuf.storage.values import UNSET, Unset, missing_checkpoint


class Client:
    """Inserts into the tables of a database, and samples from them, without a server.

    `tables` are the tables' definitions, which every process must pass. Calls may be made by any thread, and block;
    `table(name)` is the same table for coroutines. A pickled client consists of its url and its tables.
    """

    def __init__(self, url: str, tables: Iterable[Table]) -> None:
        self._url = url
        self._tables: dict[str, Table] = {}
        for table in tables:
            if not isinstance(table, Table):
                raise ConfigError(f"tables must be of replaybuf.integrations.reverb.Table, got {type(table).__name__}")
            if table.name in self._tables:
                raise ConfigError(f"tables: there are two of the name {table.name}")
            self._tables[table.name] = table.replace(url=url)
        if not self._tables:
            raise ConfigError("tables: there must be at least one")

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
        for table in self._tables.values():
            run(table.close())

    def table(self, name: str) -> Table:
        """Return a table. Raises InputError if there is none of this name."""
        if not isinstance(name, str) or name not in self._tables:
            raise InputError(f"there is no table {shown(name)}; there are {', '.join(self._tables)}")
        return self._tables[name]

    def insert(
        self, data: Any, priorities: Mapping[str, float], *, timeout: float | Unset | None = UNSET
    ) -> dict[str, int]:
        """Store an item with the same data in each of these tables, one after the other. Return its keys, by table.

        Each is committed by itself. If a table has no room within `timeout` seconds (by default its `put_timeout`),
        FullError is raised, and the tables before it keep their items.
        """
        if not isinstance(priorities, Mapping) or not priorities:
            raise InputError(f"priorities must be a dict with the priority for each table, got {shown(priorities)}")
        by_table = {self.table(name): priority for name, priority in priorities.items()}
        return {table.name: run(table.insert(data, priority, timeout=timeout)) for table, priority in by_table.items()}

    def sample(
        self,
        table: str,
        num_samples: int = 1,
        *,
        emit_timesteps: bool = True,
        timeout: float | None = SAMPLE_TIMEOUT,
    ) -> Iterator[Any]:
        """Yield `num_samples` samples, each a list of one, as Reverb does for items from `insert`.

        With `emit_timesteps=False` the samples themselves are yielded.

        Each sample is drawn at the time of its iteration, from all current items, so an item may come more than once.
        `sample_batch` returns different items, in one transaction. Raises NotReadyError if no item is available within
        `timeout` seconds.
        """
        source = self.table(table)
        samples = (item for _ in range(num_samples) for item in run(source.sample(1, timeout=timeout, at_least=1)))
        return ([sample] for sample in samples) if emit_timesteps else samples

    def sample_batch(
        self,
        table: str,
        num_samples: int,
        *,
        timeout: float | None = SAMPLE_TIMEOUT,
        at_least: int | None = None,
    ) -> list[ReplaySample]:
        """Sample different items in one transaction, as `Table.sample` does."""
        return run(self.table(table).sample(num_samples, timeout=timeout, at_least=at_least))

    def mutate_priorities(
        self, table: str, updates: Mapping[int, float] | None = None, deletes: Iterable[int] | None = None
    ) -> None:
        """Set the priorities of items of a table by key, then remove some; missing keys are ignored."""
        target = self.table(table)
        if updates:
            run(target.update_priorities(updates))
        if deletes is not None:
            run(target.delete(deletes))

    def reset(self, table: str) -> None:
        """Remove all items of a table; the rate limiter isn't reset (`Table.reset`)."""
        run(self.table(table).reset())

    def checkpoint(self, step: int | None = None) -> int:
        """Make a checkpoint of all tables, one after the other. Return its step: by default one more than the last.

        It takes milliseconds, and blocks no other call. The last three are kept (`keep_checkpoints` of the options).
        """
        step = 1 + max(self._steps(), default=0) if step is None else step
        for table in self._tables.values():
            run(table.buffer.checkpoint(step))
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
        for table in self._tables.values():
            run(table.buffer.restore(step))
        return step

    def _steps(self) -> set[int]:
        """Return the steps of which all tables have a checkpoint."""
        steps = [{checkpoint.step for checkpoint in run(table.buffer.checkpoints())} for table in self._tables.values()]
        return set.intersection(*steps)
