"""The reference backend with its metadata in a DataFrame, for looking at the data with pandas.

Filters and sorting are vectorised; everything else is shared with the backend in memory. New groups wait in a list
until the next read, because adding a row copies the whole DataFrame.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import reduce
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from replaybuf.query import BetweenNode, LogicNode, Node, NotNode, ScalarNode, SetNode, predicate
from replaybuf.query.nodes import tag_name
from replaybuf.rules.policies import Order
from replaybuf.rules.race import KEYS
from replaybuf.storage.memory.backend import MemoryStorage
from replaybuf.storage.memory.items import IN_ORDER, Items, Key
from replaybuf.storage.values import StorageItem

Mask = NDArray[np.bool_]

_INTEGERS = ("uid", "timestamp_id", "staleness", "times_sampled", "deliveries")
_FLOATS = ("priority", "created_at")
_NULLABLE = {"reward": float, "trained_step": int}  # as floats, of which NaN is None
_COLUMNS: dict[str, Any] = {
    field.name: np.int64 if field.name in _INTEGERS else np.float64 if field.name in (*_FLOATS, *_NULLABLE) else object
    for field in fields(StorageItem)
    if field.name not in ("item", "probability", "weight")
}
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "$eq": operator.eq,
    "$ne": operator.ne,
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}
# Integers up to here are exact as floats.
_EXACT = 2**53


class Frame(Items):
    """The metadata of groups in a DataFrame, one row per group, indexed by uid. A number that is None is NaN."""

    def __init__(self) -> None:
        self._rows = _frame([])
        self._new: list[StorageItem] = []

    @property
    def frame(self) -> pd.DataFrame:
        """All groups."""
        if self._new:
            self._rows, self._new = pd.concat([self._rows, _frame(self._new)]), []
        return self._rows

    def __len__(self) -> int:
        return len(self._rows) + len(self._new)

    def add(self, item: StorageItem) -> None:
        self._new.append(item)

    def get(self, uid: int) -> StorageItem | None:
        if uid not in self.frame.index:
            return None
        row: dict[str, Any] = {name: self.frame.at[uid, name] for name in _COLUMNS}
        row |= {name: int(row[name]) for name in _INTEGERS} | {name: float(row[name]) for name in _FLOATS}
        row |= {name: None if np.isnan(row[name]) else kind(row[name]) for name, kind in _NULLABLE.items()}
        row["tags"] = dict(row["tags"]) if row["tags"] else None
        return StorageItem(**row)

    def remove(self, uids: Iterable[int]) -> None:
        self._rows = self.frame.drop(index=list(uids))

    def change(self, uids: Iterable[int], **values: Any) -> None:
        chosen = list(uids)
        for name, value in values.items():
            self.frame.loc[chosen, name] = pd.Series([value] * len(chosen), index=chosen, dtype=_COLUMNS[name])

    def select(self, query: Node, order: Order = IN_ORDER, key: Key | None = None) -> list[int]:
        chosen = self.frame[_mask(query, self.frame)]
        names = [term.field for term in order]
        if key is not None:
            for name in set(names) & set(KEYS):
                chosen = chosen.assign(**{name: [key(int(uid), name) for uid in chosen.index]})
        ascending = [not term.descending for term in order]
        chosen = chosen.sort_values(names, ascending=ascending, kind="stable", na_position="last")
        return [int(uid) for uid in chosen.index]

    def with_key(self, task_name: str, key: str) -> list[int]:
        frame = self.frame
        return [int(uid) for uid in frame.index[(frame["key"] == key) & (frame["task_name"] == task_name)]]


class PandasStorage(MemoryStorage):
    """Groups in a DataFrame of this process; they are lost when it ends."""

    new_table = Frame

    @property
    def frame(self) -> pd.DataFrame:
        """A copy of the metadata of all groups, one row per group."""
        assert isinstance(self._groups.table, Frame)
        return self._groups.table.frame.copy()


def _frame(items: list[StorageItem]) -> pd.DataFrame:
    columns = {name: pd.Series([getattr(item, name) for item in items], dtype=kind) for name, kind in _COLUMNS.items()}
    return pd.DataFrame(columns).set_index(pd.Index([item.uid for item in items], dtype=np.int64))


def _mask(node: Node, frame: pd.DataFrame) -> Mask:
    """Return the mask of the rows that match, with the meaning of `replaybuf.query.predicate`."""
    match node:
        case LogicNode("$and", conditions):
            return reduce(operator.and_, (_mask(part, frame) for part in conditions), np.ones(len(frame), bool))
        case LogicNode(_, conditions):
            return reduce(operator.or_, (_mask(part, frame) for part in conditions), np.zeros(len(frame), bool))
        case NotNode(condition):
            return ~_mask(condition, frame)
    if tag_name(node.field) is not None:
        matches = predicate(node)
        return np.array([matches(SimpleNamespace(tags=tags)) for tags in frame["tags"]], bool)
    column = frame[node.field].to_numpy()
    match node:
        case BetweenNode(_, lower, upper):
            return _compare(column, "$gte", lower) & _compare(column, "$lte", upper)
        case SetNode(_, op, values):
            return _member(column, values) if op == "$in" else ~_member(column, values)
        case ScalarNode(_, op, value):
            return _compare(column, op, value)


def _compare(column: NDArray[Any], op: str, value: Any) -> Mask:
    if value is None:
        return pd.isna(column) if op == "$eq" else ~pd.isna(column)
    mixed = isinstance(value, float) and column.dtype == np.int64
    if mixed or (isinstance(value, int) and abs(value) > _EXACT):
        column = column.astype(object)  # numpy would round one to the other's type
    matches = np.full(len(column), op == "$ne")
    known = ~pd.isna(column)
    matches[known] = np.asarray(_COMPARISONS[op](column[known], value), bool)
    return matches


def _member(column: NDArray[Any], values: tuple[Any, ...]) -> Mask:
    listed = frozenset(values)
    unique, places = np.unique(column.astype(object)[~pd.isna(column)], return_inverse=True)
    found = np.full(len(column), None in listed)
    found[~pd.isna(column)] = np.array([value in listed for value in unique], bool)[places]
    return found
