"""Which reader a file needs: it is known by its first bytes, not by its name."""

from __future__ import annotations

import itertools
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
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


#: What is no file: to open it could wait for ever.
_SPECIAL: Final = {
    stat.S_IFIFO: "a named pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


#: What readers raise for files that hold what they have not foreseen.
_UNFORESEEN: Final = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, NotImplementedError)


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
            shown, place = redact_path(str(file)), "the beginning"
            try:
                for group in self._read(file):
                    place = group.place
                    group.place = f"{shown}: {place}"
                    yield group
            except FileError as error:
                raise type(error)(f"{shown}: {error}") from error
            except ReplayBufError:
                raise
            except RecursionError as error:
                raise FileError(f"{shown}: its values are nested too deeply, or hold themselves") from error
            except PermissionError as error:
                raise AccessError(f"{shown} can't be read: {error.strerror}") from error
            except OSError as error:
                raise FileError(f"{shown} can't be read: {error.strerror or error}") from error
            except _UNFORESEEN as error:
                what = f"the values can't be read ({type(error).__name__}: {error!s:.150})"
                raise FileError(f"{shown}: after {place}: {what}") from error

    def _read(self, path: Path) -> Iterator[FileGroup]:
        if (kind := stat.S_IFMT(path.stat().st_mode)) in _SPECIAL:
            raise FileError(f"it is {_SPECIAL[kind]}, not a file; copy what comes out of it to one")
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
