"""Files of rollouts: their names and formats, the reader for each, and the rows of JSON lines.

A file's name says its format; rows of JSON have the numbers of their lines.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import itertools
import json
import math
import stat
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

#: How many bytes of a file are read at once for its digest.
_PIECE: Final = 16 << 20


def dump(row: Row) -> bytes:
    """Return a row of JSON values as a line."""
    try:
        return pydantic_core.to_json(row) + b"\n"
    except pydantic_core.PydanticSerializationError:  # half of a surrogate pair, or nested deeply
        return json.dumps(row, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def numbered_lines(path: Path) -> Generator[tuple[int, bytes], None, None]:
    """Yield the lines of a file that aren't blank, with their numbers. Raises OSError."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.removeprefix(codecs.BOM_UTF8).strip():
                yield number, line


def read_rows(path: Path) -> Generator[Placed, None, None]:
    """Yield the objects in a file of lines. Raises FileError for a line that has none."""
    with contextlib.closing(numbered_lines(path)) as lines:
        for number, line in lines:
            yield f"line {number}", parsed(line, number)


def parsed(line: bytes, number: int) -> Row:
    """Return the object in a line of JSON. Raises FileError."""
    try:
        row = _DECODER.decode(line.decode("utf-8-sig").strip())
    except FileError as error:
        raise FileError(f"line {number}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise FileError(f"line {number}: no JSON object ({error!s:.100}); write one a line, in UTF-8") from error
    if type(row) is not dict:
        raise FileError(f"line {number}: expected an object, got {row!r:.60}; write one a line")
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
_FORMATS: Final = (".jsonl", ".parquet")


def format_of(path: Path) -> str:
    """Return the format that the name of a new file determines. Raises InputError."""
    if (form := path.suffix.lower()) in _FORMATS:
        return form
    raise InputError(f"{redact_path(str(path))!r:.200} doesn't say its format: a file is named {', '.join(_FORMATS)}")


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

    path: Path
    mapping: ColumnMapping = field(default_factory=ColumnMapping)

    def pieces(self) -> Generator[bytes, None, None]:
        """Yield the bytes by which an import knows the file: all of its own, and how its columns are read."""
        mapping = self.mapping
        yield json.dumps([sorted(mapping.fields.items()), mapping.task, mapping.status]).encode()
        with file_errors(self.path, "read"):
            if not stat.S_ISREG(self.path.stat().st_mode):  # to open a pipe could block for ever
                redacted = redact_path(str(self.path))
                raise FileError(f"{redacted} is no file; copy what comes out of a pipe or a device into one")
            with self.path.open("rb") as raw:
                while piece := raw.read(_PIECE):
                    yield piece

    def read(self) -> Iterator[FileGroup]:
        """Yield the groups. FileError for an invalid file, with the file's name first."""
        redacted, place = redact_path(str(self.path)), "the beginning"
        with file_errors(self.path, "read"):
            try:
                for group in self._groups():
                    place = group.place
                    group.place = f"{redacted}: {place}"
                    yield group
            except FileError as error:
                raise FileError(f"{redacted}: {error}") from error
            except ReplayBufError:
                raise
            except RecursionError as error:
                raise FileError(f"{redacted}: its values are nested too deeply, or hold themselves") from error
            except _UNFORESEEN_ERRORS as error:
                reason = f"the values can't be read ({type(error).__name__}: {error!s:.150})"
                raise FileError(f"{redacted}: after {place}: {reason}") from error

    def _groups(self) -> Iterator[FileGroup]:
        """Yield the groups of the rows, of an export or foreign ones. An error closes the file at once."""
        reader = read_parquet if self.path.suffix.lower() == ".parquet" else read_rows
        with contextlib.closing(reader(self.path)) as rows:
            first_row = next(rows, None)
            if first_row is not None:
                all_rows = itertools.chain([first_row], rows)
                yield from groups_of(all_rows) if is_ours(first_row[1]) else foreign_groups(all_rows, self.mapping)
