"""`replaybuf stats`, `watch`, `serve`: the content of a database, now or live, in the terminal or the browser."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaybuf.buffer.buffer_metrics import TOTALS
from replaybuf.cli import why
from replaybuf.cli.commands import TEXT, Buffer, Out, Url, option
from replaybuf.cli.groups import trainer_text
from replaybuf.cli.output import console, print_json, print_line, print_table, write
from replaybuf.common import units
from replaybuf.common.redact import escape_line
from replaybuf.errors import ReplayBufError
from replaybuf.storage.sql.inspection.measures import rows_of_lanes
from replaybuf.storage.sql.inspection.reader import Reader, Transaction, open_reader
from replaybuf.values.rollouts.statuses import Status
from replaybuf.view.columns import LANES, columns
from replaybuf.view.metrics import figures_of
from replaybuf.view.wait_reasons import Waits, read_waits

if TYPE_CHECKING:
    from rich.text import Text

_ALWAYS_SHOWN = ("put", "sampled_new", "taken")

#: The maximum fraction of the time spent reading: slow readings are made less often.
_SHARE = 0.1
_READ_TIMEOUT = 20.0
_INTERVAL = 2.0  # seconds between readings
_PORT, _LOCALHOST = 8321, "127.0.0.1"


def stats(url: Url, output: Out = TEXT, buffer: Buffer = None) -> None:
    """Show how many groups there are of each task and status, and what went in and out.

    "groups" can be drawn, "leased" ones are with a consumer; of those that are "overdue" the lease is over, and they
    come back with the next call that takes groups. Rollouts, tokens (of the responses) and size (of the payloads) are
    those of both. Reward, staleness and age are those of groups: the mean reward, the mean and the largest staleness in
    train steps (of groups with responses), the time since the oldest and the newest was put.

    The second table counts groups and draws so far, whichever process caused them, under the names that
    buffer.metrics() gives them; a restore takes the counts back to its checkpoint. What never happened is left out.
    "put" counts every put, also those of prompts that are handed out (init), of interrupted groups (aborted) and of
    groups that were too old by then (expired). "expired" counts those that became too old in the buffer.

    Below are the prompts drawn from each dataset, each counted once however often it was handed out; where the trainer
    says that it is; the last checkpoint; and the size of the database with the WAL of a SQLite file. Where payloads
    are kept apart, the bytes are those of the files, each of which goes with its last group.

    With --format json all of it is there, for each buffer what buffer.metrics() gives.

    \b
    Examples:
      replaybuf stats run.db
      replaybuf stats postgresql://rl@db/run7 --format json | jq .buffers
    """
    reader = open_reader(url)
    figures, now = reader.read(lambda tx: (_read_figures(tx, buffer), tx.now()))
    if output.for_people:
        _print_stats(figures, now)
    else:
        print_json(figures)


def watch(url: Url, buffer: Buffer = None) -> None:
    """Watch a database, full screen: who waits and why, then who is there and what "stats" prints, every two seconds.

    The processes that wait come first, of every buffer, with the cause to remove; then leases and workers, the groups
    with their rewards and staleness, the totals. What the terminal has no lines for is left out at the end.

    It only reads. Where that takes long, it is done less often. The error of a database that is gone or locked is
    shown, and the read is tried again. Ctrl-C ends it; on a pipe the view is printed once.

    \b
    Examples:
      replaybuf watch run.db
      replaybuf watch postgresql://rl@db/run7
      replaybuf watch run.db | head -20
    """
    reader = open_reader(url)
    if sys.stdout.isatty():
        _show_live(reader, buffer)
    else:
        _print_view(_read_view(reader, buffer))


def serve(
    url: Url,
    port: Annotated[int, option("--port", "The port; 0 for one that is free.", min=0, max=65535)] = _PORT,
    host: Annotated[
        str, option("--host", "Where to listen; all but 127.0.0.1 and ::1 need a token.", metavar="ADDRESS")
    ] = _LOCALHOST,
    buffer: Buffer = None,
    prefix: Annotated[
        str, option("--prefix", "The path under which a proxy has the page, such as /rl.", metavar="PATH")
    ] = "",
) -> None:
    """Show a database in the browser, on a page of this machine.

    The page only reads, and the run doesn't notice. It is at http://127.0.0.1:8321/ and for this machine only; on a
    server, forward the port: ssh -L 8321:localhost:8321 HOST. With --host 0.0.0.0 others reach it, too, with the token
    in the environment variable REPLAYBUF_TOKEN, or else one that is made; it is printed with the address. Ctrl-C ends
    it. It needs other packages: pip install starlette uvicorn jinja2.

    \b
    Examples:
      replaybuf serve run.db
      replaybuf serve run.db --port 8080
      replaybuf serve postgresql://reader@db.cluster/rl --buffer train
      replaybuf serve run.db --host 0.0.0.0
      replaybuf serve run.db --host 0.0.0.0 --prefix /rl
    """
    from replaybuf.web import server
    from replaybuf.web.app import create_app

    reader = open_reader(url)
    reader.read(lambda tx: None)
    if token := os.environ.get("REPLAYBUF_TOKEN"):
        server.check_token(token)
    elif not server.is_loopback(host):
        token = server.new_token()
    app = create_app(reader, buffer=buffer, token=token or None, prefix=prefix)
    listening = server.bind(host, port)
    address = server.address_of(listening, host) + server.check_prefix(prefix).lstrip("/")
    if token:
        address += f"?token={token}"
    typer.echo(f"{reader.where} is at {address}  (Ctrl-C ends it)")
    server.serve(app, listening)


# The figures


def _read_figures(tx: Transaction, buffer: str | None) -> dict[str, Any]:
    """Return the groups by task and status, and the figures of one buffer or of all, as `read_figures` has them."""
    return {"groups": rows_of_lanes(tx, buffer), **figures_of(tx, buffer)}


def _print_stats(figures: dict[str, Any], now: datetime) -> None:
    """Print the figures as tables, with lines about the run and the database below."""
    rows, buffers, database = figures["groups"], figures["buffers"], figures["database"]
    several = len(buffers) > 1
    if rows:
        lane_columns = [column for column in LANES if several or column.name != "buffer"]
        print_table([*rows, _total_row(rows)] if len(rows) > 1 else rows, lane_columns, now, footer=len(rows) > 1)
    totals = [
        {"buffer": name, "task_name": task, **numbers}
        for name, metrics in buffers.items()
        for task, numbers in metrics["tasks"].items()
        if any(numbers[total] for total in TOTALS)
    ]
    if totals:
        write(["\n" if rows else "", "so far, less what restores took back\n"])
        names = [name for name in TOTALS if name in _ALWAYS_SHOWN or any(row[name] for row in totals)]
        print_table(totals, columns(*(["buffer"] if several else []), "task_name", *names))
    lines = [] if rows else ["The buffer is empty."]
    completed = [row for row in rows if row["status"] == Status.COMPLETED]
    rewarded = {row["task_name"] for row in completed if row["reward"] is not None}
    if unusable := {row["task_name"] for row in completed} - rewarded:
        text = units.listed(sorted(unusable))
        lines.append(f"no completed group of {text} has a usable reward: a finite number, or a dict's under reward_key")
    for name, metrics in buffers.items():
        suffix = f" of {name}" if several else ""
        lines += _progress_lines(metrics, suffix)
    size, waiting = units.size(database["bytes"]), units.number(database["unswept_payloads"])
    wal = f" ({units.size(database['wal_bytes'])} of it WAL)" if database["wal_bytes"] else ""
    lines.append(f"database {size}{wal}, {waiting} unswept payloads, schema {database['schema']}")
    write(["\n"] if rows or totals else [])
    for line in [*lines, *(_place_text(url, place) for url, place in database["places"].items())]:
        print_line(line)


def _place_text(url: str, place: dict[str, Any]) -> str:
    """Return a line about the files in a place."""
    groups, files = (units.number_of(place[f"{name}s"], name) for name in ("group", "file"))
    return f"payloads in {url}: {units.size(place['bytes'])} of {groups}, {files}"


def _progress_lines(metrics: dict[str, Any], suffix: str) -> list[str]:
    """Return lines about the progress of the run."""
    lines = []
    if metrics["prompts"]:
        prompt_counts = ", ".join(f"{units.number(count)} for {name}" for name, count in metrics["prompts"].items())
        lines.append(f"prompts drawn{suffix}: {prompt_counts}")
    if trainer := metrics["trainer"]:
        lines.append(trainer_text(trainer, suffix))
    if checkpoints := metrics["checkpoints"]["count"]:
        step = metrics["checkpoints"]["step"]
        lines.append(f"{units.number_of(checkpoints, 'step checkpoint')}{suffix}, the last of step {step}")
    return lines


_SUMMED_COLUMNS = ("groups", "leased", "overdue", "rollouts", "response_tokens", "bytes")


def _total_row(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of totals; means over tasks would be meaningless."""
    total: dict[str, Any] = {name: sum(row[name] or 0 for row in rows) for name in _SUMMED_COLUMNS}
    total |= {"oldest": min(row["oldest"] for row in rows), "newest": max(row["newest"] for row in rows)}
    total["max_staleness"] = max((value for row in rows if (value := row["max_staleness"]) is not None), default=None)
    return {"buffer": "", "task_name": "total", "status": "", "reward": None, "staleness": None, **total}


# The live view


#: The waits of each buffer, buffers in which somebody waits first, the figures of `stats`, and the time.
_View = tuple[list[Waits], dict[str, Any], datetime]


def _read_view(reader: Reader, buffer: str | None) -> _View:
    def read(tx: Transaction) -> _View:
        waits = sorted(read_waits(tx, buffer), key=lambda row: not row.somebody_waits)
        return waits, _read_figures(tx, buffer), tx.now()

    return reader.read(read, timeout=_READ_TIMEOUT)


def _print_view(view: _View) -> None:
    waits, figures, now = view
    several = len(waits) > 1
    for row in waits:
        asked = row if row.somebody_waits else replace(row, waits=[])  # without answers to questions that nobody asked
        if not why.print_waits(asked, several=several):
            write([f"Nobody waits{f' in {escape_line(row.buffer)}' if several else ''}\n"])
    for row in waits:
        why.print_processes(row, several=several)
    write(["\n"])
    _print_stats(figures, now)


def _show_live(reader: Reader, buffer: str | None) -> None:
    from rich.console import ConsoleDimensions, Group
    from rich.live import Live
    from rich.text import Text

    head, body = Text(f"reading {reader.where} ..."), Text()
    out = console()
    with Live(head, console=out, screen=True, auto_refresh=False) as live:
        live.refresh()
        while True:
            started, failure = time.monotonic(), Text()
            try:
                view = _read_view(reader, buffer)
                head = Text(f"{units.moment(view[2])[11:]} UTC  {reader.where}", style="bold")
                body = _as_text(view)
            except Exception as error:  # of any kind: the next reading may succeed
                kind = "" if isinstance(error, ReplayBufError) else f"{type(error).__name__}: "
                failure = Text(escape_line(f"trying again: {kind}{error}"), style="bold red")
            pause = max(_INTERVAL, (time.monotonic() - started) / _SHARE if not failure else 0)
            out.size = ConsoleDimensions(*os.get_terminal_size(sys.stdout.fileno()))  # COLUMNS isn't updated
            live.update(Group(head, *([failure] if failure else []), body), refresh=True)
            time.sleep(pause)


class _TerminalOutput(io.StringIO):
    """Takes what is printed for a terminal."""

    def isatty(self) -> bool:
        return True


def _as_text(view: _View) -> Text:
    from rich.text import Text

    printed = _TerminalOutput()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        _print_view(view)
    return Text.from_ansi(printed.getvalue())
