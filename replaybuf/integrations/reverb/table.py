"""A Reverb table over the store: a buffer of its own, with one task, where every group is one item."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.common.checks import check_list, check_task_name, whole
from replaybuf.config import ReplayBufferConfig
from replaybuf.errors import ConfigError, InputError
from replaybuf.integrations.reverb.rate_limiters import Queue, RateLimiter, Stack
from replaybuf.integrations.reverb.selectors import Fifo, Lifo, Selector, exponent_of, priority_of, weight_of
from replaybuf.rules.transitions import level_of
from replaybuf.storage.values import UNSET, StorageItem, Unset
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


class Table:
    """Items that are inserted with a priority, sampled, and removed beyond `max_size`, in a database.

    `sampler` and `remover` are of the module `selectors`, `rate_limiter` is of `rate_limiters`. An item is removed with
    its sample number `max_times_sampled`; below 1, never.
    `url` is the database, and `options` are further ones of ReplayBufferConfig, such as `seed` or `durability`. A table
    without a url is a definition: for a `Client`, or for `replace(url=...)`. All processes that open a table of this
    name should have the same definition.

    `buffer` is the underlying replay buffer, for features that Reverb lacks: leases, queries, tags, metrics. The name
    of the table is that of its buffer and of the buffer's only task.

    Raises ConfigError, with the name of the argument, for unsupported values.
    """

    def __init__(
        self,
        name: str,
        sampler: Selector,
        remover: Selector,
        max_size: int,
        rate_limiter: RateLimiter,
        max_times_sampled: int = 0,
        extensions: Any = (),
        signature: Any = None,
        *,
        url: str | None = None,
        **options: Any,
    ) -> None:
        arguments = {
            "name": name,
            "sampler": sampler,
            "remover": remover,
            "max_size": max_size,
            "rate_limiter": rate_limiter,
            "max_times_sampled": max_times_sampled,
            "url": url,
        }
        if extensions:
            raise ConfigError(f"table {name}: extensions can't be run here; leave them out")
        if signature is not None:
            raise ConfigError(f"table {name}: signature is not checked here, items may hold any values; leave it out")
        config, self._arguments = table_config(arguments, options), {**arguments, **options}
        self.name, self.url = name, url
        self.sampler, self.remover, self.rate_limiter = sampler, remover, rate_limiter
        self.max_size, self.max_times_sampled = max_size, config.max_times_sampled
        self._exponent = exponent_of(sampler, remover)
        self._buffer = None if url is None else config.build()

    @classmethod
    def queue(cls, name: str, max_size: int, **options: Any) -> Self:
        """Return a table that is a bounded queue: oldest first, each item once; inserts wait when it is full."""
        return cls(name, Fifo(), Fifo(), max_size, Queue(max_size), 1, **options)

    @classmethod
    def stack(cls, name: str, max_size: int, **options: Any) -> Self:
        """Return a table that is a bounded stack: newest first, each item once; inserts wait when it is full."""
        return cls(name, Lifo(), Lifo(), max_size, Stack(max_size), 1, **options)

    def replace(self, **changes: Any) -> Self:
        """Return a table with this one's definition, except for the given arguments."""
        return type(self)(**{**self._arguments, **changes})

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self._arguments), ()

    def __repr__(self) -> str:
        limiter = self.rate_limiter
        return f"Table({self.name!r}, {self.sampler}, {self.remover}, max_size={self.max_size}, {limiter})"

    # Opening

    @property
    def buffer(self) -> ReplayBuffer[Any]:
        """The underlying buffer. Raises InputError for a table without a url."""
        if self._buffer is None:
            raise InputError(f"table {self.name} has no url: give it one, or give the table to a Client")
        return self._buffer

    async def __aenter__(self) -> Self:
        await self.buffer.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all waits with ClosedError, and release the database. Idempotent."""
        await self.buffer.close()

    # Items

    async def insert(
        self, data: Any, priority: float = 1.0, *, key: str | None = None, timeout: float | Unset | None = UNSET
    ) -> int:
        """Store an item and return its key; it is committed when this returns.

        `data` is a number, a text, an array or tensor, or nested lists, tuples and dicts of them; the option `types`
        names the classes of named tuples in it. An item with the same text `key` is replaced. If the rate limiter
        blocks it, the insert waits for up to `timeout` seconds (default: `put_timeout` of the options, 600; None: for
        ever), then it raises FullError.
        """
        uid = await self.buffer.put(
            [{_DATA: data}],
            self.name,
            priority=weight_of(priority, self._exponent),
            key=key,
            status=Status.COMPLETED,
            timeout=timeout,
        )
        assert uid is not None
        return uid

    async def sample(
        self, num_samples: int = 1, *, timeout: float | None = SAMPLE_TIMEOUT, at_least: int | None = None
    ) -> list[ReplaySample]:
        """Sample `num_samples` different items, in one transaction.

        Waits until there are that many, or `at_least` as many, for up to `timeout` seconds (None: for ever); then
        raises NotReadyError, with the reason. With a timeout of 0 it returns the available ones. Reverb's client, like
        `Client.sample`, samples one item after the other, possibly the same one again. With a `Prioritized` sampler
        each call reads the priorities of all items.
        """
        batch = await self.buffer.sample({self.name: num_samples}, timeout=timeout, at_least=at_least, beta=1)
        size = _table_size(batch[self.name])
        return [self._sample(item, size) for item in batch[self.name]]

    async def update_priorities(self, priorities: Mapping[int, float]) -> int:
        """Set the priorities of items by key. Return the number of these items that still exist."""
        if not isinstance(priorities, Mapping):
            raise InputError(f"expected a dict of keys and priorities, got {type(priorities).__name__}")
        weights = {key: weight_of(priority, self._exponent) for key, priority in priorities.items()}
        return await self.buffer.update_priorities(weights)

    async def delete(self, keys: Iterable[int]) -> int:
        """Remove items by key. Return the number of items removed."""
        uids = check_list(keys, "keys")
        return await self.buffer.delete({"task_name": self.name, "uid": {"$in": uids}}) if uids else 0

    async def reset(self) -> int:
        """Remove all items. Return their number.

        The rate limiter keeps its error, which stays within its range; Reverb's is reset to 0.
        """
        return await self.buffer.delete({"task_name": self.name})

    # Reading

    async def can_sample(self, num_samples: int) -> bool:
        """Return whether `sample` would not block."""
        return await self.buffer.is_ready({self.name: num_samples})

    async def can_insert(self, num_inserts: int) -> bool:
        """Return whether this number of inserts would not block."""
        level = level_of(await self.buffer.tallies(), self.name)
        room = self.buffer.limits.insertable(level, Status.COMPLETED)
        return room is None or room >= num_inserts

    def _sample(self, item: StorageItem[Any], table_size: int) -> ReplaySample:
        assert item.probability is not None
        info = SampleInfo(
            key=item.uid,
            probability=item.probability if self.sampler.is_random else 1.0,
            table_size=table_size,
            priority=priority_of(item.priority, self._exponent),
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


_CONFIG_PREFIX = f"{ReplayBufferConfig[Any].__name__}: "
# The names of limits in errors, and Reverb's names.
_REVERB_OPTIONS = {"capacity": "max_size", "min_size": "min_size_to_sample"}


def table_config(arguments: Mapping[str, Any], options: Mapping[str, Any]) -> ReplayBufferConfig[Any]:
    """Return the config of the buffer of a table with these arguments; `options` are further ones of the config.

    Raises ConfigError, which names the table's arguments.
    """
    name, url = arguments["name"], arguments["url"]
    try:
        check_task_name(name, "name")
    except InputError as error:
        raise ConfigError(f"a table's {error}") from None

    def config_error(text: str) -> ConfigError:
        return ConfigError(f"table {name}: {text}")

    for argument, kind in (("sampler", Selector), ("remover", Selector), ("rate_limiter", RateLimiter)):
        if not isinstance(arguments[argument], kind):
            raise config_error(f"{argument} must be one of {kind.__module__}, got {arguments[argument]!r}")
    times = whole(arguments["max_times_sampled"])
    if times is None:
        raise config_error(f"max_times_sampled must be a whole number, got {arguments['max_times_sampled']!r:.100}")
    settings = {
        "name": name,
        "policy": arguments["sampler"].policy,
        "remover": arguments["remover"].policy,
        "capacity": arguments["max_size"],
        "max_times_sampled": max(0, times),
        "rollout_type": dict,
        **arguments["rate_limiter"].limits,
    }
    if duplicates := sorted(settings.keys() & options.keys()):
        raise config_error(f"{', '.join(duplicates)} is what the arguments of the table say; leave it out")
    try:
        config = ReplayBufferConfig[Any](url="memory://" if url is None else url, **settings, **options)
        config.rules()
    except ConfigError as error:
        words = re.sub(r"\b(capacity|min_size)\b", lambda match: _REVERB_OPTIONS[match[0]], str(error))
        raise config_error(words.removeprefix(_CONFIG_PREFIX)) from None
    return config
