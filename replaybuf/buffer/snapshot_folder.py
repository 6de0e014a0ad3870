"""Where a snapshot is: a file of one name, in a folder of its own."""

from __future__ import annotations

from pathlib import Path

from replaybuf.checks import check_no_url
from replaybuf.errors import MissingSnapshotError, SnapshotError
from replaybuf.redact import redact_path

SNAPSHOT_FILE = "replaybuf.sqlite"


def snapshot_file(folder: Path, *, make: bool = False) -> Path:
    """Return the file of the snapshot in a folder; `make` the folder for a new one. Raises SnapshotError.

    MissingSnapshotError where there should be a snapshot, and is none.
    """
    check_no_url(folder)
    file, shown = folder / SNAPSHOT_FILE, f"{redact_path(str(folder)):.200}"
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        elif folder.is_file():
            inside = redact_path(str(folder.parent))
            raise MissingSnapshotError(f"{shown} is a file: give the folder that it is in, {inside}")
        elif not file.is_file():
            raise MissingSnapshotError(f"there is no snapshot in {shown}: expected the file {SNAPSHOT_FILE}")
    except MissingSnapshotError:
        raise
    except OSError as error:
        what = "make" if make else "look into"
        raise SnapshotError(f"can't {what} the folder {shown} for the snapshot: {error.strerror}") from error
    return file
