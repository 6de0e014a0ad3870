"""Rows as columns of Arrow, for Parquet and Arrow files, and back.

A column has the type of its values in the first rows: numbers, texts, bytes, lists of these in the dtype of the arrays
that they were, lists of objects of texts (messages), and JSON as text for everything else. What later turns up and
doesn't fit its column goes to the column `$more`, as JSON; so does a None that is there, since null means that the
rollout has no such field. The schema's metadata entry `replaybuf` says which columns are JSON.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from replaybuf.errors import FileError
from replaybuf.files.column_types import arrow, arrow_type, column_for, fits, is_unicode, joined
from replaybuf.files.rows import KINDS, METADATA, PREFIX, REST, ROLLOUTS, Row, is_of_rollout
from replaybuf.files.values import to_json

MORE: Final = "$more"
_ABOUT: Final = b"replaybuf"
_JSON_FIELDS: Final = (KINDS, REST, MORE)
_METADATA: Final = {
    "uid": "int64",
    "task_name": "string",
    "status": "string",
    "staleness": "int64",
    "priority": "double",
    "times_sampled": "int64",
    "created_at": "double",
    "reward": "double",
    "tags": "json",
    "key": "string",
    "error": "string",
    "deliveries": "int64",
    "worker": "string",
    "trained_step": "int64",
    "index": "int32",
    "size": "int32",
}


class Columns:
    """The columns of a file, as its first rows gave them."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._grouped = not is_of_rollout(rows[0])
        prefix = "" if self._grouped else PREFIX
        #: The columns beside the fields in a row of a rollout.
        self._beside = frozenset(() if self._grouped else (f"{PREFIX}{name}" for name in _METADATA))
        self._metadata = {prefix + name: column for name, column in _METADATA.items() if prefix or name in METADATA}
        rollouts = [one for row in rows for one in row[ROLLOUTS]] if self._grouped else rows
        self._fields = self._columns_of(rollouts) | dict.fromkeys(_JSON_FIELDS, "json")

    def _columns_of(self, rollouts: Iterable[Row]) -> dict[str, str]:
        wanted: dict[str, set[str]] = {}
        for row in rollouts:
            kinds = row.get(KINDS, {})
            for name, value in row.items():
                if name not in self._beside and name not in _JSON_FIELDS and is_unicode(name):
                    wanted.setdefault(name, set())
                    if value is not None:
                        wanted[name].add(column_for(value, kinds.get(name)))
        return {name: joined(found) for name, found in wanted.items()}

    def schema(self) -> Any:
        """Return the schema, with what is needed to read the rows back."""
        pa = arrow()
        fields = [(name, arrow_type(column)) for name, column in self._fields.items()]
        columns = [(name, arrow_type(column)) for name, column in self._metadata.items()]
        columns += [(ROLLOUTS, pa.list_(pa.struct(fields)))] if self._grouped else fields
        about = {
            "format": 1,
            "rows": "groups" if self._grouped else "rollouts",
            "json": [name for name, column in self._fields.items() if column == "json"],
        }
        return pa.schema(columns, metadata={_ABOUT: json.dumps(about).encode()})

    def table(self, rows: Sequence[Row], schema: Any) -> Any:
        """Return rows as a table of these columns."""
        pa = arrow()
        if self._grouped:
            flat = [{**self._told(row), ROLLOUTS: [self._fitted(one) for one in row[ROLLOUTS]]} for row in rows]
        else:
            flat = [{**self._told(row), **self._fitted(row)} for row in rows]
        return pa.Table.from_pylist(flat, schema=schema)

    def _told(self, row: Row) -> Row:
        told = {name: row.get(name) for name in self._metadata}
        tags = "tags" if self._grouped else f"{PREFIX}tags"
        told[tags] = None if told[tags] is None else json.dumps(told[tags])
        return told

    def _fitted(self, row: Row) -> Row:
        """Return the fields of a rollout as its columns take them."""
        fitted: Row = {}
        more: Row = {}
        kinds = row.get(KINDS, {})
        for name, value in row.items():
            if name in self._beside:
                continue
            column = self._fields.get(name)
            if name in _JSON_FIELDS:
                fitted[name] = json.dumps(value)
            elif column is None or value is None or not self._takes(column, value, kinds.get(name)):
                more[name] = to_json(value) if type(value) is bytes else value
            else:
                fitted[name] = (
                    json.dumps(to_json(value) if type(value) is bytes else value) if column == "json" else value
                )
        if more:
            fitted[MORE] = json.dumps(more)
        return fitted

    def _takes(self, column: str, value: Any, kind: str | None) -> bool:
        if not fits(column_for(value, kind), column):
            return False
        if column in ("string", "list:string") or column.startswith("structs:"):
            return is_unicode(value)
        return True


# Reading


class Reading:
    """How the rows of a file's tables are read: those of our exports by what their schema says, others as they are."""

    def __init__(self, schema: Any) -> None:
        twice = [name for name, count in Counter(schema.names).items() if count > 1]
        if twice:
            raise FileError(f"two columns have the name {twice[0]!r:.60}; rename one of them")
        self._about = _about(schema)
        self._json = frozenset(self._about["json"] if self._about else ())

    def rows(self, batch: Any, first: int) -> Iterable[tuple[str, Row]]:
        """Yield the rows of a batch, whose first has this number."""
        names = batch.schema.names
        columns = [_values(name, column, first) for name, column in zip(names, batch.columns, strict=True)]
        for number in range(batch.num_rows):
            row = {name: column[number] for name, column in zip(names, columns, strict=True)}
            place = f"row {first + number}"
            if self._about is None:
                yield place, {name: value for name, value in row.items() if value is not None}
            elif self._about["rows"] == "groups":
                rollouts = row.pop(ROLLOUTS, None)
                if type(rollouts) is not list or not all(type(one) is dict for one in rollouts):
                    raise FileError(f"{place}: rollouts is {rollouts!r:.60}; expected a list of objects")
                unfitted = [self._unfitted(f"{place}, rollouts[{n}]", one) for n, one in enumerate(rollouts)]
                yield place, {**self._told(place, row, ""), ROLLOUTS: unfitted}
            else:
                told = {name: row.pop(name) for name in list(row) if name.startswith(PREFIX)}
                yield place, {**self._told(place, told, PREFIX), **self._unfitted(place, row)}

    def _told(self, place: str, row: Row, prefix: str) -> Row:
        tags = f"{prefix}tags"
        return {**row, tags: _parsed(place, tags, row.get(tags))}

    def _unfitted(self, place: str, row: Row) -> Row:
        values = {
            name: _parsed(place, name, value) if name in self._json else value
            for name, value in row.items()
            if value is not None
        }
        more = values.pop(MORE, None)
        if type(more) not in (dict, type(None)):
            raise FileError(f"{place}, column {MORE!r}: {more!r:.60}; expected an object with fields")
        return {**values, **(more or {})}


def _about(schema: Any) -> Mapping[str, Any] | None:
    """Return what the schema of one of our exports says of itself, None for other files. Raises FileError."""
    text = (schema.metadata or {}).get(_ABOUT)
    if text is None:
        return None
    try:
        about = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"the schema's metadata 'replaybuf' is damaged ({error!s:.100})") from error
    if type(about) is dict and about.get("format") not in (None, 1):
        raise FileError(f"the file has format {about['format']!r:.40} of replaybuf's; upgrade replaybuf")
    if not (
        type(about) is dict
        and about.get("format") == 1
        and about.get("rows") in ("rollouts", "groups")
        and type(about.get("json")) is list
        and all(type(name) is str for name in about["json"])
    ):
        raise FileError(f"the schema's metadata 'replaybuf' is damaged ({about!r:.100})")
    return about


def _values(name: str, column: Any, first: int) -> list[Any]:
    """Return the values of a column, whose first row has this number. FileError for those that Python lacks."""
    values: list[Any] = []
    try:
        for one in column:
            values.append(one.as_py())
    except (ValueError, TypeError, LookupError, ArithmeticError, arrow().ArrowException) as error:
        raise FileError(f"row {first + len(values)}, column {name!r:.60}: it can't be read ({error!s:.200})") from error
    return values


def _parsed(place: str, name: str, text: Any) -> Any:
    """Return the value of a column with JSON."""
    try:
        return None if text is None else json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise FileError(f"{place}, column {name!r:.60}: no JSON ({error!s:.100})") from error
