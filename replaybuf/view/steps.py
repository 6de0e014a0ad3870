"""Train steps: what each was trained on, by whom it was made, and what stands out."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from replaybuf.common import units
from replaybuf.common.units import listed, named
from replaybuf.rules.comparison import Part, by_worker, mean, tabulate
from replaybuf.storage.sql.inspection.group_metadata import choose, extreme_rollouts, tasks_of
from replaybuf.storage.sql.inspection.reader import Transaction
from replaybuf.storage.sql.inspection.run_records import (
    GONE,
    Batch,
    Recorded,
    StepKey,
    annotations_of,
    batches_of_steps,
    list_steps,
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

    `earlier` is the step before which there are more; `nothing` says why there is none.
    """

    now: datetime
    rows: list[StepRow]
    workers: Workers
    earlier: int | None
    known: Recorded
    nothing: str


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
    """Return the last `limit` steps of a buffer before `before`, newest first, or what one task or worker has of them.

    What stands out is looked for in the newest of them, with up to `judged` groups; of one task or worker, there are no
    more than these, unless all are asked for.
    """
    name, unfiltered = choose(tx, buffer), task is None and worker is None
    numbers = list_steps(tx, name, before=before, limit=None if limit is None else limit + 1)
    rows = [StepRow.of(key, batches) for key, batches in batches_of_steps(tx, name, numbers[:limit]).items()]
    looked_at, groups = set[int](), 0
    for row in rows:
        groups += row.groups
        if groups > judged and looked_at and (unfiltered or limit is not None):
            break
        looked_at.add(row.step)
    workers, drawn = read_workers(tx, name, before=before, task=task, also=looked_at)
    if not unfiltered:
        rows = _rows_of_worker(drawn, looked_at, worker)
    lower = _step_sentences(drawn, workers, looked_at, worker)
    rows = [replace(row, lower=lower.get((row.step, row.restores), "")) for row in rows]
    covered = numbers[:limit] if unfiltered else looked_at
    earlier = min(covered, default=numbers[0] + 1) if len(covered) < len(numbers) else None
    nothing = ""
    if not rows and not (unfiltered and earlier is not None):
        phrase = "for a step" if before is None else f"for a step before {before}"
        phrase += "" if earlier is None else f" from {earlier} on"
        nothing = no_groups(tx, name, phrase, task, worker)
    return Steps(tx.now(), rows, workers, earlier, recorded(tx, name), nothing)


def _rows_of_worker(drawn: Drawn, steps: Set[int], worker: str | None) -> list[StepRow]:
    """Return these steps with the groups of one worker only, and the reward of others' groups of the same tasks; with
    all groups if it is None."""
    rows = []
    for key, batches in drawn.items():
        if key.step in steps and (part := only(batches, worker=worker)):
            parts = by_worker([tabulate(member for _, member in groups_of(batches))]) if worker is not None else []
            others = next((part.others for part in parts if part.name == worker), None)
            rows.append(replace(StepRow.of(key, part), others=others))
    return rows


def _step_sentences(drawn: Drawn, workers: Workers, steps: Set[int], worker: str | None) -> dict[tuple[int, int], str]:
    """Return a sentence for each of these steps in which something stands out, by step and restores.

    Workers that are worse over the last steps are left out. With a worker, the sentences are about it alone.
    """
    sentences, everybody = {}, tables_of(drawn)
    tables = workers.others_of(everybody)
    for key in drawn:
        if key.step in steps:
            result = compare(drawn, tables, key, everybody)
            if worker is not None:
                own = [part for part in result.workers if part.name == worker]
                result = replace(result, workers=own, others=[], together=None)
            if result.stands_out:
                sentences[key.step, key.restores] = result.verdict()
    return sentences


# One step


@dataclass(frozen=True, slots=True)
class Step:
    """A train step in one run: a sentence about what stands out, its groups by worker and task, and its draws.

    `groups` are rows of those trained on, each once, lowest reward first: the fields of `Member`, its draw, where it is
    `now`, its prompt if it exists, and the means of its `annotations`; the step has the means of these. `worst` are
    the answers with the lowest rewards among them, as rows of the view `rollouts`. `reward_before` is the mean reward
    of the steps before. `over_steps` has the workers over the last steps up to this one.
    """

    summary: StepRow
    verdict: str
    reward_before: float | None
    workers: list[Part]
    tasks: list[Part]
    batches: list[Batch]
    groups: list[dict[str, Any]]
    annotations: dict[str, float | None]
    worst: list[dict[str, Any]]
    over_steps: Workers

    @property
    def stands_out(self) -> bool:
        return bool(self.summary.lower or self.over_steps.worse)

    @property
    def title(self) -> str:
        """Its step, the run if there are several, and the number of its groups and draws."""
        row = self.summary
        run = ", before a restore undid it" if row.undone else f", after restore {row.restores}" if row.resumed else ""
        groups, draws = units.number_of(row.groups, "group"), units.number_of(row.batches, "draw")
        return f"step {row.step}{run}: {groups} in {draws}"

    def facts(self, now: datetime, time: Callable[[datetime], str] = units.iso) -> dict[str, str]:
        """Return the known facts of the step as texts, by name; "" for unknown ones."""
        row = self.summary
        average, largest = units.number(row.staleness, 1), units.number(row.max_staleness)
        by = ", ".join(row.taken_by) or "nobody with a name"
        consumed = "" if row.consumed is None else f"{units.number(row.settled)} of {units.number(row.groups)}"
        return {
            "taken": f"{time(row.first_at)} ({units.ago(row.first_at, now)}) by {by}",
            "consumed": consumed,
            "reward": self.reward_text,
            "staleness": "" if row.staleness is None else f"mean {average}, max {largest}",
            "weights": "" if row.oldest_model_step is None else f"of {row.weights}",
            "means": units.annotated(self.annotations),
        }

    @property
    def gone(self) -> int:
        """The number of groups that exist no more, nor their texts."""
        return sum(group["now"] == GONE for group in self.groups)

    @property
    def reward_text(self) -> str:
        """The mean reward, its range, that of the steps before, and the number of groups without a usable one."""
        row, without = self.summary, sum(group["reward"] is None for group in self.groups)
        unusable = f"no usable reward in {without} of {units.number_of(len(self.groups), 'group')}" if without else ""
        if row.reward is None:
            return unusable
        text = f"{row.reward:.3f} ({row.min_reward:.3f} to {row.max_reward:.3f})"
        if self.reward_before is not None:
            text += f", {self.reward_before:.3f} in the steps before"
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
    compared, others = compare(drawn, tables, key), compare(drawn, over_steps.others_of(tables), key, tables)
    before = compared.before if worker is None else None  # it is that of all workers
    summary = replace(StepRow.of(key, batches), lower=others.verdict() if others.stands_out else "")
    in_step = others.verdict(besides=bool(over_steps.worse))
    noted, places = annotations_of(tx, batches), whereabouts(tx, batches)
    members = sorted(groups_of(batches), key=by_reward)
    stored = [member.uid for _, member in members if places[member.uid] != GONE]
    prompts = {row["uid"]: row["prompt"] for row in tx.rows(_PROMPTS, uids=stored)}
    groups = [
        {
            "step": key.step,
            "restores": key.restores,
            "batch": batch.id,
            "taken_by": batch.worker,
            **asdict(member),
            "now": places[member.uid],
            "prompt": prompts.get(member.uid),
            "annotations": noted.get((batch.id, member.uid), {}),
        }
        for batch, member in members
    ]
    names = dict.fromkeys(name for group in groups for name in group["annotations"])
    return Step(
        summary,
        "; ".join([*map(str, over_steps.worse), in_step]),
        before,
        compared.workers,
        compared.tasks,
        [replace(batch, members=()) for batch in batches],
        groups,
        {name: mean(group["annotations"].get(name) for group in groups) for name in names},
        _lowest_answers(tx, stored, worst) if worst and stored else [],
        over_steps,
    )


def _lowest_answers(tx: Transaction, uids: Sequence[int], limit: int) -> list[dict[str, Any]]:
    """Return the rollouts with the lowest rewards among these groups."""
    chosen = extreme_rollouts(tx, uids, limit, worst=True)
    rows = {(row["uid"], row["position"]): row for row in tx.rows(_ANSWERS, uids=[uid for uid, *_ in chosen])}
    return [rows[uid, position] for uid, position, _ in chosen]


_WORKERS = "SELECT DISTINCT name FROM rb_worker WHERE buffer = :buffer ORDER BY name"
_MOST_NAMED = 10


def no_groups(tx: Transaction, buffer: str, phrase: str, task: str | None = None, worker: str | None = None) -> str:
    """Return a sentence for steps without recorded draws, or without groups of a task and a worker.

    `phrase` names the steps.
    """
    records = recorded(tx, buffer)
    if records.last is not None:
        steps = f"step {records.first}" if records.first == records.last else f"steps {records.first} to {records.last}"
        filters = (("task", task), ("worker", worker))
        chosen = [f" of {kind} {named(name)}" for kind, name in filters if name is not None]
        missing = f"group{''.join(chosen)} was drawn {phrase}" if chosen else f"draw {phrase} is recorded"
        existing = {"task": tasks_of(tx, buffer), "worker": tx.values(_WORKERS, buffer=buffer)}
        unknown = [kind for kind, name in filters if name is not None and name not in existing[kind]]
        names = [f"; the {kind}s are {listed(existing[kind], _MOST_NAMED)}" for kind in unknown if existing[kind]]
        return f"no {missing}; the recorded draws are for {steps}{''.join(names)}"
    if records.batches:
        return (
            f"of {records.batches:,} recorded draws none names its train step: pass current_train_step= to "
            "them (train_step= to leased_steps or acknowledge), or refresh the staleness"
        )
    return "no draw is recorded: nothing was taken yet, or with history=0"
