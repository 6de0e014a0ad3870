"""Which reader a file needs: it is known by its first bytes, not by its name."""

from __future__ import annotations

import itertools
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from replaybuf.errors import AccessError, FileEndsError, FileError, ReplayBufError
from replaybuf.files.arrow_tables import read_tables
from replaybuf.files.exporting import files_in, parts_of
from replaybuf.files.foreign_rows import ColumnMapping, foreign_groups
from replaybuf.files.json_lines import read_rows
from replaybuf.files.pickled_values import read_saved
from replaybuf.files.row_format import FileGroup, Placed, groups_of, is_ours
from replaybuf.redact import redact_path

_SQLITE: Final = b"SQLite format 3\0"
_ARROW: Final = b"ARROW1"
_STREAM: Final = b"\xff\xff\xff\xff"
_PARQUET: Final = b"PAR1"
_ZIP: Final = b"PK\x03\x04"
_PICKLE: Final = b"\x80"
_DATABASE: Final = (
    "this is a database: replaybuf save and resume, or export, copy the groups of one of replaybuf's; those of others "
    "are imported from JSONL"
)
#: The ends of the names of files that are never empty, as those of plain lines may be.
_FILLED: Final = (".gz", ".zst", ".parquet", ".arrow", ".feather", ".arrows", ".pth", ".pt", ".pkl")


def is_sqlite(path: Path) -> bool:
    """Return whether a file is a SQLite database; an empty one becomes one. OSError when it can't be read."""
    with path.open("rb") as raw:
        return raw.read(len(_SQLITE)) in (b"", _SQLITE)


def _check_ordinary(path: Path) -> None:
    """Raise FileError for a pipe, a socket or a device: to open it could wait for ever. OSError if none is there."""
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind in _SPECIAL:
        raise FileError(f"it is {_SPECIAL[kind]}, not a file; copy what comes out of it to one")


_SPECIAL: Final = {
    stat.S_IFIFO: "a named pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@dataclass(frozen=True, slots=True)
class RolloutFile:
    """A file, the parts of one, or the folder of a dataset, and how others' rows in it are read."""

    where: str
    mapped: ColumnMapping = field(default_factory=ColumnMapping)

    def read(self) -> Iterator[FileGroup]:
        """Yield the groups. FileError, which begins with the file's name, for one that is wrong."""
        if self.where.startswith(("postgres", "sqlite:")) and "://" in self.where:
            raise FileError(f"{redact_path(self.where)}: {_DATABASE}")
        path = Path(self.where)
        if path.is_dir():
            files = files_in(path)
        else:
            files = [path] if path.exists() else parts_of(path) or [path]
        for file in files:
            try:
                for group in _guarded(partial(self._read, file)):
                    group.place = f"{redact_path(str(file))}: {group.place}"
                    yield group
            except FileError as error:
                raise type(error)(f"{redact_path(str(file))}: {error}") from error
            except RecursionError as error:
                raise FileError(
                    f"{redact_path(str(file))}: its values are nested too deeply, or hold themselves"
                ) from error
            except PermissionError as error:
                raise AccessError(f"{redact_path(str(file))} can't be read: {error.strerror}") from error
            except OSError as error:
                raise FileError(f"{redact_path(str(file))} can't be read: {error.strerror or error}") from error

    def _read(self, path: Path) -> Iterator[FileGroup]:
        _check_ordinary(path)
        with path.open("rb") as raw:
            magic = raw.read(16)
        if not magic and path.name.lower().endswith(_FILLED):
            raise FileEndsError("the file is empty")
        if magic == _SQLITE:
            raise FileError(_DATABASE)
        if magic.startswith((_ZIP, _PICKLE)):
            return read_saved(path, self.mapped)
        if magic.startswith(_PARQUET):
            return self._grouped(read_tables(path, "parquet"))
        if magic.startswith(_ARROW):
            return self._grouped(read_tables(path, "arrow"))
        if magic.startswith(_STREAM):
            return self._grouped(read_tables(path, "stream"))
        return self._grouped(read_rows(path))

    def _grouped(self, rows: Iterator[Placed]) -> Iterator[FileGroup]:
        """Return the groups of rows: of ours, or of others'."""
        first = next(rows, None)
        if first is None:
            return iter(())
        every = itertools.chain([first], rows)
        return groups_of(every) if is_ours(first[1]) else foreign_groups(every, self.mapped)


def _guarded(read: Callable[[], Iterator[FileGroup]]) -> Iterator[FileGroup]:
    """Yield the groups that are read. FileError where a file holds what its reader has not foreseen."""
    place = "the beginning"
    try:
        for group in read():
            place = group.place
            yield group
    except ReplayBufError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, NotImplementedError) as error:
        raise FileError(f"after {place}: the values can't be read ({type(error).__name__}: {error!s:.150})") from error
