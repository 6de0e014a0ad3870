"""The bytes of arrays behind the msgpack of a payload: written from the arrays' own memory, read without a copy.

They lie in the order in which the msgpack refers to them, each at the next place in the payload that is a multiple of
64. So no reference has to say where its bytes are, and no two of them can mean the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]
import numpy as np

from replaybuf.codec.arrays import AnyArray, head_of, read_head
from replaybuf.codec.marks import ARRAY_BEHIND, PLAIN_ARRAY

_Extension: Final = msgpack.ExtType
_make: Final = tuple.__new__  # its own would check what is known here
_ALIGNMENT: Final = 64
_PADDING: Final = tuple(map(bytes, range(_ALIGNMENT)))
#: Smaller arrays are in the msgpack: written faster and read slower there, and without padding.
_SMALLEST: Final = 256
#: An array that is kept keeps no more than this many times its own bytes in memory.
_MOST_KEPT: Final = 64


class Octets(np.ndarray[Any, Any]):
    """Bytes as an array, of a value that isn't one. They are read as an array of this dtype and shape."""


def reference(array: AnyArray, behind: list[Any]) -> Any:
    """Return what msgpack packs for a plain array, whose bytes may be added to those `behind`; None for others.

    TypeError for dtypes that would not round-trip.
    """
    contiguous = array.flags.c_contiguous
    if (known := _known(array.dtype, array.shape)) is None or (not contiguous and array.flags.fnc):
        return None
    extension, lent = known
    if array.nbytes < _SMALLEST:
        return _make(_Extension, (PLAIN_ARRAY, extension.data + array.tobytes()))
    behind.append(array if lent and contiguous else array.tobytes())
    return extension


@lru_cache(maxsize=4096)
def _known(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[Any, bool] | None:
    """Return the reference to such an array, and whether numpy lends its memory; None for what isn't plain."""
    head = head_of(dtype, shape)
    return None if head is None else (_make(_Extension, (ARRAY_BEHIND, head)), dtype.kind not in "mM")


def laid_out(behind: Iterable[Any], end: int) -> tuple[list[Any], int]:
    """Return the parts of a payload that follow its first `end` bytes, and where they end."""
    parts = []
    for one in behind:
        if padding := -end % _ALIGNMENT:
            parts.append(_PADDING[padding])
        parts.append(one)
        end += padding + (len(one) if type(one) is bytes else one.nbytes)
    return parts, end


class Behind:
    """The reading of the arrays behind the msgpack of a payload, which ends at byte `end` of its `body`.

    The body is in the payload from byte `start` on. Given the whole payload as `own` bytes, which nobody else will read
    or write, arrays live in its memory, except small ones, which would keep far more than themselves. Without, each has
    memory of its own.
    """

    __slots__ = ("_end", "_least", "_memory", "_shared", "_size", "_start")

    def __init__(self, body: memoryview, start: int, end: int, own: bytes | None) -> None:
        self._end, self._size = start + end, start + len(body)
        self._shared = own is not None and end < len(body)
        self._memory: Any = owned(own) if self._shared and own is not None else body
        self._start = 0 if self._shared else start
        self._least = self._size // _MOST_KEPT

    def restore(self, head: bytes) -> AnyArray:
        """Return the next array, of this dtype and shape: writable, aligned. Raises any exception when there is none.

        Takes no more memory than the array's bytes.
        """
        dtype, shape = read_head(head)
        at = self._end + -self._end % _ALIGNMENT
        array: AnyArray = np.ndarray(shape, dtype, self._memory, at - self._start)
        self._end = at + array.nbytes
        return array if self._shared and array.nbytes >= self._least else array.copy()

    def finish(self) -> None:
        """Raise ValueError unless the last array ended where the body ends."""
        if self._end != self._size:
            raise ValueError("its lengths don't add up")


class _Memory:
    """The memory of bytes, as numpy asks for it: writable."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        address = np.frombuffer(raw, np.uint8).__array_interface__["data"][0]
        self.__array_interface__ = {"shape": (len(raw),), "typestr": "|u1", "data": (address, False), "version": 3}


def owned(raw: bytes) -> AnyArray:
    """Return a writable array in the memory of bytes that nobody else holds, which saves a copy.

    Python shares bytes of length 0 and 1 among all who ask for them: those are copied.
    """
    if len(raw) < 2:
        return np.frombuffer(bytearray(raw), np.uint8)
    return np.asarray(_Memory(raw))
