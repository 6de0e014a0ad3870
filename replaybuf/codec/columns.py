"""Columns: a group as one list of the values of each field, instead of a map for each rollout.

The msgpack of a payload is a list of name, kind and content of each column. What the rollouts share is there once, and
arrays of a field are one block. Dicts with the same keys in all rollouts are columns again. What was one object in
several rollouts comes back as one object, and what was two equal ones as two.

| kind | content |
|---|---|
| SHARED | one value, of all rollouts |
| LIST | a list of values |
| ARRAYS | an entry of the table of arrays (`codec.blocks`) |
| INDEXED | a list of the indices, for each rollout that of a value, and of the values |
| COPIES | the msgpack of a large value, which all rollouts have their own copy of |
| DICT | name, kind and content of each key |
| ROWS | the rollouts as dicts: of one rollout, or for keys that are no texts, or in different orders; the only column |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np

from replaybuf.codec.blocks import GROUPED, MOST_USES, BlockWriter
from replaybuf.codec.extension_types import MISSING, SCALARS

SHARED, LIST, ARRAYS, INDEXED, COPIES, DICT, ROWS = range(7)

_CONTAINERS: Final = frozenset({list, tuple, dict})
_COUNTED: Final = frozenset({str, bytes, int, bool})
_TEXTS: Final = frozenset({str, bytes, type(None)})
_DEEPEST: Final = 8
_ONLY_NONE: Final = frozenset({type(None)})
_ONLY_STR: Final = frozenset({str})
_ONLY_INT: Final = frozenset({int})


class ColumnWriter:
    """Makes the columns of one group. `pack` packs a value by itself.

    `held` are the contents in which msgpack may meet values that it would store as something else.
    """

    __slots__ = ("_blocks", "_pack", "held", "values")

    def __init__(self, blocks: BlockWriter, pack: Callable[[Any], bytes]) -> None:
        self._blocks = blocks
        self._pack = pack
        self.held: list[Any] = []
        #: The number of values of all columns.
        self.values = 0

    def rollouts(self, rows: Sequence[dict[Any, Any]], omitted: frozenset[str], *, declared: bool) -> list[Any]:
        """Return the columns of rollouts, without fields `omitted` that are None in all of them.

        Names of fields that are `declared` by a class are texts.
        """
        self.values += len(rows)
        transposed = _transposed(rows, declared=declared)
        if transposed is None:
            kept: Sequence[dict[Any, Any]] = rows
            if omitted:
                kept = [{k: v for k, v in row.items() if v is not None or k not in omitted} for row in rows]
            self.held += kept
            return [None, ROWS, *kept]
        columns: list[Any] = []
        for name, values in transposed:
            if values[0] is not None or name not in omitted or not _ONLY_NONE.issuperset(map(type, values)):
                columns += (name, *self._column(values, 0))
        return columns

    def _column(self, values: Sequence[Any], depth: int) -> tuple[int, Any]:
        """Return the kind and the content of a column."""
        first, rows = values[0], len(values)
        kind = type(first)
        self.values += rows
        if kind is np.ndarray and (entry := self._blocks.column(values)) is not None:
            return ARRAYS, entry
        kinds = {*map(type, values)}
        if SCALARS.issuperset(kinds):
            if len(kinds) == 1 and kind in _COUNTED and values.count(first) == rows:
                return SHARED, first
            long = _TEXTS.issuperset(kinds) and max(map(len, filter(None, values)), default=0) >= GROUPED
            return (INDEXED, _indexed(values, values)) if long else (LIST, [*values])
        ids = [*map(id, values)]
        different = len({*ids})
        if different == 1:
            self.held.append(first)
            return SHARED, first
        if different < rows or len(kinds) > 1:
            self.held += values
            return (LIST, [*values]) if different == rows else (INDEXED, _indexed(values, ids))
        if kind is dict and depth < _DEEPEST and (items := _transposed(values, strictly=True)) is not None:
            columns: list[Any] = []
            for name, members in items:
                columns += (name, *self._column(members, depth + 1))
            return DICT, columns
        if kind in _CONTAINERS and rows <= MOST_USES and _are_equal(values):
            packed = self._pack(first)
            if len(packed) >= GROUPED and all(self._pack(value) == packed for value in values[1:]):  # 1 == True
                return COPIES, packed
        self.held += values
        return LIST, [*values]


def _indexed(values: Sequence[Any], keys: Sequence[Any]) -> list[Any]:
    places: dict[Any, int] = {}
    indices = [places.setdefault(key, len(places)) for key in keys]
    return [indices, *dict(zip(keys, values, strict=True)).values()]


def _are_equal(values: Sequence[Any]) -> bool:
    try:
        return values.count(values[0]) == len(values)
    except Exception:  # of arrays, which can't be compared as a whole, or of users' values
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
    """Makes the values of columns: `arrays` those of an entry, and `unpack` the value that is packed in some bytes.

    At most `budget` values are made.
    """

    __slots__ = ("_arrays", "_left", "_unpack")

    def __init__(
        self, unpack: Callable[[bytes], Any], arrays: Callable[[Any, int], Sequence[Any]], budget: int
    ) -> None:
        self._unpack = unpack
        self._arrays = arrays
        self._left = budget

    def spend(self, values: int) -> None:
        """Raise ValueError if there are more values than such a payload can have."""
        self._left -= values
        if self._left < 0:
            raise ValueError("it claims more values than it has room for")

    def columns(self, flat: Sequence[Any], rows: int) -> dict[Any, Sequence[Any]]:
        """Return the values of columns, given their names, kinds and contents. Raises any exception if invalid."""
        if len(flat) % 3:
            raise ValueError("its columns are incomplete")
        self.spend(len(flat) // 3 * rows)
        found: dict[Any, Sequence[Any]] = {}
        parts = iter(flat)
        for name, kind, content in zip(parts, parts, parts, strict=True):
            if kind == SHARED:
                found[name] = [content] * rows
            elif kind == LIST and type(content) is list and len(content) == rows:
                found[name] = content
            elif kind == ARRAYS:
                found[name] = self._arrays(content, rows)
            else:
                found[name] = self._others(kind, content, rows)
        if 3 * len(found) != len(flat):
            raise ValueError("it has a field twice")
        return found

    def _others(self, kind: Any, content: Any, rows: int) -> Sequence[Any]:
        """Return the values of a column of a rarer kind."""
        if kind == COPIES:
            if rows > MOST_USES:
                raise ValueError("a value is used too often")
            return [self._unpack(content) for _ in range(rows)]
        if type(content) is not list:
            raise ValueError(f"a {type(content).__name__} where a column belongs")
        if kind == DICT:
            return self.dicts(self.columns(content, rows), rows)
        if kind == INDEXED:
            content = _of_indices(*content)
        elif kind != LIST:
            raise ValueError(f"unknown kind of column ({kind!r:.20}); was it written by a newer replaybuf?")
        if len(content) != rows:
            raise ValueError(f"a column of {len(content)} values for {rows} rollouts")
        return content  # type: ignore[no-any-return]

    def dicts(self, columns: dict[Any, Sequence[Any]], rows: int) -> list[dict[Any, Any]]:
        """Return the rollouts, or their values of a field, as dicts."""
        if not columns:
            return [{} for _ in range(rows)]
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _of_indices(indices: Any, *values: Any) -> list[Any]:
    if type(indices) is not list or not _ONLY_INT.issuperset(map(type, indices)) or min(indices) < 0:
        raise ValueError("no indices of values")
    return [values[index] for index in indices]
