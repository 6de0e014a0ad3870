"""`replaybuf stats`: the content of a buffer by task and status, what went in and out, and figures for monitoring."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Annotated, Any

import typer

from replaybuf.buffer.metrics import TOTALS
from replaybuf.cli.app import TEXT, Buffer, Url, option
from replaybuf.cli.groups import trainer_text
from replaybuf.cli.output import Format, Output, print_line, print_table, write
from replaybuf.common import units
from replaybuf.common.redact import escape
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.inspection.measures import (
    BufferMeasures,
    count_unswept,
    list_places,
    measure,
    rows_of_lanes,
)
from replaybuf.storage.sql.inspection.reader import ReadTransaction, open_reader
from replaybuf.view.columns import LANES, columns
from replaybuf.view.metrics.exposition import SCANNED, prometheus, read_figures, run_progress, tasks_of

_ALWAYS = ("put", "sampled_new", "taken")
_PROMETHEUS = "prometheus"


def _output(format: str | Output) -> Output:
    if isinstance(format, str) and format not in (*Format, _PROMETHEUS):
        raise typer.BadParameter(f"{format!r:.100} is none of {', '.join((*Format, _PROMETHEUS))}.")
    return Output(format) if isinstance(format, str) else format


_Out = Annotated[
    Output,
    option("--format", "text, json, csv, or prometheus.", metavar="FORMAT", parser=_output, show_default=False),
]
_Scanned = Annotated[
    int,
    option(
        "--scanned",
        "For prometheus: without staleness, draws, rewards and bytes of buffers with more groups, of which each is "
        "looked at.",
        metavar="N",
        min=0,
    ),
]


def stats(url: Url, output: _Out = TEXT, buffer: Buffer = None, scanned: _Scanned = SCANNED) -> None:
    """Show how many groups there are of each task and status, and what went in and out since the beginning.

    "groups" can be drawn, "leased" ones are with a consumer; of those that are "overdue" the lease is over, and they
    come back with the next call that takes groups. Rollouts, tokens (of the responses) and size (of the payloads) are
    those of both. Reward, staleness and age are those of groups: the mean reward, the mean and the largest staleness in
    train steps, the time since the oldest and the newest was put.

    The second table counts groups and draws since the beginning, whichever process caused them, under the names that
    buffer.metrics() gives them; those that never happened are left out. "put" counts every put, also those of prompts
    that are handed out (init), of interrupted groups (aborted) and of groups that were too old by then (expired); a
    line below says how many were of which status. "expired" counts those that became too old in the buffer. Below are
    the prompts that were drawn from each dataset, where the trainer says that it is, and the steps of the checkpoints.

    Where payloads are kept apart, the bytes are those of the files, each of which goes with its last group.

    With --format json all of it is there, for each buffer what buffer.metrics() gives; csv has the rows of the first
    table; prometheus prints metrics with their meaning, as "replaybuf serve" has them at /metrics, for node_exporter's
    textfile collector and the like.

    \b
    Examples:
      replaybuf stats run.db
      replaybuf stats postgresql://rl@db/run7 --format json | jq .buffers.default.tasks.math.put
      replaybuf stats run.db --buffer eval --format csv
      replaybuf stats run.db --format prometheus > rl.tmp && mv rl.tmp /var/lib/node_exporter/replaybuf.prom
    """
    reader = open_reader(url)
    if output.format == _PROMETHEUS:
        text = prometheus(read_figures(reader, buffer=buffer, scanned=scanned))
        write([escape(text, keep="\n") if sys.stdout.isatty() else text])
        return
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
        shown = [one for one in LANES if several or one.name != "buffer"]
        print_table([*rows, _total(rows)] if len(rows) > 1 else rows, shown, now, footer=len(rows) > 1)
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
    lines = [] if rows else ["The buffer is empty."]
    for name, metrics in buffers.items():
        of = f" of {name}" if several else ""
        lines += [*_puts(metrics["put_of"], of), *_where(metrics, of)]
    size, waiting = units.size(database["database_bytes"]), units.number(database["unswept_payloads"])
    lines.append(f"database {size}, {waiting} unswept payloads, schema {database['schema']}")
    write(["\n"] if rows or totals else [])
    for line in [*lines, *map(place_text, database["places"])]:
        print_line(line)


def place_text(place: dict[str, Any]) -> str:
    """Return a line about the files in a place."""
    groups, files = (units.number_of(place[f"{name}s"], name) for name in ("group", "file"))
    return f"payloads in {place['url']}: {units.size(place['bytes'])} of {groups}, {files}"


def _puts(put_of: dict[str, dict[str, int]], of: str) -> list[str]:
    """Return a line with the puts by status, for each task with puts of several statuses."""
    return [
        f"put into {task}{of}: {', '.join(f'{units.number(n)} {status}' for status, n in numbers.items())}"
        for task, numbers in put_of.items()
        if len(numbers) > 1
    ]


def _where(metrics: dict[str, Any], of: str) -> list[str]:
    """Return lines about the progress of the run."""
    lines = []
    if metrics["prompts"]:
        drawn = ", ".join(f"{units.number(count)} for {name}" for name, count in metrics["prompts"].items())
        lines.append(f"prompts drawn{of}: {drawn}")
    if trainer := metrics["trainer"]:
        lines.append(trainer_text(trainer, of))
    if metrics["checkpoints"]:
        lines.append(f"step checkpoints{of}: {', '.join(map(str, metrics['checkpoints']))}")
    return lines


_ADDED_UP = ("groups", "leased", "overdue", "rollouts", "response_tokens", "bytes")


def _total(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of totals; means over tasks would be meaningless."""
    total: dict[str, Any] = {name: sum(row[name] or 0 for row in rows) for name in _ADDED_UP}
    total |= {name: max(row[name] for row in rows) for name in ("max_staleness", "newest")}
    total |= {"oldest": min(row["oldest"] for row in rows)}
    return {"buffer": "", "task_name": "total", "status": "", "reward": None, "staleness": None, **total}
