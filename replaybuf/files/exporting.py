"""Exports: groups that match a query, from any store into files, a batch at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from replaybuf.codec.payload import Codec
from replaybuf.errors import FileError, ReplayBufError
from replaybuf.files.rows import Row, RowsOf, rows_of
from replaybuf.files.writing import Parts, Writer
from replaybuf.progress import OnProgress, Teller
from replaybuf.query import Node
from replaybuf.rollouts.rollout_type import RolloutType
from replaybuf.rules.policies import Order
from replaybuf.storage.contract import GroupStorage
from replaybuf.storage.values import StorageItem

T = TypeVar("T")

#: Reads and writes payloads as trees, whatever the class of the rollouts.
TREES: Final = Codec(RolloutType(dict)).as_trees()

#: Groups that are turned into rows at a time. (A store reads them in pieces of some megabytes.)
_GROUPS: Final = 32


@dataclass(frozen=True, slots=True)
class Chosen:
    """The groups of an export: those that match, in an order, at most `limit`; with a row a rollout or a group."""

    query: Node
    order: Order = ()
    limit: int | None = None
    rows: RowsOf = "rollouts"


@dataclass(slots=True)
class Exported:
    """What an export has written: its files, and the groups and rollouts in them.

    `left` are groups that left the buffer before they were read, `unreadable` the uids of those whose payload can't be
    decoded; neither are in the files. `bytes` is the size of the files.
    """

    files: list[Path] = field(default_factory=list)
    groups: int = 0
    rollouts: int = 0
    bytes: int = 0
    left: int = 0
    unreadable: list[int] = field(default_factory=list)


async def export_files(
    storage: GroupStorage,
    chosen: Chosen,
    path: Path,
    *,
    max_bytes: int | None = None,
    force: bool = False,
    progress: OnProgress | None = None,
) -> Exported:
    """Write groups to the file `path`, or to several if it would have more than `max_bytes`. Return what was written.

    The files get their names when all are complete; until then, and after an error, there are none. Raises
    FileThereError where there is such a file, unless `force`; DiskFullError, AccessError, FileError.
    """
    with Parts(path, max_bytes=max_bytes, force=force) as parts:
        await in_thread(parts.check)
        done = await export_rows(storage, chosen, parts, progress)
        done.files = await in_thread(parts.publish)
        done.bytes = parts.bytes
    return done


async def export_rows(
    storage: GroupStorage, chosen: Chosen, writer: Writer | Parts, progress: OnProgress | None = None
) -> Exported:
    """Write groups as rows, whoever writes these. Return what was written."""
    total = await storage.count(chosen.query, at_most=chosen.limit)
    done, teller = Exported(), Teller(progress, total)
    async with aclosing(batches_of(storage, chosen, done)) as batches:
        async for rows, groups in batches:
            await in_thread(lambda rows=rows: writer.write(rows))  # type: ignore[misc]
            teller.add(groups, 0)
    teller.finish()
    done.left = max(0, total - done.groups - len(done.unreadable))
    return done


async def batches_of(
    storage: GroupStorage, chosen: Chosen, done: Exported
) -> AsyncGenerator[tuple[list[Row], int], None]:
    """Yield the rows of groups, batch by batch, with the number of groups in each; they are counted in `done`."""
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
                yield await in_thread(lambda: _rows(storage.codec, held, chosen.rows)), len(held)
                held.clear()
    if held:
        yield await in_thread(lambda: _rows(storage.codec, held, chosen.rows)), len(held)


def _rows(codec: Codec, items: Sequence[StorageItem], rows: RowsOf) -> list[Row]:
    made: list[Row] = []
    for item in items:
        try:
            trees = item.item if codec is TREES else TREES.decode(codec.encode(item.item), owned=True)
            made += rows_of(item, trees, rows)
        except RecursionError as error:
            raise FileError(f"group {item.uid} can't be written: its values are nested too deeply") from error
        except ReplayBufError as error:
            raise FileError(f"group {item.uid} can't be written: {error}") from error
    return made


async def in_thread(function: Callable[[], T]) -> T:
    """Run a function in a thread, and wait for its end even when cancelled: until then its files are its own."""
    running = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # nobody hears of it
        raise
