"""`replaybuf save`, `replaybuf resume`: copies of a buffer in files."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import typer

from replaybuf.buffer.copies import snapshot_file
from replaybuf.cli.groups import columns
from replaybuf.cli.options import OneBuffer, Url, buffer_option, listing, on_storage, option, url_and, with_bar
from replaybuf.cli.output import Column, Output
from replaybuf.errors import ConfigError
from replaybuf.progress import OnProgress
from replaybuf.rules.limits import Rules
from replaybuf.rules.policies import resolve_policy
from replaybuf.storage.sql.inspection.groups import DEFAULT, choose
from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.storage.sql.inspection.writer import Target, policy_of, save_snapshot

Folder = Annotated[str | None, typer.Argument(metavar="FOLDER", help="The folder of the snapshot.", show_default=False)]
_Loaded = Annotated[str | None, buffer_option("Load it into the buffer of this name; else into the one named default.")]
_COLUMNS = columns("buffer", "file", "groups", "bytes")
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
    buffer: OneBuffer = None,
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
    about = {"policy": resolve_policy(policy).name} if policy else {}
    file = snapshot_file(Path(folder), make=True)
    whole = payloads == "copy"
    _, done = with_bar("saved", lambda tell: save_snapshot(reader, name, str(file), about, tell, whole=whole))
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
    file = str(snapshot_file(Path(folder)))
    saved = policy_of(file)
    rules = Rules(resolve_policy(policy)) if policy else _rules_of(saved)

    def load(tell: OnProgress) -> None:
        on_storage(target.url, name, lambda storage: storage.resume(file, {}, tell), rules=rules, payloads=payloads)

    _, done = with_bar("loaded", load)
    row = {"url": target.where, "buffer": name, "file": file, "groups": done.groups, "bytes": done.bytes}
    own = Column("policy", lambda r: r["policy"] or "any", right=False)
    output.rows([row | {"policy": policy or saved}], [*_COLUMNS, own])


def _rules_of(policy: str | None) -> Rules:
    """Return the rules of this policy. Of a user's own policy only the name is known, which is enough."""
    with suppress(ConfigError):
        return Rules(resolve_policy(policy)) if policy else Rules()
    return Rules()
