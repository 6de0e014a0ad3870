"""Rows as Arrow tables: writes Parquet and Arrow files, and reads them in batches.

A column has the type of its values in the first rows: numbers, texts, bytes, lists of these in the dtype of the
original arrays, lists of objects of texts (messages), or JSON for everything else. A later value that doesn't fit its
column goes to the column `$more`, as JSON; so does an explicit None, since null means that the rollout lacks the field.
The schema's metadata entry `replaybuf` says which columns are JSON.

A column's type is a text: "int64", "list:int32", "structs:role,content", "json", ...
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from replaybuf.checks import needed
from replaybuf.errors import FileError
from replaybuf.files.row_format import KINDS, METADATA, PREFIX, REST, ROLLOUTS, Placed, Row, is_of_rollout, to_json

_INT64: Final = 2**63
_ITEMS: Final[dict[type, str]] = {int: "int64", float: "float64", str: "string", bool: "bool_"}


def arrow(module: str = "pyarrow") -> Any:
    """Return pyarrow, or a module of it. Raises MissingDriverError."""
    return needed(module, "Parquet and Arrow files need the package pyarrow: pip install pyarrow")


def column_for(value: Any, kind: str | None) -> str:
    """Return the column type for a value of a row, given its kind there (`row_format.KINDS`).

    "list:" is the type of an empty list, which fits any list column.
    """
    if type(value) is int:
        return "int64" if -_INT64 <= value < _INT64 else "json"
    if type(value) is not list:
        return {**_ITEMS, bytes: "binary"}.get(type(value), "json")
    if kind is not None and ":" in kind:  # numbers
        dtype = kind.split(":")[1]
        name = np.dtype("float32" if dtype == "bfloat16" else dtype).name
        return "list:" + {"float16": "float32", "bool": "bool_"}.get(name, name)
    kinds = set(map(type, value))
    if not kinds:
        return "list:"
    if len(kinds) == 1 and (one := kinds.pop()) in _ITEMS:
        if one is int and not -_INT64 <= min(value) <= max(value) < _INT64:
            return "json"
        return f"list:{_ITEMS[one]}"
    if all(type(item) is dict and item and set(map(type, item.values())) == {str} for item in value):
        names = {tuple(item) for item in value}
        first = names.pop()
        if not names and is_unicode(first) and not any("," in name for name in first):
            return f"structs:{','.join(first)}"
    return "json"


def joined(wanted: set[str]) -> str:
    """Return the common column type for values of these types."""
    filled = wanted - {"list:"}
    if len(filled) == 1:
        return filled.pop()
    numbers = {one.removeprefix("list:") for one in filled}
    if filled and all(one.startswith("list:") for one in filled):
        if all(name.startswith("int") for name in numbers):
            return "list:int64"
        if numbers <= {"float32", "float64"}:
            return "list:float64"
    return "json"


def fits(wanted: str, column: str) -> bool:
    """Return whether values of one type fit a column of another."""
    if wanted == column or column == "json":
        return True
    if wanted == "list:":
        return column.startswith(("list:", "structs:"))
    wider = {"list:int64": "list:int", "list:float64": "list:float"}.get(column)
    return wider is not None and wanted.startswith(wider)


def arrow_type(column: str) -> Any:
    """Return a column type as an Arrow type. Raises MissingDriverError."""
    pa = arrow()
    if column == "json":
        return pa.string()
    if column.startswith("list:"):
        return pa.list_(arrow_type(column.removeprefix("list:")))
    if column.startswith("structs:"):
        return pa.list_(pa.struct([(name, pa.string()) for name in column.removeprefix("structs:").split(",")]))
    return getattr(pa, column)()


def is_unicode(value: Any) -> bool:
    """Return whether texts are valid Unicode: Arrow has no lone surrogates."""
    if type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
        return True
    return all(map(is_unicode, (*value, *value.values()) if type(value) is dict else value))


MORE: Final = "$more"
_ABOUT: Final = b"replaybuf"
_JSON_FIELDS: Final = (KINDS, REST, MORE)
_METADATA: Final = {
    "uid": "int64",
    "task_name": "string",
    "status": "string",
    "staleness": "int64",
    "priority": "float64",
    "times_sampled": "int64",
    "created_at": "float64",
    "reward": "float64",
    "tags": "json",
    "key": "string",
    "error": "string",
    "deliveries": "int64",
    "worker": "string",
    "trained_step": "int64",
    "index": "int32",
    "size": "int32",
}


class TableColumns:
    """The columns of a file, determined by its first rows."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._grouped = not is_of_rollout(rows[0])
        prefix = "" if self._grouped else PREFIX
        #: The metadata columns in rows of rollouts, beside the fields.
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
        """Return the schema, with the metadata for reading the rows back."""
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
            flat = [{**self._metadata_of(row), ROLLOUTS: [self._fitted(one) for one in row[ROLLOUTS]]} for row in rows]
        else:
            flat = [{**self._metadata_of(row), **self._fitted(row)} for row in rows]
        return pa.Table.from_pylist(flat, schema=schema)

    def _metadata_of(self, row: Row) -> Row:
        metadata = {name: row.get(name) for name in self._metadata}
        tags = "tags" if self._grouped else f"{PREFIX}tags"
        metadata[tags] = None if metadata[tags] is None else json.dumps(metadata[tags])
        return metadata

    def _fitted(self, row: Row) -> Row:
        """Return the fields of a rollout, with those that don't fit their columns in `$more`."""
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


# TableReader


class TableReader:
    """Reads the rows of a file's tables: those of exports according to their schema, others unchanged."""

    def __init__(self, schema: Any) -> None:
        twice = [name for name, count in Counter(schema.names).items() if count > 1]
        if twice:
            raise FileError(f"two columns have the name {twice[0]!r:.60}; rename one of them")
        self._about = _about(schema)
        self._json = frozenset(self._about["json"] if self._about else ())

    def rows(self, batch: Any, first: int) -> Iterable[tuple[str, Row]]:
        """Yield the rows of a batch; `first` is the number of the first row."""
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
                yield place, {**self._metadata_of(place, row, ""), ROLLOUTS: unfitted}
            else:
                metadata = {name: row.pop(name) for name in list(row) if name.startswith(PREFIX)}
                yield place, {**self._metadata_of(place, metadata, PREFIX), **self._unfitted(place, row)}

    def _metadata_of(self, place: str, row: Row, prefix: str) -> Row:
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
    """Return the metadata `replaybuf` in the schema of one of our exports, None for other files. Raises FileError."""
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
    """Return the values of a column; `first` is the number of its first row. FileError for values that Python lacks."""
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


#: The number of rows in memory together when a file is read.
_ROWS: Final = 64
#: The size at which buffered rows are written: larger pieces are better for readers, smaller ones for memory.
_BYTES: Final = 4 << 20
#: The end of an Arrow stream.
_END: Final = b"\xff\xff\xff\xff\0\0\0\0"


class TableWriter:
    """Writes rows to a Parquet or Arrow file, with the columns of the first rows."""

    def __init__(self, raw: IO[bytes], form: str) -> None:
        self._raw = raw
        self._form = form
        self._columns: TableColumns | None = None
        self._schema: Any = None
        self._writer: Any = None
        self._held: list[Any] = []
        arrow()

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows. The first call determines the columns."""
        if self._columns is None:
            self._columns = TableColumns(rows)
            self._schema = self._columns.schema()
            self._writer = self._opened()
        self._held.append(self._columns.table(rows, self._schema))
        if sum(table.nbytes for table in self._held) >= _BYTES:
            self._write_held()

    def _write_held(self) -> None:
        if self._held:
            self._writer.write_table(arrow().concat_tables(self._held))
            self._held.clear()

    def _opened(self) -> Any:
        if self._form == "parquet":
            return arrow("pyarrow.parquet").ParquetWriter(self._raw, self._schema, compression="zstd")
        ipc = arrow().ipc
        return (ipc.new_stream if self._form == "stream" else ipc.new_file)(self._raw, self._schema)

    def close(self) -> None:
        """Write the end of the file; without rows, an empty table."""
        if self._writer is None:
            self._schema = arrow().schema([])
            self._writer = self._opened()
        self._write_held()
        self._writer.close()


def read_tables(path: Path, form: str) -> Generator[Placed, None, None]:
    """Yield the rows of a Parquet or Arrow file. FileError when it is damaged, or cut short."""
    pa = arrow()
    number = 1
    try:
        for reading, batch in _batches(path, form):
            yield from reading.rows(batch, number)
            number += batch.num_rows
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        what = str(error).strip().partition("\n")[0]
        raise FileError(
            f"row {number}: this is no whole {'Parquet' if form == 'parquet' else 'Arrow'} file: cut short, damaged, "
            f"or of another format ({what:.200})"
        ) from error


def _batches(path: Path, form: str) -> Iterator[tuple[TableReader, Any]]:
    if form == "parquet":
        with arrow("pyarrow.parquet").ParquetFile(path, memory_map=False) as file:
            reading = TableReader(file.schema_arrow)
            for batch in file.iter_batches(_ROWS):
                yield reading, batch
        return
    pa = arrow()
    with pa.memory_map(str(path)) as source:
        file = pa.ipc.open_stream(source) if form == "stream" else pa.ipc.open_file(source)
        reading = TableReader(file.schema)
        for whole in file if form == "stream" else map(file.get_batch, range(file.num_record_batches)):
            whole.validate(full=True)  # offsets beyond the file would crash the process
            for start in range(0, whole.num_rows, _ROWS):
                yield reading, whole.slice(start, _ROWS)
        if form == "stream" and source.size() >= len(_END):
            source.seek(source.size() - len(_END))
            if source.read() != _END:
                raise FileError(
                    "the file ends without the mark at the end of a stream; it was cut short", reason="ends"
                )
