"""JSONL files as an indexed dataset: a line is parsed when it is used."""

from __future__ import annotations

import json
import operator
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, SupportsIndex

from replaybuf.errors import InputError

_BOM = b"\xef\xbb\xbf"


class _Index(NamedTuple):
    """The offsets of the lines of a file, and the size and time of the file at that moment."""

    offsets: array[int]
    stamp: tuple[int, int]


class JSONLines:
    """The objects in one or more JSONL files, as an indexed dataset of dicts, in the order of the files.

    Blank lines are skipped. The files are read once, at the first use, to find where their lines begin (8 bytes of
    memory for each); after that, only the lines that are used. May be used by several threads, forked, and pickled: no
    file stays open.

    Raises InputError if a file is missing, can't be read, or has changed since that first use (its size or modification
    time), and for a line that isn't a JSON object in UTF-8, with the file and the number of the line.
    """

    def __init__(self, paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> None:
        several = [paths] if isinstance(paths, (str, os.PathLike)) else paths
        if isinstance(several, (bytes, bytearray)) or not isinstance(several, Iterable):
            raise InputError(f"expected the path of a JSONL file, or a list of them, got {paths!r:.100}")
        self.paths = tuple(map(_check_path, several))
        if not self.paths:
            raise InputError("the list of JSONL files is empty")
        self._found: tuple[list[_Index], list[int]] | None = None

    def __len__(self) -> int:
        return self._indexes()[1][-1]

    def __getitem__(self, number: SupportsIndex) -> dict[str, Any]:
        indexes, ends = self._indexes()
        wanted = operator.index(number)
        at = wanted + ends[-1] if wanted < 0 else wanted
        if not 0 <= at < ends[-1]:
            raise IndexError(f"there is no item {wanted}: the files have {ends[-1]}")
        place = bisect_right(ends, at)
        path, (offsets, stamp) = self.paths[place], indexes[place]
        offset = offsets[at - (ends[place - 1] if place else 0)]
        with _opened(path) as file:
            if _stamp(file) != stamp:
                raise InputError(
                    f"{path} was changed since its lines were counted: files of prompts must stay as they are during a "
                    "run; build JSONLines anew"
                )
            file.seek(offset)
            line = file.readline()
            try:
                return _parse(line)
            except ValueError as error:
                file.seek(0)
                raise InputError(f"{path}, line {_line_number(file, offset)}: {error}") from error

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[number] for number in range(len(self)))

    def __repr__(self) -> str:
        return f"JSONLines({', '.join(map(str, self.paths))})"

    def __getstate__(self) -> dict[str, Any]:
        # A copy finds the lines anew: on another host the same file may have another time.
        return {"paths": self.paths, "_found": None}

    def _indexes(self) -> tuple[list[_Index], list[int]]:
        """Return the index of each file, and the number of items up to its end.

        Without a lock, which a fork could leave held for ever: two threads that come first do the same work twice.
        """
        if self._found is None:
            indexes = [_find_lines(path) for path in self.paths]
            self._found = indexes, list(accumulate(len(index.offsets) for index in indexes))
        return self._found


def _check_path(path: Any) -> Path:
    try:
        file = Path(path).absolute()  # the process that reads it may be in another folder
        if file.is_dir():
            raise InputError(f"{file} is a folder; give the JSONL files in it")
        if not file.exists():
            raise InputError(f"there is no file {file}")
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"expected the path of a JSONL file, got {path!r:.100}") from error
    return file


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror}") from error


def _stamp(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _find_lines(path: Path) -> _Index:
    offsets, offset = array("q"), 0
    with _opened(path) as file:
        stamp = _stamp(file)
        for line in file:
            if line.removeprefix(b"" if offset else _BOM).strip():
                offsets.append(offset)
            offset += len(line)
        if _stamp(file) != stamp or offset != stamp[0]:
            raise InputError(f"{path} was changed while its lines were counted: wait until it is whole")
    return _Index(offsets, stamp)


def _line_number(file: BinaryIO, offset: int) -> int:
    number = 1
    while offset > 0 and (block := file.read(min(offset, 1 << 20))):
        number += block.count(b"\n")
        offset -= len(block)
    return number


def _parse(line: bytes) -> dict[str, Any]:
    """Return the object in a line. Raises ValueError that says why there is none."""
    try:
        record = json.loads(line.removeprefix(_BOM).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: {error}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, got {line.strip()[:100].decode('utf-8', 'replace')}")
    return record
