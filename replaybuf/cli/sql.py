"""`replaybuf sql`: one statement that can't write."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any

import typer

from replaybuf.cli.options import Url, listing, option, url_and
from replaybuf.cli.output import Column, Output, Row, encode, iso
from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.storage.sql.inspection.statement import run_statement

_LONGEST = 600.0


@listing
def sql(
    url: Url,
    output: Output,
    statement: Annotated[
        str | None, typer.Argument(metavar="STATEMENT", help="One SQL statement.", show_default=False)
    ] = None,
    timeout: Annotated[
        float, option("--timeout", metavar="SECONDS", min=0.001, max=_LONGEST, help="Stop the statement after this.")
    ] = 60.0,
) -> None:
    """Run one SQL statement that only reads.

    The database itself refuses to write: a SQLite file is opened read-only, PostgreSQL runs a read-only transaction
    that the statement can't leave. All rows are fetched before the first is printed, so that the run is never held up.

    The views for people, with their columns (docs/sql.md says what they mean, and has answers to copy):

    \b
      groups: uid, timestamp_id, buffer, task_name, status, staleness,
        priority, times_sampled, created_at, leased_until, archived_at,
        deliveries, reward, rollouts, prompt_tokens, response_tokens,
        finish_reasons, prompt, response, tags, key, error, bytes, worker,
        put_step, leased_by, trained_step, full_prompt, messages
      rollouts: uid, position, buffer, task_name, rollout_id, status,
        staleness, oldest_model_step, reward, rewards, prompt_tokens,
        response_tokens, finish_reason, prompt, response, error_msg,
        full_response, worker
      batches: id, buffer, taken_at, step, status, worker, lease, tasks,
        groups, settled, reward, min_reward, max_reward, staleness,
        max_staleness, oldest_model_step, newest_model_step, restores,
        first_uid, last_uid
      batch_groups: batch, buffer, step, taken_by, uid, task_name, worker,
        reward, staleness, oldest_model_step, created_at, first_uid,
        last_uid
      leases: lease, buffer, task_name, status, worker, since, until,
        groups, deliveries, step
      checkpoints: buffer, step, created_at, groups, bytes
      waiters: buffer, worker, host, pid, kind, wants, status, query, since,
        deadline, seen_at, reason, limits
      workers: buffer, worker, host, pid, started_at, last_seen, ended_at,
        groups_last_hour, rollouts_last_hour, tokens_last_hour,
        failures_last_hour, taken_last_hour
      events: id, buffer, happened_at, kind, task_name, worker, step,
        groups, uids, detail

    "prompt" and "response" are cut after 200 characters, "full_prompt" and "full_response" are whole. Times are UTC.
    Groups of all named buffers are there, leased ones too (with a "leased_until").

    On a terminal that is too narrow for the table, each row is printed with a line for each field.

    \b
    Examples:
      replaybuf sql run.db "SELECT task_name, count(*), avg(reward) FROM groups GROUP BY 1"
      replaybuf sql run.db "SELECT * FROM rollouts WHERE finish_reason = 'length'" --csv > long.csv
      replaybuf sql run.db "SELECT avg(rewards ->> '$.format') FROM rollouts"
      replaybuf sql run.db "SELECT tags ->> 'level' AS level, avg(reward) FROM groups GROUP BY 1"
      replaybuf sql run.db "SELECT worker, avg(reward) FROM batch_groups WHERE step = 413 GROUP BY 1"
      replaybuf sql run.db "SELECT worker, wants, reason FROM waiters"
    """
    url, query = url_and(url, statement, "STATEMENT")
    if not query.strip():
        raise typer.BadParameter("the statement is empty", param_hint="STATEMENT")
    names, found = run_statement(open_reader(url), query, timeout)
    if not names:
        output.note("the statement gave no rows")
        return
    rows = [dict(zip(names, row, strict=True)) for row in found]
    output.rows(rows, [_column(name, rows) for name in names])
    if not found:
        output.note(f"no rows (columns: {', '.join(names)})")


def _column(name: str, rows: Sequence[Row]) -> Column:
    number = all(isinstance(row[name], int | float | Decimal | None) for row in rows)
    return Column(name, lambda row: cell(row[name]), right=number, text=not number)


def cell(value: Any) -> str:
    """Return a value for people."""
    if value is None:
        return ""
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value):,} bytes>"
    if isinstance(value, float | Decimal):
        return f"{value:.6g}"
    if isinstance(value, datetime):
        return iso(value)
    if isinstance(value, dict | list):
        return encode(value)
    return str(value)
