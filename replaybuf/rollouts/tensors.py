"""Token fields and rewards that are tensors: read as arrays, extended and copied as what they are.

Nothing is imported for it: tensors are known by what they can do.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

_NUMBERS = (list, np.ndarray)


def is_tensor(values: Any) -> bool:
    """Return whether this is a torch tensor, or stands for one."""
    return type(values) is not list and hasattr(values, "detach") and hasattr(values, "new_full")


def as_array(values: Any) -> Any:
    """Return a tensor, or what else gives its numbers as an array, as one; anything else as it is.

    ValueError for a tensor that has no numbers to read.
    """
    if values is None or isinstance(values, _NUMBERS):
        return values
    if is_tensor(values):
        try:
            return _numbers(values.detach().cpu())
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"a tensor of {values.dtype} can't be read: {error}") from error
    return np.asarray(values) if hasattr(values, "__array__") else values


def _numbers(tensor: Any) -> Any:
    try:
        return tensor.numpy()
    except TypeError:  # a float that numpy doesn't have
        return tensor.float().numpy()


def extended(tokens: Any, count: int, number: int) -> Any:
    """Return a tensor of tokens with `count` times this number behind them. ValueError when it isn't a row of them."""
    try:
        return sys.modules["torch"].cat([tokens, tokens.new_full((count,), number)])
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def repeated(number: int, count: int, like: Any) -> Any:
    """Return an int32 tensor of `count` times this number, where the tensor `like` is."""
    return like.new_full((count,), number, dtype=getattr(sys.modules.get("torch"), "int32", None))


def copied(values: Any) -> Any:
    """Return a copy of tokens that shares nothing with them, of the same kind; None for None."""
    if values is None:
        return None
    if is_tensor(values):
        return values.detach().clone()
    return values.copy() if hasattr(values, "copy") else list(values)
