"""The definition of a table: its arguments, checked, and the config of its buffer."""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from replaybuf.checks import check_task_name, whole
from replaybuf.config import ReplayBufferConfig
from replaybuf.errors import ConfigError, InputError
from replaybuf.readable_config import nearest
from replaybuf.reverb.rate_limiters import RateLimiter
from replaybuf.reverb.selectors import Selector
from replaybuf.rollouts.shapes import is_namedtuple

#: Where a named tuple is in the data, as indices and keys from the outside, the name of its class, and of its fields.
Named = list[Any]


def unnamed(data: Any, known: Collection[Any]) -> tuple[Any, list[Named]]:
    """Return the data with plain tuples, and what makes them named again, the outermost first."""
    found: list[Named] = []
    try:
        return _unnamed(data, (), known, found), found
    except RecursionError:  # nested too deeply, or in itself: storing it says so
        return data, []


def _unnamed(data: Any, path: tuple[Any, ...], known: Collection[Any], found: list[Named]) -> Any:
    kind = type(data)
    if kind is dict:
        return {key: _unnamed(value, (*path, key), known, found) for key, value in data.items()}
    if isinstance(data, tuple) and is_namedtuple(kind) and kind not in known:
        found.append([list(path), kind.__name__, list(kind._fields)])
    elif kind not in (list, tuple):
        return data
    values = [_unnamed(value, (*path, place), known, found) for place, value in enumerate(data)]
    return values if kind is list else tuple(values)


def named_again(data: Any, found: Sequence[Named]) -> Any:
    """Return the data of `unnamed` as they were."""
    for path, name, parts in reversed(found):  # the innermost first
        data = _replaced(data, path, _class(name, tuple(parts))._make)
    return data


def _replaced(data: Any, path: Sequence[Any], make: Callable[[Any], Any]) -> Any:
    if not path:
        return make(data)
    first, *rest = path
    value = _replaced(data[first], rest, make)
    if isinstance(data, tuple):
        values = (*data[:first], value, *data[first + 1 :])
        return values if type(data) is tuple else type(data)(*values)
    data[first] = value
    return data


@lru_cache(maxsize=1000)
def _class(name: str, fields: tuple[str, ...]) -> Any:
    return namedtuple(name, fields)


_CONFIG = f"{ReplayBufferConfig[Any].__name__}: "
# Errors of limits name these fields.
_REVERBS_WORDS = {"capacity": "max_size", "min_size": "min_size_to_sample"}


@dataclass(frozen=True)
class Definition:
    """The arguments of a table; `options` are those of ReplayBufferConfig. Raises ConfigError, as `config` does."""

    name: str
    sampler: Selector
    remover: Selector
    max_size: int
    rate_limiter: RateLimiter
    max_times_sampled: int
    url: str | None
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        try:
            check_task_name(self.name, "name")
        except InputError as error:
            raise ConfigError(f"a table's {error}") from None
        for argument, kind, module in (
            ("sampler", Selector, "selectors"),
            ("remover", Selector, "selectors"),
            ("rate_limiter", RateLimiter, "rate_limiters"),
        ):
            value = getattr(self, argument)
            if not isinstance(value, kind):
                raise self._wrong(f"{argument} must be one of replaybuf.reverb.{module}, got {value!r}")
        if whole(self.max_times_sampled) is None:
            raise self._wrong(f"max_times_sampled must be a whole number, got {self.max_times_sampled!r:.100}")

    @property
    def arguments(self) -> dict[str, Any]:
        """What makes the same table again."""
        return {**self._own, **self.options}

    @property
    def times_sampled(self) -> int:
        """How often an item is sampled; 0 for any number."""
        return max(0, whole(self.max_times_sampled) or 0)

    def config(self) -> ReplayBufferConfig[Any]:
        """Return the config of the buffer below. Errors name the table's arguments."""
        ours = {
            "name": self.name,
            "policy": self.sampler.policy,
            "remover": self.remover.policy,
            "capacity": self.max_size,
            "max_times_sampled": self.times_sampled,
            "rollout_type": dict,
            **self.rate_limiter.limits,
        }
        for name in ours:
            if name in self.options:
                raise self._wrong(f"{name} is what the arguments of the table say; leave it out")
        self._check_options(ours)
        try:
            config = ReplayBufferConfig[Any](url="memory://" if self.url is None else self.url, **ours, **self.options)
            config.rules()
        except ConfigError as error:
            words = re.sub(r"\b(capacity|min_size)\b", lambda match: _REVERBS_WORDS[match[0]], str(error))
            raise self._wrong(words.removeprefix(_CONFIG)) from None
        return config

    def _check_options(self, ours: Iterable[str]) -> None:
        """Raise ConfigError for an option that there isn't, with the nearest that there is."""
        further = [name for name in ReplayBufferConfig.model_fields if name not in ours]
        for name in self.options:
            if name not in further:
                near = nearest(name, [known for known in (*self._own, *further) if known not in self.options])
                hint = f"; did you mean {near}?" if near else f" (options: {', '.join(further)})"
                raise self._wrong(f"{name} is no option of a table{hint}")

    @property
    def _own(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "options"}

    def _wrong(self, what: str) -> ConfigError:
        return ConfigError(f"table {self.name}: {what}")
