"""What a table is in a buffer: its arguments as a config, checked, and the named tuples in its items."""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Callable, Collection, Mapping, Sequence
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
        data = _replaced(data, path, _named(name, tuple(parts))._make)
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


_named: Callable[[str, tuple[str, ...]], Any] = lru_cache(maxsize=1000)(namedtuple)

_CONFIG = f"{ReplayBufferConfig[Any].__name__}: "
# Errors of limits name these fields.
_REVERBS_WORDS = {"capacity": "max_size", "min_size": "min_size_to_sample"}


def table_config(arguments: Mapping[str, Any], options: Mapping[str, Any]) -> ReplayBufferConfig[Any]:
    """Return the config of the buffer below a table with these arguments; `options` are further ones of the config.

    Raises ConfigError, which names the table's arguments.
    """
    name, url = arguments["name"], arguments["url"]
    try:
        check_task_name(name, "name")
    except InputError as error:
        raise ConfigError(f"a table's {error}") from None

    def wrong(what: str) -> ConfigError:
        return ConfigError(f"table {name}: {what}")

    for argument, kind, module in (
        ("sampler", Selector, "selectors"),
        ("remover", Selector, "selectors"),
        ("rate_limiter", RateLimiter, "rate_limiters"),
    ):
        if not isinstance(arguments[argument], kind):
            raise wrong(f"{argument} must be one of replaybuf.reverb.{module}, got {arguments[argument]!r}")
    times = whole(arguments["max_times_sampled"])
    if times is None:
        raise wrong(f"max_times_sampled must be a whole number, got {arguments['max_times_sampled']!r:.100}")
    ours = {
        "name": name,
        "policy": arguments["sampler"].policy,
        "remover": arguments["remover"].policy,
        "capacity": arguments["max_size"],
        "max_times_sampled": max(0, times),
        "rollout_type": dict,
        **arguments["rate_limiter"].limits,
    }
    further = [field for field in ReplayBufferConfig.model_fields if field not in ours]
    for option in options:
        if option in ours:
            raise wrong(f"{option} is what the arguments of the table say; leave it out")
    for option in options:
        if option not in further:
            near = nearest(option, [known for known in (*arguments, *further) if known not in options])
            hint = f"; did you mean {near}?" if near else f" (options: {', '.join(further)})"
            raise wrong(f"{option} is no option of a table{hint}")
    try:
        config = ReplayBufferConfig[Any](url="memory://" if url is None else url, **ours, **options)
        config.rules()
    except ConfigError as error:
        words = re.sub(r"\b(capacity|min_size)\b", lambda match: _REVERBS_WORDS[match[0]], str(error))
        raise wrong(words.removeprefix(_CONFIG)) from None
    return config
