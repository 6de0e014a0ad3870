"""A train step as `replaybuf trace` shows it: what stands out, the workers, and the groups."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

from replaybuf import units
from replaybuf.cli.groups import ARCHIVE, age_of
from replaybuf.cli.output import Column, Row, console, iso, print_table, write
from replaybuf.redact import escape
from replaybuf.storage.sql.inspection.drawn_batches import GONE, Batch
from replaybuf.storage.sql.inspection.traces import StepSummary, StepTrace, consumed

if TYPE_CHECKING:
    from replaybuf.rules.comparison import Part

_LABEL = 11


def steps_rows(found: Sequence[StepSummary], limit: int | None) -> list[dict[str, Any]]:
    """Return rows of steps, newest first, with the change of the reward from the step before in the same run."""
    rows = []
    kept = sorted({one.step for one in found}, reverse=True)[:limit]
    for i, one in enumerate(found):
        earlier = (other for other in found[i + 1 :] if other.step < one.step and other.restores <= one.restores)
        before = next(earlier, None)
        change = None
        if before is not None and one.reward is not None and before.reward is not None:
            change = one.reward - before.reward
        if one.step in kept:
            rows.append({**asdict(one), "change": change})
    return rows


def step_value(runs: Sequence[StepTrace], lowest: Sequence[Sequence[Row]] | None = None) -> dict[str, Any]:
    """Return a step for programs; with the lowest answers of each run if they were asked for."""
    values = [_run_value(run) for run in runs]
    if lowest is not None:
        values = [value | {"worst": answers} for value, answers in zip(values, lowest, strict=True)]
    return {"step": runs[0].summary.step, "runs": values}


def _run_value(run: StepTrace) -> dict[str, Any]:
    return {
        **asdict(run.summary),
        "reward_before": run.before,
        "verdict": run.verdict,
        "workers": [part_row(part, "worker") for part in run.workers],
        "tasks": [part_row(part, "task_name") for part in run.tasks],
        "batches": [batch_row(one) for one in run.batches],
        "groups": group_rows(run),
    }


def part_row(part: Part, name: str) -> dict[str, Any]:
    """Return a worker's or a task's groups of a step as a row."""
    return {
        name: part.name,
        "groups": part.groups,
        "reward": part.reward,
        "others": part.others,
        "below": part.below,
        "staleness": part.staleness,
        "stands_out": part.stands_out,
    }


def batch_row(one: Batch) -> dict[str, Any]:
    """Return a draw as a row, without its members."""
    values = asdict(one)
    del values["members"]
    return values


def group_rows(run: StepTrace) -> list[dict[str, Any]]:
    """Return the groups that a step was trained on as rows, lowest reward first."""
    return [
        {"step": run.summary.step, "restores": run.summary.restores, "batch": drawn.id, "taken_by": drawn.worker}
        | asdict(one)
        | {"now": run.places[one.uid]}
        for drawn, one in run.groups
    ]


def print_step(run: StepTrace, now: datetime, limit: int | None, lowest: Sequence[Row] = ()) -> None:
    """Print a step: what stands out, then the workers, the groups of lowest reward, the tasks and the draws."""
    from rich.text import Text

    out = console()
    out.print(Text(escape(_title(run.summary)), style="bold"), soft_wrap=True)
    for name, value in _facts(run, now).items():
        if value:
            style = "red" if name == "" and any(part.stands_out for part in (*run.workers, *run.tasks)) else ""
            out.print(Text(f"  {name:<{_LABEL}}" if name else "  ").append(escape(value), style=style), soft_wrap=True)
    _print_some([part_row(part, "worker") for part in run.workers], part_columns("worker"), limit, "workers")
    if lowest:
        write([f"\nthe lowest {units.number_of(len(lowest), 'answer')}\n"])
        for answer in lowest:
            title = f"  group {answer['uid']}, rollout {answer['position']}, reward {units.figure(answer['reward'])}"
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
    more = f" ({limit} of {len(rows):,}; --limit 0 shows all)" if limit is not None and len(rows) > limit else ""
    write([f"\n{what}{more}\n"])
    print_table(rows[:limit], columns)


def _title(one: StepSummary) -> str:
    run = ""
    if one.undone:
        run = ", before a restore undid it"
    elif one.resumed:
        run = f", after restore {one.restores}"
    batches = "1 batch" if one.batches == 1 else f"{units.number(one.batches)} batches"
    return f"step {one.step}{run}: {units.number(one.groups)} groups in {batches}"


def _facts(run: StepTrace, now: datetime) -> dict[str, str]:
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
        text += f", {abs(one.reward - run.before):.3f} {side} the steps before ({run.before:.3f})"
    return text


def _weights_text(one: StepSummary) -> str:
    oldest, newest = one.oldest_model_step, one.newest_model_step
    if oldest is None:
        return ""
    return f"of step {oldest}" if oldest == newest else f"of steps {oldest} to {newest}"


def part_columns(name: str) -> list[Column]:
    """Return the columns of `part_row`."""
    return [
        Column(name.removesuffix("_name"), lambda r: r[name] or "-", right=False, text=True, style=_part_style),
        Column("groups", lambda r: units.number(r["groups"])),
        Column("reward", lambda r: units.number(r["reward"], 3)),
        Column("others" if name == "worker" else "before", lambda r: units.number(r["others"], 3)),
        Column("below", lambda r: units.number(r["below"], 3), style=_part_style),
        Column("stale", lambda r: units.number(r["staleness"], 1)),
    ]


def _part_style(row: Row) -> str:
    return "red" if row["stands_out"] else ""


def group_columns(run: StepTrace) -> list[Column]:
    """Return the columns of `group_rows`."""
    columns = [
        Column("uid", lambda r: str(r["uid"])),
        Column("worker", lambda r: r["worker"] or "-", right=False, text=True),
        Column("task", lambda r: r["task_name"], right=False, text=True),
        Column("reward", lambda r: units.number(r["reward"], 3)),
        Column("stale", lambda r: units.number(r["staleness"])),
        Column("weights", lambda r: units.number(r["oldest_model_step"]), spare=True),
        Column("batch", lambda r: str(r["batch"]), spare=True),
        Column("now", lambda r: r["now"], right=False),
    ]
    if len(consumed(run.batches)) == 1:
        columns = [column for column in columns if column.header != "batch"]
    return columns


def batch_columns(now: datetime) -> list[Column]:
    """Return the columns of `batch_row`."""
    return [
        Column("batch", lambda r: str(r["id"])),
        Column("taken", lambda r: units.age(age_of(r["taken_at"], now))),
        Column("step", lambda r: "-" if r["step"] is None else str(r["step"])),
        Column("groups", lambda r: units.number(r["groups"])),
        Column("consumed", lambda r: units.number(r["settled"])),
        Column("back", lambda r: units.number(r["back"]) if r["back"] else "", spare=True),
        Column("reward", lambda r: units.number(r["reward"], 3)),
        Column("stale", lambda r: units.number(r["staleness"], 1)),
        Column("by", lambda r: r["worker"] or "-", right=False, text=True),
    ]
