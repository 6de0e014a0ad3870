"""Imports the groups of a file into any store, each exactly once.

The file is read twice: first completely, so that nothing of a damaged file is written; then again, in batches. A batch
is put in one transaction with a *cursor* of the buffer, named by a digest of the file's bytes and of how its columns
are read. Its position is the number of imported groups. So a killed import continues where it ended, and a repeated one
does nothing, even if the groups have been consumed meanwhile. A checkpoint keeps the cursor with the groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Final

from xxhash import xxh3_128

from replaybuf.common.checks import check_staleness
from replaybuf.common.progress import OnProgress, ProgressReporter, in_pieces
from replaybuf.common.worker_name import worker_name
from replaybuf.errors import ConflictError, FileError, ReplayBufError, RolloutError
from replaybuf.files.exporting import in_thread
from replaybuf.files.row_format import FileGroup
from replaybuf.files.sources import RolloutFile
from replaybuf.storage.reports import EventKind
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.values import NewGroup
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.marks import Marks
from replaybuf.values.rollouts.outline import outline
from replaybuf.values.rollouts.rollout import Status
from replaybuf.values.rollouts.rollout_type import RolloutType
from replaybuf.values.rollouts.segments import count_of

#: Writes the payloads of rows without one, whose rollouts are dicts.
_PLAIN_CODEC: Final = Codec(RolloutType(dict))


def checked_group(group: FileGroup, codec: Codec) -> NewGroup:
    """Return a group as every store accepts it, validated. Raises FileError with the place in the file."""
    try:
        payload = _PLAIN_CODEC.encode(group.rollouts) if group.payload is None else group.payload
        if group.metadata["status"] == Status.FILLING:
            raise FileError("a rollout of a group that fills is put by itself: put(group=, size=)")
        entry = NewGroup(**group.metadata, rollouts=codec.decode(payload), payload=payload, segments=group.segments)
        if len(entry.rollouts) != len(group.rollouts):
            raise FileError(f"the payload has {len(entry.rollouts)} rollouts, and there are {len(group.rollouts)} here")
        _check_rollouts(entry.rollouts, codec.rollout_type)
    except (ReplayBufError, ArithmeticError) as error:
        raise FileError(f"{group.place}: {error}") from error
    return entry


def _check_rollouts(rollouts: Sequence[Any], kind: RolloutType) -> None:
    """Raise the errors of a put: it computes rollout metadata and an index for SQL from fields of any content."""
    try:
        for rollout in rollouts:
            check_staleness(int(kind.get(rollout, "seq_staleness") or 0), "seq_staleness")
        Marks.of(rollouts, kind)
        outline(rollouts, kind)
    except ReplayBufError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise RolloutError(f"the rollouts have a field that no store can take ({error!s:.150})") from error


Lane = tuple[str, Status]

#: The prefix of import cursors' names.
IMPORT: Final = "import "
#: The numbers of groups and payload bytes put in one transaction.
_GROUPS: Final = 128
_BYTES: Final = 16 << 20


@dataclass(slots=True)
class Survey:
    """The content of a file: groups and rollouts by task and status. `there` is the number of groups imported before.

    `digest` stands for the bytes of the file and the mapping of its columns.
    """

    groups: Counter[Lane] = field(default_factory=Counter)
    rollouts: Counter[Lane] = field(default_factory=Counter)
    there: Counter[Lane] = field(default_factory=Counter)
    digest: str = ""

    @property
    def new(self) -> int:
        """The number of groups that an import would put."""
        return self.groups.total() - self.there.total()


@dataclass(slots=True)
class Imported:
    """The result of an import: the groups and rollouts put; `there` is the number of groups imported before.

    `found` is the content of the file, by task and status; `found.new` is the number of groups to be put.
    """

    found: Survey
    groups: int = 0
    rollouts: int = 0
    there: int = 0


async def import_from(
    storage: SQLStorage,
    source: RolloutFile,
    *,
    again: bool = False,
    dry_run: bool = False,
    progress: OnProgress | None = None,
) -> Imported:
    """Put the groups of a file, each exactly once; none if any of them is invalid. Return the counts.

    With `again`, groups that were imported before are imported once more. With `dry_run`, nothing is put. `progress` is
    called in both passes: with the groups read, of an unknown total, and then with the groups put. Raises the errors of
    `survey` and `import_groups`.
    """
    scan = await survey(storage, source, again=again, progress=progress)
    if dry_run or not scan.new:
        return Imported(scan, there=scan.there.total())
    return await import_groups(storage, source, scan, again=again, progress=progress)


async def survey(
    storage: SQLStorage, source: RolloutFile, *, again: bool = False, progress: OnProgress | None = None
) -> Survey:
    """Read a file to its end, check each group, and return what an import would do. Writes nothing.

    Raises FileError with the place of the first invalid group.
    """
    digest, lanes = xxh3_128(), list[Lane]()
    with closing(source.pieces()) as pieces:
        while piece_of_bytes := await in_thread(lambda: next(pieces, None)):
            digest.update(piece_of_bytes)
    scan, reporter = Survey(digest=digest.hexdigest()), ProgressReporter(progress, None)
    with closing(_pieces(storage.codec, source)) as reading:
        while piece := await in_thread(lambda: next(reading, None)):
            for group, _ in piece:
                lanes.append(group.lane)
                scan.rollouts[group.lane] += count_of(group.rollouts, group.segments)
            reporter.add(len(piece), sum(len(new_group.payload or b"") for _, new_group in piece))
    reporter.finish()
    scan.groups = Counter(lanes)
    if lanes and not again:  # only now: a file with a mistake makes no database
        scan.there = Counter(lanes[: (await storage.cursor(IMPORT + scan.digest)).position])
    return scan


Pair = tuple[FileGroup, NewGroup]


def _pieces(codec: Codec, source: RolloutFile) -> Generator[list[Pair], None, None]:
    """Yield the groups of a file, as they are in it and checked, in the pieces of an import."""
    groups = ((group, checked_group(group, codec)) for group in source.read())
    return in_pieces(groups, lambda pair: len(pair[1].payload or b""), _GROUPS, _BYTES)


async def import_groups(
    storage: SQLStorage,
    source: RolloutFile,
    scan: Survey,
    *,
    again: bool = False,
    progress: OnProgress | None = None,
) -> Imported:
    """Put the groups of a surveyed file. Return the counts.

    Each batch is atomic: a repeated import continues after the last one, if the first failed, was cancelled or killed.
    Raises ConflictError when another process is importing the same file, FileError when it has changed since the
    survey, and the errors of `put`.
    """
    cursor, number = await storage.cursor(IMPORT + scan.digest), 0
    there, worker = 0 if again else cursor.position, worker_name()
    result, reporter = Imported(scan, there=there), ProgressReporter(progress, scan.new)
    with closing(_pieces(storage.codec, source)) as reading:
        while piece := await in_thread(lambda: next(reading, None)):
            batch = [new_group for _, new_group in piece[max(0, there - number) :]]
            number += len(piece)
            if not batch:
                continue
            for new_group in batch:
                new_group.worker = new_group.worker or worker
            next_cursor = replace(cursor, position=number)
            if not await storage.put_with_cursor(batch, next_cursor, EventKind.IMPORTED):
                raise ConflictError(
                    f"another process imports the same file, or the buffer was restored; {result.groups} groups were "
                    "put here. Run the import again when that is over: it goes on where they are"
                )
            cursor = replace(next_cursor, version=next_cursor.version + 1)
            result.groups += len(batch)
            result.rollouts += sum(count_of(new_group.rollouts, new_group.segments) for new_group in batch)
            reporter.add(len(batch), sum(len(new_group.payload or b"") for new_group in batch))
    reporter.finish()
    if number != scan.groups.total():
        raise FileError("the file has changed since it was read the first time; look at what is in the buffer")
    return result
