"""`replaybuf why`: explains the waits of trainers and producers, and timeouts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from replaybuf import units
from replaybuf.cli.app import URL_VARIABLE, Buffer, Url, Where, argument, listing, option, status_of, url_of_variable
from replaybuf.cli.groups import columns, query_of, trainer_text
from replaybuf.cli.output import Column, Output, print_table, write
from replaybuf.redact import escape_line
from replaybuf.rollouts.statuses import Status
from replaybuf.rules.circumstances import Circumstances, in_force
from replaybuf.rules.limits import Limits
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.inspection.groups import lease_text
from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.storage.sql.inspection.waits import DrawQuestion, Explanation, explain
from replaybuf.units import time_of

_MOST_WAITS = 20
_MOST_WORKERS = 20

Task = Annotated[str | None, argument("[TASK]", "Only waits for groups of this task.")]
Size = Annotated[int | None, option("--size", "Ask for a draw of so many groups.", min=1)]
OfStatus = Annotated[str | None, option("--status", "Ask for a draw of groups of this status.", metavar="STATUS")]


@listing
def why(
    url: Url,
    output: Output,
    task: Task = None,
    buffer: Buffer = None,
    size: Size = None,
    status: OfStatus = None,
    where: Where = None,
) -> None:
    """Say why a trainer or a producer waits: the cause to remove in one sentence, the numbers below.

    There is a line for each process that waits at this moment. Where none waits for groups, the first line says who
    gave up last (or went silent, for it was killed), if that was within a day, and who did has not gone on since;
    where none waits at all, the next is about a draw of one group that somebody might do now. So it is with --size,
    --status or --where, which say what for. Other causes, which may come next, follow as "also". Below are the groups
    by status with what was put and drawn since the beginning, who leases groups and until when, the workers (a
    "silent" one was killed, or gave no sign of life for a minute, or for 15 seconds of a wait, without having ended,
    and did at least what is shown; it is "replaced" once a later one does the same), and the limits in force.

    With --json all of it is there; --nl and --csv give a row for each wait.

    \b
    Examples:
      replaybuf why run.db
      replaybuf why postgresql://rl@db/run7 math --size 64
      replaybuf why run.db math --where '{"reward": {"$gte": 0.9}}'
      replaybuf why run.db --json | jq -r '.[].waits[].reason'
    """
    variable = os.environ.get(URL_VARIABLE)
    if task is None and variable and url != variable and "://" not in url and not Path(url).exists():
        url, task = url_of_variable(), url  # if the variable is set, a single argument that is no database is the task
    query_of(where, None, None)  # raises for an invalid query before the database is opened
    question = DrawQuestion(task, size or 1, status_of(status) or Status.COMPLETED, where)
    asked = not (size is None and status is None and where is None)
    reader = open_reader(url)
    found = reader.read(lambda tx: explain(tx, buffer, question, asked=asked))
    rows = [wait.row(one.buffer) for one in found for wait in one.waits]
    if not output.printed(lambda: [_as_json(one) for one in found], lambda: rows):
        for number, one in enumerate(found):
            write(["\n"] if number else [])
            _print(one, several=len(found) > 1, about_a_draw=asked or task is not None)


# For programs


def _as_json(found: Explanation) -> dict[str, Any]:
    about = found.about
    waits = [
        one.row(found.buffer)
        | {"limits": None if one.limits is None else in_force(one.limits)}
        | {"facts": [{"text": fact.text, "reason": fact.reason} for fact in one.diagnosis.facts]}
        for one in found.waits
    ]
    return {
        "buffer": found.buffer,
        "now": time_of(about.now),
        "somebody_waits": not found.asked,
        "gave_up": None if found.gave_up is None else _timed(found.gave_up, "time"),
        "waits": waits,
        "tasks": _tasks(about),
        "leases": [_timed(one, "until") for one in about.held],
        "workers": [
            _timed(one, "started_at", "seen_at", "ended_at") | {"state": about.state_of(one)} for one in about.workers
        ],
        "trainer": None if about.trainer is None else asdict(about.trainer),
    }


def _timed(one: Any, *names: str) -> dict[str, Any]:
    """Return the fields of a dataclass, with the named ones as times."""
    return asdict(one) | {name: time_of(getattr(one, name)) for name in names}


# For people


def _print(found: Explanation, *, several: bool, about_a_draw: bool) -> None:
    write(sentences(found, several=several, about_a_draw=about_a_draw))
    if rows := _tasks(found.about):
        write(["\n"])
        print_table(rows, _task_columns(found.about))
    print_processes(found)
    if further := _further(found):
        write(["\n", *(f"{escape_line(line)}\n" for line in further)])


def print_processes(found: Explanation, *, several: bool = False) -> None:
    """Print who leases groups, and the workers; with the name of the buffer, if there are `several`."""
    about = found.about
    workers = [asdict(one) | {"state": about.state_of(one)} for one in about.workers[:_MOST_WORKERS]]
    title = f"{escape_line(found.buffer)}\n" if several else ""
    for rows, shown in (
        ([asdict(one) for one in about.held], _lease_columns(about)),
        (workers, _worker_columns(about)),
    ):
        if rows:
            write(["\n", title])
            print_table(rows, shown)
            title = ""


def sentences(found: Explanation, *, several: bool, about_a_draw: bool = False) -> Iterable[str]:
    """Return a line for each wait, with lines below it for its other causes.

    `about_a_draw` says that the user asked about one draw: then the last heartbeat of takers isn't shown.
    """
    now, of = found.about.now, f" of {found.buffer}" if several else ""
    alike = Counter((one.wait.worker, one.diagnosis.sentence) for one in found.waits)
    shown = list({(one.wait.worker, one.diagnosis.sentence): one for one in reversed(found.waits)}.values())[::-1]
    if last := found.gave_up:
        end = "went silent" if last.killed else "gave up"
        text = f"{last.worker or 'somebody'} {end} {units.age(now - last.time)} ago, {last.detail}"
        nobody = "Nobody waits now" if found.asked else "Nobody waits for groups now"
        yield f"{escape_line(f'{nobody}{of}; {text}')}\n"
    elif found.asked and not about_a_draw and (nobody := _nobody_draws(found.about)):
        yield f"{escape_line(f'Nobody draws{of}; {nobody}')}\n"
    for one in shown[:_MOST_WAITS]:
        wait, times = one.wait, alike[(one.wait.worker, one.diagnosis.sentence)]
        who = f"{wait.worker or 'somebody'}{f' ({times} calls)' if times > 1 else ''}{of}"
        since = "" if wait.since is None else f" since {units.age(now - wait.since)}"
        begins = f"If somebody drew now{of}: " if found.asked else f"{who} waits{since}: "
        if found.asked and one is not shown[0]:  # the next task of the same question
            yield f"  {escape_line(one.diagnosis.sentence)}\n"
        else:
            yield f"{escape_line(begins + one.diagnosis.sentence)}\n"
        also = [fact.text for fact in one.diagnosis.facts if fact.reason is not None]
        yield from (f"  also: {escape_line(text)}\n" for text in also)
    if len(shown) > _MOST_WAITS:
        yield f"and {len(shown) - _MOST_WAITS:,} more\n"


def _nobody_draws(about: Circumstances) -> str:
    """Return a sentence about the last heartbeat of all takers; "" if one is alive, none exists, or the last one ended.

    A taker that ended by itself is no cause to investigate.
    """
    takers = [one for one in about.workers if one.taken]
    if not takers or any(one.state(about.now) == "alive" for one in takers):
        return ""
    last = max(takers, key=lambda one: one.ended_at or one.seen_at)
    if last.ended_at is not None:
        return ""
    return f"{last.name} gave its last sign of life {units.age(about.now - last.seen_at)} ago"


def _further(found: Explanation) -> Iterable[str]:
    about, lines = found.about, []
    known = {str(in_force(one.limits)): one for one in found.waits if one.limits is not None}
    for one in known.values():
        shown = ", ".join(f"{name} {value}" for name, value in in_force(one.limits or Limits()).items())
        lines.append(f"limits in force{f' for {one.wait.worker}' if one.wait.worker else ''}: {shown or 'none'}")
    if not known:
        lines.append("limits in force: none that a worker has noted")
    if about.trainer is not None:
        lines.append(trainer_text(asdict(about.trainer)))
    if last := about.last_take:
        who = f" by {last.worker}" if last.worker else ""
        drawn = units.number_of(last.groups, "group")
        lines.append(f"last drawn: {drawn}{who}, {units.age(about.now - last.time)} ago")
    return lines


def _tasks(about: Circumstances) -> list[dict[str, Any]]:
    """Return a row for each task: its groups by status, its totals, and its completed groups per hour."""
    rows = []
    for task in sorted({task for task, _, _ in about.tallies}):
        there = {str(status): about.count(task, status) for status in Status}
        rows.append(
            {
                "task_name": task,
                **there,
                "leased": sum(about.count(task, status, Tally.LEASED) for status in Status),
                "prompts": about.count(task, Status.INIT, Tally.PUT),
                "put": sum(about.count(task, status, Tally.PUT) for status in Status if status != Status.INIT),
                "drawn": sum(about.count(task, Status.COMPLETED, name) for name in _DRAWN),
                "completed_per_hour": about.hourly(task, Status.COMPLETED),
                "last_put": time_of(about.last(task)),
                "refreshed_to": about.steps.get(task),
            }
        )
    return rows


_DRAWN = (Tally.SAMPLED_NEW, Tally.SAMPLED_AGAIN)


def _task_columns(about: Circumstances) -> list[Column]:
    now = datetime.fromtimestamp(about.now, UTC)
    counts = [str(status) for status in Status if status != Status.ARCHIVED] + ["leased", "prompts", "put", "drawn"]
    always = ("completed", "leased", "put", "drawn")
    used = [name for name in counts if name in always or any(row[name] for row in _tasks(about))]
    return [
        *columns("task_name", *used),
        Column("an hour", lambda r: units.number(r["completed_per_hour"]), spare=True),
        Column("last put", lambda r: units.ago(r["last_put"], now)),
        Column("at step", lambda r: units.number(r["refreshed_to"]), spare=True),
    ]


def _lease_columns(about: Circumstances) -> list[Column]:
    now = datetime.fromtimestamp(about.now, UTC)
    return [
        Column("leased by", lambda r: r["holder"] or "-", right=False, text=True),
        *columns("task_name", "status", "groups"),
        Column("ends", lambda r: lease_text(time_of(r["until"]), now)),
    ]


def _worker_columns(about: Circumstances) -> list[Column]:
    hosts = {one.host for one in about.workers[:_MOST_WORKERS]}
    return [
        Column("worker", lambda r: r["name"], right=False, text=True),
        Column("pid", lambda r: str(r["pid"])),
        *([Column("host", lambda r: r["host"], right=False, text=True)] if len(hosts) > 1 else []),
        Column("state", lambda r: r["state"], right=False, style=lambda r: _STATES.get(r["state"], "")),
        Column("seen", lambda r: f"{units.age(about.now - r['seen_at'])} ago"),
        *columns("groups", "failures", "taken", groups="put", failures="failed", taken="drawn"),
    ]


_STATES = {"alive": "green", "silent": "red"}
