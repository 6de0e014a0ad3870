"""Parquet and Arrow files: writing tables of rows, and reading them in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

from replaybuf.errors import FileEndsError, FileError
from replaybuf.files.column_types import arrow
from replaybuf.files.columns import Columns, Reading
from replaybuf.files.rows import Placed, Row

#: Rows that are in memory together when a file is read.
_ROWS: Final = 64
#: Rows are written together from this size on: readers like larger pieces, and memory smaller ones.
_BYTES: Final = 4 << 20
#: The end of an Arrow stream.
_END: Final = b"\xff\xff\xff\xff\0\0\0\0"


class TableWriter:
    """Writes rows to a Parquet or Arrow file whose columns are those of the first rows."""

    def __init__(self, raw: IO[bytes], form: str) -> None:
        self._raw = raw
        self._form = form
        self._columns: Columns | None = None
        self._schema: Any = None
        self._writer: Any = None
        self._held: list[Any] = []
        arrow()

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows. The first call decides about the columns."""
        if self._columns is None:
            self._columns = Columns(rows)
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
            from pyarrow import parquet  # type: ignore[import-untyped]

            return parquet.ParquetWriter(self._raw, self._schema, compression="zstd")
        ipc = arrow().ipc
        return (ipc.new_stream if self._form == "stream" else ipc.new_file)(self._raw, self._schema)

    def close(self) -> None:
        """Write the end of the file; without rows, an empty table."""
        if self._writer is None:
            self._schema = arrow().schema([])
            self._writer = self._opened()
        self._write_held()
        self._writer.close()


def read_tables(path: Path, form: str) -> Iterator[Placed]:
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


def _batches(path: Path, form: str) -> Iterator[tuple[Reading, Any]]:
    if form == "parquet":
        from pyarrow import parquet

        with parquet.ParquetFile(path, memory_map=False) as file:
            reading = Reading(file.schema_arrow)
            for batch in file.iter_batches(_ROWS):
                yield reading, batch
        return
    pa = arrow()
    with pa.memory_map(str(path)) as source:
        file = pa.ipc.open_stream(source) if form == "stream" else pa.ipc.open_file(source)
        reading = Reading(file.schema)
        for whole in file if form == "stream" else map(file.get_batch, range(file.num_record_batches)):
            whole.validate(full=True)  # offsets that lead out of the file would end the process
            for start in range(0, whole.num_rows, _ROWS):
                yield reading, whole.slice(start, _ROWS)
        if form == "stream" and source.size() >= len(_END):
            source.seek(source.size() - len(_END))
            if source.read() != _END:
                raise FileEndsError("the file ends without the mark at the end of a stream; it was cut short")
