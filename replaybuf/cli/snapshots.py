"""`replaybuf save`, `replaybuf resume`, `replaybuf checkpoints`: copies of a buffer, in files and in the database."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from sqlalchemy import Connection, select

from replaybuf import units
from replaybuf.bar import progress_bar
from replaybuf.cli.groups import buffers_of, look_at
from replaybuf.cli.options import Buffer, Url, buffer_option, listing, option, url_and
from replaybuf.cli.output import Column, Output, iso
from replaybuf.errors import ConfigError, InputError
from replaybuf.storage.sql.engine.sqlite_connections import is_memory, is_wal
from replaybuf.storage.sql.engine.urls import parse_url, public_url
from replaybuf.storage.sql.inspection import LOCK_TIMEOUT, read, read_url
from replaybuf.storage.sql.schema.tables import checkpoint
from replaybuf.storage.sql.statements.lanes import Scope

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

    from replaybuf.progress import OnProgress, Progress
    from replaybuf.storage.sql.backend import SQLStorage

_DEFAULT = "default"

Folder = Annotated[str | None, typer.Argument(metavar="FOLDER", help="The folder of the snapshot.", show_default=False)]
_Saved = Annotated[
    str | None, buffer_option("This buffer of the database; else the only one, or the one named default.")
]
_Loaded = Annotated[str | None, buffer_option("Load it into the buffer of this name; else into the one named default.")]
_NAMES = "fifo, lifo, staleness, uniform, prioritized, or module:Class."
_Of = Annotated[str | None, option("--policy", metavar="NAME", help=f"Only for buffers of this policy: {_NAMES}")]
_For = Annotated[str | None, option("--policy", metavar="NAME", help=f"For a run of another policy: {_NAMES}")]


@listing
def save(url: Url, output: Output, folder: Folder = None, buffer: _Saved = None, policy: _Of = None) -> None:
    """Write a snapshot of a buffer into a folder, while the run goes on.

    It is the same that buffer.save() writes: one SQLite file, whichever database the buffer is in, that buffer.resume()
    and "replaybuf resume" load into another. It appears under its name only when it is complete, over an older one.
    Leased groups are in it as if they had been given back.

    A buffer resumes from a snapshot of its own policy only. The database doesn't know the policy of its run: with
    --policy the snapshot is for buffers of that one, without it for those of any.

    \b
    Examples:
      replaybuf save run.db backup
      replaybuf save postgresql://rl@db/run7 backup --buffer eval --policy staleness
    """
    url, folder = url_and(url, folder, "FOLDER")
    parsed, name = read_url(url), read(url, lambda connection: _chosen(connection, buffer))
    about = {"policy": _policy(policy).name} if policy else {}
    file = _file_in(Path(folder), make=True)
    done = _with_bar("saved", lambda tell: _save(parsed, name, str(file), about, tell))
    row = {"url": public_url(parsed), "buffer": name, "file": str(file), "groups": done.groups, "bytes": done.bytes}
    output.rows([row], _COLUMNS)


@listing
def resume(url: Url, output: Output, folder: Folder = None, buffer: _Loaded = None, policy: _For = None) -> None:
    """Load a snapshot into a buffer that is empty.

    All of it or nothing: a snapshot that was cut short or damaged is refused. Snapshots go from any database to any. A
    SQLite file that isn't there is made.

    The snapshot's own policy is taken, whatever it is, and goes on as it would have; build the buffer with it.
    --policy is for a run that goes on with another one.

    \b
    Examples:
      replaybuf resume new.db backup
      replaybuf resume postgresql://rl@db/run8 backup --buffer train
    """
    from replaybuf.storage.sql.copies.snapshot_file import read_snapshot_facts

    url, folder = url_and(url, folder, "FOLDER")
    parsed, name = _target_url(url), buffer or _DEFAULT
    file = _file_in(Path(folder))
    saved = asyncio.run(read_snapshot_facts(str(file))).get("policy")
    storage = _storage(parsed, name, _policy(policy) if policy else _known_policy(saved))
    done = _with_bar("loaded", lambda tell: _resume(storage, str(file), tell))
    row = {
        "url": public_url(parsed),
        "buffer": name,
        "file": str(file),
        "groups": done.groups,
        "bytes": done.bytes,
        "policy": policy or saved,
    }
    own = Column("policy", lambda r: r["policy"] or "any", right=False)
    output.rows([row], [*_COLUMNS, own])


_COLUMNS = [
    Column("buffer", lambda r: r["buffer"], right=False, text=True),
    Column("file", lambda r: r["file"], right=False, text=True),
    Column("groups", lambda r: units.number(r["groups"])),
    Column("size", lambda r: units.size(r["bytes"])),
]


def _chosen(connection: Connection, buffer: str | None) -> str:
    """The buffer of this name, or the only one, or the one without a name of its own. Raises InputError."""
    there = buffers_of(connection)
    if buffer is None and len(there) > 1 and _DEFAULT not in there:
        raise InputError(f"there are several buffers in this database: choose one with --buffer: {', '.join(there)}")
    return look_at(connection, buffer).buffer or (there[0] if len(there) == 1 else _DEFAULT)


def _with_bar(what: str, work: Callable[[OnProgress], Coroutine[Any, Any, None]]) -> Progress:
    """Run `work(tell)` with a bar; how much there was."""
    from replaybuf.progress import Progress

    last = Progress(0, 0, 0)
    with progress_bar(what) as bar:

        def tell(progress: Progress) -> None:
            nonlocal last
            last = progress
            bar(progress.groups, progress.total)

        asyncio.run(work(tell))
    return last


async def _save(url: URL, name: str, file: str, about: dict[str, str], tell: OnProgress) -> None:
    from replaybuf.storage.sql.copies.snapshot import copy_to
    from replaybuf.storage.sql.engine.database import Database
    from replaybuf.storage.sql.statements.fence import join

    database = Database(url, durability="normal", lock_timeout=LOCK_TIMEOUT, read_only=not _has_log(url))
    try:
        scope = await database.read(lambda connection: join(connection, Scope(name)))
        await copy_to(database, scope, file, about, tell)
    finally:
        await database.dispose()


def _has_log(url: URL) -> bool:
    """Whether it is a SQLite file with a write-ahead log, and may be written.

    The last one to close such a file removes the log, unless it only reads: then an empty one would be left behind.
    """
    path = url.database or ""
    return url.get_backend_name() == "sqlite" and os.access(path, os.W_OK) and is_wal(path)


async def _resume(storage: SQLStorage, file: str, tell: OnProgress) -> None:
    try:
        await storage.resume(file, {}, tell)
    finally:
        await storage.close()


def _storage(url: URL, name: str, policy: Any) -> SQLStorage:
    from replaybuf.codec.payload import Codec
    from replaybuf.rollouts.rollout_type import RolloutType
    from replaybuf.rules.limits import Rules
    from replaybuf.storage.sql.backend import SQLStorage

    rules = Rules(policy) if policy is not None else Rules()
    return SQLStorage(url.render_as_string(hide_password=False), Codec(RolloutType(dict)), rules, name=name)


def _policy(name: str) -> Any:
    from replaybuf.rules.policies import resolve_policy

    return resolve_policy(name)


def _known_policy(name: str | None) -> Any:
    """The policy of this name; of one's own policies nothing but the name is known, and it doesn't take more."""
    try:
        return _policy(name) if name else None
    except ConfigError:
        return None


def _file_in(folder: Path, *, make: bool = False) -> Path:
    from replaybuf.buffer.reader import SNAPSHOT_FILE, missing_snapshot
    from replaybuf.errors import SnapshotError

    file = folder / SNAPSHOT_FILE
    if make:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SnapshotError(f"can't make the folder {folder} for the snapshot: {error}") from error
    elif not file.is_file():
        raise missing_snapshot(folder)
    return file


def _target_url(url: str) -> URL:
    """As `read_url`, also for a SQLite file that isn't there yet."""
    parsed = parse_url(url) if "://" in url or not url else parse_url("sqlite://").set(database=url)
    if is_memory(parsed):
        raise ConfigError("a SQLite database in memory would be gone with this command; give a file or a server")
    return parsed


@listing
def checkpoints(url: Url, output: Output, buffer: Buffer = None) -> None:
    """List the step checkpoints in a database: what buffer.restore(step) can go back to.

    "groups" and "size" are what each holds; payloads that several of them hold, or that are still in the buffer, take
    their space once.

    \b
    Example:
      replaybuf checkpoints run.db
    """

    def collect(connection: Connection) -> list[dict[str, Any]]:
        scope = look_at(connection, buffer)
        query = select(checkpoint).order_by(checkpoint.c.buffer, checkpoint.c.id)
        if scope.buffer is not None:
            query = query.where(checkpoint.c.buffer == scope.buffer)
        return [
            {
                "buffer": row.buffer,
                "step": row.step,
                "created_at": datetime.fromtimestamp(row.created_at, UTC),
                "groups": row.groups,
                "bytes": row.bytes,
            }
            for row in connection.execute(query)
        ]

    rows = read(url, collect)
    columns = [
        Column("buffer", lambda r: r["buffer"], right=False, text=True),
        Column("step", lambda r: units.number(r["step"])),
        Column("made", lambda r: iso(r["created_at"]), right=False),
        Column("groups", lambda r: units.number(r["groups"])),
        Column("size", lambda r: units.size(r["bytes"])),
    ]
    if rows or not output.for_people:
        output.rows(rows, columns)
    else:
        output.note("there are no checkpoints")
