"""`replaybuf stats`: the content of a buffer by task and status, what went in and out, and figures for monitoring."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Annotated, Any

from replaybuf.buffer.metrics import TOTALS
from replaybuf.cli.commands import TEXT, Buffer, Url, format_option
from replaybuf.cli.groups import trainer_text
from replaybuf.cli.output import Output, print_line, print_table, write
from replaybuf.common import units
from replaybuf.common.redact import escape
from replaybuf.storage.sql.inspection.measures import rows_of_lanes
from replaybuf.storage.sql.inspection.reader import Transaction, open_reader
from replaybuf.view.columns import LANES, columns
from replaybuf.view.metrics import figures_of, prometheus, read_figures

_ALWAYS = ("put", "sampled_new", "taken")
_PROMETHEUS = "prometheus"
_Out = Annotated[Output, format_option("text, json, csv, or prometheus.", _PROMETHEUS)]


def stats(url: Url, output: _Out = TEXT, buffer: Buffer = None) -> None:
    """Show how many groups there are of each task and status, and what went in and out.

    "groups" can be drawn, "leased" ones are with a consumer; of those that are "overdue" the lease is over, and they
    come back with the next call that takes groups. Rollouts, tokens (of the responses) and size (of the payloads) are
    those of both. Reward, staleness and age are those of groups: the mean reward, the mean and the largest staleness in
    train steps, the time since the oldest and the newest was put.

    The second table counts groups and draws so far, whichever process caused them, under the names that
    buffer.metrics() gives them; a restore takes the counts back to its checkpoint. What never happened is left out.
    "put" counts every put, also those of prompts that are handed out (init), of interrupted groups (aborted) and of
    groups that were too old by then (expired). "expired" counts those that became too old in the buffer.

    Below are the prompts drawn from each dataset, each counted once however often it was handed out; where the trainer
    says that it is; the last checkpoint; and the size of the database, with the WAL of a SQLite file. Where payloads
    are kept apart, the bytes are those of the files, each of which goes with its last group.

    With --format json all of it is there, for each buffer what buffer.metrics() gives; csv has the rows of the first
    table; prometheus prints metrics with their meaning, as "replaybuf serve" has them at /metrics, for node_exporter's
    textfile collector and the like.

    \b
    Examples:
      replaybuf stats run.db
      replaybuf stats postgresql://rl@db/run7 --format json | jq .buffers
      replaybuf stats run.db --buffer eval --format csv
      replaybuf stats run.db --format prometheus > replaybuf.prom
    """
    reader = open_reader(url)
    if output.format == _PROMETHEUS:
        text = prometheus(read_figures(reader, buffer=buffer))
        write([escape(text, keep="\n") if sys.stdout.isatty() else text])
        return
    found, now = reader.read(lambda tx: (read(tx, buffer), tx.now()))
    if not output.printed(lambda: found, lambda: found["groups"]):
        print_stats(found, now)


def read(tx: Transaction, buffer: str | None) -> dict[str, Any]:
    """Return the groups by task and status, and the figures of one buffer or of all, as `read_figures` has them."""
    return {"groups": rows_of_lanes(tx, buffer), **figures_of(tx, buffer)}


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
        write(["\n" if rows else "", "so far, less what restores took back\n"])
        names = [name for name in TOTALS if name in _ALWAYS or any(row[name] for row in totals)]
        print_table(totals, columns(*(["buffer"] if several else []), "task_name", *names))
    lines = [] if rows else ["The buffer is empty."]
    for name, metrics in buffers.items():
        of = f" of {name}" if several else ""
        lines += _where(metrics, of)
    size, waiting = units.size(database["bytes"]), units.number(database["unswept_payloads"])
    lines.append(f"database {size}, {waiting} unswept payloads, schema {database['schema']}")
    write(["\n"] if rows or totals else [])
    for line in [*lines, *(place_text(url, place) for url, place in database["places"].items())]:
        print_line(line)


def place_text(url: str, place: dict[str, Any]) -> str:
    """Return a line about the files in a place."""
    groups, files = (units.number_of(place[f"{name}s"], name) for name in ("group", "file"))
    return f"payloads in {url}: {units.size(place['bytes'])} of {groups}, {files}"


def _where(metrics: dict[str, Any], of: str) -> list[str]:
    """Return lines about the progress of the run."""
    lines = []
    if metrics["prompts"]:
        drawn = ", ".join(f"{units.number(count)} for {name}" for name, count in metrics["prompts"].items())
        lines.append(f"prompts drawn{of}: {drawn}")
    if trainer := metrics["trainer"]:
        lines.append(trainer_text(trainer, of))
    if made := metrics["checkpoints"]["count"]:
        last = metrics["checkpoints"]["step"]
        lines.append(f"{units.number_of(made, 'step checkpoint')}{of}, the last of step {last}")
    return lines


_ADDED_UP = ("groups", "leased", "overdue", "rollouts", "response_tokens", "bytes")


def _total(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of totals; means over tasks would be meaningless."""
    total: dict[str, Any] = {name: sum(row[name] or 0 for row in rows) for name in _ADDED_UP}
    total |= {name: max(row[name] for row in rows) for name in ("max_staleness", "newest")}
    total |= {"oldest": min(row["oldest"] for row in rows)}
    return {"buffer": "", "task_name": "total", "status": "", "reward": None, "staleness": None, **total}
