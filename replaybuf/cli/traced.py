"""The output of `replaybuf trace`: train steps, one step, the life of a group, and a worker's groups."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

from replaybuf import units
from replaybuf.cli.groups import ARCHIVE, age_of, columns
from replaybuf.cli.output import Column, Row, console, iso, print_facts, print_table, write
from replaybuf.redact import escape
from replaybuf.rules.comparison import Part
from replaybuf.storage.sql.inspection.lives import Life, is_settled, place_of, timeline, uids_text
from replaybuf.storage.sql.inspection.run_records import GONE, Batch
from replaybuf.storage.sql.inspection.traces import StepSummary, StepTrace, WorkerTrace, changes, consumed

_GROUPS = 10


def steps_rows(found: Sequence[StepSummary], limit: int | None) -> list[dict[str, Any]]:
    """Return rows of steps, newest first, with the change of the reward from the step before in the same run."""
    kept = sorted({one.step for one in found}, reverse=True)[:limit]
    pairs = zip(found, changes(found), strict=True)
    return [{**asdict(one), "change": change} for one, change in pairs if one.step in kept]


def step_value(runs: Sequence[StepTrace], lowest: Sequence[Sequence[Row]] | None = None) -> dict[str, Any]:
    """Return a step for JSON; with the lowest answers of each run if they were requested."""
    values = [
        {
            **asdict(run.summary),
            "reward_before": run.before,
            "steps_before": run.steps_before,
            "verdict": run.verdict,
            "workers": [part_row(part, "worker") for part in run.workers],
            "tasks": [part_row(part, "task_name") for part in run.tasks],
            "batches": [batch_row(one) for one in run.batches],
            "groups": group_rows(run),
        }
        for run in runs
    ]
    if lowest is not None:
        values = [value | {"worst": answers} for value, answers in zip(values, lowest, strict=True)]
    return {"step": runs[0].summary.step, "runs": values}


def part_row(part: Part, name: str) -> dict[str, Any]:
    """Return a row that summarises a worker's or a task's groups of a step."""
    return {name: part.name, **{one: getattr(part, one) for one in _OF_PARTS}}


_OF_PARTS = ("groups", "reward", "others", "below", "staleness", "stands_out")


def batch_row(one: Batch) -> dict[str, Any]:
    """Return a draw as a row, without its members."""
    return {name: value for name, value in asdict(one).items() if name != "members"}


def group_rows(run: StepTrace) -> list[dict[str, Any]]:
    """Return the groups that a step was trained on as rows, lowest reward first."""
    return [
        {"step": run.summary.step, "restores": run.summary.restores, "batch": drawn.id, "taken_by": drawn.worker}
        | asdict(one)
        | {"now": run.places[one.uid]}
        for drawn, one in run.groups
    ]


def print_step(run: StepTrace, now: datetime, limit: int | None, lowest: Sequence[Row] = ()) -> None:
    """Print a step: the verdict, then the workers, the groups of lowest reward, the tasks and the draws."""
    from rich.text import Text

    out = console()
    stands_out = any(part.stands_out for part in (*run.workers, *run.tasks))
    print_facts(_title(run.summary), _step_facts(run, now), 11, {"": "red" if stands_out else ""})
    _print_some([part_row(part, "worker") for part in run.workers], part_columns("worker"), limit, "workers")
    if lowest:
        write([f"\nthe lowest {units.number_of(len(lowest), 'answer')}\n"])
        for answer in lowest:
            title = f"  group {answer['uid']}, rollout {answer['position']}, reward {units.figure(answer['reward'])}"
            title += f", by {escape(answer['worker'])}" if answer["worker"] else ""
            out.print(Text(title, style="bold"), soft_wrap=True)
            out.print(Text(textwrap.indent(escape(answer["response"] or "", keep="\n"), "    ")), soft_wrap=True)
    _print_some(group_rows(run), group_columns(run), limit, "groups, the lowest reward first")
    if len(run.tasks) > 1:
        _print_some([part_row(part, "task_name") for part in run.tasks], part_columns("task_name"), limit, "tasks")
    if len(run.batches) > 1:
        _print_some([batch_row(one) for one in run.batches], batch_columns(now), limit, "batches")
    if gone := sum(run.places[one.uid] == GONE for _, one in run.groups):
        write([f"\n{units.number(gone)} of them are gone, and their texts: {ARCHIVE}\n"])
    write(["\n"])


def _print_some(rows: Sequence[Row], columns: Sequence[Column], limit: int | None, what: str) -> None:
    more = f" ({limit} of {len(rows):,}; --limit all shows all)" if limit is not None and len(rows) > limit else ""
    write([f"\n{what}{more}\n"])
    print_table(rows[:limit], columns)


def _title(one: StepSummary) -> str:
    run = ", before a restore undid it" if one.undone else f", after restore {one.restores}" if one.resumed else ""
    batches = "1 batch" if one.batches == 1 else f"{units.number(one.batches)} batches"
    return f"step {one.step}{run}: {units.number(one.groups)} groups in {batches}"


def _step_facts(run: StepTrace, now: datetime) -> dict[str, str]:
    one = run.summary
    taken = f"{iso(one.first_at)} ({units.age(age_of(one.first_at, now))} ago)"
    stale = f"{units.number(one.staleness, 1)} on average, {units.number(one.max_staleness)} at most"
    return {
        "": run.verdict,
        "taken": f"{taken} by {', '.join(one.taken_by) or 'nobody with a name'}",
        "consumed": "" if one.settled == one.groups else f"{units.number(one.settled)} of {units.number(one.groups)}",
        "reward": _reward_text(run),
        "staleness": "" if one.staleness is None else stale,
        "weights": _weights_text(one),
    }


def _reward_text(run: StepTrace) -> str:
    one = run.summary
    if one.reward is None:
        return ""
    text = f"{one.reward:.3f} ({units.number(one.min_reward, 3)} to {units.number(one.max_reward, 3)})"
    if run.before is not None:
        side = "below" if one.reward < run.before else "above"
        steps = "step" if run.steps_before == 1 else f"{run.steps_before} steps"
        text += f", {abs(one.reward - run.before):.3f} {side} the {steps} before ({run.before:.3f})"
    return text


def _weights_text(one: StepSummary) -> str:
    oldest, newest = one.oldest_model_step, one.newest_model_step
    if oldest is None:
        return ""
    return f"of step {oldest}" if oldest == newest else f"of steps {oldest} to {newest}"


def part_columns(name: str) -> list[Column]:
    """Return the columns of `part_row`."""
    others = "others" if name == "worker" else "before"
    found = columns(name, "groups", "reward", "others", "below", "staleness", others=others)
    return [replace(one, style=_part_style) if one.header in ("worker", "task", "below") else one for one in found]


def _part_style(row: Row) -> str:
    return "red" if row["stands_out"] else ""


def group_columns(run: StepTrace) -> list[Column]:
    """Return the columns of `group_rows`."""
    batch = ["batch"] if len(consumed(run.batches)) > 1 else []
    names = ("uid", "worker", "task_name", "reward", "staleness", "oldest_model_step", *batch, "now")
    return columns(*names, spare=("oldest_model_step", "batch"))


def batch_columns(now: datetime) -> list[Column]:
    """Return the columns of `batch_row`."""
    return [
        *columns("id", id="batch"),
        Column("taken", lambda r: units.age(age_of(r["taken_at"], now))),
        *columns("step", "groups", "settled", settled="consumed"),
        Column("back", lambda r: units.number(r["back"]) if r["back"] else "", spare=True),
        *columns("reward", "staleness", "worker", worker="by"),
    ]


# The life of a group


def life_value(life: Life) -> dict[str, Any]:
    """Return a group's life for JSON."""
    return {
        "uid": life.uid,
        **asdict(life.origin),
        "now": place_of(life),
        "group": life.there,
        "replaces": life.replaces,
        "replaced_by": life.replaced_by,
        "checkpoints": life.checkpoints,
        "draws": [
            batch_row(one) | {"reward_then": one.members[0].reward, "staleness_then": one.members[0].staleness}
            for one in life.draws
        ],
        "timeline": timeline(life),
    }


def print_life(life: Life) -> None:
    """Print a group's life: its put, its events, and where it is now."""
    of = f" of {life.origin.task_name}" if life.origin.task_name else ""
    print_facts(f"group {life.uid}{of}", _life_facts(life), 13)
    if rows := timeline(life):
        write(["\n"])
        print_table(rows, _life_columns(life.now))


def _life_facts(life: Life) -> dict[str, str | None]:
    put, there = life.origin, life.there
    return {
        "buffer": put.buffer if life.several else None,
        "put by": put.worker,
        "weights": None if put.oldest_model_step is None else f"of step {put.oldest_model_step}",
        "reward": None if put.reward is None else f"{put.reward:.3f}",
        "now": place_of(life),
        "replaces": uids_text(life.replaces),
        "replaced by": uids_text(life.replaced_by),
        "checkpoints": ", ".join(map(str, life.checkpoints)),
        "error": None if there is None else there["error"],
        "prompt": None if there is None else there["prompt"],
        "texts": f"gone with it; {ARCHIVE}" if there is None and any(map(is_settled, life.draws)) else None,
    }


def _life_columns(now: datetime) -> list[Column]:
    return [
        Column("when", lambda r: "-" if r["at"] is None else iso(r["at"]), right=False),
        Column("ago", lambda r: units.age(age_of(r["at"], now)), spare=True),
        Column("what", lambda r: r["what"], right=False),
        *columns("step", "worker", worker="by"),
        Column("", lambda r: r["detail"] or "", right=False, text=True),
    ]


# A worker


def worker_value(worker: str, found: WorkerTrace) -> dict[str, Any]:
    """Return a worker's groups and draws for JSON."""
    return {
        "worker": worker,
        "steps": worker_rows(found),
        "groups": [{"step": drawn.step, **asdict(one)} for drawn, one in found.lowest],
        "buffered": found.buffered,
        "draws": [batch_row(one) for one in found.draws],
    }


def worker_rows(found: WorkerTrace) -> list[dict[str, Any]]:
    """Return a row for each train step that used a worker's groups."""
    return [
        {"step": one.summary.step, "restores": one.summary.restores, "of": one.summary.groups}
        | {name: getattr(one.part, name) for name in _OF_PARTS}
        for one in found.steps
    ]


def print_worker(worker: str, found: WorkerTrace, now: datetime) -> None:
    """Print the train steps with a worker's groups, its groups in the buffer, and its own draws."""
    from rich.text import Text

    console().print(Text(escape(f"worker {worker}"), style="bold"), soft_wrap=True)
    steps = columns("step", "groups", "of", "reward", "others", "below", "staleness")
    steps[5] = replace(steps[5], style=_part_style)
    lowest = [{"step": drawn.step, **asdict(one)} for drawn, one in found.lowest[:_GROUPS]]
    leased = Column("leased", lambda r: "yes" if r["leased"] else "-", right=False)
    buffered = [*columns("task_name", "status"), leased, *columns("groups", "reward", "last_uid", last_uid="last uid")]
    for title, rows, shown in (
        ("trained on", worker_rows(found), steps),
        ("groups, the lowest reward first", lowest, columns("uid", "step", "task_name", "reward", "staleness")),
        ("in the buffer", found.buffered, buffered),
        ("drawn by it", [batch_row(one) for one in found.draws], batch_columns(now)[:-1]),
    ):
        if rows:
            write([f"\n{title}\n"])
            print_table(rows, shown)
