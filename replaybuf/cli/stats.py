"""`replaybuf stats`: what is in a buffer, by task and status."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, func, select, table, text
from sqlalchemy.sql.expression import column

from replaybuf import units
from replaybuf.buffer.metrics import DISTRIBUTIONS, TOTALS, add_distributions, of_tasks
from replaybuf.cli.escape import escape
from replaybuf.cli.groups import GROUPS, age_of, buffers_of, look_at, now_of, status_style, tidy
from replaybuf.cli.options import Buffer, Url, listing
from replaybuf.cli.output import Column, Output, Row, print_table, write
from replaybuf.errors import InputError
from replaybuf.produce.train_state import TRAINER, TrainState
from replaybuf.rollouts.rollout import Status
from replaybuf.storage.sql.engine.urls import public_url
from replaybuf.storage.sql.inspection import read, read_url
from replaybuf.storage.sql.schema.create import current_revision
from replaybuf.storage.sql.schema.tables import checkpoint, garbage
from replaybuf.storage.sql.statements.counts import read_tallies
from replaybuf.storage.sql.statements.cursors import read_cursors
from replaybuf.storage.sql.statements.lanes import Scope
from replaybuf.storage.sql.statements.matching import read_histogram

_TOTAL = "total"
_STATUSES = [*map(str, Status)]
_ALWAYS = ("put", "sampled_new", "taken")


@dataclass(slots=True)
class Stats:
    """A row for each buffer, task and status; the metrics of each buffer; what is known of the whole database."""

    rows: list[dict[str, Any]]
    buffers: dict[str, dict[str, Any]]
    database: dict[str, Any]
    now: datetime
    several: bool


@listing
def stats(url: Url, output: Output, buffer: Buffer = None) -> None:
    """Show how many groups there are of each task and status, and what went in and out since the beginning.

    "groups" can be drawn, "leased" ones are with a consumer. Rollouts, tokens (of the responses) and size (of the
    payloads) are those of both. Reward, staleness and age are those of groups: the mean reward, the mean and the
    largest staleness in train steps, the time since the oldest and the newest was put.

    The second table counts groups and draws since the beginning, whichever process caused them, under the names that
    buffer.metrics() gives them; those that never happened are left out. Below are the prompts that were drawn from each
    dataset, where the trainer says that it is, and the steps of the checkpoints.

    With --json all of it is there, for each buffer what buffer.metrics() gives; --nl and --csv give the rows of the
    first table.

    \b
    Examples:
      replaybuf stats run.db
      replaybuf stats postgresql://rl@db/run7 --json | jq .buffers.default.tasks.math.put
      watch -n 5 replaybuf stats run.db
    """
    found = read(url, lambda connection: collect(connection, buffer))
    found.database = {"url": public_url(read_url(url)), **found.database}
    if output.format == "json":
        output.value({"database": found.database, "groups": found.rows, "buffers": found.buffers})
    elif not output.for_people:
        output.rows(found.rows, [])
    else:
        _print(found)


def collect(connection: Connection, buffer: str | None) -> Stats:
    """The statistics of a buffer, or of all, from one state of the database."""
    scope = look_at(connection, buffer)
    g = GROUPS.c
    grouped = select(
        g.buffer,
        g.task_name,
        g.status,
        (func.count() - func.count(g.leased_until)).label("groups"),
        func.count(g.leased_until).label("leased"),
        func.sum(g.rollouts).label("rollouts"),
        func.avg(g.reward).label("reward"),
        func.avg(g.staleness).label("staleness"),
        func.max(g.staleness).label("max_staleness"),
        func.sum(g.prompt_tokens).label("prompt_tokens"),
        func.sum(g.response_tokens).label("response_tokens"),
        func.sum(g.bytes).label("bytes"),
        func.min(g.created_at).label("oldest"),
        func.max(g.created_at).label("newest"),
    ).group_by(g.buffer, g.task_name, g.status)
    if scope.buffer is not None:
        grouped = grouped.where(g.buffer == scope.buffer)
    rows = [tidy(row) for row in connection.execute(grouped).mappings()]
    for row in rows:
        row["staleness"] = float(row["staleness"])
    rows.sort(key=lambda row: (row["buffer"], row["task_name"], _STATUSES.index(row["status"])))
    there = buffers_of(connection)
    steps = _checkpoints(connection)
    buffers = {
        name: {
            "tasks": _tasks(connection, Scope(name)),
            "checkpoints": steps.get(name, []),
            **_cursors(connection, Scope(name)),
        }
        for name in there
        if buffer in (None, name)
    }
    return Stats(rows, buffers, _database(connection), now_of(connection), several=len(buffers) > 1)


def _tasks(connection: Connection, scope: Scope) -> dict[str, dict[str, Any]]:
    """What `buffer.metrics()` says of the tasks, without rates."""
    tasks = of_tasks(read_tallies(connection, scope))
    for field in DISTRIBUTIONS:
        add_distributions(tasks, field, read_histogram(connection, scope, field))
    return tasks


def _checkpoints(connection: Connection) -> dict[str, list[int]]:
    """The steps of the checkpoints of each buffer, as they were made."""
    steps: dict[str, list[int]] = {}
    for name, step in connection.execute(select(checkpoint.c.buffer, checkpoint.c.step).order_by(checkpoint.c.id)):
        steps.setdefault(name, []).append(step)
    return steps


def _cursors(connection: Connection, scope: Scope) -> dict[str, Any]:
    """How many prompts were drawn from each dataset, and where the trainer says that it is."""
    cursors = {one.name: one for one in read_cursors(connection, scope)}
    published = cursors.pop(TRAINER, None)
    trainer = None
    if published is not None:
        with suppress(InputError):  # another version's: the rest is as good without it
            trainer = asdict(TrainState.decode(published.value))
    return {"prompts": {name: one.position for name, one in sorted(cursors.items())}, "trainer": trainer}


def _database(connection: Connection) -> dict[str, Any]:
    unswept = int(connection.execute(select(func.count()).select_from(garbage)).scalar_one())
    return {
        "schema": current_revision(connection),
        "database_bytes": _database_bytes(connection),
        "unswept_payloads": unswept,
    }


def _database_bytes(connection: Connection) -> int:
    if connection.dialect.name == "postgresql":
        return int(connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one())
    files = table("pragma_database_list", column("name"), column("file"))
    path = connection.execute(select(files.c.file).where(files.c.name == "main")).scalar_one()
    beside = (Path(f"{path}{suffix}") for suffix in ("", "-wal"))
    return sum(file.stat().st_size for file in beside if file.exists())


# Printing


def _print(found: Stats) -> None:
    rows = found.rows
    if rows:
        total = len(rows) > 1
        print_table([*rows, _total(rows)] if total else rows, _columns(found), footer=total)
    totals = [
        {"buffer": name, "task_name": task, **numbers}
        for name, metrics in found.buffers.items()
        for task, numbers in metrics["tasks"].items()
        if any(numbers[total] for total in TOTALS)
    ]
    if totals:
        write(["\nsince the beginning\n"] if rows else ["since the beginning\n"])
        print_table(totals, _columns_of_totals(totals, found.several))
    database = found.database
    size = units.size(database["database_bytes"])
    waiting = units.number(database["unswept_payloads"])
    lines = [] if rows else ["The buffer is empty."]
    for name, metrics in found.buffers.items():
        lines += _where(metrics, f" of {escape(name)}" if found.several else "")
    lines.append(f"database {size}, {waiting} unswept payloads, schema {database['schema']}")
    write(["\n", *(f"{line}\n" for line in lines)] if rows or totals else (f"{line}\n" for line in lines))


def _where(metrics: dict[str, Any], of: str) -> list[str]:
    """How far a run has come."""
    lines = []
    if metrics["prompts"]:
        drawn = ", ".join(f"{units.number(count)} for {escape(name)}" for name, count in metrics["prompts"].items())
        lines.append(f"prompts drawn{of}: {drawn}")
    if trainer := metrics["trainer"]:
        step = "has finished" if trainer["finished"] else f"is at step {trainer['train_step']}"
        lines.append(f"the trainer{of} {step}, its newest weights are of step {trainer['model_step']}")
    if metrics["checkpoints"]:
        lines.append(f"step checkpoints{of}: {', '.join(map(str, metrics['checkpoints']))}")
    return lines


def _total(rows: list[dict[str, Any]]) -> dict[str, Any]:
    counts = ("groups", "leased", "rollouts", "prompt_tokens", "response_tokens", "bytes")
    total: dict[str, Any] = {name: sum(row[name] or 0 for row in rows) for name in counts}
    for name in ("reward", "staleness"):
        total[name] = None  # a mean over tasks says nothing
    total["max_staleness"] = max(row["max_staleness"] for row in rows)
    total["oldest"] = min(row["oldest"] for row in rows)
    total["newest"] = max(row["newest"] for row in rows)
    return {"buffer": "", "task_name": _TOTAL, "status": "", **total}


def _columns(found: Stats) -> list[Column]:
    def mean(row: Row, name: str, digits: int) -> str:
        return units.number(row[name], digits) if row["status"] else ""

    columns = [
        Column("task", lambda r: r["task_name"], right=False, text=True),
        Column("status", lambda r: r["status"], right=False, style=status_style),
        Column("groups", lambda r: units.number(r["groups"])),
        Column("leased", lambda r: units.number(r["leased"])),
        Column("rollouts", lambda r: units.number(r["rollouts"]), spare=True),
        Column("reward", lambda r: mean(r, "reward", 3)),
        Column("stale", lambda r: mean(r, "staleness", 1)),
        Column("max", lambda r: units.number(r["max_staleness"])),
        Column("tokens", lambda r: units.short(r["response_tokens"]), spare=True),
        Column("size", lambda r: units.size(r["bytes"]), spare=True),
        Column("oldest", lambda r: units.age(age_of(r["oldest"], found.now))),
        Column("newest", lambda r: units.age(age_of(r["newest"], found.now)), spare=True),
    ]
    if not any(row["leased"] for row in found.rows):
        columns = [column for column in columns if column.header != "leased"]
    return [*_buffer_column(found.several), *columns]


def _columns_of_totals(rows: list[dict[str, Any]], several: bool) -> list[Column]:
    names = [name for name in TOTALS if name in _ALWAYS or any(row[name] for row in rows)]
    counts = [Column(name, lambda r, name=name: units.number(r[name])) for name in names]  # type: ignore[misc]
    return [*_buffer_column(several), Column("task", lambda r: r["task_name"], right=False, text=True), *counts]


def _buffer_column(several: bool) -> list[Column]:
    return [Column("buffer", lambda r: r["buffer"], right=False, text=True)] if several else []
