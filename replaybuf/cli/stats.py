"""`replaybuf stats`, `replaybuf metrics`: the content of a buffer by task and status, and figures for monitoring."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Annotated, Any

from replaybuf import units
from replaybuf.buffer.metrics import TOTALS
from replaybuf.cli.app import Buffer, Url, listing, option
from replaybuf.cli.groups import age_of, columns, trainer_text
from replaybuf.cli.output import Column, Output, Row, print_table, write
from replaybuf.observe.exposition import SCANNED, prometheus, read_figures, run_progress, samples_of, tasks_of
from replaybuf.redact import escape
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.inspection.measures import (
    BufferMeasures,
    count_unswept,
    list_places,
    measure,
    rows_of_lanes,
)
from replaybuf.storage.sql.inspection.reader import ReadTransaction, open_reader

_TOTAL = "total"
#: Columns that are left out if no row has a value, and their keys in the rows.
_IF_ANY = {"leased": "leased", "unreadable": "unreadable_rewards"}
_ALWAYS = ("put", "sampled_new", "taken")


@listing
def stats(url: Url, output: Output, buffer: Buffer = None) -> None:
    """Show how many groups there are of each task and status, and what went in and out since the beginning.

    "groups" can be drawn, "leased" ones are with a consumer; of those that are "overdue" the lease is over, and they
    come back with the next call that takes groups. Rollouts, tokens (of the responses) and size (of the payloads) are
    those of both; "unreadable" are those whose reward is no number, so that it counts as none. Reward, staleness and
    age are those of groups: the mean reward, the mean and the largest staleness in train steps, the time since the
    oldest and the newest was put.

    The second table counts groups and draws since the beginning, whichever process caused them, under the names that
    buffer.metrics() gives them; those that never happened are left out. "put" counts every put, also those of prompts
    that are handed out (init), of interrupted groups (aborted) and of groups that were too old by then (expired); a
    line below says how many were of which status. "expired" counts those that became too old in the buffer. Below are
    the prompts that were drawn from each dataset, where the trainer says that it is, and the steps of the checkpoints.

    Where payloads are kept apart, the bytes are those of the files, each of which goes with its last group.

    With --json all of it is there, for each buffer what buffer.metrics() gives; --nl and --csv give the rows of the
    first table.

    \b
    Examples:
      replaybuf stats run.db
      replaybuf stats postgresql://rl@db/run7 --json | jq .buffers.default.tasks.math.put
      replaybuf stats run.db --buffer eval --csv
    """
    reader = open_reader(url)

    found, now = reader.read(lambda tx: (read(tx, buffer, reader.where), tx.now()))
    if not output.printed(lambda: found, lambda: found["groups"]):
        print_stats(found, now)


def read(tx: ReadTransaction, buffer: str | None, where: str) -> dict[str, Any]:
    """Return the figures of one buffer or of all in the database at `where`."""
    sizes = {"database_bytes": tx.database_bytes(), "unswept_payloads": count_unswept(tx)}
    return {
        "database": {"url": where, "schema": tx.revision(), **sizes, "places": list_places(tx)},
        "groups": rows_of_lanes(tx, buffer),
        "buffers": {name: _metrics(measures) for name, measures in measure(tx, buffer).items()},
    }


def _metrics(figures: BufferMeasures) -> dict[str, Any]:
    """Return the tasks of `buffer.metrics()`, without rates, and the progress of the run."""
    tasks = tasks_of(figures)
    put_of: dict[str, dict[str, int]] = {task: {} for task in tasks}
    for (task, status, tally), n in sorted(figures.tallies.items()):
        if tally == Tally.PUT and n:
            put_of[task][str(status)] = n
    progress = run_progress(figures.cursors)
    return {"tasks": tasks, "put_of": put_of, "checkpoints": [one.step for one in figures.checkpoints], **progress}


# Printing


def print_stats(found: dict[str, Any], now: datetime) -> None:
    """Print the figures as tables, with lines about the run and the database below."""
    rows, buffers, database = found["groups"], found["buffers"], found["database"]
    several = len(buffers) > 1
    if rows:
        total = len(rows) > 1
        print_table([*rows, _total(rows)] if total else rows, _columns(rows, now, several), footer=total)
    totals = [
        {"buffer": name, "task_name": task, **numbers}
        for name, metrics in buffers.items()
        for task, numbers in metrics["tasks"].items()
        if any(numbers[total] for total in TOTALS)
    ]
    if totals:
        write(["\nsince the beginning\n"] if rows else ["since the beginning\n"])
        names = [name for name in TOTALS if name in _ALWAYS or any(row[name] for row in totals)]
        print_table(totals, columns(*(["buffer"] if several else []), "task_name", *names))
    size = units.size(database["database_bytes"])
    waiting = units.number(database["unswept_payloads"])
    lines = [] if rows else ["The buffer is empty."]
    for name, metrics in buffers.items():
        of = f" of {escape(name)}" if several else ""
        lines += [*_puts(metrics["put_of"], of), *_where(metrics, of)]
    lines.append(f"database {size}, {waiting} unswept payloads, schema {database['schema']}")
    lines += [place_text(place) for place in database["places"]]
    write(["\n", *(f"{line}\n" for line in lines)] if rows or totals else (f"{line}\n" for line in lines))


def place_text(place: dict[str, Any]) -> str:
    """Return a line about the files in a place."""
    groups, files = (units.number_of(place[f"{name}s"], name) for name in ("group", "file"))
    return f"payloads in {escape(place['url'])}: {units.size(place['bytes'])} of {groups}, {files}"


def _puts(put_of: dict[str, dict[str, int]], of: str) -> list[str]:
    """Return a line with the puts by status, for each task with puts of several statuses."""
    return [
        f"put into {escape(task)}{of}: {', '.join(f'{units.number(n)} {status}' for status, n in numbers.items())}"
        for task, numbers in put_of.items()
        if len(numbers) > 1
    ]


def _where(metrics: dict[str, Any], of: str) -> list[str]:
    """Return lines about the progress of the run."""
    lines = []
    if metrics["prompts"]:
        drawn = ", ".join(f"{units.number(count)} for {escape(name)}" for name, count in metrics["prompts"].items())
        lines.append(f"prompts drawn{of}: {drawn}")
    if trainer := metrics["trainer"]:
        lines.append(trainer_text(trainer, of))
    if metrics["checkpoints"]:
        lines.append(f"step checkpoints{of}: {', '.join(map(str, metrics['checkpoints']))}")
    return lines


def _total(rows: list[dict[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {name: sum(row[name] or 0 for row in rows) for name in _ADDED_UP}
    total |= {name: max(row[name] for row in rows) for name in ("max_staleness", "newest")}
    total |= {"oldest": min(row["oldest"] for row in rows)}
    # Means over tasks would be meaningless.
    return {"buffer": "", "task_name": _TOTAL, "status": "", "reward": None, "staleness": None, **total}


_ADDED_UP = ("groups", "leased", "overdue", "rollouts", "unreadable_rewards", "response_tokens", "bytes")


def _columns(rows: list[dict[str, Any]], now: datetime, several: bool) -> list[Column]:
    def mean(row: Row, name: str, digits: int) -> str:
        return units.number(row[name], digits) if row["status"] else ""

    found = [
        *columns("buffer", "task_name", "status", "groups"),
        Column("leased", _leased),
        *columns("rollouts", spare=("rollouts",)),
        Column("reward", lambda r: mean(r, "reward", 3)),
        *columns("unreadable_rewards", unreadable_rewards="unreadable"),
        Column("stale", lambda r: mean(r, "staleness", 1)),
        *columns("max_staleness", "response_tokens", "bytes", spare=("response_tokens", "bytes")),
        Column("oldest", lambda r: units.age(age_of(r["oldest"], now))),
        Column("newest", lambda r: units.age(age_of(r["newest"], now)), spare=True),
    ]
    empty = {header for header, name in _IF_ANY.items() if not any(row[name] for row in rows)}
    return [column for column in found if column.header not in empty and (several or column.header != "buffer")]


def _leased(row: Row) -> str:
    overdue = f" ({units.number(row['overdue'])} overdue)" if row["overdue"] else ""
    return units.number(row["leased"]) + overdue


_Scanned = Annotated[
    int,
    option(
        "--scanned",
        "Leave out staleness, draws, rewards and bytes of buffers with more groups: they look at every group.",
        metavar="N",
        min=0,
    ),
]
_Only = Annotated[str, option("--only", "Only the metrics whose names begin like this.", metavar="NAME")]


@listing
def metrics(url: Url, output: Output, buffer: Buffer = None, only: _Only = "", scanned: _Scanned = SCANNED) -> None:
    """Print the figures of a database as Prometheus reads them, for node_exporter's textfile collector and the like.

    Each is preceded by its meaning. "replaybuf serve" gives the same at /metrics, and a trainer with an endpoint of its
    own registers a collector (docs/metrics.md). With --json they are nested, as buffer.metrics() has them, and all of
    them; with --table, --nl and --csv each number is a row with its labels.

    \b
    Examples:
      replaybuf metrics run.db
      replaybuf metrics run.db --only replaybuf_groups_ --csv
      replaybuf metrics run.db > rl.tmp && mv rl.tmp /var/lib/node_exporter/replaybuf.prom
      replaybuf metrics postgresql://rl@db/run7 --json | jq .buffers.default.last_batch
    """
    reader = open_reader(url)
    figures = read_figures(reader, buffer=buffer, scanned=scanned)
    if output.format == "json":
        output.value(figures)
    elif output.asked:
        rows = _samples(figures, only)
        output.rows(rows, _sample_columns(rows))
    else:
        text = prometheus(figures, only=only)
        write([escape(text, keep="\n") if sys.stdout.isatty() else text])


_LABELS = ("buffer", "task", "status", "kind", "state", "dataset", "version", "le")


def _samples(figures: dict[str, Any], only: str) -> list[dict[str, Any]]:
    return [
        {"name": sample.series, **{name: sample.labels.get(name) for name in _LABELS}, "value": sample.value}
        for metric, samples in samples_of(figures, "")
        for sample in samples
        if metric.name.startswith(only)
    ]


def _sample_columns(rows: list[dict[str, Any]]) -> list[Column]:
    """Return the columns of a table: the labels that some row has, and the value."""
    labels = [name for name in _LABELS if any(row[name] is not None for row in rows)]
    texts = [Column(name, lambda r, name=name: r[name] or "", right=False, text=True) for name in ("name", *labels)]  # type: ignore[misc]
    return [*texts, Column("value", lambda r: f"{r['value']:.12g}")]
