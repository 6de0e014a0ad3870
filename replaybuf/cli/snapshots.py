"""`replaybuf save`, `replaybuf resume`: copies of a buffer in files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from replaybuf import units
from replaybuf.cli.options import Url, buffer_option, listing, option, url_and, with_bar
from replaybuf.cli.output import Column, Output
from replaybuf.errors import ConfigError
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.sql.inspection.group_payloads import AS_DICTS
from replaybuf.storage.sql.inspection.groups import choose
from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.storage.sql.inspection.snapshots import DEFAULT, Target, policy_of, save_snapshot

if TYPE_CHECKING:
    from replaybuf.progress import OnProgress, Progress

Folder = Annotated[str | None, typer.Argument(metavar="FOLDER", help="The folder of the snapshot.", show_default=False)]
_Saved = Annotated[
    str | None, buffer_option("This buffer of the database; else the only one, or the one named default.")
]
_Loaded = Annotated[str | None, buffer_option("Load it into the buffer of this name; else into the one named default.")]
_NAMES = "fifo, lifo, staleness, uniform, prioritized, or module:Class."
_Of = Annotated[str | None, option("--policy", metavar="NAME", help=f"Only for buffers of this policy: {_NAMES}")]
_Payloads = Annotated[
    Literal["copy", "keep"],
    option("--payloads", metavar="HOW", help="Payloads kept apart: copy them, or keep them where they are."),
]
_Place = Annotated[
    str, option("--payloads", metavar="PLACE", help="Keep large payloads apart, in this folder or object store.")
]
_For = Annotated[str | None, option("--policy", metavar="NAME", help=f"For a run of another policy: {_NAMES}")]


@listing
def save(
    url: Url,
    output: Output,
    folder: Folder = None,
    buffer: _Saved = None,
    policy: _Of = None,
    payloads: _Payloads = "copy",
) -> None:
    """Write a snapshot of a buffer into a folder, while the run goes on.

    It is the same that buffer.save() writes: one SQLite file, whichever database the buffer is in, that buffer.resume()
    and "replaybuf resume" load into another. It appears under its name only when it is complete, over an older one.
    Leased groups are in it as if they had been given back.

    A buffer resumes from a snapshot of its own policy only. The database doesn't know the policy of its run: with
    --policy the snapshot is for buffers of that one, without it for those of any.

    Payloads that are kept apart from the database are in the snapshot, too. With --payloads keep it only refers to
    them, and is good until the run goes on: to move a run that has stopped to another database.

    \b
    Examples:
      replaybuf save run.db backup
      replaybuf save postgresql://rl@db/run7 backup --buffer eval --policy staleness
    """
    url, folder = url_and(url, folder, "FOLDER")
    reader = open_reader(url)
    name = reader.read(lambda tx: choose(tx, buffer))
    about = {"policy": _policy(policy).name} if policy else {}
    file = _file_in(Path(folder), make=True)
    done = _with_bar(
        "saved", lambda tell: save_snapshot(reader, name, str(file), about, tell, whole=payloads == "copy")
    )
    row = {"url": reader.where, "buffer": name, "file": str(file), "groups": done.groups, "bytes": done.bytes}
    output.rows([row], _COLUMNS)


@listing
def resume(
    url: Url,
    output: Output,
    folder: Folder = None,
    buffer: _Loaded = None,
    policy: _For = None,
    payloads: _Place = "database",
) -> None:
    """Load a snapshot into a buffer that is empty.

    All of it or nothing: a snapshot that was cut short or damaged is refused. Snapshots go from any database to any. A
    SQLite file that isn't there is made.

    The snapshot's own policy is taken, whatever it is, and goes on as it would have; build the buffer with it.
    --policy is for a run that goes on with another one.

    All payloads are in the database then, or the large ones in the place that --payloads names, which the run is to be
    given, too; the snapshot isn't needed any more, nor what it refers to.

    \b
    Examples:
      replaybuf resume new.db backup
      replaybuf resume postgresql://rl@db/run8 backup --buffer train
    """
    url, folder = url_and(url, folder, "FOLDER")
    target, name = Target.at(url), buffer or DEFAULT
    file = str(_file_in(Path(folder)))
    saved = policy_of(file)
    rules = _rules(_policy(policy) if policy else _known_policy(saved))
    storage = SQLStorage(target.url, AS_DICTS, rules, name=name, payloads=payloads)
    done = _with_bar("loaded", lambda tell: _load(storage, file, tell))
    row = {
        "url": target.where,
        "buffer": name,
        "file": file,
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


def _with_bar(what: str, work: Callable[[OnProgress], None]) -> Progress:
    """Run `work(tell)` with a progress bar. Return its last progress."""
    from replaybuf.progress import Progress

    last = Progress(0, 0, 0)

    def noting(tell: OnProgress) -> None:
        def note(progress: Progress) -> None:
            nonlocal last
            last = progress
            tell(progress)

        work(note)

    with_bar(what, noting)
    return last


def _load(storage: SQLStorage, file: str, tell: OnProgress) -> None:
    async def load() -> None:
        try:
            await storage.resume(file, {}, tell)
        finally:
            await storage.close()

    asyncio.run(load())


def _rules(policy: Any) -> Any:
    from replaybuf.rules.limits import Rules

    return Rules() if policy is None else Rules(policy)


def _policy(name: str) -> Any:
    from replaybuf.rules.policies import resolve_policy

    return resolve_policy(name)


def _known_policy(name: str | None) -> Any:
    """Return the policy with this name. Of a user's own policy only the name is known, which is enough."""
    try:
        return _policy(name) if name else None
    except ConfigError:
        return None


def _file_in(folder: Path, *, make: bool = False) -> Path:
    from replaybuf.buffer.copies import snapshot_file

    return snapshot_file(folder, make=make)
