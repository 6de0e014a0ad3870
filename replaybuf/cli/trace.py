"""`replaybuf trace`: from a train step to the groups that it was trained on, and back."""

from __future__ import annotations

import os
from datetime import datetime
from typing import Annotated, Any

import typer

from replaybuf import units
from replaybuf.cli.app import (
    URL_VARIABLE,
    OneBuffer,
    Url,
    argument,
    listing,
    option,
    read_limit,
    url_of_variable,
    whole_number,
)
from replaybuf.cli.groups import age_of, columns
from replaybuf.cli.output import Column, Output, Row
from replaybuf.cli.traced import (
    group_rows,
    life_value,
    print_life,
    print_step,
    print_worker,
    step_value,
    steps_rows,
    worker_rows,
    worker_value,
)
from replaybuf.errors import InputError
from replaybuf.redact import escape, redact
from replaybuf.storage.sql.inspection.groups import choose
from replaybuf.storage.sql.inspection.lives import Life, life_of, nothing_of, timeline
from replaybuf.storage.sql.inspection.reader import Reader, ReadTransaction, open_reader
from replaybuf.storage.sql.inspection.run_records import Recorded, recorded
from replaybuf.storage.sql.inspection.traces import (
    StepSummary,
    lowest_answers,
    summarise_steps,
    trace_step,
    trace_worker,
    workers_of,
)
from replaybuf.worker_name import check_worker

_KINDS = ("steps", "step", "uid", "worker")
_STEPS, _GROUPS = 20, 10
_NAMED = 10

_What = Annotated[str | None, argument("WHAT", "steps, step, uid or worker, or a step; steps if left out.")]
_Which = Annotated[str | None, argument("WHICH", "The step, the uid or the worker's name.")]


@listing
def trace(
    url: Url,
    output: Output,
    what: _What = None,
    which: _Which = None,
    buffer: OneBuffer = None,
    before: Annotated[int | None, option("--before", "With steps: only those before this one.", metavar="STEP")] = None,
    limit: Annotated[
        str | None,
        option("--limit", "At most so many steps (20), or groups and workers (10), or all.", metavar="N|all"),
    ] = None,
    worst: Annotated[
        int | None, option("--worst", "With step: also the N answers with the lowest rewards.", min=1, max=100)
    ] = None,
) -> None:
    """Show what a train step was trained on, who made it, and what became of a group.

    "steps" lists the last train steps, with the mean reward of their groups and its change from the step before. "step
    413" says what it was trained on: from which weights, how stale, and made by whom, the workers first whose groups
    are worst compared with those that others made of the same tasks; then the groups themselves. "uid 17" is the life
    of a group: put, drawn, given back, by whom, replaced by what, in which checkpoints. "worker NAME" is what one
    worker made.

    The last 10,000 draws of a buffer are recorded, unless its config says
    otherwise. Of a step that was trained on again after a restore, both are shown, the last first.

    \b
    Examples:
      replaybuf trace run.db
      replaybuf trace run.db step 413 --worst 3
      replaybuf trace run.db uid 17
      replaybuf trace run.db worker gpu-node-7 --limit 100
      replaybuf trace run.db step 413 --json | jq '.runs[0].workers[0]'
    """
    url, what, which = _words(url, what, which)
    if worst is not None and what != "step":
        raise typer.BadParameter("it goes with a step", param_hint="--worst")
    reader = open_reader(url)
    if what == "uid":
        _uid(reader, output, _number(which, "uid"))
    elif what == "step":
        _step(reader, output, buffer, _number(which, "step"), _or(limit, _GROUPS), worst or 0)
    elif what == "worker":
        if which is None:
            raise typer.BadParameter("it is missing; replaybuf trace URL worker NAME", param_hint="WHICH")
        _worker(reader, output, buffer, check_worker(which), _or(limit, _STEPS))
    else:
        _steps(reader, output, buffer, before, _or(limit, _STEPS))


def _words(url: str, what: str | None, which: str | None) -> tuple[str, str, str | None]:
    """Return URL, WHAT and WHICH; the URL may come from its environment variable."""
    known = os.environ.get(URL_VARIABLE)
    if known and url in _KINDS and (what is None or what not in _KINDS) and which is None:
        url, what, which = url_of_variable(), url, what
    elif known and what is None and url.isdecimal():
        url, what = url_of_variable(), url
    what = what or _KINDS[0]
    if which is None and what.removeprefix("-").isdecimal():
        return url, "step", what
    if what not in _KINDS:
        raise typer.BadParameter(f"{redact(what)!r:.100} is none of {', '.join(_KINDS)}.", param_hint="WHAT")
    if what == "steps" and which is not None:
        raise typer.BadParameter(f"steps takes none; did you mean: step {redact(which):.100}", param_hint="WHICH")
    return url, what, which


def _number(text: str | None, what: str) -> int:
    if text is None:
        raise typer.BadParameter(f"it is missing; replaybuf trace URL {what} N", param_hint="WHICH")
    if abs(number := whole_number(text, "WHICH")) >= 2**63:
        raise typer.BadParameter(f"{number:.3g} is too large.", param_hint="WHICH")
    return number


def _or(limit: str | None, default: int) -> int | None:
    """Return the limit or its default; None for all."""
    return default if limit is None else read_limit(limit)


# The last steps


def _steps(reader: Reader, output: Output, buffer: str | None, before: int | None, limit: int | None) -> None:
    def read(tx: ReadTransaction) -> tuple[list[StepSummary], Recorded, datetime]:
        name = choose(tx, buffer)
        more = None if limit is None else limit + 1  # the last row's change is relative to the step before it
        return summarise_steps(tx, name, before=before, limit=more), recorded(tx, name), tx.now()

    found, known, now = reader.read(read)
    rows = steps_rows(found, limit)
    if found or not output.for_people:
        output.rows(rows, _columns(rows, now))
    else:
        output.note(_nothing(known, "for a step" if before is None else f"for a step before {before}"))
        return
    if limit is not None and len({one.step for one in found}) > limit:
        page = [f"--before {rows[-1]['step']}"] if rows else []
        output.note(f"more steps: {', or '.join([*page, '--limit all'])}")
    if known.without_step:
        output.note(f"{units.number(known.without_step)} of {units.number(known.batches)} draws name no train step")


def _columns(rows: list[dict[str, Any]], now: datetime) -> list[Column]:
    change = Column(
        "change",
        lambda r: "" if r["change"] is None else f"{r['change']:+.3f}",
        style=lambda r: "red" if (r["change"] or 0.0) < 0 else "",
    )
    found = [
        *columns("step"),
        Column("trained", lambda r: units.age(age_of(r["last_at"], now)), spare=True),
        *columns("groups", "settled", "reward"),
        change,
        *columns("min_reward", "max_reward", spare=("min_reward", "max_reward")),
        *columns("staleness", "max_staleness"),
        Column("weights", _weights_text, spare=True),
        Column("run", _run_text, right=False),
        Column("taken by", lambda r: ", ".join(r["taken_by"]) or "-", right=False, text=True),
    ]
    hidden = {"settled"} if all(row["settled"] == row["groups"] for row in rows) else set()
    hidden |= set() if any(row["resumed"] or row["undone"] for row in rows) else {"run"}
    return [column for column in found if column.header not in hidden]


def _weights_text(row: Row) -> str:
    """Return the range of model steps of the groups."""
    oldest, newest = row["oldest_model_step"], row["newest_model_step"]
    if oldest is None:
        return "-"
    return str(oldest) if oldest == newest else f"{oldest}-{newest}"


def _run_text(row: Row) -> str:
    """Return the run of a step, by the restores before it, and whether a later restore undid the step."""
    run = f"after restore {row['restores']}" if row["resumed"] else "first"
    return f"{run}, undone" if row["undone"] else run


# A step, a group, a worker


def _step(reader: Reader, output: Output, buffer: str | None, step: int, limit: int | None, worst: int) -> None:
    def read(tx: ReadTransaction) -> Any:
        name = choose(tx, buffer)
        runs = trace_step(tx, name, step)
        lowest = [lowest_answers(tx, name, run, worst) if worst else [] for run in runs]
        return runs, lowest, recorded(tx, name), tx.now()

    runs, lowest, known, now = reader.read(read)
    if not runs:
        raise InputError(_nothing(known, f"for step {step}"))
    groups = [row for run in runs for row in group_rows(run)]
    if not output.printed(lambda: step_value(runs, lowest if worst else None), lambda: groups):
        for run, answers in zip(runs, lowest, strict=True):
            print_step(run, now, limit, answers)


def _uid(reader: Reader, output: Output, uid: int) -> None:
    def read(tx: ReadTransaction) -> tuple[Life | None, str]:
        life = life_of(tx, uid)
        return life, "" if life else nothing_of(tx, uid)

    life, why = reader.read(read)
    if life is None:
        raise InputError(why)
    if not output.printed(lambda: life_value(life), lambda: timeline(life)):
        print_life(life)


def _worker(reader: Reader, output: Output, buffer: str | None, worker: str, limit: int | None) -> None:
    def read(tx: ReadTransaction) -> Any:
        name = choose(tx, buffer)
        found = trace_worker(tx, name, worker, limit)
        return found, tx.now(), workers_of(tx, name) if found is None else []

    found, now, others = reader.read(read)
    if found is None:
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        there = f"there are {', '.join(others[:_NAMED])}{more}" if others else "no group there names its worker"
        raise InputError(f"nothing is known of a worker {escape(worker)!r:.200}; {there}")
    if not output.printed(lambda: worker_value(worker, found), lambda: worker_rows(found)):
        print_worker(worker, found, now)


def _nothing(known: Recorded, which: str) -> str:
    """Return a sentence for a step or worker without recorded draws."""
    if known.last is not None:
        return f"no draw {which} is recorded; those that are are for steps {known.first} to {known.last}"
    if known.batches:
        return (
            f"of {units.number(known.batches)} recorded draws none names its train step: pass current_train_step= to "
            "them (train_step= to leased_steps or acknowledge), or refresh the staleness"
        )
    return "no draw is recorded: nothing was taken yet, or with history=0"
