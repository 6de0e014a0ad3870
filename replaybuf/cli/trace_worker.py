"""What a worker made, as `replaybuf trace` shows it."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Any

from replaybuf import units
from replaybuf.cli.groups import status_style
from replaybuf.cli.output import Column, console, print_table, write
from replaybuf.cli.trace_step import batch_columns, batch_row, part_row
from replaybuf.redact import escape
from replaybuf.storage.sql.inspection.traces import WorkerTrace

_GROUPS = 10


def worker_value(worker: str, found: WorkerTrace) -> dict[str, Any]:
    """Return what a worker made and drew for programs."""
    return {
        "worker": worker,
        "steps": worker_rows(found),
        "groups": [{"step": drawn.step, **asdict(one)} for drawn, one in found.lowest],
        "buffered": found.buffered,
        "draws": [batch_row(one) for one in found.draws],
    }


def worker_rows(found: WorkerTrace) -> list[dict[str, Any]]:
    """Return the steps that were trained on a worker's groups as rows."""
    rows = []
    for one in found.steps:
        row = part_row(one.part, "worker")
        del row["worker"]
        rows.append({"step": one.summary.step, "restores": one.summary.restores, "of": one.summary.groups, **row})
    return rows


def print_worker(worker: str, found: WorkerTrace, now: datetime) -> None:
    """Print what was trained of what a worker made, what of it is in the buffer, and what it drew itself."""
    from rich.text import Text

    console().print(Text(escape(f"worker {worker}"), style="bold"), soft_wrap=True)
    if found.steps:
        write(["\ntrained on\n"])
        print_table(worker_rows(found), _STEPS)
        write(["\ngroups, the lowest reward first\n"])
        print_table([{"step": drawn.step, **asdict(one)} for drawn, one in found.lowest[:_GROUPS]], _LOWEST)
    if found.buffered:
        write(["\nin the buffer\n"])
        print_table(found.buffered, _BUFFERED)
    if found.draws:
        write(["\ndrawn by it\n"])
        print_table([batch_row(one) for one in found.draws], batch_columns(now)[:-1])


_STEPS = [
    Column("step", lambda r: str(r["step"])),
    Column("groups", lambda r: units.number(r["groups"])),
    Column("of", lambda r: units.number(r["of"])),
    Column("reward", lambda r: units.number(r["reward"], 3)),
    Column("others", lambda r: units.number(r["others"], 3)),
    Column("below", lambda r: units.number(r["below"], 3), style=lambda r: "red" if r["stands_out"] else ""),
    Column("stale", lambda r: units.number(r["staleness"], 1)),
]
_LOWEST = [
    Column("uid", lambda r: str(r["uid"])),
    Column("step", lambda r: "-" if r["step"] is None else str(r["step"])),
    Column("task", lambda r: r["task_name"], right=False, text=True),
    Column("reward", lambda r: units.number(r["reward"], 3)),
    Column("stale", lambda r: units.number(r["staleness"])),
]
_BUFFERED = [
    Column("task", lambda r: r["task_name"], right=False, text=True),
    Column("status", lambda r: r["status"], right=False, style=status_style),
    Column("leased", lambda r: "yes" if r["leased"] else "-", right=False),
    Column("groups", lambda r: units.number(r["groups"])),
    Column("reward", lambda r: units.number(r["reward"], 3)),
    Column("last uid", lambda r: str(r["last_uid"])),
]
