"""`replaybuf doctor --rescue`: snapshots of the readable groups of a damaged SQLite file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from replaybuf.buffer.snapshot_folder import SNAPSHOT_FILE
from replaybuf.checks import check_no_url
from replaybuf.errors import NotADatabaseError, SnapshotError
from replaybuf.redact import redact_path
from replaybuf.storage.sql.inspection.rescue.metadata import read_metadata
from replaybuf.storage.sql.inspection.rescue.salvage import opened
from replaybuf.storage.sql.inspection.rescue.snapshot import write_snapshot


@dataclass(frozen=True, slots=True)
class Rescued:
    """What was saved of one buffer: the snapshot's file, the number of groups, and the number lost, as far as known."""

    buffer: str
    file: str
    groups: int
    bytes: int
    lost: int


def rescue(path: Path, folder: Path, tell: Callable[[int, int], None] = lambda done, total: None) -> list[Rescued]:
    """Write what can be read of the SQLite file `path` into a snapshot in `folder`.

    If the file has several buffers, each gets its own folder in `folder`. Never writes to the file. Raises
    SnapshotError if the folder already has a snapshot, and NotADatabaseError if nothing can be read.
    """
    check_no_url(folder)
    if folder.exists() and next(folder.glob(f"**/{SNAPSHOT_FILE}"), None) is not None:
        raise SnapshotError(f"there is a snapshot in {redact_path(str(folder))} already; give another folder")
    rescued = []
    with opened(path) as damaged:
        last, buffers = read_metadata(damaged)
        if damaged.guessed and not any(found.lanes or found.groups for found in buffers.values()):
            raise NotADatabaseError(f"{path} is no replaybuf database, or nothing of it can be read")
        total, done = sum(len(found.groups) for found in buffers.values()), 0
        for name, found in sorted(buffers.items()):
            inside = folder if len(buffers) == 1 else folder / quote(name, safe="")
            try:
                inside.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                shown = redact_path(str(inside))
                raise SnapshotError(f"can't make the folder {shown} for the snapshot: {error.strerror}") from error
            file = str(inside / SNAPSHOT_FILE)
            written = write_snapshot(damaged, found, file, last, lambda n, before=done: tell(before + n, total))  # type: ignore[misc]
            done += len(found.groups)
            rescued.append(Rescued(name, file, written.groups, written.bytes, written.lost))
    return rescued
