"""Which groups an export copies; the folder of a snapshot."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict

from replaybuf.common.checks import check_no_url
from replaybuf.common.redact import redact_path
from replaybuf.errors import SnapshotError
from replaybuf.rules.policies import OrderTerm
from replaybuf.rules.query import Query

OrderBy = str | OrderTerm | Iterable[str | OrderTerm] | None


class Selection(TypedDict, total=False):
    """The groups of an export. `ReplayBuffer.export` has the meaning, `find` that of `order_by`."""

    where: Query | None
    order_by: OrderBy
    limit: int | None


SNAPSHOT_FILE = "replaybuf.sqlite"


def snapshot_file(folder: Path, *, make: bool = False) -> Path:
    """Return the snapshot file of a folder; with `make`, create the folder for a new one. Raises SnapshotError.

    Without `make`, raises SnapshotError if there is no snapshot.
    """
    check_no_url(folder)
    file, shown = folder / SNAPSHOT_FILE, f"{redact_path(str(folder)):.200}"
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        elif folder.is_file():
            inside = redact_path(str(folder.parent))
            raise SnapshotError(f"{shown} is a file: give the folder that it is in, {inside}", reason="missing")
        elif not file.is_file():
            raise SnapshotError(f"there is no snapshot in {shown}: expected the file {SNAPSHOT_FILE}", reason="missing")
    except OSError as error:
        what = "make" if make else "look into"
        raise SnapshotError(f"can't {what} the folder {shown} for the snapshot: {error.strerror}") from error
    return file
