"""The definition of a Reverb table: a buffer of its own, with one task, where every group is one item."""

from __future__ import annotations

from typing import Any, Self

from replaybuf.common.checks import shown, whole
from replaybuf.config import ReplayBufferConfig
from replaybuf.errors import ConfigError
from replaybuf.integrations.reverb.rate_limiters import Queue, RateLimiter
from replaybuf.integrations.reverb.selectors import Fifo, Lifo, Selector, exponent_of

#: Reverb's arguments that may be given without a value.
_NOT_HERE = ("signature", "extensions")


class Table:
    """The definition of a table: items are inserted with a priority, sampled, and removed beyond `max_size`.

    `sampler` and `remover` are of the module `selectors`, `rate_limiter` is of `rate_limiters`. An item is removed with
    its sample number `max_times_sampled`; with 0 or less, never. `options` are further ones of ReplayBufferConfig, such
    as `seed` or `durability`. All processes that open a table of this name should have the same definition.

    Raises ConfigError for what can't work, in the words of the config: `max_size` is its `capacity`.
    """

    def __init__(
        self,
        name: str,
        sampler: Selector,
        remover: Selector,
        max_size: int,
        rate_limiter: RateLimiter,
        max_times_sampled: int = 0,
        **options: Any,
    ) -> None:
        arguments = (("sampler", sampler, Selector), ("remover", remover, Selector))
        for argument, value, kind in (*arguments, ("rate_limiter", rate_limiter, RateLimiter)):
            if not isinstance(value, kind):
                raise ConfigError(f"table {name}: {argument} must be one of {kind.__module__}, got {value!r}")
        if (times := whole(max_times_sampled)) is None:
            raise ConfigError(f"table {name}: max_times_sampled must be a whole number, got {shown(max_times_sampled)}")
        self.name, self.sampler = name, sampler
        self.exponent = exponent_of(sampler, remover)
        settings = {
            "name": name,
            "policy": sampler.policy,
            "remover": remover.policy,
            "capacity": max_size,
            "max_times_sampled": max(0, times),
            "rollout_type": dict,
            **rate_limiter.limits,
        }
        if twice := {*settings, "url"} & options.keys():
            raise ConfigError(f"table {name}: {', '.join(sorted(twice))} is said by the table's own arguments")
        self._settings = settings | {key: value for key, value in options.items() if value or key not in _NOT_HERE}
        self.config("memory://")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @classmethod
    def queue(cls, name: str, max_size: int, **options: Any) -> Self:
        """Return a table that is a bounded queue: oldest first, each item once; inserts wait when it is full."""
        return cls(name, Fifo(), Fifo(), max_size, Queue(max_size), 1, **options)

    @classmethod
    def stack(cls, name: str, max_size: int, **options: Any) -> Self:
        """Return a table that is a bounded stack: newest first, each item once; inserts wait when it is full."""
        return cls(name, Lifo(), Lifo(), max_size, Queue(max_size), 1, **options)

    def config(self, url: str) -> ReplayBufferConfig[Any]:
        """Return the config of the buffer that has the table's items, in a task of its name. Raises ConfigError."""
        try:
            return ReplayBufferConfig[Any](url=url, **self._settings)
        except ConfigError as error:
            raise ConfigError(f"table {self.name}: {error}") from None
