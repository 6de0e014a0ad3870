"""numpy arrays and scalars in payloads: dtypes, scalars, and arrays of objects (other arrays: `codec.blocks`).

Scalars are `[dtype, bytes]`, arrays of objects `[shape, items]`. A dtype is stored as its `str` ("<i8", ">f4",
"<M8[ns]"). It is passed to `np.dtype` only after it has matched the grammar below, which has no objects and no
structured dtypes.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from replaybuf.codec.extension_types import checked

AnyArray = npt.NDArray[Any]

_SIMPLE = re.compile(r"[<>|](b1|[iu][1248]|f(2|4|8|12|16)|c(8|16|24|32)|[mM]8(\[\d{0,9}[a-zA-Z]+\])?|[SU]\d{1,9})")
_MOST_DIMENSIONS = 64  # numpy's limit
_WHY_NOT = {
    "V": "store a dict of its fields, an array for each",
    "T": "use a fixed-width dtype ('U') or a list of str",
}


def encode_objects(array: AnyArray) -> list[Any]:
    """Return the stored form of an array of dtype object, whose items may be any values."""
    return [list(array.shape), checked(array.ravel().tolist())]


def decode_objects(content: list[Any]) -> AnyArray:
    """Return the array of objects stored as `content`. ValueError or TypeError for an invalid content."""
    shape, items = content
    if type(shape) is not list or type(items) is not list:
        raise ValueError("no array of objects")
    if len(shape) > _MOST_DIMENSIONS or min(shape, default=0) < 0 or math.prod(shape) != len(items):
        raise ValueError(f"an array of shape {shape!r:.80} can't have {len(items)} items")
    array: AnyArray = np.empty(shape, object)
    flat = array.reshape(-1)
    for place, item in enumerate(items):  # one by one: numpy would unpack items that are lists
        flat[place] = item
    return array


def encode_scalar(value: np.generic) -> list[Any]:
    """Return the stored form of a numpy scalar (except `np.str_` and `np.bytes_`: arrays lose their trailing zeros)."""
    return [describe_dtype(value.dtype), value.tobytes()]


def decode_scalar(content: Any) -> Any:
    """Return the numpy scalar stored as `content`. ValueError or TypeError for an invalid content."""
    description, raw = content
    dtype = simple_dtype(description)
    if len(raw) != dtype.itemsize:
        raise ValueError(f"a {description} can't have {len(raw)} bytes")
    return np.frombuffer(raw, dtype)[0]


@lru_cache(maxsize=512)
def describe_dtype(dtype: np.dtype[Any]) -> str:
    """Return the stored form of a dtype. TypeError, with advice, when `simple_dtype` could not restore it."""
    advice = _WHY_NOT.get(dtype.kind, "")
    if not advice:
        try:
            rebuilt = simple_dtype(dtype.str)
            if rebuilt == dtype and rebuilt.type is dtype.type:
                return dtype.str
        except (TypeError, ValueError) as error:
            advice = str(error)
    raise TypeError(f"a numpy dtype {dtype} can't be stored: {advice or 'convert it to a dtype of numpy itself'}")


@lru_cache(maxsize=512)
def simple_dtype(description: str) -> np.dtype[Any]:
    """Return the dtype with this description. ValueError when the description is outside the grammar."""
    if type(description) is not str or not _SIMPLE.fullmatch(description):
        raise ValueError(f"unknown dtype {description!r:.80}")
    dtype = np.dtype(description)
    if dtype.itemsize == 0:  # a few bytes could then claim any number of items
        raise ValueError("its items have no size")
    return dtype
