"""numpy arrays and scalars in payloads: how they are stored and rebuilt.

An array is *plain* when its dtype isn't structured and it is in C order. Nearly all are, so those are stored in the
form that is fastest to read: a *head*, which is length of dtype (u8) | dimensions (u8) | dtype | shape (u64 each), and
the bytes after it or, of larger arrays, out of band: after the msgpack of all rollouts. Others are stored as `[dtype,
shape, order, bytes]`, scalars as `[dtype, bytes]`, arrays of objects as `[shape, order, items]`. A dtype is stored as
its `str` ("<i8", ">f4", "<M8[ns]") or, when structured, as its `descr`. Nothing from a payload reaches `np.dtype`
before it has matched the grammar below, which has no objects.

Out-of-band bytes are written from the arrays' own memory and read without a copy. They lie in the order in which the
msgpack refers to them, each at the next offset in the payload that is a multiple of 64. So no reference has to give an
offset, and no two of them can refer to the same bytes.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final, Literal

import msgpack  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt

from replaybuf.codec.extension_types import OUT_OF_BAND_ARRAY, PLAIN_ARRAY, wrapped
from replaybuf.codec.payload_header import ALIGNMENT

AnyArray = npt.NDArray[Any]

_SIMPLE = re.compile(r"[<>|](b1|[iu][1248]|f(2|4|8|12|16)|c(8|16|24|32)|[mM]8(\[\d{0,9}[a-zA-Z]+\])?|[SUV]\d{1,9})")
_MAX_NESTING = 16
_SHAPES = tuple(struct.Struct(f"<{dimensions}Q") for dimensions in range(65))  # numpy's limit
_WHY_NOT = {
    "O": "some of its fields hold Python objects; use a list of dicts, or a dtype that says what they hold",
    "T": "use a fixed-width dtype ('U') or a list of str",
}


@lru_cache(maxsize=4096)
def read_head(head: bytes) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the dtype and the shape of a plain array. Raises any exception when they make no sense."""
    shape_at = 2 + head[0]
    return _simple_dtype(head[2:shape_at].decode("ascii")), _SHAPES[head[1]].unpack(head[shape_at:])


def decode_plain_array(content: bytes) -> AnyArray:
    """Return the plain array whose bytes are in `content`: writable, aligned, in its own memory.

    Raises any exception when the content makes no sense; takes no more memory than the content.
    """
    data_at = 2 + content[0] + 8 * content[1]
    dtype, shape = read_head(content[:data_at])
    array: AnyArray = np.ndarray(shape, dtype, content, data_at)
    if array.nbytes != len(content) - data_at:
        raise ValueError(f"an array of shape {shape!r:.80} can't have {len(content) - data_at} bytes")
    return array.copy()


def encode_array(array: AnyArray) -> list[Any]:
    """Return the stored form of an array. TypeError for dtypes that would not round-trip."""
    order: Literal["C", "F"] = "F" if array.flags.fnc else "C"
    return [describe_dtype(array.dtype), list(array.shape), order, array.tobytes(order)]


def decode_array(content: Any) -> AnyArray:
    """Return the array stored as `content`: writable, aligned, in its own memory.

    ValueError or TypeError when the content makes no sense; takes no more memory than the content.
    """
    description, shape, order, raw = content
    if order not in ("C", "F"):
        raise ValueError(f"unknown array order {order!r:.80}")
    array: AnyArray = np.ndarray(shape, build_dtype(description), raw, order=order)
    if array.nbytes != len(raw) or list(array.shape) != shape:  # numpy takes -1 for "whatever fits"
        raise ValueError(f"an array of shape {shape!r:.80} can't have {len(raw)} bytes")
    return array.copy(order)


def encode_objects(array: AnyArray) -> list[Any]:
    """Return the stored form of an array of dtype object, whose items are values like any others."""
    order: Literal["C", "F"] = "F" if array.flags.fnc else "C"
    return [list(array.shape), order, wrapped(array.ravel(order).tolist())]


def decode_objects(content: list[Any]) -> AnyArray:
    """Return the array of objects stored as `content`; errors and memory as in `decode_array`."""
    shape, order, items = content
    if order not in ("C", "F") or type(shape) is not list or type(items) is not list:
        raise ValueError("no array of objects")
    if len(shape) >= len(_SHAPES) or min(shape, default=0) < 0 or math.prod(shape) != len(items):
        raise ValueError(f"an array of shape {shape!r:.80} can't have {len(items)} items")
    array: AnyArray = np.empty(shape, object, order)
    flat = array.reshape(-1, order=order)
    for place, item in enumerate(items):  # one by one: numpy would unpack items that are lists
        flat[place] = item
    return array


def encode_scalar(value: np.generic) -> list[Any]:
    """Return the stored form of a numpy scalar (not of `np.str_` and `np.bytes_`: arrays lose their trailing zeros)."""
    return [describe_dtype(value.dtype), value.tobytes()]


def decode_scalar(content: Any) -> Any:
    """Return the numpy scalar stored as `content`; errors as in `decode_array`."""
    description, raw = content
    return decode_array([description, [], "C", raw])[()]


@lru_cache(maxsize=512)
def describe_dtype(dtype: np.dtype[Any]) -> Any:
    """Return the stored form of a dtype. TypeError, with advice, when `build_dtype` could not restore it."""
    advice = _WHY_NOT["O"] if dtype.hasobject and dtype.kind != "T" else _WHY_NOT.get(dtype.kind, "")
    if not advice:
        try:
            description = dtype.str if dtype.names is None else dtype.descr
            rebuilt = build_dtype(description)
            if rebuilt == dtype and rebuilt.type is dtype.type:
                return description
        except (TypeError, ValueError) as error:
            advice = str(error)
    raise TypeError(f"a numpy dtype {dtype} can't be stored: {advice or 'convert it to a dtype of numpy itself'}")


def build_dtype(description: Any) -> np.dtype[Any]:
    """Return the dtype with this description. ValueError when the description is outside the grammar."""
    if isinstance(description, str):
        return _simple_dtype(description)
    _check_structured(description, 0)
    return _with_size(np.lib.format.descr_to_dtype(description))


@lru_cache(maxsize=512)
def _simple_dtype(description: str) -> np.dtype[Any]:
    if not _SIMPLE.fullmatch(description):
        raise ValueError(f"unknown dtype {description!r}")
    return _with_size(np.dtype(description))


def _with_size(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.itemsize == 0:  # a few bytes of payload could then claim any number of items
        raise ValueError("its items have no size")
    return dtype


def _check_structured(description: Any, depth: int) -> None:
    """Raise ValueError unless this is a list of `(name, dtype)` or `(name, dtype, shape)`, nested dtypes included."""
    if isinstance(description, str) and _SIMPLE.fullmatch(description):
        return
    if not isinstance(description, list) or depth > _MAX_NESTING:
        raise ValueError(f"unknown dtype {description!r:.80}")
    for field in description:
        if not isinstance(field, tuple) or len(field) not in (2, 3):
            raise ValueError(f"unknown dtype field {field!r:.80}")
        _check_structured(field[1], depth + 1)


_Extension: Final = msgpack.ExtType
_make: Final = tuple.__new__  # without the checks of ExtType.__new__
_PADDING: Final = tuple(map(bytes, range(ALIGNMENT)))
#: Smaller arrays are in the msgpack: written faster and read slower there, and without padding.
_SMALLEST: Final = 256
#: An array that is kept keeps no more than this many times its own bytes in memory.
_MOST_KEPT: Final = 64


class RawBytes(np.ndarray[Any, Any]):
    """Bytes as an array, of a value that isn't one. They are read as an array of this dtype and shape."""


def array_reference(array: AnyArray, out_of_band: list[Any]) -> Any:
    """Return the object that msgpack packs for a plain array, None for others. Large ones are added to `out_of_band`.

    TypeError for dtypes that would not round-trip.
    """
    contiguous = array.flags.c_contiguous
    if (known := _known(array.dtype, array.shape)) is None or (not contiguous and array.flags.fnc):
        return None
    extension, lent = known
    if array.nbytes < _SMALLEST:
        return _make(_Extension, (PLAIN_ARRAY, extension.data + array.tobytes()))
    out_of_band.append(array if lent and contiguous else array.tobytes())
    return extension


@lru_cache(maxsize=4096)
def _known(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[Any, bool] | None:
    """Return the reference to such an array, and whether numpy lends its memory; None for what isn't plain."""
    description = "" if dtype.char == "O" else describe_dtype(dtype)
    if not description or type(description) is not str:
        return None
    head = bytes((len(description), len(shape))) + description.encode("ascii") + _SHAPES[len(shape)].pack(*shape)
    return _make(_Extension, (OUT_OF_BAND_ARRAY, head)), dtype.kind not in "mM"


def aligned(out_of_band: Iterable[Any], sizes: Iterable[int], end: int) -> tuple[list[Any], int]:
    """Return the buffers with padding, to follow the first `end` bytes of a payload, and the offset of their end."""
    parts = []
    for one, size in zip(out_of_band, sizes, strict=True):
        if padding := -end % ALIGNMENT:
            parts.append(_PADDING[padding])
        parts.append(one)
        end += padding + size
    return parts, end


def sizes_of(out_of_band: Iterable[Any]) -> list[int]:
    """Return the sizes of out-of-band buffers, in bytes."""
    return [len(one) if type(one) is bytes else one.nbytes for one in out_of_band]


class OutOfBandReader:
    """Reads the out-of-band arrays of a payload, which follow its byte `end`, in their order.

    `memory` has the bytes of the payload from byte `base` on, to its end. If it `lends` itself, as it may where nothing
    else refers to it, arrays live in it, except small ones, which would keep far more than themselves. Otherwise each
    has memory of its own.
    """

    __slots__ = ("_base", "_end", "_least", "_lends", "_memory", "_size")

    def __init__(self, memory: Any, base: int, end: int, *, lends: bool) -> None:
        self._base, self._end, self._size = base, end, base + len(memory)
        self._lends = lends
        self._memory: Any = as_writable(memory) if lends and type(memory) is bytes else memory
        self._least = len(memory) // _MOST_KEPT

    def read(self, head: bytes) -> AnyArray:
        """Return the next array, of this dtype and shape: writable, aligned. Raises any exception when there is none.

        Takes no more memory than the array's bytes.
        """
        dtype, shape = read_head(head)
        at = self._end + -self._end % ALIGNMENT
        array: AnyArray = np.ndarray(shape, dtype, self._memory, at - self._base)
        self._end = at + array.nbytes
        return array if self._lends and array.nbytes >= self._least else array.copy()

    def small(self, array: AnyArray) -> Any:
        """Return an array that is in the msgpack."""
        return array

    def defer(self, deferred: bool) -> None:
        """Do nothing: no array is deferred."""

    def finish(self) -> None:
        """Raise ValueError unless the last array ended where the payload ends."""
        if self._end != self._size:
            raise ValueError("its lengths don't add up")


class _Memory:
    """The memory of bytes, as numpy asks for it: writable."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        address = np.frombuffer(raw, np.uint8).__array_interface__["data"][0]
        self.__array_interface__ = {"shape": (len(raw),), "typestr": "|u1", "data": (address, False), "version": 3}


def as_writable(raw: bytes) -> AnyArray:
    """Return a writable array in the memory of bytes to which there is no other reference, which saves a copy.

    Python shares bytes of length 0 and 1 in the whole process: those are copied.
    """
    if len(raw) < 2:
        return np.frombuffer(bytearray(raw), np.uint8)
    return np.asarray(_Memory(raw))
