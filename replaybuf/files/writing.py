"""Writing files of rows: in one file or several, which get their names when all are complete."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final, Protocol

from replaybuf.errors import AccessError, DiskFullError, FileError, FileThereError, InputError
from replaybuf.files.rows import Row
from replaybuf.files.tables import TableWriter
from replaybuf.files.texts import dump, open_to_write
from replaybuf.partial import partial_file, publish
from replaybuf.redact import redact_path

#: The formats of files, by the ends of their names.
FORMATS: Final = {
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".jsonl.zst", ".ndjson.zst"), "jsonl"),
    ".parquet": "parquet",
    **dict.fromkeys((".arrow", ".feather"), "arrow"),
    ".arrows": "stream",
}
_PART: Final = re.compile(r"-([0-9]{5})-of-([0-9]{5})$")


class Writer(Protocol):
    """Writes rows to one file."""

    def write(self, rows: Sequence[Row]) -> None: ...

    def close(self) -> None: ...


class TextWriter:
    """Writes rows as lines of JSON, compressed as the name says."""

    def __init__(self, raw: IO[bytes], name: str) -> None:
        self._raw = raw
        self._stream = open_to_write(raw, name)

    def write(self, rows: Sequence[Row]) -> None:
        self._stream.write(b"".join(map(dump, rows)))

    def close(self) -> None:
        if self._stream is not self._raw:
            self._stream.close()


def ending_of(path: Path) -> str:
    """Return the end of a file's name that says its format. Raises InputError."""
    name = path.name.lower()
    for ending in sorted(FORMATS, key=len, reverse=True):
        if name.endswith(ending):
            return path.name[-len(ending) :]
    raise InputError(f"{redact_path(str(path))!r:.200} doesn't say its format: a file is named {', '.join(FORMATS)}")


def parts_of(path: Path) -> list[Path]:
    """Return the parts of an export that was written in several files, by the name that it was given.

    Raises FileError when some of them are missing.
    """
    try:
        ending = ending_of(path)
    except InputError:
        return []
    found = _sets(path, ending)
    for count, parts in found.items():
        if len(found) > 1 or len(parts) != count:
            raise FileError(
                f"{path}: there are {len(parts)} of its {count} parts, or those of several exports; move away what is "
                "named like a part and isn't one"
            )
    return [one for parts in found.values() for one in parts]


def _sets(path: Path, ending: str) -> dict[int, list[Path]]:
    """Return the files that are named as parts of `path`, in their order, by the number of parts that they name."""
    stem = path.name.removesuffix(ending)
    found: dict[int, list[Path]] = {}
    for one in sorted(path.parent.glob(f"{glob.escape(stem)}-?????-of-?????{glob.escape(ending)}")):
        match = _PART.search(one.name.removesuffix(ending))
        if match and int(match[1]) < int(match[2]):
            found.setdefault(int(match[2]), []).append(one)
    return found


class Parts:
    """The files of one export: those beyond `max_bytes` begin another one. Nothing has a final name before `publish`.

    Use it as a context manager: files that weren't published are removed at its end.
    """

    def __init__(self, path: Path, *, max_bytes: int | None, force: bool) -> None:
        self.path = path
        self._ending = ending_of(path)
        self._form = FORMATS[self._ending.lower()]
        self._max_bytes = max_bytes
        self._force = force
        self._stack = contextlib.ExitStack()
        self._done: list[str] = []
        self._raw: IO[bytes] | None = None
        self._writer: Writer | None = None
        self.bytes = 0

    def __enter__(self) -> Parts:
        return self

    def check(self) -> None:
        """Raise FileThereError where the files would replace others."""
        self._refuse([self.path, *self._old_parts()])
        if self.path.is_dir():
            raise FileThereError(f"{redact_path(str(self.path))} is a folder; give the name of a file in it")

    def _refuse(self, files: Iterable[Path]) -> None:
        there = None if self._force else next((one for one in files if one.exists()), None)
        if there is not None:
            raise FileThereError(
                f"{redact_path(str(there))} is there already; choose another name, or replace it (--force; "
                "force=True in Python)"
            )

    def __exit__(self, *_: object) -> None:
        if self._raw is not None:
            with contextlib.suppress(Exception):  # what is half written is removed
                self._raw.close()
        self._stack.close()

    def write(self, rows: Sequence[Row]) -> None:
        """Write the rows of whole groups. Raises DiskFullError."""
        with self._told():
            if self._raw is not None and self._max_bytes is not None and self._raw.tell() >= self._max_bytes:
                self._end()
            if self._writer is None:
                self._begin()
            assert self._writer is not None
            self._writer.write(rows)

    def publish(self) -> list[Path]:
        """Give the files their names, and remove those of an older export. Return them. Raises FileThereError.

        No set of parts ever mixes two exports: older parts go before the first one gets its name, and after an error
        none is left.
        """
        with self._told():
            if self._writer is None and not self._done:
                self._begin()
            self._end()
        names = [self.path] if len(self._done) == 1 else [self._part(n) for n in range(len(self._done))]
        self._refuse(names)
        with self._told():
            if len(names) > 1:
                _remove({self.path, *names, *self._old_parts()})
            try:
                for partial, path in zip(self._done, names, strict=True):
                    publish(partial, str(path))
            except BaseException:
                _remove(names if len(names) > 1 else ())
                raise
            _remove({self.path, *self._old_parts()} - set(names))
        return names

    def _begin(self) -> None:
        partial = self._stack.enter_context(partial_file(str(self.path)))
        self._raw = open(partial, "wb")  # noqa: SIM115
        form = TextWriter(self._raw, self._ending.lower()) if self._form == "jsonl" else None
        self._writer = form or TableWriter(self._raw, self._form)
        self._done.append(partial)

    def _end(self) -> None:
        if self._writer is not None and self._raw is not None:
            self._writer.close()
            self._raw.flush()
            os.fsync(self._raw.fileno())  # a disk that is full says so before an older export is touched
            self.bytes += self._raw.tell()
            self._raw.close()
            self._raw = self._writer = None

    def _part(self, number: int) -> Path:
        stem = self.path.name.removesuffix(self._ending)
        return self.path.with_name(f"{stem}-{number:05}-of-{len(self._done):05}{self._ending}")

    def _old_parts(self) -> list[Path]:
        """Return the parts of whole exports; what else is named like a part is another's."""
        return [
            one for count, parts in _sets(self.path, self._ending).items() if len(parts) == count > 1 for one in parts
        ]

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        shown = redact_path(str(self.path))
        try:
            yield
        except PermissionError as error:
            raise AccessError(f"{shown} can't be written: {error.strerror}") from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFullError(
                    f"the disk is full: {shown} was not written; make room on its disk, or choose another"
                ) from error
            raise FileError(f"{shown} can't be written: {error.strerror or error}") from error


def _remove(files: Iterable[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def size_of(path: Path) -> int:
    """Return the bytes of a file, 0 for what isn't one."""
    return os.stat(path).st_size if path.is_file() else 0


def writer_to(stream: Any) -> Writer:
    """Return the writer of lines of JSON to a stream, such as stdout."""
    return TextWriter(stream, "")
