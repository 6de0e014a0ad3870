"""Columns: a group as one list of the values of each field, instead of a map for each rollout.

The msgpack of a payload is a list of name, kind and content of each column. What the rollouts share is there once, and
arrays of a field are one block. Dicts with the same keys in all rollouts are columns again. What was one object in
several rollouts comes back as one object, and what was two equal ones as two.

| kind | content |
|---|---|
| SHARED | one value, of all rollouts |
| LIST | a list of values |
| ARRAYS | dtype, number of the first array, block, lengths or shapes (`codec.blocks`) |
| INDEXED | for each rollout the index of a value; kind and content of a column of these values |
| PACKED | the msgpack of each value that is stored, for each rollout the index of one: equal ones are stored once |
| DICT | name, kind and content of each key |
| PARTIAL | the indices of the rollouts that have the field; kind and content of the column of their values |
| ROWS | the rollouts as dicts: of one rollout, or for keys that are no texts, or in different orders; the only column |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np

from replaybuf.codec.blocks import GROUPED, MOST_USES, BlockWriter
from replaybuf.codec.extension_types import SCALARS, holds_numbers

SHARED, LIST, ARRAYS, INDEXED, PACKED, DICT, PARTIAL, ROWS = range(8)

_CONTAINERS: Final = frozenset({list, tuple, dict})
_COUNTED: Final = frozenset({str, bytes, int, bool})
_TEXTS: Final = frozenset({str, bytes})
#: Lists of fewer numbers aren't packed one by one.
_MANY: Final = 1024
_DEEPEST: Final = 8
_ONLY_STR: Final = frozenset({str})
_ONLY_INT: Final = frozenset({int})
#: Marks fields that a rollout doesn't have.
MISSING: Final = object()


class ColumnWriter:
    """Makes the columns of one group. `pack` packs a value by itself; `arrays` says whether arrays may be columns.

    `held` are the contents in which msgpack may meet values that it would store as something else.
    """

    __slots__ = ("_arrays", "_blocks", "_pack", "held", "values")

    def __init__(self, blocks: BlockWriter, pack: Callable[[Any], bytes], *, arrays: bool) -> None:
        self._blocks = blocks
        self._pack = pack
        self._arrays = arrays
        self.held: list[Any] = []
        #: The number of values of all columns.
        self.values = 0

    def rollouts(self, rows: Sequence[dict[Any, Any]], omitted: frozenset[str], *, declared: bool) -> list[Any]:
        """Return the columns of rollouts, without fields `omitted` that are None in all of them.

        Names of fields that are `declared` by a class are texts.
        """
        self.values += len(rows)
        transposed = _transposed(rows, declared=declared) if len(rows) > 1 else None
        if transposed is None:
            kept: Sequence[dict[Any, Any]] = rows
            if omitted and len(rows) > 1:
                kept = [{k: v for k, v in row.items() if v is not None or k not in omitted} for row in rows]
            self.held.append(kept)
            return [None, ROWS, *kept]
        columns: list[Any] = []
        for name, values in transposed:
            if values[0] is not None or name not in omitted or not _are_none(values):
                columns += (name, *self._column(values, 0))
        return columns

    def _column(self, values: Sequence[Any], depth: int, *, inside: bool = False) -> tuple[int, Any]:
        """Return the kind and the content of a column; `inside` another, nothing is nested deeper than in a rollout."""
        first, rows = values[0], len(values)
        kind = type(first)
        self.values += rows
        if kind is np.ndarray and self._arrays and (content := self._blocks.column(values)) is not None:
            return ARRAYS, content
        ids = {*map(id, values)}
        if len(ids) == 1:
            return self._shared(first, kind)
        kinds = {*map(type, values)}
        if len(kinds) == 1:
            if kind in _COUNTED:
                return self._scalars(values, first, kind)
            if kind is float:
                return LIST, [*values]
        if id(MISSING) in ids:
            present = [index for index, value in enumerate(values) if value is not MISSING]
            return PARTIAL, [present, *self._column([values[index] for index in present], depth, inside=True)]
        if SCALARS.issuperset(kinds):
            return LIST, [*values]
        if len(ids) < rows:
            return self._indexed(values, [*map(id, values)], depth)
        if len(kinds) == 1:
            if kind is dict and not any(values):
                return DICT, []
            if kind is dict and depth < _DEEPEST and (items := _transposed(values, strictly=True)) is not None:
                columns: list[Any] = []
                for name, members in items:
                    columns += (name, *self._column(members, depth + 1, inside=inside))
                return DICT, columns
        if (inside or len(kinds) == 1) and (packed := self._packed(values, always=inside)) is not None:
            return PACKED, packed
        self.held.append(values)
        return LIST, [*values]

    def _shared(self, value: Any, kind: type) -> tuple[int, Any]:
        if kind not in SCALARS:
            self.held.append((value,))
        return SHARED, value

    def _scalars(self, values: Sequence[Any], first: Any, kind: type) -> tuple[int, Any]:
        if values.count(first) == len(values):
            return SHARED, first
        if kind in _TEXTS and max(map(len, values)) >= GROUPED and len({*values}) < len(values):
            return self._indexed(values, values, 0)
        return LIST, [*values]

    def _indexed(self, values: Sequence[Any], keys: Sequence[Any], depth: int) -> tuple[int, Any]:
        places: dict[Any, int] = {}
        indices = [places.setdefault(key, len(places)) for key in keys]
        found = dict(zip(keys, values, strict=True))
        return INDEXED, [indices, *self._column([found[key] for key in places], depth, inside=True)]

    def _packed(self, values: Sequence[Any], *, always: bool) -> list[Any] | None:
        """Return the content of a column of large values; None for small ones, unless `always`."""
        first = values[0]
        if not always and (
            type(first) not in _CONTAINERS or (type(first) is list and len(first) < _MANY and holds_numbers(first))
        ):
            return None
        packed = self._pack(first)
        if not always and len(packed) < GROUPED:
            return None
        places: dict[bytes, int] = {packed: 0}
        uses, stored, indices = [1], [packed], [0]
        for value in values[1:]:
            packed = self._pack(value)
            place = places.get(packed)
            if place is None or uses[place] == MOST_USES:
                place = places[packed] = len(stored)
                stored.append(packed)
                uses.append(0)
            uses[place] += 1
            indices.append(place)
        return [stored, indices]


def _are_none(values: Sequence[Any]) -> bool:
    try:
        return values.count(None) == len(values)
    except ValueError:  # of an array, which can't be compared as a whole
        return False


def _transposed(
    rows: Sequence[dict[Any, Any]], *, declared: bool = False, strictly: bool = False
) -> list[tuple[Any, Sequence[Any]]] | None:
    """Return the names and values of columns; None if rollouts have keys that are no texts, or in different orders.

    With MISSING for fields that a rollout lacks, or None in that case, too, if `strictly`.
    """
    names = tuple(rows[0])
    keys = [*map(tuple, rows)]
    if not declared and not _ONLY_STR.issuperset(map(type, chain.from_iterable(keys))):
        return None
    if keys.count(names) == len(rows):
        return [*zip(names, zip(*[row.values() for row in rows], strict=True), strict=True)]
    union = dict.fromkeys(chain.from_iterable(keys))
    if strictly or any([name for name in union if name in row] != list(row) for row in rows):
        return None
    return [(name, [row.get(name, MISSING) for row in rows]) for name in union]


class ColumnReader:
    """Makes the values of columns. `unpack` returns the value that is packed in some bytes.

    At most `budget` values are made, and no packed value more than MOST_USES times. `partial` says whether there was a
    column that some rollouts don't have.
    """

    __slots__ = ("_arrays", "_left", "_unpack", "partial")

    def __init__(self, unpack: Callable[[bytes], Any], arrays: Callable[[Any, int], list[Any]], budget: int) -> None:
        self._unpack = unpack
        self._arrays = arrays
        self._left = budget
        self.partial = False

    def spend(self, values: int) -> None:
        """Raise ValueError if there are more values than such a payload can have."""
        self._left -= values
        if self._left < 0:
            raise ValueError("it claims more values than it has room for")

    def column(self, kind: Any, content: Any, rows: int) -> Sequence[Any]:
        """Return the values of a column, MISSING where a rollout has none. Raises any exception for an invalid one."""
        self.spend(rows)
        if kind == SHARED:
            return [content] * rows
        if kind == ARRAYS:
            return self._arrays(content, rows)
        if type(content) is not list:
            raise ValueError(f"a {type(content).__name__} where a column belongs")
        if kind == DICT:
            return self.dicts(dict(self.columns(content, rows)), rows)
        if kind == LIST:
            values: list[Any] = content
        elif kind == INDEXED:
            indices, inner, values = content
            _check_indices(indices, rows, rows)
            found = self.column(inner, values, max(indices, default=-1) + 1)
            values = [found[index] for index in indices]
        elif kind == PACKED:
            stored, indices = content
            _check_indices(indices, rows, len(stored))
            if max(map(indices.count, {*indices}), default=0) > MOST_USES:
                raise ValueError("a value is used too often")
            values = [self._unpack(stored[index]) for index in indices]
        elif kind == PARTIAL:
            present, inner, found = content
            _check_indices(present, len(present), rows)
            if present != sorted({*present}):
                raise ValueError("no indices of rollouts")
            self.partial = True
            values = [MISSING] * rows
            for index, value in zip(present, self.column(inner, found, len(present)), strict=True):
                values[index] = value
        else:
            raise ValueError(f"unknown kind of column ({kind!r:.20}); was it written by a newer replaybuf?")
        if len(values) != rows:
            raise ValueError(f"a column of {len(values)} values for {rows} rollouts")
        return values

    def columns(self, flat: Sequence[Any], rows: int) -> Iterator[tuple[Any, Sequence[Any]]]:
        """Yield the name and the values of each column."""
        if len(flat) % 3:
            raise ValueError("its columns are incomplete")
        for place in range(0, len(flat), 3):
            yield flat[place], self.column(flat[place + 1], flat[place + 2], rows)

    def dicts(self, columns: dict[Any, Sequence[Any]], rows: int) -> list[dict[Any, Any]]:
        """Return the rollouts, or their values of a field, as dicts."""
        if not columns:
            return [{} for _ in range(rows)]
        found = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        if not self.partial:
            return found
        return [{name: value for name, value in row.items() if value is not MISSING} for row in found]


def _check_indices(indices: Any, length: int, end: int) -> None:
    """Raise ValueError unless this is a list of so many indices below `end`."""
    if type(indices) is not list or len(indices) != length or not _ONLY_INT.issuperset(map(type, indices)):
        raise ValueError("no indices of values")
    if indices and not 0 <= min(indices) <= max(indices) < end:
        raise ValueError("no indices of values")
