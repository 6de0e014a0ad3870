"""Exports: groups that match a query, from any store, in batches, to files, DataFrames and datasets.

The files of an export get their final names together, after the last one is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, TypeVar, cast

from replaybuf.atomic_file import partial_file, publish
from replaybuf.cancellation import to_its_end
from replaybuf.checks import needed
from replaybuf.codec.payload import Codec
from replaybuf.errors import (
    AccessError,
    FileError,
    ReplayBufError,
    StorageError,
)
from replaybuf.files.arrow_tables import TableWriter
from replaybuf.files.row_format import PlainValues, Row, RowsOf, as_json, rows_of
from replaybuf.files.sources import FORMATS, dump, ending_of, open_to_write, sets_of_parts
from replaybuf.progress import OnProgress, ProgressReporter
from replaybuf.query import Node
from replaybuf.redact import redact_path
from replaybuf.rollouts.rollout_type import RolloutType
from replaybuf.rules.policies import Order
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.sql.inspection.group_payloads import AS_DICTS
from replaybuf.storage.values import StorageItem


class JSONLinesWriter:
    """Writes rows as lines of JSON, compressed according to the file's name."""

    def __init__(self, raw: IO[bytes], name: str, plain: PlainValues) -> None:
        self._raw = raw
        self._plain = plain
        self._stream = open_to_write(raw, name)

    def write(self, rows: Sequence[Row]) -> None:
        self._stream.write(b"".join(dump(as_json(row, self._plain)) for row in rows))

    def close(self) -> None:
        if self._stream is not self._raw:
            self._stream.close()


RowWriter = JSONLinesWriter | TableWriter


class ExportFiles:
    """The files of one export, each of at most about `max_bytes`. None has its final name before `publish`.

    A context manager: unpublished files are removed at its end.
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
        self._writer: RowWriter | None = None
        self.bytes = 0
        self.plain = PlainValues()

    def __enter__(self) -> ExportFiles:
        return self

    def check(self) -> None:
        """Raise FileError if the files would replace existing ones."""
        self._refuse([self.path, *self._old_parts()])
        if self.path.is_dir():
            raise FileError(
                f"{redact_path(str(self.path))} is a folder; give the name of a file in it", reason="exists"
            )

    def _refuse(self, files: Iterable[Path]) -> None:
        there = None if self._force else next((one for one in files if one.exists()), None)
        if there is not None:
            raise FileError(
                f"{redact_path(str(there))} is there already; choose another name, or replace it (--force; "
                "force=True in Python)",
                reason="exists",
            )

    def __exit__(self, *_: object) -> None:
        for opened in (self._writer, self._raw):
            if opened is not None:
                with contextlib.suppress(Exception):  # a partial file is removed
                    opened.close()
        self._stack.close()

    def write(self, rows: Sequence[Row]) -> None:
        """Write the rows of whole groups. Raises StorageError."""
        with self._translating_errors():
            if self._raw is not None and self._max_bytes is not None and self._raw.tell() >= self._max_bytes:
                self._end()
            if self._writer is None:
                self._begin()
            assert self._writer is not None
            self._writer.write(rows)

    def publish(self) -> list[Path]:
        """Give the files their final names, and remove those of an older export. Return them. Raises FileError.

        Parts of two exports are never mixed: older parts are removed before the first file gets its name, and after an
        error no part is left.
        """
        with self._translating_errors():
            if self._writer is None and not self._done:
                self._begin()
            self._end()
        names = [self.path] if len(self._done) == 1 else [self._part(n) for n in range(len(self._done))]
        self._refuse(names)
        with self._translating_errors():
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
        if self._form == "jsonl":
            self._writer = JSONLinesWriter(self._raw, self._ending.lower(), self.plain)
        else:
            self._writer = TableWriter(self._raw, self._form, self.plain)
        self._done.append(partial)

    def _end(self) -> None:
        if self._writer is not None and self._raw is not None:
            self._writer.close()
            self._raw.flush()
            os.fsync(self._raw.fileno())  # a full disk raises before an older export is touched
            self.bytes += self._raw.tell()
            self._raw.close()
            self._raw = self._writer = None

    def _part(self, number: int) -> Path:
        stem = self.path.name.removesuffix(self._ending)
        return self.path.with_name(f"{stem}-{number:05}-of-{len(self._done):05}{self._ending}")

    def _old_parts(self) -> list[Path]:
        """Return the parts of complete exports; other files with names like parts aren't ours."""
        return [
            one
            for count, parts in sets_of_parts(self.path, self._ending).items()
            if len(parts) == count > 1
            for one in parts
        ]

    @contextlib.contextmanager
    def _translating_errors(self) -> Iterator[None]:
        shown = redact_path(str(self.path))
        try:
            yield
        except PermissionError as error:
            raise AccessError(f"{shown} can't be written: {error.strerror}") from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageError(
                    f"the disk is full: {shown} was not written; make room on its disk, or choose another",
                    reason="disk full",
                ) from error
            raise FileError(f"{shown} can't be written: {error.strerror or error}") from error


def _remove(files: Iterable[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


T = TypeVar("T")

#: Reads and writes payloads of any class unchanged, for exact exports where the classes aren't known.
AS_STORED: Final = Codec(RolloutType(dict)).as_trees()

#: The number of groups converted to rows at a time. (A store reads them in pieces of some megabytes.)
_GROUPS: Final = 32


@dataclass(frozen=True, slots=True)
class ExportQuery:
    """The groups of an export: those that match, in order, at most `limit`; a row is a rollout or a group.

    `exact`: with the groups' payloads, so that an import gives the same rollouts.
    """

    query: Node
    order: Order = ()
    limit: int | None = None
    rows: RowsOf = "rollouts"
    exact: bool = False


@dataclass(slots=True)
class Exported:
    """The result of an export: its files, and the groups and rollouts in them.

    `left` is the number of groups removed from the buffer before they were read, `unreadable` the uids of groups whose
    payload can't be decoded; both are missing from the files. `bytes` is the size of the files. `warnings` name the
    values that are text in the files, because JSON and Arrow lack their kind.
    """

    files: list[Path] = field(default_factory=list)
    groups: int = 0
    rollouts: int = 0
    bytes: int = 0
    left: int = 0
    unreadable: list[int] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


async def export_files(
    storage: SQLStorage,
    chosen: ExportQuery,
    path: Path,
    *,
    max_bytes: int | None = None,
    force: bool = False,
    progress: OnProgress | None = None,
) -> Exported:
    """Write groups to the file `path`, or to several if it would exceed `max_bytes`. Return the counts.

    The files get their final names when all are complete; until then, and after an error, none exists. Raises
    FileError if one exists already, unless `force`; StorageError, AccessError, FileError.
    """
    with ExportFiles(path, max_bytes=max_bytes, force=force) as parts:
        await in_thread(parts.check)
        done = await _export(storage, chosen, parts, progress)
        done.files = await in_thread(parts.publish)
        done.bytes, done.warnings = parts.bytes, parts.plain.warnings()
    return done


async def export_lines(
    storage: SQLStorage, chosen: ExportQuery, stream: Any, progress: OnProgress | None = None
) -> Exported:
    """Write groups as lines of JSON to a stream, such as stdout. Return the counts."""
    plain = PlainValues()
    done = await _export(storage, chosen, JSONLinesWriter(stream, "", plain), progress)
    done.warnings = plain.warnings()
    return done


async def _export(
    storage: SQLStorage, chosen: ExportQuery, writer: RowWriter | ExportFiles, progress: OnProgress | None
) -> Exported:
    total = await storage.count(chosen.query, at_most=chosen.limit)
    done, reporter = Exported(), ProgressReporter(progress, total)
    async with aclosing(batches_of(storage, chosen, done)) as batches:
        async for rows, groups in batches:
            await in_thread(partial(writer.write, rows))
            reporter.add(groups, 0)
    reporter.finish()
    done.left = max(0, total - done.groups - len(done.unreadable))
    return done


async def batches_of(
    storage: SQLStorage, chosen: ExportQuery, done: Exported
) -> AsyncGenerator[tuple[list[Row], int], None]:
    """Yield batches of rows, each with its number of groups; `done` counts the groups."""
    held: list[StorageItem] = []
    found = cast(Any, storage.find(chosen.query, order=chosen.order, limit=chosen.limit))
    async with aclosing(found):
        async for item in found:
            if not item.item:
                done.unreadable.append(item.uid)
                continue
            held.append(item)
            done.groups += 1
            done.rollouts += len(item.item)
            if len(held) >= _GROUPS:
                yield await in_thread(lambda: _rows(storage.codec, held, chosen)), len(held)
                held.clear()
    if held:
        yield await in_thread(lambda: _rows(storage.codec, held, chosen)), len(held)


def _rows(codec: Codec, items: Sequence[StorageItem], chosen: ExportQuery) -> list[Row]:
    made: list[Row] = []
    for item in items:
        try:
            rollouts, payload = item.item, None
            if codec is not AS_DICTS:
                payload = codec.encode(rollouts)
                rollouts = AS_DICTS.decode(payload)
            made += rows_of(item, rollouts, chosen.rows, payload if chosen.exact else None)
        except RecursionError as error:
            raise FileError(f"group {item.uid} can't be written: its values are nested too deeply") from error
        except ReplayBufError as error:
            raise FileError(f"group {item.uid} can't be written: {error}") from error
    return made


async def in_thread(function: Callable[[], T]) -> T:
    """Run a function in a thread, and wait for its end even when cancelled, because it uses files until then."""
    return await to_its_end(asyncio.to_thread(function))


_DATASET_FILE_BYTES = 1 << 28


async def to_pandas(storage: SQLStorage, chosen: ExportQuery) -> Any:
    """Return groups as a DataFrame with the rows of an export."""
    pandas = needed("pandas", "to_pandas() needs the package pandas: pip install pandas")
    every, plain = list[Row](), PlainValues()
    async with aclosing(batches_of(storage, chosen, Exported())) as batches:
        async for rows, _ in batches:
            every += await in_thread(lambda rows=rows: [as_json(row, plain) for row in rows])  # type: ignore[misc]
    return await in_thread(lambda: pandas.DataFrame.from_records(every))


async def to_dataset(storage: SQLStorage, chosen: ExportQuery, folder: Path, progress: OnProgress | None = None) -> Any:
    """Write groups to Arrow files in `folder`, and return a dataset that reads its rows from them."""
    datasets = needed("datasets", "to_dataset() needs the package datasets: pip install datasets pyarrow")
    await in_thread(lambda: folder.mkdir(parents=True, exist_ok=True))
    name = folder / "rollouts.arrows"
    done = await export_files(storage, chosen, name, max_bytes=_DATASET_FILE_BYTES, force=True, progress=progress)
    parts = await in_thread(lambda: [datasets.Dataset.from_file(str(file)) for file in done.files])
    return parts[0] if len(parts) == 1 else await in_thread(lambda: datasets.concatenate_datasets(parts))
