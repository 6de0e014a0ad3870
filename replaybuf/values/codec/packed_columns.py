"""Columns: a group as one list of the values of each field.

The msgpack of a payload is a list of name, kind and content of each column. What the rollouts share is there once, and
arrays of a field are one block. Dicts with the same keys in all rollouts are columns again. What was one object in
several rollouts comes back as one object, and what was two equal ones as two.

| kind | content |
|---|---|
| SHARED | one value, of all rollouts |
| LIST | a list of values |
| ARRAYS | an entry of the table of arrays (`codec.blocks`) |
| INDEXED | a list of the indices, for each rollout that of a value, and of the values |
| DICT | name, kind and content of each key |
| NUMBERS | long lists of numbers, packed together (`codec.number_lists`) |
| PARTIAL | the indices of the rollouts that have the field, kind and content of the column of these alone |
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np

from replaybuf.values.codec.blocks import GROUPED, BlockWriter
from replaybuf.values.codec.number_lists import FEWEST, pack_numbers, unpack_numbers
from replaybuf.values.codec.value_types import SCALARS, are_counts

SHARED, LIST, ARRAYS, INDEXED, DICT, NUMBERS, PARTIAL = range(7)

#: For each segment the index of an earlier one that it continues, or None; None for whole rollouts.
Parents = Sequence[int | None] | None

_COUNTED_TYPES: Final = frozenset({str, bytes, int, bool})
_TEXTS: Final = frozenset({str, bytes, type(None)})
_DEEPEST_DICT: Final = 8
_ONLY_NONE: Final = frozenset({type(None)})
_ONLY_STR: Final = frozenset({str})
#: The value of a field that a rollout doesn't have, unlike others of its group.
_MISSING: Final = object()


class ColumnWriter:
    """Makes the columns of one group."""

    __slots__ = ("_blocks", "_origins")

    def __init__(self, blocks: BlockWriter, parents: Parents = None) -> None:
        self._blocks = blocks
        # Of segments: the one whose values each may begin with. Those that continue none often have the same prompt.
        self._origins = [parent or 0 for parent in parents] if parents is not None else None

    def rollouts(self, rows: Sequence[dict[str, Any]], omitted: frozenset[str]) -> list[Any]:
        """Return the columns of rollouts, without fields `omitted` that are None in all of them."""
        if len(rows) == 1:
            return self._columns_of_one(rows[0], omitted)
        columns: list[Any] = []
        names, keys = tuple(rows[0]), [*map(tuple, rows)]
        if keys.count(names) == len(rows):
            for name, values in zip(names, zip(*[row.values() for row in rows], strict=True), strict=True):
                if values[0] is not None or name not in omitted or not _ONLY_NONE.issuperset(map(type, values)):
                    columns += (name, *self._column(values, 0))
            return columns
        origins = self._origins
        for name in dict.fromkeys(chain.from_iterable(keys)):
            indices = [index for index, row in enumerate(rows) if name in row]
            whole = len(indices) == len(rows)
            self._origins = origins if whole else None  # which are indices of rollouts
            column = self._column([rows[index][name] for index in indices], 0)
            columns += (name, *column) if whole else (name, PARTIAL, [indices, *column])
        return columns

    def _columns_of_one(self, row: dict[str, Any], omitted: frozenset[str]) -> list[Any]:
        """Return the columns of one rollout, which shares all with itself, except long lists of numbers."""
        fields = {name: value for name, value in row.items() if value is not None or name not in omitted}
        self._blocks.put_together(fields.values())
        columns: list[Any] = [SHARED] * (3 * len(fields))
        columns[::3], columns[2::3] = fields, fields.values()
        for index, value in enumerate(fields.values()):
            if type(value) is list and len(value) >= FEWEST:
                columns[3 * index + 1 : 3 * index + 3] = self._lists([value])
        return columns

    def _column(self, values: Sequence[Any], depth: int) -> tuple[int, Any]:
        """Return the kind and the content of a column."""
        first, rows = values[0], len(values)
        kind = type(first)
        if kind is np.ndarray and (entry := self._blocks.column(values, self._origins)) is not None:
            return ARRAYS, entry
        kinds = {*map(type, values)}
        if SCALARS.issuperset(kinds):
            if len(kinds) == 1 and kind in _COUNTED_TYPES and values.count(first) == rows:
                return SHARED, first
            long = _TEXTS.issuperset(kinds) and max(map(len, filter(None, values)), default=0) >= GROUPED
            return (INDEXED, _index_values(values, values)) if long else (LIST, [*values])
        ids = [*map(id, values)]
        different = len({*ids})
        if different == 1:
            return SHARED, first
        if different < rows or len(kinds) > 1:
            return (LIST, [*values]) if different == rows else (INDEXED, _index_values(values, ids))
        if kind is dict and depth < _DEEPEST_DICT and (names := _shared_names(values)):
            columns: list[Any] = []
            for name, members in zip(names, zip(*[value.values() for value in values], strict=True), strict=True):
                columns += (name, *self._column(members, depth + 1))
            return DICT, columns
        return self._lists(values) if kind is list else (LIST, [*values])

    def _lists(self, values: Sequence[list[Any]]) -> tuple[int, Any]:
        numbers = pack_numbers(values, self._origins)
        return (LIST, [*values]) if numbers is None else (NUMBERS, numbers)


def _index_values(values: Sequence[Any], keys: Sequence[Any]) -> list[Any]:
    places: dict[Any, int] = {}
    indices = [places.setdefault(key, len(places)) for key in keys]
    return [indices, *dict(zip(keys, values, strict=True)).values()]


def _shared_names(values: Sequence[dict[Any, Any]]) -> tuple[str, ...]:
    """Return the keys of dicts if all have the same texts, in the same order; else none."""
    names, keys = tuple(values[0]), [*map(tuple, values)]
    shared = keys.count(names) == len(values) and _ONLY_STR.issuperset(map(type, chain.from_iterable(keys)))
    return names if shared else ()


#: CPython's function that untracks an object from the garbage collector.
_untrack: Final = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("PyObject_GC_UnTrack", ctypes.pythonapi))
_LONG: Final = 32
_NUMBERS: Final = frozenset({int, float})


def leave_alone(values: Iterable[Any]) -> None:
    """Untrack the values of fields that are long lists of numbers from the garbage collector.

    It would traverse all tokens in memory again and again: in takes of 128 groups with 100 KB of lists that is 42 ms
    instead of 3, a quarter of their time, of which 20 ms are one pause of the event loop. A list is taken for one of
    numbers if it begins and ends with one. A cycle that a user later makes through such a list is never freed.
    """
    for items in values:
        if type(items) is list and len(items) > _LONG and type(items[0]) in _NUMBERS and type(items[-1]) in _NUMBERS:
            _untrack(items)


class ColumnReader:
    """Makes the values of columns: `arrays` those of an entry."""

    __slots__ = ("_arrays", "partial")

    def __init__(self, arrays: Callable[[Any, int], Sequence[Any]]) -> None:
        self._arrays = arrays
        #: Whether some rollouts lack a field: `_MISSING` is its value then.
        self.partial = False

    def columns(self, flat: Sequence[Any], rows: int) -> dict[Any, Sequence[Any]]:
        """Return the values of columns, given their names, kinds and contents. Raises any exception if invalid."""
        if type(flat) is not list or len(flat) % 3:
            raise ValueError("its columns are incomplete")
        values: dict[Any, Sequence[Any]] = {}
        parts = iter(flat)
        for name, kind, content in zip(parts, parts, parts, strict=True):
            if kind == SHARED:
                values[name] = [content] * rows
                leave_alone((content,))
            elif kind == LIST and type(content) is list and len(content) == rows:
                values[name] = content
                leave_alone(content)
            elif kind == ARRAYS:
                values[name] = self._arrays(content, rows)
            else:
                values[name] = self._rare_column(kind, content, rows)
        if 3 * len(values) != len(flat):
            raise ValueError("it has a field twice")
        return values

    def _rare_column(self, kind: Any, content: Any, rows: int) -> Sequence[Any]:
        """Return the values of a column of a rarer kind."""
        if type(content) is not list:
            raise ValueError(f"a {type(content).__name__} where a column belongs")
        if kind == DICT:
            return self.dicts(self.columns(content, rows), rows)
        if kind == NUMBERS:
            content = unpack_numbers(content)
            leave_alone(content)
        elif kind == PARTIAL:
            indices, kind, content = content
            if not are_counts(indices) or len({*indices}) < len(indices):
                raise ValueError("no indices of rollouts")
            [values] = self.columns(["", kind, content], len(indices)).values()
            content = [_MISSING] * rows
            for index, value in zip(indices, values, strict=True):
                content[index] = value
            self.partial = True
        elif kind == INDEXED:
            content = _values_at(*content)
        elif kind != LIST:
            raise ValueError(f"unknown kind of column ({kind!r:.20}); was it written by a newer replaybuf?")
        if len(content) != rows:
            raise ValueError(f"a column of {len(content)} values for {rows} rollouts")
        return content  # type: ignore[no-any-return]

    def dicts(self, columns: dict[Any, Sequence[Any]], rows: int) -> list[dict[Any, Any]]:
        """Return the rollouts, or their values of a field, as dicts."""
        if not columns:
            return [{} for _ in range(rows)]
        if self.partial:
            rows_of = zip(*columns.values())
            return [{name: value for name, value in zip(columns, row) if value is not _MISSING} for row in rows_of]
        return [dict(zip(columns, row)) for row in zip(*columns.values())]


def _values_at(indices: Any, *values: Any) -> list[Any]:
    if not are_counts(indices):
        raise ValueError("no indices of values")
    return [values[index] for index in indices]
