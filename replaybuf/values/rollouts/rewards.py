"""Rewards as numbers, for SQL, orders and means; and tokens in lists, arrays and tensors alike."""

from __future__ import annotations

import sys
from numbers import Real
from typing import Any, Final

import numpy as np

#: The part of a dict reward that is the number, unless the config names another.
SCORE: Final = "score"

#: Larger numbers count as not finite: sums of their squares, in SQL and in Python, aren't.
_LARGEST: Final = 1e100


def reward_value(reward: Any, key: str = SCORE) -> float | None:
    """Return a reward as a number: itself, or the part `key` of a dict; None if missing, not a number, not finite or
    beyond 1e100.

    A tensor or array of one element counts as that number.
    """
    if isinstance(reward, dict):
        reward = reward.get(key)
    if type(reward) is float:  # nearly all are
        return reward if -_LARGEST <= reward <= _LARGEST else None
    if reward is not None and not isinstance(reward, Real):
        reward = _single_number(reward)
    if reward is None:
        return None
    try:
        value = float(reward)
    except (OverflowError, TypeError, ValueError):  # an int too large for a float, or a numpy.timedelta64
        return None
    return value if -_LARGEST <= value <= _LARGEST else None


def _single_number(values: Any) -> Real | None:
    """Return the single number of a tensor or array, or None."""
    try:
        array = as_array(values)
    except ValueError:
        return None
    number = array.item() if isinstance(array, np.ndarray) and array.size == 1 else None
    return number if isinstance(number, Real) else None


# Tokens

_NUMBERS = (list, np.ndarray)


def is_tensor(values: Any) -> bool:
    """Return whether this is a torch tensor, or a stand-in for one."""
    return type(values) is not list and hasattr(values, "detach") and hasattr(values, "new_full")


def as_array(values: Any) -> Any:
    """Return a tensor or another object with `__array__` as a numpy array; other values unchanged.

    Raises ValueError for a tensor that can't be read.
    """
    if values is None or isinstance(values, _NUMBERS):
        return values
    if is_tensor(values):
        try:
            return _as_numpy(values.detach().cpu())
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"a tensor of {values.dtype} can't be read: {error}") from error
    return np.asarray(values) if hasattr(values, "__array__") else values


def _as_numpy(tensor: Any) -> Any:
    try:
        return tensor.numpy()
    except TypeError:  # a float type unknown to numpy
        return tensor.float().numpy()


def extended(tokens: Any, count: int, number: int) -> Any:
    """Return a tensor of tokens with `number` appended `count` times. Raises ValueError unless it is 1-dimensional."""
    try:
        return sys.modules["torch"].cat([tokens, tokens.new_full((count,), number)])
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def repeated(number: int, count: int, like: Any) -> Any:
    """Return an int32 tensor that repeats `number` `count` times, on the device of `like`."""
    return like.new_full((count,), number, dtype=getattr(sys.modules.get("torch"), "int32", None))


def copied(values: Any) -> Any:
    """Return an independent copy of tokens, of the same type; None for None."""
    if values is None:
        return None
    if is_tensor(values):
        return values.detach().clone()
    return values.copy() if hasattr(values, "copy") else list(values)
