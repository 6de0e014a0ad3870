"""Copies of a buffer: files, checkpoints and snapshots, and restoring from them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, Literal

from replaybuf.buffer import spans
from replaybuf.buffer.reader import BufferReader
from replaybuf.checks import check_folder, check_limit, check_no_url, check_source, check_step, check_whole
from replaybuf.errors import InputError, SnapshotError
from replaybuf.files.exporting import Exported, ExportQuery, export_files, to_dataset, to_pandas
from replaybuf.files.foreign_rows import FIELDS, ColumnMapping
from replaybuf.files.importing import Imported, ImportOptions, import_from
from replaybuf.files.row_format import RowsOf
from replaybuf.files.sources import RolloutFile
from replaybuf.progress import OnProgress
from replaybuf.query import Query
from replaybuf.redact import redact_path
from replaybuf.rollouts.statuses import StatusLike
from replaybuf.rules.policies import OrderTerm, parse_order
from replaybuf.storage.values import Checkpoint, R
from replaybuf.tracing import traced
from replaybuf.worker_name import working_as

SNAPSHOT_FILE = "replaybuf.sqlite"
#: Whether a snapshot includes payloads that are kept apart, or refers to them.
SavedPayloads = Literal["copy", "keep"]


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


class BufferCopies(BufferReader[R], Generic[R]):
    """The methods of a buffer that copy groups out of it and back. `ReplayBuffer` adds the others."""

    # Files

    async def export(
        self,
        path: str | os.PathLike[str],
        *,
        where: Query | None = None,
        order_by: str | OrderTerm | Iterable[str | OrderTerm] | None = None,
        limit: int | None = None,
        rows: RowsOf = "rollouts",
        exact: bool = False,
        max_bytes: int | None = None,
        force: bool = False,
        progress: OnProgress | None = None,
    ) -> Exported:
        """Write groups to a file, without consuming them: JSONL (.jsonl, .jsonl.gz, .jsonl.zst), Parquet or Arrow.

        A row is a rollout or a group (`rows="groups"`), with the group's metadata and all fields of the rollouts, of
        any class. Their values are JSON's or Arrow's; the result's `warnings` name those that are text. With `exact`
        the groups' payloads are there, too, and an import gives the same rollouts. The groups are those that match
        `where` when the export begins; groups removed before they are read are left out and counted. Memory use is
        bounded.

        The file gets its name when it is complete. From `max_bytes` on another one is begun: NAME-00000-of-00003.jsonl.
        An existing file is replaced only with `force`. Raises FileError, StorageError, AccessError, QueryError
        and, for Parquet and Arrow, MissingDriverError without pyarrow. `progress` is called as in `save`.
        """
        chosen = self._chosen(where, order_by, limit, rows, exact)
        most = None if max_bytes is None else check_limit(max_bytes)
        return await export_files(
            self.storage, chosen, check_folder(path), max_bytes=most, force=force, progress=progress
        )

    async def to_pandas(
        self,
        *,
        where: Query | None = None,
        order_by: str | OrderTerm | Iterable[str | OrderTerm] | None = None,
        limit: int | None = None,
        rows: RowsOf = "rollouts",
    ) -> Any:
        """Return groups as a pandas DataFrame with the rows of `export`; all of them are in memory. Needs pandas."""
        return await to_pandas(self.storage, self._chosen(where, order_by, limit, rows))

    async def to_dataset(
        self,
        folder: str | os.PathLike[str],
        *,
        where: Query | None = None,
        order_by: str | OrderTerm | Iterable[str | OrderTerm] | None = None,
        limit: int | None = None,
        rows: RowsOf = "rollouts",
        progress: OnProgress | None = None,
    ) -> Any:
        """Return groups as a Hugging Face `datasets.Dataset`, which reads its rows lazily from `folder`.

        The folder gets Arrow files, written as by `export`, and may be deleted after the dataset. Needs the packages
        datasets and pyarrow. Raises the errors of `export`.
        """
        return await to_dataset(
            self.storage, self._chosen(where, order_by, limit, rows), check_folder(folder), progress
        )

    async def import_from(
        self,
        source: str | os.PathLike[str],
        *,
        dry_run: bool = False,
        task: str | None = None,
        status: StatusLike | None = None,
        fields: Mapping[str, str] | None = None,
        as_task: str | None = None,
        as_status: StatusLike | None = None,
        key: str | None = None,
        as_they_are: bool = False,
        partial: bool = False,
        again: bool = False,
        progress: OnProgress | None = None,
    ) -> Imported:
        """Put the groups of a file, each exactly once: an export of ours, others' rows, and saved buffers.

        A folder is the folder of a dataset (`to_dataset`), or of another single export.

        The file is read to its end first, and nothing of an invalid one is put. Then groups are put in batches; an
        import that failed, was cancelled or killed continues there when it is repeated, and groups that were imported
        before are skipped, unless `again`. With `dry_run` the result only says what would be put. The result's
        `found.warnings` name likely mistakes: no responses, rows of a prompt that are apart.

        `task` and `status` restrict the import to matching groups. In others' rows, `fields` are the columns of our
        fields ({"response": "completion"}), `as_task` is the task of rows that don't name one, `as_status` the status
        of all, and `key` the column with the group's key; `as_they_are` keeps unknown columns as fields, for rollouts
        that are dicts. `partial` puts the complete groups of a truncated file.

        The limits hold, without waiting for room: FullError is raised, and groups already put are kept. `progress` is
        called as in `save`, for each of the two passes; in the first the total is 0 until the file's end. Raises
        FileError with the position of a fault in the file, FileError, AccessError, InputError,
        ConflictError while another process imports the same file, MissingDriverError, and the errors of `put`.
        """
        self._check_open()
        check = self.rollout_type.statuses.check
        statuses = [None if one is None else check(one) for one in (status, as_status)]
        cls, names = self.rollout_type.cls, self.rollout_type.names
        known = None if issubclass(cls, dict) else FIELDS | names
        mapped = ColumnMapping({} if fields is None else fields, as_task, statuses[1], key, as_they_are, known)
        wanted = ImportOptions(task, statuses[0], partial, again, dry_run)
        file = RolloutFile(check_source(source), mapped)
        with working_as(self.worker):
            return await import_from(self.storage, file, wanted, progress)

    def _chosen(
        self, where: Query | None, order_by: Any, limit: int | None, rows: RowsOf, exact: bool = False
    ) -> ExportQuery:
        self._check_open()
        if rows not in ("rollouts", "groups"):
            raise InputError(f"rows must be 'rollouts' or 'groups', not {rows!r:.100}")
        return ExportQuery(
            self._parsed({} if where is None else where), parse_order(order_by), check_limit(limit), rows, bool(exact)
        )

    # Checkpoints

    @traced("replaybuf.checkpoint", spans.of_step, spans.of_checkpoint)
    async def checkpoint(self, step: int) -> Checkpoint:
        """Make a checkpoint of the buffer, for a `restore` to this train step; call this when the weights are saved.

        Only metadata is copied, not payloads: some milliseconds for 10,000 groups of any size. Leased groups are
        included as if they were given back: acknowledge a batch before the checkpoint of its step. Cursors of prompt
        ledgers are included. A checkpoint of the same step is replaced. The last `keep_checkpoints` are kept (a setting
        of the config; default 3). Their payloads take space until they are dropped.
        """
        self._check_open()
        return await self.storage.checkpoint(check_whole(check_step(step, "step"), "step"), self._keep_checkpoints)

    @traced("replaybuf.restore", spans.of_restore, spans.of_checkpoint)
    async def restore(self, step: int, *, keep_new: bool = False) -> Checkpoint:
        """Restore the buffer exactly as it was at the checkpoint of this train step, in one transaction.

        Groups taken since are back, with their order, staleness, priority, number of draws, status and tags. Groups put
        since are removed. Draws with a seed continue as they did from there. Raises CheckpointError if there is no
        checkpoint of this step.

        With `keep_new`, groups put since are kept, as if they had not been drawn, and the cursors of prompt ledgers
        aren't moved. Groups that were put and taken since are back only if they were archived.

        All other processes that have the buffer open belong to the earlier run and are fenced off: their puts, draws,
        waits and acknowledgements raise FencedError until they build the buffer anew.
        """
        self._check_open()
        return await self.storage.restore(check_step(step, "step"), keep_new=keep_new)

    async def checkpoints(self) -> list[Checkpoint]:
        """Return the step checkpoints, in the order in which they were made."""
        self._check_open()
        return await self.storage.checkpoints()

    async def drop_checkpoint(self, step: int) -> None:
        """Drop the checkpoint of this train step, and the payloads that only it needs. Raises CheckpointError."""
        self._check_open()
        await self.storage.drop_checkpoint(check_step(step, "step"))

    # Snapshots

    async def save(
        self,
        path: str | os.PathLike[str],
        *,
        payloads: SavedPayloads = "copy",
        progress: OnProgress | None = None,
    ) -> Path:
        """Write a self-contained snapshot into the folder `path`, without stopping writers. Return its file.

        Payloads outside the database (`payloads` in the config) are in the snapshot, too. With `payloads="keep"` the
        snapshot only refers to them: it is small and quickly made, to move a stopped run to another database. It
        doesn't retain them, and is valid until the run continues, since groups are then removed, and kept ones may move
        to other files. `resume` copies them, or refuses.

        The file gets its name only when it is complete. `progress(Progress(groups, total, bytes))` is called at the
        beginning, at the end, and at most five times a second in between. It is called in the database's thread, not
        the caller's, and must not block. An exception from it ends the save, and nothing is written.
        """
        self._check_open()
        if payloads not in ("copy", "keep"):
            raise InputError(f"payloads must be 'copy' or 'keep', not {payloads!r:.100}")
        folder = check_folder(path)
        file = await asyncio.to_thread(snapshot_file, folder, make=True)
        about = {"policy": self.policy.name}
        await self.storage.save(str(file), about, progress, whole=payloads == "copy")
        return file

    async def resume(self, path: str | os.PathLike[str], *, progress: OnProgress | None = None) -> None:
        """Load the snapshot in the folder `path` into this buffer, all of it or nothing.

        Large payloads are copied to the place of this buffer's payloads, whether the snapshot includes or refers to
        them; the buffer depends on neither afterwards.

        Raises SnapshotError if the buffer isn't empty, and SnapshotError or StorageError if
        the snapshot is of another policy or schema, SnapshotError if it is damaged, truncated, or refers to deleted
        payloads, and PayloadStoreError if their place can't be reached. `progress` is called as in `save`.
        """
        self._check_open()
        folder = check_folder(path)
        file = await asyncio.to_thread(snapshot_file, folder)
        await self.storage.resume(str(file), {"policy": self.policy.name}, progress)

    def state_dict(self) -> dict[str, Any]:
        """Return a dict with the content of a snapshot file, for frameworks that want one. Blocks; `save` doesn't."""
        self._check_open()
        return {"snapshot": self.storage.snapshot({"policy": self.policy.name})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a dict from `state_dict` into this buffer, which must be empty. Blocks. Errors are those of `resume`."""
        self._check_open()
        snapshot = state.get("snapshot") if isinstance(state, Mapping) else None
        if not isinstance(snapshot, bytes):
            raise SnapshotError("expected a dict from ReplayBuffer.state_dict()", reason="mismatch")
        self.storage.load_snapshot(snapshot, {"policy": self.policy.name})
