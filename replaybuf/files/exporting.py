"""Exports: groups that match a query, from any store, in batches, to files.

A file gets its final name when it is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, TypeVar, cast

from replaybuf.common.cancellation import shielded
from replaybuf.common.file_systems import partial_file, publish
from replaybuf.common.progress import OnProgress, ProgressReporter
from replaybuf.common.redact import redact_path
from replaybuf.errors import FileError, ReplayBufError
from replaybuf.files.parquet_files import TableWriter
from replaybuf.files.row_format import Row, plain, rows_of
from replaybuf.files.sources import dump, file_errors, format_of
from replaybuf.rules.policies import Order, OrderTerm
from replaybuf.rules.query import LogicNode, Node, ScalarNode
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.sql.inspection.group_payloads import AS_DICTS
from replaybuf.storage.values import StorageItem
from replaybuf.values.codec.library_values import UnfetchedError
from replaybuf.values.codec.packed_columns import Parents
from replaybuf.values.codec.payload import Codec
from replaybuf.values.codec.payload_format import Buffer
from replaybuf.values.rollouts.statuses import Status


class JSONLinesWriter:
    """Writes rows as lines of JSON."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw

    def write(self, rows: Sequence[Row]) -> None:
        self._raw.write(b"".join(dump(plain(row)) for row in rows))

    def close(self) -> None:
        """Do nothing: a file of lines has no end of its own."""


Writer = JSONLinesWriter | TableWriter
T = TypeVar("T")

OrderBy = str | OrderTerm | Iterable[str | OrderTerm] | None

#: The number of groups converted to rows at a time. (A store reads them in pieces of some megabytes.)
_GROUPS_AT_ONCE: Final = 32


@dataclass(frozen=True, slots=True)
class ExportQuery:
    """The groups of an export: those that match, in order, at most `limit`.

    `exact`: with the groups' payloads, so that an import gives the same rollouts.
    """

    query: Node
    order: Order = ()
    limit: int | None = None
    exact: bool = False


@dataclass(slots=True)
class Exported:
    """The result of an export: its file, and the groups and rollouts in it.

    `unreadable` are the uids of groups whose payload can't be decoded, which are missing from the file. `bytes` is its
    size.
    """

    groups: int = 0
    rollouts: int = 0
    bytes: int = 0
    unreadable: list[int] = field(default_factory=list)


async def export_file(
    storage: SQLStorage, selection: ExportQuery, path: Path, *, force: bool = False, progress: OnProgress | None = None
) -> Exported:
    """Write groups to the file `path`. Return the counts.

    It gets its name when it is complete; until then, and after an error, there is none. Raises FileError if one exists
    already, unless `force`; StorageError, AccessError, FileError.
    """
    form = format_of(path)
    with file_errors(path, "written"), contextlib.ExitStack() as stack:
        raw = await in_thread(lambda: _open(path, stack, force=force))
        writer = TableWriter(raw) if form == ".parquet" else JSONLinesWriter(raw)
        stack.callback(_close_quietly, writer)
        exported = await _export(storage, selection, writer, progress)
        exported.bytes = await in_thread(lambda: _publish(writer, raw, path, force=force))
    return exported


def _check_free(path: Path, *, force: bool) -> None:
    """Raise FileError if the file would replace another."""
    redacted = redact_path(str(path))
    if path.is_dir():
        raise FileError(f"{redacted} is a folder; give the name of a file in it", reason="exists")
    if path.exists() and not force:
        raise FileError(
            f"{redacted} is there already; choose another name, or replace it (--force; force=True in Python)",
            reason="exists",
        )


def _open(path: Path, stack: contextlib.ExitStack, *, force: bool) -> IO[bytes]:
    """Open the file under a temporary name. When the stack is closed, it is removed, unless it was published."""
    _check_free(path, force=force)
    return stack.enter_context(open(stack.enter_context(partial_file(str(path))), "wb"))


def _publish(writer: Writer, raw: IO[bytes], path: Path, *, force: bool) -> int:
    """Give a complete file its final name. Return its size."""
    writer.close()
    size = raw.tell()
    raw.close()  # a full disk raises before an older export is replaced
    _check_free(path, force=force)
    publish(raw.name, str(path))
    return size


def _close_quietly(writer: Writer) -> None:
    with contextlib.suppress(Exception):  # of a file that is removed
        writer.close()


async def export_lines(
    storage: SQLStorage, selection: ExportQuery, stream: Any, progress: OnProgress | None = None
) -> Exported:
    """Write groups as lines of JSON to a stream, such as stdout. Return the counts."""
    return await _export(storage, selection, JSONLinesWriter(stream), progress)


async def _export(storage: SQLStorage, selection: ExportQuery, writer: Writer, progress: OnProgress | None) -> Exported:
    query = LogicNode("$and", (selection.query, ScalarNode("status", "$ne", Status.FILLING)))
    exported, items = Exported(), list[StorageItem]()
    reporter = ProgressReporter(progress, await storage.count(query, at_most=selection.limit))

    async def write() -> None:
        await in_thread(lambda: writer.write(_rows(storage.codec, items, selection)))
        reporter.add(len(items), 0)
        items.clear()

    matches = cast(Any, storage.find(query, order=selection.order, limit=selection.limit))
    async with aclosing(matches):
        async for item in matches:
            if not item.item:
                exported.unreadable.append(item.uid)
                continue
            items.append(item)
            exported.groups += 1
            exported.rollouts += item.rollouts
            if len(items) >= _GROUPS_AT_ONCE:
                await write()
    if items:
        await write()
    reporter.finish()
    return exported


def _encoded(codec: Codec, rollouts: Sequence[Any], parents: Parents) -> Buffer:
    """Return the payload of rollouts, with the values of the Ray ObjectRefs in them, which may contain further ones."""
    fetched: dict[Any, Any] = {}
    while True:
        try:
            return codec.encode(rollouts, fetched, parents)
        except UnfetchedError as unfetched:
            fetched |= codec.fetch(unfetched.refs)


def _rows(codec: Codec, items: Sequence[StorageItem], selection: ExportQuery) -> list[Row]:
    rows: list[Row] = []
    for item in items:
        try:
            rollouts, payload = item.flat, None
            if codec is not AS_DICTS:
                payload = _encoded(codec, rollouts, None if item.segments is None else item.segments.parents)
                rollouts = AS_DICTS.decode(payload)
            rows += rows_of(item, rollouts, bytes(payload) if selection.exact and payload is not None else None)
        except RecursionError as error:
            raise FileError(f"group {item.uid} can't be written: its values are nested too deeply") from error
        except ReplayBufError as error:
            raise FileError(f"group {item.uid} can't be written: {error}") from error
    return rows


async def in_thread(function: Callable[[], T]) -> T:
    """Run a function in a thread, and wait for its end even when cancelled, because it uses files until then."""
    return await shielded(asyncio.to_thread(function))
