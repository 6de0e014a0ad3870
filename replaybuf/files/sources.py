"""Files of rollouts: their names and formats, the reader for each, and the rows of JSON lines.

A file's format is recognised by its first bytes, not by its name; rows have the numbers of their lines.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import itertools
import json
import math
import stat
import zlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pydantic_core

from replaybuf.common.redact import redact_path
from replaybuf.errors import AccessError, FileError, InputError, ReplayBufError, StorageError
from replaybuf.files.foreign_rows import ColumnMapping, foreign_groups
from replaybuf.files.parquet_files import read_parquet
from replaybuf.files.row_format import FileGroup, Placed, Row, groups_of, is_ours

#: A longer line is refused, because it would have to be in memory as a whole.
_MOST_BYTES: Final = 1 << 30
#: How many bytes of a file are read at once for its digest.
_PIECE: Final = 16 << 20
_GZIP: Final = b"\x1f\x8b"
_BOM: Final = b"\xef\xbb\xbf"
#: The formats, for the error about a file that has none of them.
READABLE: Final = "what can be read is JSONL (also .gz) and Parquet"


def dump(row: Row) -> bytes:
    """Return a row of JSON values as a line."""
    try:
        return pydantic_core.to_json(row) + b"\n"
    except pydantic_core.PydanticSerializationError:  # half of a surrogate pair, or nested deeply
        return json.dumps(row, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def numbered_lines(path: Path) -> Generator[tuple[int, bytes], None, None]:
    """Yield the lines of a file that aren't blank, plain or gzipped, with their numbers. Raises FileError, OSError."""
    with path.open("rb") as raw:
        is_gzip = raw.read(2) == _GZIP
        raw.seek(0)
        stream: Any = gzip.GzipFile(fileobj=raw, mode="rb") if is_gzip else raw
        for number in itertools.count(1):
            try:
                line = stream.readline(_MOST_BYTES + 1)
            except (EOFError, zlib.error, gzip.BadGzipFile, ValueError) as error:
                reason = "ends" if isinstance(error, EOFError) else ""
                raise FileError(
                    f"line {number}: the compressed file is cut short or damaged ({error})", reason=reason
                ) from error
            if not line:
                return
            if len(line) > _MOST_BYTES:
                raise FileError(f"line {number} has more than {_MOST_BYTES:,} bytes; is this a file of lines of JSON?")
            if number == 1:
                line = line.removeprefix(_BOM)
            if line.strip():
                yield number, line


def read_rows(path: Path) -> Generator[Placed, None, None]:
    """Yield the objects in a file of lines. Raises FileError for a line that has none; reason "ends" for a cut one."""
    with contextlib.closing(numbered_lines(path)) as lines:
        for number, line in lines:
            yield f"line {number}", parsed(line, number)


def parsed(line: bytes, number: int) -> Row:
    """Return the object in a line of JSON. Raises FileError."""
    is_whole = line.endswith(b"\n") or not line.lstrip().startswith(b"{")
    try:
        row = _DECODER.decode(line.decode("utf-8").strip())
    except UnicodeDecodeError as error:
        if not is_whole and error.end >= len(line):
            raise FileError(f"line {number}: the file ends within a character", reason="ends") from error
        raise FileError(
            f"line {number}: byte {error.start} is no UTF-8; write the file as UTF-8; {READABLE}"
        ) from error
    except RecursionError as error:
        raise FileError(f"line {number}: nested too deeply") from error
    except FileError as error:
        raise FileError(f"line {number}: {error}") from None
    except ValueError as error:
        if not is_whole:
            raise FileError(f"line {number}: the file ends within a row ({error!s:.100})", reason="ends") from error
        raise FileError(f"line {number}: no JSON object ({error!s:.100}); write one a line; {READABLE}") from error
    if type(row) is not dict:
        raise FileError(f"line {number}: expected an object, got {row!r:.60}; write one a line; {READABLE}")
    return row


def _refuse(constant: str) -> Any:
    raise FileError(f"{constant} is no JSON; write null")


def _finite_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise FileError(f"{text:.60} is larger than any number that a float can hold; write null")
    return number


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite_float)


#: The formats of files, by file name extension.
FORMATS: Final = {
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    **dict.fromkeys((".jsonl.gz", ".ndjson.gz"), "gzip"),
    ".parquet": "parquet",
}


def format_of(path: Path) -> str:
    """Return the format that a file name determines. Raises InputError."""
    for ending, form in FORMATS.items():
        if path.name.lower().endswith(ending):
            return form
    raise InputError(f"{redact_path(str(path))!r:.200} doesn't say its format: a file is named {', '.join(FORMATS)}")


_SQLITE: Final = b"SQLite format 3\0"
_PARQUET: Final = b"PAR1"
_DATABASE: Final = (
    "this is a database: replaybuf checkpoint save and resume, or export, copy the groups of one of replaybuf's; "
    "those of others are imported from JSONL"
)
_PICKLED: Final = (
    "this is a pickle, or a file of torch.save or numpy: load it where its classes are, if you trust it, and write its "
    "rollouts as JSONL (docs/files.md, Saved buffers)"
)
#: What other files are, by their first bytes.
_OTHER_FORMATS: Final = {_SQLITE: _DATABASE, **dict.fromkeys((b"PK\x03\x04", b"\x80"), _PICKLED)}
#: Extensions of files that are never empty, as opposed to plain lines.
_SUFFIXES_WITH_MAGIC: Final = (".gz", ".parquet")


#: Exceptions of readers about unforeseen content.
_UNFORESEEN_ERRORS: Final = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, NotImplementedError)


@contextlib.contextmanager
def file_errors(path: Path, action: str) -> Iterator[None]:
    """Raise errors of the file system as ours; `action` is what was to be done: "read" or "written"."""
    redacted = redact_path(str(path))
    try:
        yield
    except ReplayBufError:
        raise
    except PermissionError as error:
        raise AccessError(f"{redacted} can't be {action}: {error.strerror}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(
                f"the disk is full: {redacted} was not {action}; make room on its disk, or choose another",
                reason="disk full",
            ) from error
        raise FileError(f"{redacted} can't be {action}: {error.strerror or error}") from error


@dataclass(frozen=True, slots=True)
class RolloutFile:
    """A file, and the mapping for foreign rows in it."""

    where: str
    mapping: ColumnMapping = field(default_factory=ColumnMapping)

    def pieces(self) -> Generator[bytes, None, None]:
        """Yield the bytes by which an import knows the file: all of its own, and how its columns are read."""
        mapping = self.mapping
        read_as = [sorted(mapping.fields.items()), mapping.task, mapping.status, mapping.key, mapping.as_they_are]
        yield json.dumps(read_as).encode()
        with self._path().open("rb") as raw:
            while piece := raw.read(_PIECE):
                yield piece

    def _path(self) -> Path:
        if self.where.startswith(("postgres", "sqlite:")) and "://" in self.where:
            raise FileError(f"{redact_path(self.where)}: {_DATABASE}")
        return Path(self.where)

    def read(self) -> Iterator[FileGroup]:
        """Yield the groups. FileError for an invalid file, with the file's name first."""
        file = self._path()
        redacted, place = redact_path(str(file)), "the beginning"
        with file_errors(file, "read"):
            try:
                for group in self._read(file):
                    place = group.place
                    group.place = f"{redacted}: {place}"
                    yield group
            except FileError as error:
                raise FileError(f"{redacted}: {error}", reason=error.reason) from error
            except ReplayBufError:
                raise
            except RecursionError as error:
                raise FileError(f"{redacted}: its values are nested too deeply, or hold themselves") from error
            except _UNFORESEEN_ERRORS as error:
                reason = f"the values can't be read ({type(error).__name__}: {error!s:.150})"
                raise FileError(f"{redacted}: after {place}: {reason}") from error

    def _read(self, path: Path) -> Iterator[FileGroup]:
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe could block for ever
            raise FileError("it is not a file; if it is a pipe or a device, copy what comes out of it to a file")
        with path.open("rb") as raw:
            magic = raw.read(16)
        if not magic and path.name.lower().endswith(_SUFFIXES_WITH_MAGIC):
            raise FileError("the file is empty", reason="ends")
        for prefix, description in _OTHER_FORMATS.items():
            if magic.startswith(prefix):
                raise FileError(description)
        return self._groups_of_rows(read_parquet(path) if magic.startswith(_PARQUET) else read_rows(path))

    def _groups_of_rows(self, rows: Generator[Placed, None, None]) -> Iterator[FileGroup]:
        """Yield the groups of rows, of an export or foreign ones. An error closes the file at once."""
        with contextlib.closing(rows):
            first_row = next(rows, None)
            if first_row is not None:
                all_rows = itertools.chain([first_row], rows)
                yield from groups_of(all_rows) if is_ours(first_row[1]) else foreign_groups(all_rows, self.mapping)
