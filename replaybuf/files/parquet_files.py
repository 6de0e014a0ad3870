"""Rows as Parquet files: writes them with types that pyarrow infers, and reads them in batches.

A column has the type of its values in the first rows, if that is one of numbers, texts, bytes, lists of these, or lists
of objects of texts (messages). Everything else is JSON as text; the column's metadata says so. A later value that
doesn't fit its column is null there, and in the column `group.more`, which is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from replaybuf.common.checks import import_optional
from replaybuf.errors import FileError
from replaybuf.files.row_format import JSON, METADATA, MORE, PAYLOAD, PREFIX, Placed, Row, plain

#: What pyarrow raises for values that a column can't hold; some of its errors are none of ValueError or TypeError.
_MISFIT_ERRORS: Final = (ValueError, TypeError, ArithmeticError, NotImplementedError)
#: The Arrow types of all columns beside the fields of rollouts.
_METADATA: Final = {
    **{name: kind for name, (*_, kind) in METADATA.items()},
    "payload": "binary",
    **dict.fromkeys(("index", "size", "rollout", "parent", "segments"), "int32"),
}
#: The metadata of columns with JSON.
_JSON: Final = {b"replaybuf": b"json"}


def arrow(module: str = "pyarrow") -> Any:
    """Return pyarrow, or a module of it. Raises MissingDriverError."""
    return import_optional(module, "Parquet files need the package pyarrow: pip install pyarrow")


def _arrow_value(value: Any) -> Any:
    """Return a value as pyarrow takes it: arrays of several dimensions as lists of arrays."""
    if isinstance(value, np.ndarray):
        if value.ndim > 1:
            return list(map(_arrow_value, value))
        return value.astype("f4") if value.dtype == np.float16 else value
    return value


def _innermost_type(kind: Any) -> Any:
    while arrow().types.is_list(kind):
        kind = kind.value_type
    return kind


def _infer_array(values: Sequence[Any]) -> Any:
    """Return values as an array in the type that pyarrow infers; None if other programs can't read it as it is."""
    try:
        array = arrow().array(list(map(_arrow_value, values)))
    except _MISFIT_ERRORS:
        return None
    types, inner = arrow().types, _innermost_type(array.type)
    if types.is_struct(inner):
        names = {field.name for field in inner if types.is_string(field.type) and "," not in field.name}
        is_plain = (
            bool(names)
            and inner != array.type
            and all(
                isinstance(obj, dict) and obj.keys() == names for value in values if value is not None for obj in value
            )
        )
    else:
        kinds = (types.is_integer, types.is_floating, types.is_boolean, types.is_string, types.is_binary, types.is_null)
        is_plain = any(test(inner) for test in kinds)
    return array if is_plain else None


def _fit_array(values: Sequence[Any], kind: Any) -> Any:
    """Return values as an array of a column's type; None if one of them doesn't fit, or would be changed."""
    array, types, inner = _infer_array(values), arrow().types, _innermost_type(kind)
    if array is None or array.type == kind:
        return array
    dtype = _innermost_type(array.type)
    try:
        if types.is_null(dtype) or (types.is_integer(dtype) and (types.is_integer(inner) or types.is_floating(inner))):
            return array.cast(kind)
    except _MISFIT_ERRORS:
        pass
    return None


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


class _Columns:
    """The columns of a file, determined by its first rows."""

    def __init__(self, rows: Sequence[Row]) -> None:
        pa = arrow()
        types = {PREFIX + name: None if kind == JSON else pa.type_for_alias(kind) for name, kind in _METADATA.items()}
        if PAYLOAD not in rows[0]:
            del types[PAYLOAD]
        for name in dict.fromkeys(name for row in rows for name in row if name != MORE and _is_unicode(name)):
            if name not in types:
                array = _infer_array([row.get(name) for row in rows])
                is_plain = array is not None and not pa.types.is_null(_innermost_type(array.type))
                types[name] = array.type if is_plain else None
        fields = [_json_field(name) if kind is None else pa.field(name, kind) for name, kind in types.items()]
        self.schema = pa.schema([*fields, _json_field(MORE)])

    def table(self, rows: Sequence[Row]) -> Any:
        """Return rows as a table of these columns, the last with what doesn't fit the others."""
        *fields, last = self.schema
        names = {field.name for field in self.schema}
        more: list[Row] = [
            {**(row.get(MORE) or {}), **{name: value for name, value in row.items() if name not in names}}
            for row in rows
        ]
        columns = [self._column(field, [row.get(field.name) for row in rows], more) for field in fields]
        columns.append(self._column(last, [row or None for row in more], more))
        return arrow().Table.from_arrays(columns, schema=self.schema)

    def _column(self, field: Any, values: list[Any], more: Sequence[Row]) -> Any:
        """Return values as a column; those that don't fit go to `more`."""
        pa = arrow()
        if field.metadata:
            texts = [None if value is None else json.dumps(plain(value)) for value in values]
            return pa.array(texts, pa.string())
        if (array := _fit_array(values, field.type)) is None:
            for place, value in enumerate(values):
                if value is not None and _fit_array([value], field.type) is None:
                    more[place][field.name], values[place] = value, None
            array = pa.array(list(map(_arrow_value, values)), field.type)
        return array


def _json_field(name: str) -> Any:
    return arrow().field(name, arrow().string(), metadata=_JSON)


#: The number of rows in memory together when a file is read.
_ROWS: Final = 64
#: The size at which buffered rows are written: larger pieces are better for readers, smaller ones for memory.
_BYTES: Final = 4 << 20


class TableWriter:
    """Writes rows to a Parquet file, with the columns of the first rows."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._columns: _Columns | None = None
        self._writer: Any = None
        self._held_tables: list[Any] = []
        arrow()

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows. The first call determines the columns."""
        if self._columns is None:
            self._columns = _Columns(rows)
            self._open(self._columns.schema)
        self._held_tables.append(self._columns.table(rows))
        if sum(table.nbytes for table in self._held_tables) >= _BYTES:
            self._write_held()

    def _open(self, schema: Any) -> None:
        self._writer = arrow("pyarrow.parquet").ParquetWriter(self._raw, schema, compression="zstd")

    def _write_held(self) -> None:
        if self._held_tables:
            self._writer.write_table(arrow().concat_tables(self._held_tables))
            self._held_tables.clear()

    def close(self) -> None:
        """Write the end of the file; without rows, an empty table."""
        if self._writer is None:
            self._open(arrow().schema([]))
        self._write_held()
        self._writer.close()


def read_parquet(path: Path) -> Generator[Placed, None, None]:
    """Yield the rows of a Parquet file: those of exports as they were written, others unchanged.

    FileError when it is damaged, or cut short.
    """
    number = 1
    try:
        with arrow("pyarrow.parquet").ParquetFile(path, memory_map=False) as file:
            schema = file.schema_arrow
            names = {field.name for field in schema if (field.metadata or {}).get(b"replaybuf") == b"json"}
            for batch in file.iter_batches(_ROWS):
                yield from _rows(batch, number, names)
                number += batch.num_rows
    except (arrow().ArrowException, OSError, UnicodeDecodeError) as error:
        message = str(error).strip().partition("\n")[0]
        raise FileError(
            f"row {number}: this is no whole Parquet file: cut short, damaged, or of another format ({message:.200})"
        ) from error


def _rows(batch: Any, first: int, names: set[str]) -> Iterator[Placed]:
    """Yield the rows of a batch; `first` is the number of the first row, the names are those of columns with JSON."""
    columns = {name: _values(name, column, first) for name, column in zip(batch.schema.names, batch, strict=True)}
    for number in range(batch.num_rows):
        place = f"row {first + number}"
        yield place, _parse_row(place, {name: column[number] for name, column in columns.items()}, names)


def _parse_row(place: str, row: Row, names: set[str]) -> Row:
    """Return the values of a row that are there, those of columns with JSON parsed."""
    values = {name: value for name, value in row.items() if value is not None}
    for name in names & values.keys():
        try:
            values[name] = json.loads(values[name])
        except (ValueError, TypeError, RecursionError) as error:
            raise FileError(f"{place}, column {name!r:.60}: no JSON ({error!s:.100})") from error
    return values


def _values(name: str, column: Any, first: int) -> list[Any]:
    """Return the values of a column; `first` is the number of its first row. FileError for values that Python lacks."""
    try:
        values: list[Any] = column.to_pylist()
    except (ValueError, TypeError, LookupError, ArithmeticError, arrow().ArrowException) as error:
        places = f"rows {first} to {first + len(column) - 1}"
        raise FileError(f"{places}, column {name!r:.60}: it can't be read ({error!s:.200})") from error
    return values
