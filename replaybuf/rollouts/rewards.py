"""Rewards as numbers, for SQL, orders and means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Final

import numpy as np

from replaybuf.rollouts.fields import as_array

#: The part of a dict reward that is the number, unless the config names another.
SCORE: Final = "score"

_NAMED = 5


def reward_value(reward: Any, key: str = SCORE) -> float | None:
    """Return a reward as a number: itself, or the part `key` of a dict; None if missing, not a number or not finite.

    A tensor or array of one element counts as that number.
    """
    if isinstance(reward, dict):
        reward = reward.get(key)
    if type(reward) is float:  # nearly all are
        return reward if math.isfinite(reward) else None
    if reward is not None and not isinstance(reward, Real):
        reward = _single(reward)
    if reward is None:
        return None
    try:
        value = float(reward)
    except (OverflowError, TypeError, ValueError):  # an int too large for a float, or a numpy.timedelta64
        return None
    return value if math.isfinite(value) else None


def unreadable(reward: Any, key: str = SCORE) -> str | None:
    """Describe a reward that `reward_value` can't read; None for readable and missing rewards."""
    if reward is None or reward_value(reward, key) is not None:
        return None
    if isinstance(reward, Mapping):
        if key in reward:
            part = unreadable(reward[key], key)
            return None if part is None else f"{key!r}: {part}"
        return f"a dict without {key!r}"
    if isinstance(reward, str):
        return "a text"
    if isinstance(reward, Real):
        return _out_of_range(reward)
    if isinstance(reward, (list, tuple)):
        return f"a {type(reward).__name__} of {len(reward)}"
    size = getattr(_array(reward), "size", None)
    if size is None:
        return f"a {type(reward).__name__}"
    single = _single(reward)
    return f"an array of {size}" if single is None else _out_of_range(single)


def numeric_parts(reward: Any) -> Sequence[str]:
    """Return the first few keys of a dict reward with numeric parts: candidates for `reward_key`."""
    parts = reward.items() if isinstance(reward, Mapping) else ()
    return [name for name, part in parts if isinstance(name, str) and reward_value(part) is not None][:_NAMED]


def _array(values: Any) -> np.ndarray[Any, Any] | None:
    try:
        array = as_array(values)
    except ValueError:
        return None
    return array if isinstance(array, np.ndarray) else None


def _out_of_range(number: Real) -> str:
    """Describe a number that isn't a finite double."""
    try:
        float(number)
    except OverflowError:
        return "a number too large for a double"
    except (TypeError, ValueError):  # a numpy.timedelta64
        return f"a {type(number).__name__}"
    return "a number that isn't finite"


def _single(values: Any) -> Real | None:
    """Return the single number of a tensor or array, or None."""
    array = _array(values)
    if array is None or array.size != 1:
        return None
    number = array.item()
    return number if isinstance(number, Real) else None
