"""Train steps: what each was trained on, by whom it was made, and what stands out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from replaybuf.common import units
from replaybuf.rules.comparison import Part, Table, all_along, mean, without
from replaybuf.storage.sql.inspection.group_metadata import choose, extreme_rollouts
from replaybuf.storage.sql.inspection.reader import Transaction
from replaybuf.storage.sql.inspection.run_records import (
    GONE,
    Batch,
    Recorded,
    StepKey,
    annotations_of,
    batches_of_steps,
    list_steps,
    next_step,
    recorded,
    whereabouts,
)
from replaybuf.view.columns import Column, columns
from replaybuf.view.drawn import (
    ByTask,
    Drawn,
    StepRow,
    by_reward,
    compare,
    groups_of,
    rewards_by_task,
    tables_of,
    with_steps_before,
)

#: The number of the last steps that are shown together.
STEPS_SHOWN = 20


@dataclass(frozen=True, slots=True)
class WorseWorker:
    """A worker whose groups are lower than those of others all along, in one task or in all (None)."""

    task_name: str | None
    part: Part

    def __str__(self) -> str:
        part, of = self.part, f" in {self.task_name}" if self.task_name else ""
        name, made = part.name or "a worker without a name", units.number_of(part.groups, "group")
        rewards = f"{made} of mean reward {part.reward:.3f}, others {part.others:.3f}"
        return f"{name} is below the others all along{of}: {rewards}"


@dataclass(frozen=True, slots=True)
class Steps:
    """Train steps of a buffer, newest first, and what stands out in them together.

    `known` has the totals of all recorded draws.
    """

    buffer: str
    now: datetime
    rows: list[StepRow]
    worse: list[WorseWorker]
    known: Recorded


def read_steps(
    tx: Transaction,
    buffer: str | None,
    *,
    before: int | None = None,
    limit: int | None = None,
    judged: int = 20_000,
) -> Steps:
    """Return the last steps of a buffer before `before`, newest first.

    What stands out is looked for in the newest of them, with up to `judged` groups.
    """
    name = choose(tx, buffer)
    drawn = batches_of_steps(tx, name, list_steps(tx, name, before=before, limit=limit))
    shown = _with_changes([StepRow.of(key, batches) for key, batches in drawn.items()])
    looked_at, count = list[StepRow](), 0
    for one in shown:
        count += one.groups
        if count > judged and looked_at:
            break
        looked_at.append(one)
    worse, lower = _judge(tx, name, looked_at)
    rows = [replace(one, lower=lower.get((one.step, one.restores), "")) for one in shown]
    return Steps(name, tx.now(), rows, worse, recorded(tx, name))


def _with_changes(found: Sequence[StepRow]) -> list[StepRow]:
    """Return steps, newest first, with the change of each mean reward from the step before in the same run."""
    rows = []
    for place, one in enumerate(found):
        earlier = (other for other in found[place + 1 :] if other.step < one.step and other.restores <= one.restores)
        before = next(earlier, None)
        known = before is not None and one.reward is not None and before.reward is not None
        rows.append(replace(one, change=one.reward - before.reward) if known else one)  # type: ignore[operator, union-attr]
    return rows


def _judge(
    tx: Transaction, buffer: str, found: Sequence[StepRow]
) -> tuple[list[WorseWorker], dict[tuple[int, int], str]]:
    """Return the workers that are below the others in these steps all along, and without them what stands out in each
    step, by step and restores."""
    if not found:
        return [], {}
    drawn, shown = with_steps_before(tx, buffer, {one.step for one in found}), {(o.step, o.restores) for o in found}
    tables = tables_of(drawn)
    keys = [key for key in drawn if (key.step, key.restores) in shown]
    worse = all_along([tables[key] for key in keys if not key.undone])
    rest = {key: without((part.name for _, part in worse), table) for key, table in tables.items()}
    compared = {key: compare(drawn, rest, key, of_run=True) for key in keys}
    lower = {(key.step, key.restores): one.verdict(None) for key, one in compared.items() if one.stands_out}
    return [WorseWorker(*one) for one in worse], lower


def neighbours(tx: Transaction, buffer: str, step: int) -> tuple[int | None, int | None]:
    """Return the nearest train steps with draws before and after a step."""
    return next(iter(list_steps(tx, buffer, before=step, limit=1)), None), next_step(tx, buffer, step)


#: The columns of `Steps.rows`.
STEPS = [
    *columns("step", "last_at", "groups", spare=("last_at",)),
    Column("consumed", "consumed", usual=None),
    Column("reward", "reward", "reward", bad="lower"),
    *columns("change", "min_reward", "max_reward", "staleness", "max_staleness", "weights", "run", "taken_by",
             spare=("min_reward", "max_reward", "weights")),
]  # fmt: skip


# One step


@dataclass(frozen=True, slots=True)
class Answer:
    """A rollout with one of the lowest rewards of a step."""

    uid: int
    position: int
    worker: str | None
    prompt: str | None
    reward: float
    response: str | None

    @property
    def title(self) -> str:
        """Its group, place and reward, and who made it."""
        by = f", by {self.worker}" if self.worker else ""
        return f"group {self.uid}, rollout {self.position}, reward {self.reward:.3f}{by}"


@dataclass(frozen=True, slots=True)
class Step:
    """A train step in one run: a sentence about what stands out, its groups by worker and task, and its draws.

    `groups` are rows of those trained on, each once, lowest reward first: the fields of `Member`, its draw, where it is
    `now`, its prompt if it exists, and the means of its `annotations`; the step has the means of these. `worst` are the
    answers with the lowest rewards among them. `reward_before` is the mean reward of the `steps_before` steps before.
    `by_task` has the workers' rewards of each task, and `worse` the workers that are below the others in this step and
    those before it together.
    """

    summary: StepRow
    verdict: str
    reward_before: float | None
    steps_before: int
    workers: list[Part]
    tasks: list[Part]
    batches: list[Batch]
    groups: list[dict[str, Any]]
    annotations: dict[str, float | None]
    worst: list[Answer]
    by_task: ByTask
    worse: list[WorseWorker]

    @property
    def stands_out(self) -> bool:
        return any(part.stands_out for part in (*self.workers, *self.tasks))

    @property
    def title(self) -> str:
        """Its step, the run if there are several, and the number of its groups and draws."""
        one = self.summary
        again = (
            ", before a restore undid it" if one.undone else f", after restore {one.restores}" if one.resumed else ""
        )
        groups, draws = units.number_of(one.groups, "group"), units.number_of(one.batches, "draw")
        return f"step {one.step}{again}: {groups} in {draws}"

    def facts(self, now: datetime, time: Callable[[datetime], str] = units.iso) -> dict[str, str]:
        """Return the known facts of the step as texts, by name; "" for unknown ones."""
        one = self.summary
        mean, most = units.number(one.staleness, 1), units.number(one.max_staleness)
        by = ", ".join(one.taken_by) or "nobody with a name"
        consumed = "" if one.consumed is None else f"{units.number(one.settled)} of {units.number(one.groups)}"
        return {
            "taken": f"{time(one.first_at)} ({units.ago(one.first_at, now)}) by {by}",
            "consumed": consumed,
            "reward": self.reward_text,
            "staleness": "" if one.staleness is None else f"mean {mean}, max {most}",
            "weights": "" if one.oldest_model_step is None else f"of {one.weights}",
            "means": units.annotated(self.annotations),
        }

    @property
    def gone(self) -> int:
        """The number of groups that exist no more, nor their texts."""
        return sum(one["now"] == GONE for one in self.groups)

    @property
    def reward_text(self) -> str:
        """The mean reward, its range, and that of the steps before."""
        one = self.summary
        if one.reward is None:
            return ""
        text = f"{one.reward:.3f} ({one.min_reward:.3f} to {one.max_reward:.3f})"
        if self.reward_before is not None:
            side, moved = "below" if one.reward < self.reward_before else "above", abs(one.reward - self.reward_before)
            steps = "step" if self.steps_before == 1 else f"{self.steps_before} steps"
            compared = "as in" if round(moved, 3) == 0 else f"{moved:.3f} {side}"
            text += f", {compared} the {steps} before ({self.reward_before:.3f})"
        return text


def read_step(tx: Transaction, buffer: str, step: int, worst: int) -> list[Step]:
    """Return a train step for each run that trained on it, last run first, with the `worst` answers of each."""
    drawn = with_steps_before(tx, buffer, {step})
    tables = tables_of(drawn)
    worse = read_steps(tx, buffer, before=step + 1, limit=STEPS_SHOWN).worse
    return [_step(tx, buffer, drawn, tables, key, worst, worse) for key in drawn if key.step == step]


_PROMPTS = "SELECT uid, prompt FROM groups WHERE uid {in:uids}"
_ANSWERS = "SELECT uid, position, worker, prompt, reward, response FROM rollouts WHERE uid {in:uids}"


def _step(
    tx: Transaction,
    buffer: str,
    drawn: Drawn,
    tables: Mapping[StepKey, Table],
    key: StepKey,
    worst: int,
    worse: list[WorseWorker],
) -> Step:
    noted = annotations_of(tx, drawn[key])
    summary, compared, places = StepRow.of(key, drawn[key]), compare(drawn, tables, key), whereabouts(tx, drawn[key])
    members = sorted(groups_of(drawn[key]), key=by_reward)
    there = [one.uid for _, one in members if places[one.uid] != GONE]
    prompts = {row["uid"]: row["prompt"] for row in tx.rows(_PROMPTS, uids=there)}
    groups = [
        {
            "step": key.step,
            "restores": key.restores,
            "batch": batch.id,
            "taken_by": batch.worker,
            **asdict(one),
            "now": places[one.uid],
            "prompt": prompts.get(one.uid),
            "annotations": noted.get((batch.id, one.uid), {}),
        }
        for batch, one in members
    ]
    names = dict.fromkeys(name for one in groups for name in one["annotations"])
    return Step(
        summary,
        compared.verdict(summary.reward),
        compared.before,
        compared.steps_before,
        compared.workers,
        compared.tasks,
        [replace(one, members=()) for one in drawn[key]],
        groups,
        {name: mean(one["annotations"].get(name) for one in groups) for name in names},
        _lowest(tx, buffer, there, worst) if worst and there else [],
        rewards_by_task([tables[key]], [(one.task_name, one.part) for one in worse]),
        worse,
    )


def _lowest(tx: Transaction, buffer: str, uids: Sequence[int], most: int) -> list[Answer]:
    """Return the rollouts with the lowest rewards among these groups."""
    chosen = extreme_rollouts(tx, buffer, None, most, worst=True, among=uids)
    found = {(row["uid"], row["position"]): row for row in tx.rows(_ANSWERS, uids=[uid for uid, _ in chosen])}
    return [Answer(**found[place]) for place in chosen]


def no_draw(known: Recorded, which: str) -> str:
    """Return a sentence for steps without recorded draws."""
    if known.last is not None:
        steps = f"step {known.first}" if known.first == known.last else f"steps {known.first} to {known.last}"
        return f"no draw {which} is recorded; the recorded ones are for {steps}"
    if known.batches:
        return (
            f"of {known.batches:,} recorded draws none names its train step: pass current_train_step= to "
            "them (train_step= to leased_steps or acknowledge), or refresh the staleness"
        )
    return "no draw is recorded: nothing was taken yet, or with history=0"
