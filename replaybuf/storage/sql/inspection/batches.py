"""What was drawn for which train step, from the rows that draws leave (`schema.records`).

After a restore a run may train on a step again: the draws before and after it are told apart by the number of restores
before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Select, func, or_, select

from replaybuf.rollouts.rollout import Status
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.records import batch
from replaybuf.storage.sql.schema.tables import buffer, group, lane
from replaybuf.storage.sql.statements.columns import uid_in

#: The steps before one, that its rewards are compared with.
STEPS_BEFORE = 10
_CHUNK = 1000


@dataclass(frozen=True, slots=True)
class Member:
    """A group as it was drawn: its mean reward, its staleness in train steps, the oldest weights in it."""

    uid: int
    task_name: str
    worker: str | None
    reward: float | None
    staleness: int | None
    oldest_model_step: int | None
    created_at: datetime | None


@dataclass(frozen=True, slots=True)
class Batch:
    """A draw by `worker` for a train step. `settled` of its groups were consumed; the others are leased, or came back.

    `reward` and `staleness` are means of its groups; `lease` is the token, None for a draw for good.
    """

    id: int
    taken_at: datetime
    restores: int
    step: int | None
    status: str
    worker: str | None
    lease: int | None
    groups: int
    settled: int
    reward: float | None
    min_reward: float | None
    max_reward: float | None
    staleness: float | None
    max_staleness: int | None
    oldest_model_step: int | None
    newest_model_step: int | None
    members: Sequence[Member] = ()


@dataclass(frozen=True, slots=True)
class StepKey:
    """A train step in the run after so many restores; `undone` if a later restore went back to before it."""

    step: int
    restores: int
    undone: bool = False


@dataclass(frozen=True, slots=True)
class Recorded:
    """What is known of a buffer's draws: their number, how many name no train step, and the first and last that do."""

    batches: int
    without_step: int
    first: int | None
    last: int | None


_NAMES = ("id", "taken_at", "step", "status", "worker", "lease", "groups", "settled", "reward", "min_reward")
_MORE = ("max_reward", "staleness", "max_staleness")
_COLUMNS = [
    *(batch.c[name] for name in (*_NAMES, *_MORE)),
    batch.c.epoch.label("restores"),
    batch.c.oldest_step.label("oldest_model_step"),
    batch.c.newest_step.label("newest_model_step"),
]


def recorded(tx: Transaction, name: str) -> Recorded:
    """Return what is known of the draws of a buffer."""
    of_buffer = batch.c.buffer == name
    counted = select(func.count(), func.count(batch.c.step), func.min(batch.c.step), func.max(batch.c.step))
    count, with_step, first, last = tx.execute(counted.where(of_buffer)).one()
    return Recorded(count, count - with_step, first, last)


def list_steps(tx: Transaction, name: str, *, before: int | None = None, limit: int | None = None) -> list[int]:
    """Return the train steps of a buffer that were drawn for, newest first, `before` one of them."""
    steps = select(batch.c.step).where(batch.c.buffer == name, batch.c.step.is_not(None)).distinct()
    if before is not None:
        steps = steps.where(batch.c.step < before)
    return list(tx.execute(steps.order_by(batch.c.step.desc()).limit(limit)).scalars())


def batches_of_steps(
    tx: Transaction, name: str, steps: Sequence[int], *, members: bool = False
) -> dict[StepKey, list[Batch]]:
    """Return the draws for train steps of a buffer, newest step first, each in the order of its draws."""
    found: dict[StepKey, list[Batch]] = {}
    if not steps:
        return found
    undone = _undone(tx, name)
    chosen = _select(members=members).where(batch.c.buffer == name, batch.c.step.between(min(steps), max(steps)))
    wanted = set(steps)
    for one in _read(tx, chosen.order_by(batch.c.step.desc(), batch.c.epoch.desc(), batch.c.id)):
        if one.step in wanted:
            key = StepKey(one.step, one.restores, one.step >= undone.get(one.restores, one.step + 1))
            found.setdefault(key, []).append(one)
    return found


def batches_before(tx: Transaction, name: str, key: StepKey) -> list[Batch]:
    """Return the draws for the steps before one, with their members, as they went before it in its run."""
    steps = list_steps(tx, name, before=key.step, limit=STEPS_BEFORE)
    found: dict[int, list[Batch]] = {}
    for other, batches in batches_of_steps(tx, name, steps, members=True).items():
        if other.restores <= key.restores:
            found.setdefault(other.step, batches)  # the last run that this one goes on from comes first
    return [one for batches in found.values() for one in batches]


def batches_with(tx: Transaction, name: str, uid: int) -> list[Batch]:
    """Return the draws that had a group, with it as their only member, in their order."""
    there = or_(batch.c.groups == 1, tx.dialect.may_begin_one(batch.c.members, uid))
    inside = batch.c.first_uid <= uid, batch.c.last_uid >= uid, there
    chosen = _select(members=True).where(batch.c.buffer == name, *inside).order_by(batch.c.id)
    return [
        replace(one, members=mine)
        for one in _read(tx, chosen)
        if (mine := [member for member in one.members if member.uid == uid])
    ]


def batches_by(tx: Transaction, name: str, worker: str, limit: int) -> list[Batch]:
    """Return the last draws by a worker, newest first."""
    chosen = _select(members=False).where(batch.c.buffer == name, batch.c.worker == worker)
    return _read(tx, chosen.order_by(batch.c.id.desc()).limit(limit))


def whereabouts(tx: Transaction, batches: Iterable[Batch]) -> dict[int, str]:
    """Return where the groups of draws are now, by uid.

    "gone", "leased", "kept" (it may be drawn again), "back" (given back, or its lease was over), or its status, such as
    "archived".
    """
    drawn = {member.uid: one for one in batches for member in one.members}
    uids, found = list(drawn), dict.fromkeys(drawn, "gone")
    columns = group.c.uid, group.c.trained_step, lane.c.status, lane.c.leased
    there = select(*columns).select_from(group.join(lane, lane.c.id == group.c.lane))
    for start in range(0, len(uids), _CHUNK):
        for row in tx.execute(there.where(uid_in(tx, uids[start : start + _CHUNK]))):
            found[row.uid] = _place(row, drawn[row.uid])
    return found


def _place(row: Any, drawn: Batch) -> str:
    if row.leased:
        return "leased"
    if row.status != drawn.status or row.status == Status.ARCHIVED:
        return str(row.status)
    return "back" if row.trained_step is None else "kept"


def moment(seconds: float | None) -> datetime | None:
    """Return a time from seconds since the epoch."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def _undone(tx: Transaction, name: str) -> dict[int, int]:
    """Return for each number of restores the first step that a later restore took back."""
    first = select(batch.c.epoch, func.min(batch.c.step)).where(batch.c.buffer == name).group_by(batch.c.epoch)
    begins = {epoch: step for epoch, step in tx.execute(first) if step is not None}
    restored = tx.execute(select(buffer.c.epoch, buffer.c.restored_step).where(buffer.c.name == name)).first()
    if restored is not None and restored.restored_step is not None:
        begins[restored.epoch] = restored.restored_step + 1
    return {
        epoch: min(step for later, step in begins.items() if later > epoch) for epoch in begins if epoch < max(begins)
    }


def _select(*, members: bool) -> Select[Any]:
    return select(*_COLUMNS, *([batch.c.members] if members else []))


def _read(tx: Transaction, chosen: Select[Any]) -> list[Batch]:
    tasks = {row.id: row.task_name for row in tx.execute(select(lane.c.id, lane.c.task_name))}
    result = []
    for row in tx.execute(chosen).mappings():
        values = {**row, "taken_at": moment(row["taken_at"])}
        values["members"] = [_member(one, tasks) for one in values.get("members", ())]
        result.append(Batch(**values))
    return result


def _member(values: Sequence[Any], tasks: dict[int, str]) -> Member:
    uid, lane_id, worker, reward, staleness, oldest, created_at = values
    return Member(uid, tasks.get(lane_id, ""), worker, reward, staleness, oldest, moment(created_at))
