"""Train steps: what each was trained on, by whom it was made, and what stands out."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from replaybuf.common import units
from replaybuf.common.units import listed, named
from replaybuf.rules.comparison import Part, by_worker, mean, tabulate
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
from replaybuf.view.drawn import Drawn, StepRow, by_reward, compare, groups_of, only, tables_of
from replaybuf.view.workers import Workers, read_workers

#: The number of the last steps that are listed together.
STEPS_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Steps:
    """Train steps of a buffer, newest first; the workers over the last of them; the totals of all recorded draws.

    `earlier` is the step before which there are more.
    """

    buffer: str
    now: datetime
    rows: list[StepRow]
    workers: Workers
    earlier: int | None
    known: Recorded


def read_steps(
    tx: Transaction,
    buffer: str | None,
    *,
    before: int | None = None,
    limit: int | None = None,
    task: str | None = None,
    worker: str | None = None,
    judged: int = 20_000,
) -> Steps:
    """Return up to `limit` steps of a buffer before `before`, newest first, or what one task or worker has of them.

    What stands out is looked for in the newest of them, with up to `judged` groups; of one task or worker, there are no
    more than these, unless all are asked for.
    """
    name, of_all = choose(tx, buffer), task is None and worker is None
    most = limit + 1 if limit is not None and of_all else None  # a change is from the step before
    numbers = list_steps(tx, name, before=before, limit=most)
    rows = [StepRow.of(key, batches) for key, batches in batches_of_steps(tx, name, numbers).items()]
    looked_at, groups = set[int](), 0
    for one in rows:
        groups += one.groups
        if groups > judged and looked_at and (of_all or limit is not None):
            break
        looked_at.add(one.step)
    workers, drawn = read_workers(tx, name, before=before, task=task, also=looked_at)
    if not of_all:
        rows = _of_one(drawn, looked_at, worker)
    lower = _lower(drawn, workers, looked_at, worker)
    rows = [replace(one, lower=lower.get((one.step, one.restores), "")) for one in _with_changes(rows)]
    steps = list(dict.fromkeys(one.step for one in rows))
    shown, has_more = steps[:limit], not of_all and len(looked_at) < len(numbers)
    last = shown[-1] if shown else numbers[0] + 1 if steps else min(looked_at, default=0)
    earlier = last if has_more or len(shown) < len(steps) else None
    return Steps(name, tx.now(), [one for one in rows if one.step in shown], workers, earlier, recorded(tx, name))


def _of_one(drawn: Drawn, steps: Set[int], worker: str | None) -> list[StepRow]:
    """Return these steps with the groups of one worker only, and the reward of others' groups of the same tasks; with
    all groups if it is None."""
    rows = []
    for key, batches in drawn.items():
        if key.step in steps and (mine := only(batches, worker=worker)):
            parts = by_worker([tabulate(member for _, member in groups_of(batches))]) if worker is not None else []
            others = next((part.others for part in parts if part.name == worker), None)
            rows.append(replace(StepRow.of(key, mine), others=others))
    return rows


def _with_changes(found: Sequence[StepRow]) -> list[StepRow]:
    """Return steps, newest first, with the change of each mean reward from the step before in the same run."""
    rows = []
    for place, one in enumerate(found):
        earlier = (other for other in found[place + 1 :] if other.step < one.step and other.restores <= one.restores)
        before = next(earlier, None)
        known = before is not None and one.reward is not None and before.reward is not None
        rows.append(replace(one, change=one.reward - before.reward) if known else one)  # type: ignore[operator, union-attr]
    return rows


def _lower(drawn: Drawn, workers: Workers, steps: Set[int], worker: str | None) -> dict[tuple[int, int], str]:
    """Return a sentence for each of these steps in which something stands out, by step and restores.

    Workers that are worse over the last steps are left out. With a worker, the sentences are about it alone.
    """
    found, others = {}, workers.others_of(tables_of(drawn))
    for key in drawn:
        if key.step in steps:
            one = compare(drawn, others, key)
            if worker is not None:
                one = replace(one, workers=[part for part in one.workers if part.name == worker], others=[])
            if one.stands_out:
                found[key.step, key.restores] = one.verdict(None)
    return found


def neighbours(tx: Transaction, buffer: str, step: int) -> tuple[int | None, int | None]:
    """Return the nearest train steps with draws before and after a step."""
    return next(iter(list_steps(tx, buffer, before=step, limit=1)), None), next_step(tx, buffer, step)


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
    `now`, its prompt if it exists, and the means of its `annotations`; the step has the means of these. `worst` are
    the answers with the lowest rewards among them. `reward_before` is the mean reward of the `steps_before` steps
    before. `over_steps` has the workers over the last steps up to this one.
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
    over_steps: Workers

    @property
    def stands_out(self) -> bool:
        return bool(self.summary.lower or self.over_steps.worse)

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
        """The mean reward, its range, that of the steps before, and the number of groups without a usable one."""
        one, without = self.summary, sum(group["reward"] is None for group in self.groups)
        unusable = f"no usable reward in {without} of {units.number_of(len(self.groups), 'group')}" if without else ""
        if one.reward is None:
            return unusable
        text = f"{one.reward:.3f} ({one.min_reward:.3f} to {one.max_reward:.3f})"
        if self.reward_before is not None:
            side, moved = "below" if one.reward < self.reward_before else "above", abs(one.reward - self.reward_before)
            steps = "step" if self.steps_before == 1 else f"{self.steps_before} steps"
            compared = "as in" if round(moved, 3) == 0 else f"{moved:.3f} {side}"
            text += f", {compared} the {steps} before ({self.reward_before:.3f})"
        return f"{text}; {unusable}" if unusable else text


def read_step(
    tx: Transaction, buffer: str, step: int, worst: int, *, task: str | None = None, worker: str | None = None
) -> list[Step]:
    """Return a train step for each run that trained on it, last run first, with the `worst` answers of each.

    With a task, all is about that task. With a worker, the groups and answers are its own; it is still compared with
    the other workers.
    """
    workers, drawn = read_workers(tx, buffer, before=step + 1, task=task, also={step})
    keys = [key for key in drawn if key.step == step and only(drawn[key], worker=worker)]
    return [_step(tx, buffer, drawn, workers, key, worst, worker) for key in keys]


_PROMPTS = "SELECT uid, prompt FROM groups WHERE uid {in:uids}"
_ANSWERS = "SELECT uid, position, worker, prompt, reward, response FROM rollouts WHERE uid {in:uids}"


def _step(
    tx: Transaction,
    buffer: str,
    drawn: Drawn,
    over_steps: Workers,
    key: StepKey,
    worst: int,
    worker: str | None,
) -> Step:
    batches, tables = drawn[key] if worker is None else only(drawn[key], worker=worker), tables_of(drawn)
    compared, rest = compare(drawn, tables, key), compare(drawn, over_steps.others_of(tables), key)
    before = compared.before if worker is None else None  # it is that of all workers
    summary = replace(StepRow.of(key, batches), lower=rest.verdict(None) if rest.stands_out else "")
    reward, besides = StepRow.of(key, drawn[key]).reward, bool(over_steps.worse)
    in_step = replace(rest, before=compared.before).verdict(reward, besides=besides)
    noted, places = annotations_of(tx, batches), whereabouts(tx, batches)
    members = sorted(groups_of(batches), key=by_reward)
    stored = [one.uid for _, one in members if places[one.uid] != GONE]
    prompts = {row["uid"]: row["prompt"] for row in tx.rows(_PROMPTS, uids=stored)}
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
        "; ".join([*map(str, over_steps.worse), in_step]),
        before,
        compared.steps_before,
        compared.workers,
        compared.tasks,
        [replace(one, members=()) for one in batches],
        groups,
        {name: mean(one["annotations"].get(name) for one in groups) for name in names},
        _lowest(tx, buffer, stored, worst) if worst and stored else [],
        over_steps,
    )


def _lowest(tx: Transaction, buffer: str, uids: Sequence[int], most: int) -> list[Answer]:
    """Return the rollouts with the lowest rewards among these groups."""
    chosen = extreme_rollouts(tx, buffer, None, most, worst=True, among=uids)
    found = {(row["uid"], row["position"]): row for row in tx.rows(_ANSWERS, uids=[uid for uid, _ in chosen])}
    return [Answer(**found[place]) for place in chosen]


def no_groups(
    tx: Transaction,
    buffer: str,
    which: str,
    task: str | None,
    worker: str | None,
    *,
    step: int | None = None,
    before: int | None = None,
    since: int | None = None,
) -> str:
    """Return a sentence for a step, or for those from `since` on, without recorded draws, or without groups of a task
    and a worker. `which` names them."""
    steps = [step] if step is not None else list_steps(tx, buffer, before=before)
    steps = [one for one in steps if since is None or one >= since]
    members = [one for of in batches_of_steps(tx, buffer, steps, members=True).values() for _, one in groups_of(of)]
    if members and (task is not None or worker is not None):
        for what, given, field in (("task", task, "task_name"), ("worker", worker, "worker")):
            names = {str(getattr(one, field) or "") for one in members}
            if given is not None and given not in names:
                known = listed(sorted(names - {""}))
                return f"no group of {what} {named(given)} was drawn {which}; there are those of {known}"
        if worker is None:
            return f"no group of task {named(task or '')} was drawn {which}"
        return f"{named(worker)} made no group of {named(task or '')} that was drawn {which}"
    return _no_draw(recorded(tx, buffer), which)


def _no_draw(known: Recorded, which: str) -> str:
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
