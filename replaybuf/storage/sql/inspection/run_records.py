"""Records of a run, read: draws for train steps, events, checkpoints, workers, figures of each minute.

Pages are newest first, and read no more rows than they show. After a restore a run may train on a step again: the
number of restores before a draw distinguishes such draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from replaybuf.common.units import time_of
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.group_metadata import check_buffer
from replaybuf.storage.sql.statements.buffer_facts import find_checkpoint as find_checkpoint
from replaybuf.values.rollouts.statuses import Status

_ENDLESS = 2**62
#: The sort column of a view, newest first, where it isn't `id`.
_KEYS = {"batch_groups": "uid", "checkpoints": "created_at", "workers": "last_seen"}


def newest(
    tx: Transaction, view: str, buffer: str | None, size: int, *conditions: str, **values: Any
) -> list[dict[str, Any]]:
    """Return the newest rows of a view, of one buffer or of all, that meet SQL conditions with these parameters.

    Raises InputError when only other buffers exist.
    """
    check_buffer(tx, buffer)
    if buffer is not None:
        conditions, values = (*conditions, "buffer = :buffer"), {**values, "buffer": buffer}
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    statement = f"SELECT * FROM {view} {where} ORDER BY {_KEYS.get(view, 'id')} DESC LIMIT :size"  # noqa: S608
    return tx.rows(statement, size=size, **values)


# Draws

_LAST_BATCHES = """SELECT taken_at, step, groups, reward, min_reward, max_reward, staleness, max_staleness FROM rb_batch
WHERE buffer = coalesce(:buffer, buffer) AND status = 'completed'
ORDER BY id DESC LIMIT :most"""


def last_batches(tx: Transaction, buffer: str | None, most: int) -> list[dict[str, Any]]:
    """Return the step, size, rewards and staleness of the last draws of completed groups, newest first.

    Their times are in seconds since the epoch.
    """
    return tx.rows(_LAST_BATCHES, buffer=buffer, most=most)


# History

_HISTORY = """SELECT buffer, since, data FROM rb_history
WHERE since >= :since AND buffer = coalesce(:buffer, buffer) ORDER BY since"""


def history_of(tx: Transaction, buffer: str | None, since: float) -> list[tuple[str, datetime, Mapping[str, Any]]]:
    """Return the figures of each minute since a time (seconds since the epoch): buffer, time and `tasks`, in order."""
    rows = tx.rows(_HISTORY, buffer=buffer, since=since)
    return [(row["buffer"], datetime.fromtimestamp(row["since"], UTC), row["data"].get("tasks", {})) for row in rows]


# Checkpoints


def read_checkpoints(tx: Transaction, buffer: str | None) -> list[dict[str, Any]]:
    """Return the checkpoints of one buffer or of all, in the order of their creation."""
    rows = newest(tx, "checkpoints", buffer, _ENDLESS)
    return sorted(rows, key=lambda row: (row["buffer"], row["created_at"]))


#: The number of earlier steps that a step's rewards are compared with.
STEPS_BEFORE = 10
#: The place of a group that was removed, with its texts.
GONE = "gone"


@dataclass(frozen=True, slots=True)
class Member:
    """A group as drawn: its mean reward, its staleness in train steps, and its oldest model step."""

    uid: int
    task_name: str
    worker: str | None
    reward: float | None
    staleness: int | None
    oldest_model_step: int | None
    created_at: datetime | None


@dataclass(frozen=True, slots=True)
class Batch:
    """A draw by `worker` for a train step. `settled` of its groups were consumed; `back` came back (released, or their
    lease expired); the others are leased.

    `reward` and `staleness` are means over its groups; `lease` is the token, None for a draw without a lease.
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
    back: int = 0

    @property
    def came_back(self) -> bool:
        """Whether all groups came back: nothing was, or will be, trained on the draw."""
        return self.back == self.groups


@dataclass(frozen=True, slots=True)
class StepKey:
    """A train step in the run after this number of restores.

    `resumed`: the run before these restores also drew for steps, so this run continues from a checkpoint.
    `undone`: a later restore returned to a point before the step.
    """

    step: int
    restores: int
    resumed: bool = False
    undone: bool = False


@dataclass(frozen=True, slots=True)
class Recorded:
    """The recorded draws of a buffer, of completed groups or for a train step: their number, the number without a step,
    and the first and last step."""

    batches: int
    without_step: int
    first: int | None
    last: int | None


_SELECT = """
SELECT
    id, taken_at, epoch AS restores, step, status, worker, lease, groups, settled, reward, min_reward, max_reward,
    staleness, max_staleness, oldest_step AS oldest_model_step, newest_step AS newest_model_step
FROM rb_batch WHERE buffer = :buffer AND """
_MEMBERS = """
SELECT p.draw, p.uid, l.task_name, p.worker, p.reward, p.staleness, p.oldest_step, p.created_at
FROM rb_past p LEFT JOIN rb_lane l ON l.id = p.lane WHERE p.draw {in:draws} AND p.draw > 0 ORDER BY p.draw, p.uid"""

# Draws except those whose groups all came back, such as the ones a DataLoader had prefetched at its end.
_DRAWN = """buffer = :buffer AND (settled > 0 OR lease IS NULL
OR lease IN (SELECT lease FROM rb_group WHERE leased_until IS NOT NULL))"""
_RECORDED = f"""
SELECT count(*), count(step), min(step), max(step) FROM rb_batch
WHERE {_DRAWN} AND (step IS NOT NULL OR status = 'completed')"""  # noqa: S608
_STEPS = f"SELECT DISTINCT step FROM rb_batch WHERE {_DRAWN} AND step < :before ORDER BY step DESC LIMIT :most"  # noqa: S608
_LAST_STEP = f"SELECT step FROM rb_batch WHERE {_DRAWN} ORDER BY id DESC LIMIT 1"  # noqa: S608
_HELD_COUNTS = "SELECT lease, count(*) FROM rb_group WHERE leased_until IS NOT NULL GROUP BY lease"
_FIRST_OF_EPOCH = "SELECT epoch, min(step) FROM rb_batch WHERE buffer = :buffer GROUP BY epoch"
_RESTORED_STEPS = "SELECT epoch, restored_step FROM rb_buffer WHERE name = :buffer AND restored_step IS NOT NULL"


def recorded(tx: Transaction, buffer: str) -> Recorded:
    """Return the totals of a buffer's recorded draws."""
    [(count, with_step, first, last)] = tx.tuples(_RECORDED, buffer=buffer)
    return Recorded(count, count - with_step, first, last)


def list_steps(tx: Transaction, buffer: str, *, before: int | None = None, limit: int | None = None) -> list[int]:
    """Return the train steps with draws of a buffer, newest first, up to `limit`, lower than `before`."""
    below, at_most = (_ENDLESS if value is None else max(-_ENDLESS, min(value, _ENDLESS)) for value in (before, limit))
    return tx.values(_STEPS, buffer=buffer, before=below, most=at_most)


def last_step(tx: Transaction, buffer: str) -> int | None:
    """Return the train step of the last draw for one."""
    step: int | None = tx.value(_LAST_STEP, buffer=buffer)
    return step


def batches_of_steps(
    tx: Transaction, buffer: str, steps: Sequence[int], *, members: bool = False
) -> dict[StepKey, list[Batch]]:
    """Return the draws for train steps of a buffer, newest step first, the draws of each in order.

    Draws whose groups all came back are left out, unless the step has no other.
    """
    by_step: dict[StepKey, list[Batch]] = {}
    if not steps:
        return by_step
    runs, requested = _runs(tx, buffer), set(steps)
    condition = "step BETWEEN :first AND :last ORDER BY step DESC, epoch DESC, id"
    values = {"buffer": buffer, "first": min(steps), "last": max(steps)}
    for draw in _read(tx, condition, values, members=members):
        if draw.step in requested:
            undone_from = runs.get(draw.restores)
            undone = undone_from is not None and draw.step >= undone_from
            key = StepKey(draw.step, draw.restores, draw.restores > min(runs, default=draw.restores), undone)
            by_step.setdefault(key, []).append(draw)
    return {key: [draw for draw in draws if not draw.came_back] or draws for key, draws in by_step.items()}


def batches_with(tx: Transaction, buffer: str, uid: int) -> list[Batch]:
    """Return the draws that had a group, in order, with that group as their only member."""
    condition = "id IN (SELECT draw FROM rb_past WHERE uid = :uid AND draw > 0) ORDER BY id"
    return [
        replace(draw, members=own)
        for draw in _read(tx, condition, {"buffer": buffer, "uid": uid}, members=True)
        if (own := [member for member in draw.members if member.uid == uid])
    ]


_ANNOTATIONS = """SELECT batch, uid, name, avg(value) AS value FROM annotations
WHERE batch {in:batches} AND value IS NOT NULL GROUP BY batch, uid, name ORDER BY name"""


def annotations_of(tx: Transaction, batches: Sequence[Batch]) -> dict[tuple[int, int], dict[str, float]]:
    """Return the means of the numeric annotations of each group of these draws, by draw and uid."""
    means: dict[tuple[int, int], dict[str, float]] = {}
    for row in tx.rows(_ANNOTATIONS, batches=[batch.id for batch in batches]):
        means.setdefault((row["batch"], row["uid"]), {})[row["name"]] = row["value"]
    return means


def whereabouts(tx: Transaction, batches: Iterable[Batch]) -> dict[int, str]:
    """Return the current place of each group of these draws, by uid.

    "gone", "leased", "kept" (it may be drawn again), "back" (released, or its lease expired), or its status, such as
    "archived".
    """
    batch_of = {member.uid: batch for batch in batches for member in batch.members}
    present = tx.rows(_PRESENT_GROUPS, uids=list(batch_of))
    return dict.fromkeys(batch_of, GONE) | {row["uid"]: _place(row, batch_of[row["uid"]]) for row in present}


_PRESENT_GROUPS = """
SELECT g.uid AS uid, g.trained_step AS trained_step, l.status AS status, l.leased AS leased
FROM rb_group g JOIN rb_lane l ON l.id = g.lane WHERE g.uid {in:uids}"""


def _place(row: dict[str, Any], batch: Batch) -> str:
    if row["leased"]:
        return "leased"
    if row["status"] != batch.status or row["status"] == Status.ARCHIVED:
        return str(row["status"])
    return "back" if row["trained_step"] is None else "kept"


def _runs(tx: Transaction, buffer: str) -> dict[int, int | None]:
    """Return the runs that drew for a step, by their number of restores: the first step undone by a later restore.

    Empty for a buffer that was never restored.
    """
    restored: dict[int, int] = dict(map(tuple, tx.tuples(_RESTORED_STEPS, buffer=buffer)))
    if not restored:
        return {}
    draws = {epoch: step for epoch, step in tx.tuples(_FIRST_OF_EPOCH, buffer=buffer) if step is not None}
    starts = draws | {epoch: step + 1 for epoch, step in restored.items()}
    return {epoch: min((step for other, step in starts.items() if other > epoch), default=None) for epoch in draws}


def _read(tx: Transaction, where: str, values: dict[str, Any], *, members: bool) -> list[Batch]:
    rows = list(tx.rows(_SELECT + where, **values))
    held: dict[int, int] = dict(map(tuple, tx.tuples(_HELD_COUNTS)))
    drawn: dict[int, list[Member]] = {}
    for record in tx.rows(_MEMBERS, draws=[row["id"] for row in rows]) if members else ():
        number, uid, task, worker, reward, staleness, oldest, created_at = record.values()
        member = Member(uid, task or "", worker, reward, staleness, oldest, time_of(created_at))
        drawn.setdefault(number, []).append(member)
    batches = []
    for row in rows:
        back = 0 if row["lease"] is None else row["groups"] - row["settled"] - held.get(row["lease"], 0)
        facts = {**row, "taken_at": time_of(row["taken_at"]), "members": drawn.get(row["id"], ()), "back": max(0, back)}
        batches.append(Batch(**facts))
    return batches
