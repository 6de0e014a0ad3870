"""Payloads whose arrays are read one by one: their places in the tail, which are wanted, and handles for the others.

The head of a payload (`codec.payload`) has a table of its arrays: their sizes and checksums, in the order in which the
msgpack refers to them. In the tail each begins at the next multiple of 64 bytes. At the end, values inside rollouts are
replaced by others: handles by the arrays that were loaded, ObjectRefs that were stored by None.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final, Literal, Protocol

import msgpack  # type: ignore[import-untyped]
import numpy as np
from pydantic import BaseModel
from xxhash import xxh3_64_intdigest

from replaybuf.codec.extension_types import CONVERTED, OUT_OF_BAND_ARRAY, SCALARS
from replaybuf.codec.numpy_arrays import OutOfBandReader, read_head
from replaybuf.codec.payload_header import LOWER, ArrayTable
from replaybuf.errors import DecodeError

#: The bytes of arrays that were read, by their number in the payload.
Pieces = Mapping[int, Any]

_CONVERTED: Final = object()


@dataclass(frozen=True, slots=True)
class DeferredArray:
    """An array that isn't read: its dtype and shape, its place in the tail, and the checksum of its bytes."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    at: int
    nbytes: int
    digest: int
    order: Literal["C", "F"] = "C"

    @classmethod
    def of(cls, array: np.ndarray[Any, Any]) -> tuple[DeferredArray, bytes]:
        """Return what is known of an array that was read, and its bytes."""
        order: Literal["C", "F"] = "F" if array.flags.fnc else "C"
        raw = array.tobytes(order)
        return cls(array.dtype, array.shape, 0, len(raw), xxh3_64_intdigest(raw) & LOWER, order), raw


class Deferring(Protocol):
    """Makes the handles that take the place of arrays."""

    def deferred(self, array: DeferredArray) -> Any:
        """Return the handle of an array that isn't read."""

    def held(self, array: np.ndarray[Any, Any]) -> Any:
        """Return the handle of an array that was read with the rest of the payload."""


class StandIn(ABC):
    """A handle in the place of an array, as decoders of values that are made of arrays meet it."""

    @abstractmethod
    def as_tensor(self, name: str, shape: Sequence[int], build: Callable[[Any], Any], flags: int) -> Any:
        """Return the handle of a tensor whose bytes these are; `build` makes it of its content."""


def checked_array(array: DeferredArray, raw: Any) -> np.ndarray[Any, Any]:
    """Return an array in the memory of its bytes. Raises DecodeError when these are not the ones that were stored."""
    if len(raw) != array.nbytes or xxh3_64_intdigest(raw) & LOWER != array.digest:
        raise DecodeError(f"an array of {array.nbytes} bytes is damaged: its checksum doesn't match")
    return np.ndarray(array.shape, array.dtype, raw, order=array.order)


def wanted_arrays(table: ArrayTable, head: Any, deferred: Collection[str]) -> list[tuple[int, int, int]]:
    """Return the arrays outside the fields `deferred`: their numbers, places in the tail, and sizes.

    Raises any exception when the head makes no sense.
    """
    kept: list[bool] = []
    deferring, converted = False, 0

    def note(code: int, _: bytes) -> Any:
        nonlocal converted
        if code == OUT_OF_BAND_ARRAY:
            kept.append(not deferring or converted > 0)
        converted += code == CONVERTED
        return _CONVERTED if code == CONVERTED else None

    def leave(pairs: Sequence[tuple[Any, Any]]) -> None:
        """Return nothing for the content of a map, whose keys may be no keys of a dict."""
        nonlocal converted
        converted -= len(pairs) == 1 and pairs[0][0] is _CONVERTED

    view = memoryview(head)
    for start, end in pairwise(table.rollouts):
        unpacker = msgpack.Unpacker(
            ext_hook=note, object_pairs_hook=leave, strict_map_key=False, unicode_errors="surrogatepass"
        )
        unpacker.feed(view[start:end])
        for _ in range(unpacker.read_map_header()):
            deferring = unpacker.unpack() in deferred
            unpacker.unpack()
    return [
        (number, at, size)
        for number, ((at, size), wanted) in enumerate(zip(table.places(), kept, strict=True))
        if wanted
    ]


class HoldingReader(OutOfBandReader):
    """Reads the arrays of a payload that was read whole, and makes handles of those in fields that are deferred."""

    __slots__ = ("_deferring", "_handles")

    def __init__(self, body: Any, base: int, end: int, handles: Deferring) -> None:
        super().__init__(body, base, end, lends=False)
        self._handles = handles
        self._deferring = False

    def read(self, head: bytes) -> Any:
        return self.small(super().read(head))

    def small(self, array: np.ndarray[Any, Any]) -> Any:
        return self._handles.held(array) if self._deferring else array

    def defer(self, deferred: bool) -> None:
        self._deferring = deferred


class _PartialReader:
    """What readers of a payload do whose tail isn't read, or not as a whole, unless they say otherwise."""

    def small(self, array: np.ndarray[Any, Any]) -> Any:
        """Return an array that is in the msgpack, or what takes its place."""
        return array

    def defer(self, deferred: bool) -> None:
        """Do nothing: there are no handles."""

    def finish(self) -> None:
        """Do nothing: how many arrays there are isn't known."""


class DeferredReader(_PartialReader):
    """Reads arrays from their pieces, and makes handles of those in fields that are deferred."""

    def __init__(self, table: ArrayTable, pieces: Pieces, handles: Deferring) -> None:
        self._places = [*table.places()]
        self._digests = table.digests
        self._pieces = pieces
        self._handles = handles
        self._next = 0
        self._deferring = False

    def small(self, array: np.ndarray[Any, Any]) -> Any:
        return self._handles.held(array) if self._deferring else array

    def read(self, head: bytes) -> Any:
        """Return the next array, or its handle. Raises any exception when there is none."""
        dtype, shape = read_head(head)
        number, self._next = self._next, self._next + 1
        at, size = self._places[number]
        array = DeferredArray(dtype, shape, at, size, self._digests[number])
        if int(np.prod(shape, dtype=object)) * dtype.itemsize != size:
            raise ValueError(f"an array of shape {shape!r:.80} can't have {size} bytes")
        return self._handles.deferred(array) if self._deferring else checked_array(array, self._pieces[number]).copy()

    def defer(self, deferred: bool) -> None:
        self._deferring = deferred

    def finish(self) -> None:
        """Raise ValueError unless all arrays were read."""
        if self._next != len(self._places):
            raise ValueError("its lengths don't add up")


class MissingReader(_PartialReader):
    """Reads None for each array, of a payload whose tail can't be read."""

    def read(self, head: bytes) -> Any:
        return None


@dataclass(frozen=True, slots=True)
class ArrayFacts(StandIn):
    """What is known of an array or tensor without its bytes; `out_of_band` unless it is among the other values."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    out_of_band: bool

    def as_tensor(self, name: str, shape: Sequence[int], build: Callable[[Any], Any], flags: int) -> ArrayFacts:
        return ArrayFacts(name, tuple(shape), self.nbytes, self.out_of_band)


class FactsReader(_PartialReader):
    """Reads what is known of each array, whose bytes need not be there."""

    def small(self, array: np.ndarray[Any, Any]) -> Any:
        return ArrayFacts(str(array.dtype), array.shape, array.nbytes, out_of_band=False)

    def read(self, head: bytes) -> Any:
        dtype, shape = read_head(head)
        return ArrayFacts(str(dtype), shape, int(np.prod(shape, dtype=object)) * dtype.itemsize, out_of_band=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Replacing:
    """Puts `instead(value)` in the place of the values that `is_one` recognises.

    Instances of `opaque` classes are left alone.
    """

    is_one: Callable[[Any], bool]
    instead: Callable[[Any], Any]
    opaque: Container[type] = ()

    def replace(self, value: Any) -> Any:
        """Return the value with others in its place or inside it, at any depth; only what can't change is made anew."""
        kind = type(value)
        if kind in SCALARS or kind in self.opaque:
            return value
        if self.is_one(value):
            return self.instead(value)
        if isinstance(value, dict):
            self._replace(value.__setitem__, list(value.items()))
        elif isinstance(value, (list, deque)):
            if not SCALARS.issuperset(map(type, value)):
                self._replace(value.__setitem__, enumerate(value))
        elif isinstance(value, (tuple, set, frozenset)):
            return self._made_anew(value)
        elif isinstance(value, np.ndarray):
            if kind is np.ndarray and value.dtype.char == "O":
                self._replace(value.__setitem__, list(np.ndenumerate(value)))
        elif isinstance(value, BaseModel):
            self.replace(value.__dict__)  # validators and frozen models have nothing to say here
            self.replace(value.__pydantic_extra__)
        else:
            fields = {name: getattr(value, name, None) for name in _field_names(kind)}
            self._replace(partial(_set_attribute, value), fields.items())
            if getattr(kind, "__pydantic_config__", {}).get("extra") == "allow":  # a pydantic dataclass
                self.replace(value.__dict__)
        return value

    def _replace(self, put: Callable[[Any, Any], None], items: Iterable[tuple[Any, Any]]) -> None:
        for place, item in items:
            if (replaced := self.replace(item)) is not item:
                put(place, replaced)

    def _made_anew(self, value: Any) -> Any:
        replaced = [self.replace(item) for item in value]
        if all(new is old for new, old in zip(replaced, value, strict=True)):
            return value
        return value._make(replaced) if hasattr(value, "_make") else type(value)(replaced)


def _field_names(kind: type) -> Iterable[str]:
    """Return the names of the fields of a dataclass, an attrs class or a msgspec Struct."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    attributes = getattr(kind, "__attrs_attrs__", ())
    return [attribute.name for attribute in attributes] or getattr(kind, "__struct_fields__", ())


def _set_attribute(instance: Any, name: str, value: Any) -> None:
    msgspec: Any = sys.modules.get("msgspec")
    if msgspec is not None and isinstance(instance, msgspec.Struct):
        msgspec.structs.force_setattr(instance, name, value)  # frozen ones change, too
        return
    with contextlib.suppress(AttributeError, TypeError):  # one that can't be changed at all keeps its value
        object.__setattr__(instance, name, value)
