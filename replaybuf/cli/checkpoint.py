"""`replaybuf checkpoint`: step checkpoints, and snapshots of a buffer in files.

Modules for writing are imported by the commands that write, so that listing is fast."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replaybuf.cli.commands import (
    TEXT,
    YES,
    Buffer,
    OneBuffer,
    Out,
    Url,
    argument,
    ask,
    buffer_option,
    on_storage,
    open_buffer,
    option,
    with_bar,
)
from replaybuf.cli.output import Output, Row
from replaybuf.common import units
from replaybuf.common.checks import check_step
from replaybuf.common.units import iso, time_of
from replaybuf.errors import ConfigError
from replaybuf.storage.sql.inspection.reader import Reader, open_reader
from replaybuf.storage.sql.inspection.run_records import find_checkpoint, read_checkpoints
from replaybuf.storage.sql.inspection.wait_facts import names_of_alive
from replaybuf.view.columns import CHECKPOINTS, Column, columns

if TYPE_CHECKING:
    from replaybuf.common.progress import OnProgress
    from replaybuf.storage.sql.backend import SQLStorage


def ls(url: Url, output: Out = TEXT, buffer: Buffer = None) -> None:
    """List the step checkpoints in a database.

    buffer.restore(step) can go back to each. "groups" and "size" are what each holds; payloads that several of them
    hold, or that are still in the buffer, take their space once.

    \b
    Examples:
      replaybuf checkpoint ls run.db
    """
    rows = open_reader(url).read(lambda tx: read_checkpoints(tx, buffer))
    if rows or not output.for_people:
        output.rows(rows, CHECKPOINTS)
    else:
        output.note("there are no checkpoints")


app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
app.command("ls")(ls)

_Step = Annotated[int, argument("STEP", "The train step of the checkpoint.")]
_Yes = Annotated[bool, YES]


@app.callback()
def checkpoint() -> None:
    """Step checkpoints in a database (ls, make, restore, drop), and snapshots of a buffer in files (save, resume)."""


@app.command("make")
def make(url: Url, step: _Step, output: Out = TEXT, buffer: OneBuffer = None) -> None:
    """Make a checkpoint of a buffer at a train step.

    Others go on meanwhile, as with buffer.checkpoint(). It replaces an older one of the same step, and drops no other.

    \b
    Examples:
      replaybuf checkpoint make run.db 400
    """
    train_step = check_step(step, "STEP")
    reader, name = open_buffer(url, buffer)
    on_storage(reader.url, name, lambda storage: storage.checkpoint(train_step, None))
    _tell(output, reader, reader.read(lambda tx: find_checkpoint(tx, name, train_step)))


@app.command("restore")
def restore(
    url: Url,
    step: _Step,
    output: Out = TEXT,
    keep_new: Annotated[bool, option("--keep-new", "Keep the groups that were put since the checkpoint.")] = False,
    buffer: OneBuffer = None,
    yes: _Yes = False,
) -> None:
    """Restore a buffer to the checkpoint of a step.

    It asks first, and does what buffer.restore() does. Groups that were taken since are back, those that were put
    since are gone (unless --keep-new). All processes that have the buffer open are fenced off: whatever they do next
    raises FencedError, until they build it again. Restore when the run is stopped, and start it from its own checkpoint
    of the same step.

    Groups that were leased at the checkpoint get new chances in random draws. To draw exactly as with the seed of a
    config, restore by buffer.restore() of that config.

    \b
    Examples:
      replaybuf checkpoint restore run.db 400
      replaybuf checkpoint restore postgresql://rl@db/run7 400 --keep-new --yes
    """
    reader, name, record = _find(url, step, buffer)
    _ask_to_restore(reader, record, keep_new=keep_new, yes=yes)
    on_storage(reader.url, name, lambda storage: storage.restore(record["step"], keep_new=keep_new))
    _tell(output, reader, record)
    output.note("restored; whoever had the buffer open before is fenced off")


@app.command("drop")
def drop(url: Url, step: _Step, output: Out = TEXT, buffer: OneBuffer = None, yes: _Yes = False) -> None:
    """Drop the checkpoint of a step.

    It asks first. Payloads that nothing else needs go with it.

    \b
    Examples:
      replaybuf checkpoint drop run.db 400
      replaybuf checkpoint drop run.db 400 --yes
    """
    reader, name, record = _find(url, step, buffer)
    ask(f"Drop the checkpoint of {_record_text(record)}? It can't be brought back.", yes=yes)
    on_storage(reader.url, name, lambda storage: storage.drop_checkpoint(record["step"]))
    _tell(output, reader, record)
    output.note("dropped")


def _find(url: str, step: int, buffer: str | None) -> tuple[Reader, str, Row]:
    """Return the reader of the database, the name of the buffer, and the checkpoint of the step."""
    reader, name = open_buffer(url, buffer)
    return reader, name, reader.read(lambda tx: find_checkpoint(tx, name, step))


def _record_text(record: Row) -> str:
    size = f"{units.number_of(record['groups'], 'group')}, {units.size(record['bytes'])}"
    return f"step {record['step']} of buffer {record['buffer']}, made {iso(time_of(record['created_at']))} ({size})"


def _ask_to_restore(reader: Reader, record: Row, *, keep_new: bool, yes: bool) -> None:
    workers = reader.read(lambda tx: names_of_alive(tx, record["buffer"]))
    changes = f"Groups put since then are {'kept' if keep_new else 'deleted'}, and those that have left are back."
    users = "Nobody was seen with it open in the last minute."
    if workers:
        users = f"These have it open and will be fenced off: {units.some(workers)}."
    ask(f"Restore {_record_text(record)} in {reader.where}? {changes} {users} Restore?", yes=yes)


def _tell(output: Output, reader: Reader, record: Row) -> None:
    shown = {name: record[name] for name in ("buffer", "step", "created_at", "groups", "bytes")}
    output.rows([{"url": reader.where, **shown, "created_at": time_of(shown["created_at"])}], CHECKPOINTS)


# Copies in files

Folder = Annotated[str, argument("FOLDER", "The folder of the snapshot.")]
_LoadInto = Annotated[str | None, buffer_option("Load it into the buffer of this name; else into that of its own.")]
_COPY_COLUMNS = columns("buffer", "file", "groups", "bytes")


@app.command("save")
def save(url: Url, folder: Folder, output: Out = TEXT, buffer: OneBuffer = None) -> None:
    """Write a snapshot of a buffer into a folder.

    The run may go on. It is the same that buffer.save() writes: one SQLite file, whichever database the buffer is in,
    that buffer.resume() and "replaybuf checkpoint resume" load into another. It appears under its name only when it is
    complete, over an older one. Leased groups are in it as if they had been given back.

    The database doesn't know the policy of its run: the snapshot is for buffers of any.

    Payloads that are kept apart from the database are in the snapshot, too.

    \b
    Examples:
      replaybuf checkpoint save run.db backup
      replaybuf checkpoint save postgresql://rl@db/run7 backup --buffer eval
    """
    reader, name = open_buffer(url, buffer)

    def write(tell: OnProgress) -> Path:
        return on_storage(reader.url, name, lambda storage: storage.save(Path(folder), {}, tell), read_only=True)

    file, total = with_bar("saved", write)
    row = {"url": reader.where, "buffer": name, "file": str(file), "groups": total.groups, "bytes": total.bytes}
    output.rows([row], _COPY_COLUMNS)


@app.command("resume")
def resume(
    url: Url,
    folder: Folder,
    output: Out = TEXT,
    buffer: _LoadInto = None,
    step: Annotated[
        int | None, option("--step", "Make it the checkpoint of this train step, for buffer.restore(N).", min=0)
    ] = None,
) -> None:
    """Load a snapshot into a buffer that is empty.

    All of it or nothing: a snapshot that was cut short or damaged is refused. Snapshots go from any database to any. A
    SQLite file that isn't there is made. The buffer has the name that it was saved with, unless --buffer says another.

    A snapshot has no step checkpoints. --step N makes one of what was loaded, so that a trainer with the weights of
    step N goes on by buffer.restore(N).

    The snapshot's own policy is taken, whatever it is, and goes on as it would have; build the buffer with it.

    All payloads are in the database then: the snapshot isn't needed any more.

    \b
    Examples:
      replaybuf checkpoint resume new.db backup --step 400
      replaybuf checkpoint resume postgresql://rl@db/run8 backup --buffer train
    """
    from replaybuf.rules.limits import Rules
    from replaybuf.rules.policies import resolve_policy
    from replaybuf.storage.sql.inspection.writer import saved_buffer, target_at

    target = target_at(url)
    file, own_name, policy = saved_buffer(Path(folder))
    name = buffer or own_name
    rules = Rules()  # only the name of a user's own policy is known, which is enough
    if policy:
        with suppress(ConfigError):
            rules = Rules(resolve_policy(policy))

    async def loaded(storage: SQLStorage, tell: OnProgress) -> None:
        await storage.resume(Path(folder), {}, tell)
        if step is not None:
            await storage.checkpoint(step, None)

    def load(tell: OnProgress) -> None:
        on_storage(target.url, name, lambda storage: loaded(storage, tell), rules=rules)

    _, total = with_bar("loaded", load)
    row = {"url": target.where, "buffer": name, "file": str(file), "groups": total.groups, "bytes": total.bytes}
    column = Column("policy", "policy", "word")
    output.rows([row | {"policy": policy}], [*_COPY_COLUMNS, column])
