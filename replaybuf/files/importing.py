"""Imports: groups of a file into any store, each exactly once.

The file is read twice: first all of it, so that nothing is written of one that is damaged; then again, in batches. A
batch is put in one transaction with a *cursor* of the buffer, named for what is in the file, which says how many groups
of each task and status are in. So an import that was killed goes on where it was, and a second one finds nothing to do,
also when the groups have been consumed meanwhile. A checkpoint keeps the cursor with the groups.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Final

from xxhash import xxh3_128

from replaybuf.checks import check_task_name
from replaybuf.codec.payload import Codec
from replaybuf.errors import ConflictError, FileEndsError, FileError
from replaybuf.files.checked import prepared
from replaybuf.files.exporting import in_thread
from replaybuf.files.remarks import Remarks
from replaybuf.files.rows import FileGroup
from replaybuf.progress import OnProgress, Teller
from replaybuf.rollouts.rollout import Status
from replaybuf.storage.contract import CursorStorage, GroupStorage, require
from replaybuf.storage.values import Cursor, NewGroup
from replaybuf.worker_name import worker_name

Lane = tuple[str, Status]
Reader = Callable[[], Iterator[FileGroup]]

#: What the names of an import's cursors begin with.
IMPORT: Final = "import "
#: Groups and bytes of payloads that are put in one transaction.
_GROUPS: Final = 128
_BYTES: Final = 16 << 20
_ODD_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class Importing:
    """Which groups of a file are imported: those of a task or a status, or all. Raises InputError.

    With `partial`, a file that ends within a row or a group is imported up to there. With `again`, what was imported
    before is imported once more. With `dry_run`, nothing is put.
    """

    task: str | None = None
    status: Status | None = None
    partial: bool = False
    again: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.task is not None:
            check_task_name(self.task, "task")

    def takes(self, group: FileGroup) -> bool:
        return self.task in (None, group.task_name) and self.status in (None, group.status)


@dataclass(slots=True)
class Survey:
    """What is in a file: groups and rollouts by task and status, what is odd about them, and how it ends.

    `there` are groups that were imported before. `odd` counts the groups of which something was noticed, and `examples`
    says where the first is. `warnings` say what may not be as it was meant. `ends` says where a file was cut short.
    `digest` is the same for files with the same groups, in whatever format.
    """

    groups: Counter[Lane] = field(default_factory=Counter)
    rollouts: Counter[Lane] = field(default_factory=Counter)
    there: Counter[Lane] = field(default_factory=Counter)
    odd: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    digest: str = ""
    ends: str | None = None

    @property
    def new(self) -> int:
        """The number of groups that an import would put."""
        return self.groups.total() - self.there.total()


@dataclass(slots=True)
class Imported:
    """What an import has put: groups and rollouts; `there` are the groups that were imported before.

    `found` is what is in the file, by task and status; `found.new` is the number of groups that were to be put.
    """

    found: Survey
    groups: int = 0
    rollouts: int = 0
    there: int = 0


async def import_from(
    storage: GroupStorage, read: Reader, wanted: Importing, progress: OnProgress | None = None
) -> Imported:
    """Put the groups of a file, each exactly once; nothing when anything in it is wrong. Return what was put.

    `progress` is told of both passes: the groups read, of a total that isn't known, and then the groups put. Raises
    what `survey` and `import_groups` raise.
    """
    found = await survey(storage, read, wanted, progress)
    if wanted.dry_run or not found.new:
        return Imported(found, there=found.there.total())
    return await import_groups(storage, read, wanted, found, progress)


async def survey(storage: GroupStorage, read: Reader, wanted: Importing, progress: OnProgress | None = None) -> Survey:
    """Read a file to its end, check each of its groups, and say what an import would do. Writes nothing.

    Raises FileError, which says where in the file the first wrong group is, and FileEndsError for a file that was cut
    short, unless `wanted.partial`.
    """
    cursors = require(storage, CursorStorage, "import_from()")
    found, teller = Survey(), Teller(progress, None)
    with closing(_surveying(storage.codec, read, wanted, found)) as reading:
        while done := await in_thread(lambda: next(reading, None)):
            teller.add(*done)
    teller.finish()
    if found.groups and not wanted.again:
        counts = _counts(await cursors.cursor(_name(found.digest)))
        for lane, n in found.groups.items():
            found.there[lane] = min(n, counts[lane])
    return found


def _surveying(codec: Codec, read: Reader, wanted: Importing, found: Survey) -> Generator[tuple[int, int], None, None]:
    """Add the groups of a file to what was found. Yield the number of groups and bytes read, piece by piece."""
    digest, remarks, groups, size = xxh3_128(), Remarks(), 0, 0
    try:
        for group in read():
            if groups >= _GROUPS or size >= _BYTES:
                yield groups, size
                groups = size = 0
            new = prepared(group, codec)
            digest.update(_identity(new))
            groups += 1
            size += len(new.payload or b"")
            if not wanted.takes(group):
                continue
            lane = (group.task_name, group.status)
            found.groups[lane] += 1
            found.rollouts[lane] += len(group.rollouts)
            remarks.add(group)
            for what in group.odd:
                found.odd[what] += 1
                found.examples.setdefault(what, group.place)
    except FileEndsError as error:
        if not wanted.partial:
            raise FileEndsError(
                f"{error}; nothing was imported. To import what is before it, say so (partial=True, --partial)"
            ) from error
        found.ends = str(error)
    found.digest, found.warnings = digest.hexdigest(), remarks.warnings()
    if groups:
        yield groups, size


async def import_groups(
    storage: GroupStorage, read: Reader, wanted: Importing, found: Survey, progress: OnProgress | None = None
) -> Imported:
    """Put the groups of a file that was surveyed. Return what was put.

    Each batch is put as a whole: an import that fails, is cancelled or killed, goes on there when it is repeated.
    Raises ConflictError when the same file is being imported by somebody else, FileError when it has changed since it
    was surveyed, and what `put` raises.
    """
    cursors, done = require(storage, CursorStorage, "import_from()"), Imported(found)
    cursor = await cursors.cursor(_name(found.digest))
    counts: Counter[Lane] = Counter() if wanted.again else _counts(cursor)
    teller, met, worker = Teller(progress, found.new), Counter[Lane](), worker_name()
    with closing(_batches(storage.codec, read, wanted, counts, met, done)) as reading:
        while (batch := await in_thread(lambda: next(reading, None))) is not None:
            if not batch:
                continue
            for new in batch:
                counts[new.task_name, new.status] += 1
                new.worker = new.worker or worker
            moved = replace(cursor, position=counts.total(), value=_packed(counts))
            if not await cursors.put_behind(batch, moved):
                raise ConflictError(
                    f"somebody else imports the same file, or the buffer was restored; {done.groups} groups were put "
                    "here. Run the import again when that is over: it goes on where they are"
                )
            cursor = replace(moved, version=moved.version + 1)
            done.groups += len(batch)
            done.rollouts += sum(len(new.rollouts) for new in batch)
            teller.add(len(batch), sum(len(new.payload or b"") for new in batch))
    teller.finish()
    if any(met[lane] != n for lane, n in found.groups.items()):
        raise FileError("the file has changed since it was read the first time; look at what is in the buffer")
    return done


def _batches(
    codec: Codec, read: Reader, wanted: Importing, counts: Counter[Lane], met: Counter[Lane], done: Imported
) -> Generator[list[NewGroup], None, None]:
    """Yield the groups that aren't in the buffer yet, in batches: empty ones while there are none among those read."""
    before, batch, size, passed = counts.copy(), list[NewGroup](), 0, 0
    groups = read()
    while True:
        try:
            group = next(groups, None)
        except FileEndsError:
            group = None
        if group is None or passed >= _GROUPS or size >= _BYTES:
            yield batch
            batch, size, passed = [], 0, 0
        if group is None:
            return
        passed += 1
        if not wanted.takes(group):
            continue
        lane = (group.task_name, group.status)
        met[lane] += 1
        if met[lane] <= before[lane]:
            done.there += 1
            continue
        batch.append(prepared(group, codec))
        size += len(batch[-1].payload or b"")


def _identity(new: NewGroup) -> bytes:
    """Return what makes a group of a file this one."""
    metadata = [new.task_name, new.status, new.staleness, new.priority, new.tags, new.key, new.times_sampled]
    return json.dumps(metadata).encode() + (new.payload or b"")


def _name(digest: str) -> str:
    return IMPORT + digest


def _packed(counts: Counter[Lane]) -> bytes:
    return json.dumps([[task, status, n] for (task, status), n in sorted(counts.items()) if n]).encode()


def _counts(cursor: Cursor) -> Counter[Lane]:
    """Return how many groups of each task and status were imported."""
    entries = json.loads(cursor.value) if cursor.value else []
    return Counter({(str(task), Status(status)): int(n) for task, status, n in entries})
