"""`replaybuf trace`: from a train step to the groups that it was trained on, and back."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

import typer

from replaybuf.cli.commands import TEXT, OfTask, OneBuffer, Out, Url, argument, option, read_limit
from replaybuf.cli.groups import ARCHIVE
from replaybuf.cli.output import Output, console, print_facts, print_json, print_line, print_table, write
from replaybuf.common import units
from replaybuf.common.redact import escape, redact
from replaybuf.errors import InputError
from replaybuf.storage.sql.inspection.group_metadata import choose
from replaybuf.storage.sql.inspection.lives import Life, is_settled, life_of, place_of, timeline, uids_text, why_unknown
from replaybuf.storage.sql.inspection.reader import Reader, Transaction, open_reader
from replaybuf.storage.sql.inspection.run_records import last_step
from replaybuf.values.rollouts.statuses import Status
from replaybuf.view.columns import BATCHES, BY_TASK, BY_WORKER, MEMBERS, STEPS, TIMELINE, Column, annotated
from replaybuf.view.steps import STEPS_SHOWN, Step, Steps, no_groups, read_step, read_steps
from replaybuf.view.workers import Workers, by_task_columns

_KINDS = ("step", "uid")
_LAST = "last"
_GROUPS = 10

_What = Annotated[str | None, argument("WHAT", "step or uid; the last steps if left out.")]
_Which = Annotated[str | None, argument("WHICH", "The step, last for the last one, or the uid.")]


def trace(
    url: Url,
    output: Out = TEXT,
    what: _What = None,
    which: _Which = None,
    buffer: OneBuffer = None,
    task: OfTask = None,
    worker: Annotated[str | None, option("--worker", "Only groups of this worker.", metavar="NAME")] = None,
    before: Annotated[int | None, option("--before", "Only steps before this one.", metavar="STEP")] = None,
    limit: Annotated[
        str | None,
        option("--limit", "At most so many steps (20), or groups and workers (10), or all.", metavar="N|all"),
    ] = None,
    worst: Annotated[
        int | None, option("--worst", "With a step, also the N answers with the lowest rewards.", min=1, max=100)
    ] = None,
) -> None:
    """Show what a train step was trained on, who made it, and what became of a group.

    Without WHAT it lists the last train steps, with the mean reward of their groups. Above are the workers that are
    below the others over the last steps, and how far each is above (+) or below (-) them in each task. A step is red
    where a task is lower than in the steps before, or another worker is lower than the others. "step 413" says what it
    was trained on: from which weights, how stale, and made by whom, the workers first whose groups are worst compared
    with those that others made of the same tasks; then the groups themselves. With --task and --worker, both are about
    these groups. "uid 17" is the life of a group: put, drawn, given back, by whom, replaced by what.

    The last 10,000 draws of a buffer are recorded, unless its config says otherwise. Of a step that was trained on
    again after a restore, both are shown, the last first.

    \b
    Examples:
      replaybuf trace run.db
      replaybuf trace run.db --task math --worker gpu-node-7
      replaybuf trace run.db step 413 --worst 3
      replaybuf trace run.db step last
      replaybuf trace run.db uid 17
      replaybuf trace run.db step 413 --format json | jq '.runs[0].workers[0]'
    """
    if what is not None and what not in _KINDS:
        raise typer.BadParameter(f"{redact(what)!r:.100} is none of {', '.join(_KINDS)}.", param_hint="WHAT")
    if worst is not None and what != "step":
        raise typer.BadParameter("it goes with a step: trace URL step last --worst N", param_hint="--worst")
    reader = open_reader(url)
    if what == "uid":
        if task is not None or worker is not None:
            raise typer.BadParameter("they go with steps and a step", param_hint="--task, --worker")
        _show_life(reader, output, _number(which, "uid"))
    elif what == "step":
        step = None if which == _LAST else _number(which, "step")
        _show_step(reader, output, buffer, step, read_limit(limit or str(_GROUPS)), worst or 0, task, worker)
    else:
        _show_steps(reader, output, buffer, before, read_limit(limit or str(STEPS_SHOWN)), task, worker)


def _number(text: str | None, kind: str) -> int:
    if text is None:
        raise typer.BadParameter(f"it is missing; replaybuf trace URL {kind} N", param_hint="WHICH")
    try:
        if abs(number := int(text)) < 2**63:
            return number
    except ValueError:
        pass
    raise typer.BadParameter(f"{redact(text)!r:.100} is no number of a {kind}.", param_hint="WHICH")


# The last steps


def _show_steps(
    reader: Reader,
    output: Output,
    buffer: str | None,
    before: int | None,
    limit: int | None,
    task: str | None,
    worker: str | None,
) -> None:
    steps = reader.read(lambda tx: read_steps(tx, buffer, before=before, limit=limit, task=task, worker=worker))
    if steps.nothing and output.for_people:
        output.note(steps.nothing)
        _note_earlier(output, steps)
        return
    if output.for_people:
        for outlier in steps.workers.worse:
            if worker in (None, outlier.part.name):
                print_line(str(outlier), "red")
        if worker is None and steps.workers.by_task.says_more:
            _print_by_task(steps.workers)
            write(["\n"])
    output.rows(steps.rows if output.for_people else [asdict(row) for row in steps.rows], STEPS, steps.now)
    _note_earlier(output, steps)
    if steps.known.without_step:
        draws = f"{units.number(steps.known.without_step)} of {units.number(steps.known.batches)} draws"
        output.note(f"{draws} name no train step")


def _note_earlier(output: Output, steps: Steps) -> None:
    if steps.earlier is not None:
        output.note(f"more steps: --before {steps.earlier}, or --limit all")


# One step


def _show_step(
    reader: Reader,
    output: Output,
    buffer: str | None,
    step: int | None,
    limit: int | None,
    worst: int,
    task: str | None,
    worker: str | None,
) -> None:
    """Show a step; None is the last one."""

    def read(tx: Transaction) -> tuple[int, list[Step], datetime]:
        name = choose(tx, buffer)
        number = last_step(tx, name) if step is None else step
        if number is None:
            raise InputError(no_groups(tx, name, "for a step"))
        runs = read_step(tx, name, number, worst, task=task, worker=worker)
        if not runs:
            raise InputError(no_groups(tx, name, f"for step {number}", task, worker))
        return number, runs, tx.now()

    train_step, runs, now = reader.read(read)
    value = {"step": train_step, "runs": [asdict(run.summary) | asdict(run) for run in runs]}
    if not output.for_people:
        print_json(value)
        return
    for run in runs:
        _print_step(run, now, limit)


def _print_step(run: Step, now: datetime, limit: int | None) -> None:
    """Print a step: the verdict, then the workers, the groups of lowest reward, the tasks and the draws."""
    print_facts(run.title, {"": run.verdict, **run.facts(now)}, 11, {"": "red" if run.stands_out else ""})
    _print_rows(run.workers, BY_WORKER, limit, "workers", now)
    if run.worst:
        write([f"\nthe lowest {units.number_of(len(run.worst), 'answer')}\n"])
        for answer in run.worst:
            by = f", by {answer['worker']}" if answer["worker"] else ""
            title = f"group {answer['uid']}, rollout {answer['position']}, reward {answer['reward']:.3f}{by}"
            print_line(title, "bold", indent="  ")
            text = textwrap.indent(escape(answer["response"] or "", keep="\n"), "    ")
            console().print(text, soft_wrap=True)
    several = len({group["batch"] for group in run.groups}) > 1
    members = [column for column in annotated(MEMBERS, run.groups) if several or column.name != "batch"]
    _print_rows(run.groups, members, limit, "groups, the lowest reward first", now)
    if len(run.tasks) > 1:
        _print_rows(run.tasks, BY_TASK, limit, "tasks", now)
    if run.over_steps.by_task.says_more:
        write(["\n"])
        _print_by_task(run.over_steps)
    if len(run.batches) > 1:
        _print_rows(run.batches, BATCHES, limit, "draws", now)
    if run.gone:
        write(["\n"])
        print_line(f"{units.number(run.gone)} of them are gone, and their texts: {ARCHIVE}")
    write(["\n"])


def _print_by_task(workers: Workers) -> None:
    rows = workers.by_task.rows
    note = "" if len(rows) <= _GROUPS else f" ({_GROUPS} of {len(rows):,} workers)"
    print_line(f"mean reward above (+) or below (-) the others over {workers.steps}{note}")
    print_table(rows[:_GROUPS], by_task_columns(workers.by_task))


def _print_rows(rows: Sequence[Any], columns: Sequence[Column], limit: int | None, noun: str, now: datetime) -> None:
    note = f" ({limit} of {len(rows):,}; --limit all shows all)" if limit is not None and len(rows) > limit else ""
    write([f"\n{noun}{note}\n"])
    print_table(rows[:limit], columns, now)


# The life of a group


def _show_life(reader: Reader, output: Output, uid: int) -> None:
    def read(tx: Transaction) -> Life:
        if (life := life_of(tx, uid)) is None:
            raise InputError(f"there is no group {uid}: {why_unknown(tx, uid)}")
        return life

    life = reader.read(read)
    value = asdict(life) | {"now": place_of(life), "timeline": timeline(life)}
    if not output.for_people:
        print_json(value)
        return
    suffix = f" of {life.task_name}" if life.task_name else ""
    print_facts(f"group {life.uid}{suffix}", _life_facts(life), 13)
    if rows := timeline(life):
        write(["\n"])
        print_table(rows, TIMELINE, life.now)


def _life_facts(life: Life) -> dict[str, str | None]:
    row = life.row
    is_unfinished = row is not None and row["status"] not in (Status.COMPLETED, Status.ARCHIVED)
    is_known = life.task_name and not is_unfinished
    unusable = "no usable one (a finite number)" if is_known else ""
    return {
        "buffer": life.buffer if life.several else None,
        "put by": life.worker,
        "weights": None if life.oldest_model_step is None else f"of step {life.oldest_model_step}",
        "reward": unusable if life.reward is None else f"{life.reward:.3f}",
        "now": place_of(life),
        "replaces": uids_text(life.replaces),
        "replaced by": uids_text(life.replaced_by),
        "error": None if row is None else row["error"],
        "prompt": None if row is None else row["prompt"],
        "texts": f"gone with it; {ARCHIVE}" if row is None and any(map(is_settled, life.draws)) else None,
    }
