"""`replaybuf stats`: what is in a buffer, by task and status."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, func, select, table, text
from sqlalchemy.sql.expression import column

from replaybuf.cli import units
from replaybuf.cli.groups import GROUPS, age_of, status_style, tidy
from replaybuf.cli.options import Url, listing
from replaybuf.cli.output import Column, Output, Row, print_table, write
from replaybuf.cli.reading import read, read_url
from replaybuf.rollout import Status
from replaybuf.storage.sql.driver import public_url
from replaybuf.storage.sql.schema import current_revision
from replaybuf.storage.sql.tables import garbage, lane, tally
from replaybuf.tally import Tally

_TOTAL = "total"
_STATUSES = [*map(str, Status)]


@dataclass(slots=True)
class Stats:
    """A row for each task and status, and what is known of the whole database."""

    rows: list[dict[str, Any]]
    database: dict[str, Any]


@listing
def stats(url: Url, output: Output) -> None:
    """Show how many groups there are of each task and status.

    Reward, staleness and age are those of the groups: the mean reward, the mean and the largest staleness in train
    steps, the time since the oldest and the newest was put. "dropped" counts the groups that expired and were not
    retryable. "tokens" are those of the responses, "size" that of the payloads.

    With --json the facts about the whole database are there too; --nl and --csv give the rows of the table.

    \b
    Examples:
      replaybuf stats run.db
      replaybuf stats postgresql://rl@db/run7 --json
      watch -n 5 replaybuf stats run.db
    """
    found = read(url, collect)
    found.database = {"url": public_url(read_url(url)), **found.database}
    if output.format == "json":
        output.value({"database": found.database, "groups": found.rows})
    elif not output.for_people:
        output.rows(found.rows, [])
    else:
        _print(found)


def collect(connection: Connection) -> Stats:
    """The statistics, from one state of the database."""
    g = GROUPS.c
    grouped = select(
        g.task_name,
        g.status,
        func.count().label("groups"),
        func.sum(g.rollouts).label("rollouts"),
        func.avg(g.reward).label("reward"),
        func.avg(g.staleness).label("staleness"),
        func.max(g.staleness).label("max_staleness"),
        func.sum(g.prompt_tokens).label("prompt_tokens"),
        func.sum(g.response_tokens).label("response_tokens"),
        func.sum(g.bytes).label("bytes"),
        func.min(g.created_at).label("oldest"),
        func.max(g.created_at).label("newest"),
    ).group_by(g.task_name, g.status)
    lanes = {(row["task_name"], row["status"]): _lane(row) for row in connection.execute(grouped).mappings()}
    counted = (
        select(lane.c.task_name, lane.c.status, func.sum(tally.c.amount))
        .join(tally, tally.c.lane == lane.c.id)
        .where(tally.c.name == str(Tally.DROPPED))
        .group_by(lane.c.task_name, lane.c.status)
    )
    for task_name, status, dropped in connection.execute(counted):
        row = lanes.setdefault((task_name, status), _empty_lane(task_name, status))
        row["dropped"] = int(dropped)
    rows = sorted(lanes.values(), key=lambda row: (row["task_name"], _STATUSES.index(row["status"])))
    return Stats(rows, _database(connection))


def _lane(row: Any) -> dict[str, Any]:
    values = tidy(row)
    values["staleness"] = float(values["staleness"])
    return _empty_lane(values["task_name"], values["status"]) | values


def _empty_lane(task_name: str, status: str) -> dict[str, Any]:
    return {
        "task_name": task_name,
        "status": status,
        "groups": 0,
        "dropped": 0,
        "rollouts": 0,
        "reward": None,
        "staleness": None,
        "max_staleness": None,
        "prompt_tokens": 0,
        "response_tokens": 0,
        "bytes": 0,
        "oldest": None,
        "newest": None,
    }


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
    now = datetime.now(UTC)
    rows = found.rows
    if rows:
        several = len(rows) > 1
        print_table([*rows, _total(rows)] if several else rows, _columns(rows, now), footer=several)
    database = found.database
    size = units.size(database["database_bytes"])
    waiting = units.number(database["unswept_payloads"])
    lines = [] if rows else ["The buffer is empty."]
    lines.append(f"database {size}, {waiting} unswept payloads, schema {database['schema']}")
    write(f"{line}\n" for line in lines)


def _total(rows: list[dict[str, Any]]) -> dict[str, Any]:
    counts = ("groups", "dropped", "rollouts", "prompt_tokens", "response_tokens", "bytes")
    total: dict[str, Any] = {name: sum(row[name] or 0 for row in rows) for name in counts}
    known = [row for row in rows if row["groups"]]
    for name in ("reward", "staleness"):
        total[name] = None  # a mean over tasks says nothing
    total["max_staleness"] = max((row["max_staleness"] for row in known), default=None)
    total["oldest"] = min((row["oldest"] for row in known), default=None)
    total["newest"] = max((row["newest"] for row in known), default=None)
    return {"task_name": _TOTAL, "status": "", **total}


def _columns(rows: list[dict[str, Any]], now: datetime) -> list[Column]:
    def mean(row: Row, name: str, digits: int) -> str:
        return units.number(row[name], digits) if row["status"] else ""

    columns = [
        Column("task", lambda r: r["task_name"], right=False, text=True),
        Column("status", lambda r: r["status"], right=False, style=status_style),
        Column("groups", lambda r: units.number(r["groups"])),
        Column("dropped", lambda r: units.number(r["dropped"])),
        Column("rollouts", lambda r: units.number(r["rollouts"])),
        Column("reward", lambda r: mean(r, "reward", 3)),
        Column("stale", lambda r: mean(r, "staleness", 1)),
        Column("max", lambda r: units.number(r["max_staleness"])),
        Column("tokens", lambda r: units.short(r["response_tokens"])),
        Column("size", lambda r: units.size(r["bytes"])),
        Column("oldest", lambda r: units.age(age_of(r["oldest"], now))),
        Column("newest", lambda r: units.age(age_of(r["newest"], now))),
    ]
    if not any(row["dropped"] for row in rows):
        columns = [column for column in columns if column.header != "dropped"]
    return columns
