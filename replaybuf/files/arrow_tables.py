"""Rows as Arrow tables: writes Parquet and Arrow files, and reads them in batches.

A column has the type of its values in the first rows: numbers, texts, bytes, lists of these in the dtype of the
original arrays, lists of objects of texts (messages), or JSON as text for everything else. A later value that doesn't
fit its column is null there, and in the column `group.more`, which is JSON. The schema's metadata entry `replaybuf`
says which columns are JSON.

A column's type is a text here: "int64", "list:int32", "list:struct:role,content", "json", ...
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from replaybuf.checks import needed
from replaybuf.errors import FileError
from replaybuf.files.row_format import MORE, PAYLOAD, PREFIX, ROLLOUTS, Placed, PlainValues, Row, is_of_rollout
from replaybuf.rollouts.rollout import Status

_NUMBER: Final = re.compile(r"u?int[0-9]+|float[0-9]+")
#: What pyarrow raises for values that a column can't hold.
_MISFITS: Final = (ValueError, TypeError, ArithmeticError)
_SCALARS: Final[dict[type, str]] = {
    int: "int64",
    float: "float64",
    str: "string",
    bool: "bool",
    bytes: "binary",
    Status: "string",
    np.float64: "float64",
    np.float32: "float32",
    np.int64: "int64",
    np.int32: "int32",
}
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
    PAYLOAD: "binary",
}
_PLACE: Final = {"index": "int32", "size": "int32"}
_ABOUT: Final = b"replaybuf"


def arrow(module: str = "pyarrow") -> Any:
    """Return pyarrow, or a module of it. Raises MissingDriverError."""
    return needed(module, "Parquet and Arrow files need the package pyarrow: pip install pyarrow")


def type_of(value: Any) -> str:
    """Return the type of the column for a value. "list:" is that of an empty list, which fits any column of lists."""
    if isinstance(value, np.ndarray):
        known = value.ndim and value.dtype.kind in "iufb" and value.dtype.itemsize <= 8
        dtype = {"float16": "float32"}.get(value.dtype.name, value.dtype.name)
        return "list:" * value.ndim + dtype if known else "json"
    if type(value) is dict:
        texts = set(map(type, (*value, *value.values()))) == {str} and not any("," in name for name in value)
        return f"struct:{','.join(value)}" if texts else "json"
    if type(value) is not list:
        return _SCALARS.get(type(value), "json")
    kinds = set(map(type, value))
    inner = common_type({_SCALARS[kind] for kind in kinds} if kinds <= _SCALARS.keys() else set(map(type_of, value)))
    return "json" if inner == "json" else f"list:{inner}"


def common_type(found: set[str]) -> str:
    """Return the type of a column of values of these types; "" for none."""
    found = {one for one in found if not any(one != other and _is_empty(one, other) for other in found)}
    if len(found) < 2:
        return "".join(found)
    numbers = {one.replace("list:", "") for one in found}
    if len({one.count("list:") for one in found}) > 1 or not all(map(_NUMBER.fullmatch, numbers)):
        return "json"
    common = "float64" if any(name.startswith("f") for name in numbers) else "int64"
    return "list:" * found.pop().count("list:") + common


def _is_empty(found: str, column: str) -> bool:
    """Return whether this is the type of an empty list, which fits the column."""
    return found.endswith("list:") and column.startswith(found)


def arrow_type(column: str) -> Any:
    """Return a column type as an Arrow type. Raises MissingDriverError."""
    pa = arrow()
    if column == "json":
        return pa.string()
    if column.startswith("list:"):
        return pa.list_(arrow_type(column.removeprefix("list:")))
    if column.startswith("struct:"):
        return pa.struct([(name, pa.string()) for name in column.removeprefix("struct:").split(",")])
    return getattr(pa, {"bool": "bool_"}.get(column, column))()


def _converts(value: Any, column: str) -> bool:
    """Return whether Arrow takes a value of the column's type: a number may be too large, a text no valid Unicode."""
    try:
        arrow().array([_arrow_value(value)], arrow_type(column))
    except _MISFITS:
        return False
    return True


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


class TableColumns:
    """The columns of a file, determined by its first rows."""

    def __init__(self, rows: Sequence[Row], plain: PlainValues) -> None:
        self._plain = plain
        self._grouped = not is_of_rollout(rows[0])
        exact = PAYLOAD in rows[0] or PREFIX + PAYLOAD in rows[0]
        metadata = {name: column for name, column in _METADATA.items() if name != PAYLOAD or exact}
        if not self._grouped:
            metadata = {PREFIX + name: column for name, column in (metadata | _PLACE).items()}
        self._metadata = metadata
        #: The names in rows of rollouts that are no fields.
        self._beside = frozenset() if self._grouped else frozenset(metadata)
        wanted: dict[str, set[str]] = {}
        for row in self._rollouts(rows):
            for name, value in row.items():
                if _is_unicode(name) and name not in self._beside and name != MORE:
                    wanted.setdefault(name, set()).update(() if value is None else (type_of(value),))
        found = {name: common_type(types) for name, types in wanted.items()}
        typed = {name: "json" if not column or column.endswith("list:") else column for name, column in found.items()}
        self._fields = {**typed, MORE: "json"}

    def _rollouts(self, rows: Sequence[Row]) -> list[Row]:
        return [one for row in rows for one in row[ROLLOUTS]] if self._grouped else list(rows)

    def schema(self) -> Any:
        """Return the schema, with the metadata for reading the rows back."""
        pa = arrow()
        fields = [(name, arrow_type(column)) for name, column in self._fields.items()]
        columns = [(name, arrow_type(column)) for name, column in self._metadata.items()]
        columns += [(ROLLOUTS, pa.list_(pa.struct(fields)))] if self._grouped else fields
        about = {"json": [name for name, column in self._metadata.items() if column == "json"]}
        about[ROLLOUTS] = [name for name, column in self._fields.items() if column == "json"]
        return pa.schema(columns, metadata={_ABOUT: json.dumps(about).encode()})

    def table(self, rows: Sequence[Row], schema: Any) -> Any:
        """Return rows as a table of these columns."""
        pa = arrow()
        try:
            return pa.Table.from_pylist([self._flat(row, checked=False) for row in rows], schema=schema)
        except _MISFITS:
            return pa.Table.from_pylist([self._flat(row, checked=True) for row in rows], schema=schema)

    def _flat(self, row: Row, *, checked: bool) -> Row:
        metadata = {name: row.get(name) for name in self._metadata}
        tags = "tags" if self._grouped else f"{PREFIX}tags"
        metadata[tags] = None if metadata[tags] is None else json.dumps(metadata[tags])
        if self._grouped:
            return metadata | {ROLLOUTS: [self._fitted(one, checked) for one in row[ROLLOUTS]]}
        return metadata | self._fitted(row, checked)

    def _fitted(self, row: Row, checked: bool) -> Row:
        """Return the fields of a rollout, with those that don't fit their columns in `group.more`."""
        fitted: Row = {}
        more: Row = dict(row.get(MORE) or {})
        for name, value in row.items():
            if name in self._beside or name == MORE or value is None:
                continue
            column = self._fields.get(name)
            if column == "json":
                fitted[name] = json.dumps(self._plain.json(name, value))
            elif common_type({type_of(value), column or "json"}) == column and not (
                checked and not _converts(value, column)
            ):
                fitted[name] = _arrow_value(value)
            else:
                more[name] = value
        if more:
            fitted[MORE] = json.dumps(self._plain.json(MORE, more))
        return fitted


def _arrow_value(value: Any) -> Any:
    """Return a value as pyarrow takes it: arrays of several dimensions as lists of arrays."""
    if isinstance(value, np.ndarray):
        if value.ndim > 1:
            return list(map(_arrow_value, value))
        return value.astype("f4" if value.dtype.itemsize == 2 and value.dtype.kind == "f" else value.dtype.name)
    return str(value) if type(value) is Status else value


class TableReader:
    """Reads the rows of a file's tables: those of exports according to their schema, others unchanged."""

    def __init__(self, schema: Any) -> None:
        twice = [name for name, count in Counter(schema.names).items() if count > 1]
        if twice:
            raise FileError(f"two columns have the name {twice[0]!r:.60}; rename one of them")
        self._json, self._json_of_rollouts = _json_columns(schema)

    def rows(self, batch: Any, first: int) -> Iterator[Placed]:
        """Yield the rows of a batch; `first` is the number of the first row."""
        columns = {name: _values(name, column, first) for name, column in zip(batch.schema.names, batch, strict=True)}
        for number in range(batch.num_rows):
            place = f"row {first + number}"
            row = _parsed(place, {name: column[number] for name, column in columns.items()}, self._json)
            if self._json_of_rollouts and type(row.get(ROLLOUTS)) is list:
                names = self._json_of_rollouts
                row[ROLLOUTS] = [_parsed(place, one, names) if type(one) is dict else one for one in row[ROLLOUTS]]
            yield place, row


def _json_columns(schema: Any) -> list[frozenset[str]]:
    """Return the names of columns with JSON, and of fields in `rollouts`; none for others' files. Raises FileError."""
    text = (schema.metadata or {}).get(_ABOUT, b"{}")
    try:
        about = json.loads(text)
        names = [frozenset(about.get(where, ())) for where in ("json", ROLLOUTS)]
        if all(type(name) is str for one in names for name in one):
            return [names[0] | names[1], frozenset()] if f"{PREFIX}uid" in schema.names else names
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass
    raise FileError(f"the schema's metadata 'replaybuf' is damaged ({text!r:.100})")


def _parsed(place: str, row: Row, names: frozenset[str]) -> Row:
    """Return the values of a row that are there, those of columns with JSON parsed."""
    found = {name: value for name, value in row.items() if value is not None}
    for name in names & found.keys():
        try:
            found[name] = json.loads(found[name])
        except (ValueError, TypeError, RecursionError) as error:
            raise FileError(f"{place}, column {name!r:.60}: no JSON ({error!s:.100})") from error
    return found


def _values(name: str, column: Any, first: int) -> list[Any]:
    """Return the values of a column; `first` is the number of its first row. FileError for values that Python lacks."""
    values: list[Any] = []
    try:
        for one in column:
            values.append(one.as_py())
    except (ValueError, TypeError, LookupError, ArithmeticError, arrow().ArrowException) as error:
        raise FileError(f"row {first + len(values)}, column {name!r:.60}: it can't be read ({error!s:.200})") from error
    return values


#: The number of rows in memory together when a file is read.
_ROWS: Final = 64
#: The size at which buffered rows are written: larger pieces are better for readers, smaller ones for memory.
_BYTES: Final = 4 << 20
#: The end of an Arrow stream.
_END: Final = b"\xff\xff\xff\xff\0\0\0\0"


class TableWriter:
    """Writes rows to a Parquet or Arrow file, with the columns of the first rows."""

    def __init__(self, raw: IO[bytes], form: str, plain: PlainValues) -> None:
        self._raw = raw
        self._form = form
        self._plain = plain
        self._columns: TableColumns | None = None
        self._schema: Any = None
        self._writer: Any = None
        self._held: list[Any] = []
        arrow()

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows. The first call determines the columns."""
        if self._columns is None:
            self._columns = TableColumns(rows, self._plain)
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
