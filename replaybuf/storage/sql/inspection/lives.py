"""The life of a group in sentences: its put, draws, leases, events, and where it is now."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from replaybuf.common import units
from replaybuf.common.checks import INT64
from replaybuf.common.units import time_of
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.group_metadata import buffers_of, read_metadata
from replaybuf.storage.sql.inspection.run_records import Batch, batches_with
from replaybuf.storage.sql.statements.buffer_facts import last_uid
from replaybuf.values.rollouts.statuses import Status


@dataclass(frozen=True, slots=True)
class Life:
    """The recorded history of a group.

    The facts of its put are from its row or, after its removal, from its first draw; without one only the buffer is
    known. `row` is its row in the view `groups` with its trained step, None after its removal. `replaces` are the
    groups that its put replaced, as far as recorded (`schema.tables`), or the rollouts that filled it; `replaced_by`
    are the groups that replaced it. An event has the time `at`, `kind`, `worker`, `step` and `detail`.
    """

    uid: int
    buffer: str
    task_name: str
    created_at: datetime | None
    worker: str | None
    train_step: int | None
    oldest_model_step: int | None
    reward: float | None
    row: dict[str, Any] | None
    draws: Sequence[Batch]
    events: Sequence[dict[str, Any]]
    replaces: Sequence[int]
    replaced_by: Sequence[int]
    now: datetime
    several: bool


def life_of(tx: Transaction, uid: int) -> Life | None:
    """Return the history of a group of any buffer, or None when nothing is recorded of it."""
    if uid not in INT64:
        return None
    current, buffers = next(iter(read_metadata(tx, [uid])), None), buffers_of(tx)
    for buffer in [current["buffer"]] if current else buffers:
        draws = batches_with(tx, buffer, uid)
        events = tx.rows(_EVENTS[tx.dialect.name].format(uid=int(uid)), buffer=buffer)
        recorded_events = [row | {"at": time_of(row["at"])} for row in events]
        replaced_by = tx.values(_SUCCESSORS[tx.dialect.name].format(uid=int(uid)), buffer=buffer)
        if current or draws or recorded_events or replaced_by:
            break
    else:
        return None
    made_from = tx.value("SELECT made_from FROM rb_group WHERE uid = :uid", uid=uid)
    replaces = sorted(json.loads(made_from) if isinstance(made_from, str) else made_from or ())
    history = (current, draws, recorded_events, replaces, replaced_by, tx.now(), len(buffers) > 1)
    task, created_at, worker, train_step, oldest, reward = _origin(tx, current, draws)
    return Life(uid, buffer, task, created_at, worker, train_step, oldest, reward, *history)


_EVENT = "SELECT happened_at AS at, kind, worker, step, detail FROM rb_event e WHERE buffer = :buffer AND {there}"
_EVENTS = {
    "sqlite": _EVENT.format(there="EXISTS (SELECT 1 FROM json_each(e.uids) WHERE value = {uid}) ORDER BY id"),
    "postgresql": _EVENT.format(there="e.uids @> '{uid}' ORDER BY id"),
}
# A replacing group has a higher uid than the replaced one.
_REPLACING = """
SELECT g.uid AS uid FROM rb_group g JOIN rb_lane l ON l.id = g.lane
WHERE g.uid > {{uid}} AND g.made_from IS NOT NULL AND l.buffer = :buffer AND {there} ORDER BY g.uid"""
_SUCCESSORS = {
    "sqlite": _REPLACING.format(there="EXISTS (SELECT 1 FROM json_each(g.made_from) WHERE value = {uid})"),
    "postgresql": _REPLACING.format(there="g.made_from @> '{uid}'"),
}


_Origin = tuple[str, datetime | None, str | None, int | None, int | None, float | None]


def _origin(tx: Transaction, row: dict[str, Any] | None, draws: Sequence[Batch]) -> _Origin:
    """Return the task, time, worker, train step, oldest model step and reward of a group's put, as far as known."""
    if row is not None:
        oldest = tx.value("SELECT oldest_step FROM rb_group WHERE uid = :uid", uid=row["uid"])
        return row["task_name"], row["created_at"], row["worker"], row["put_step"], oldest, row["reward"]
    if not draws:
        return "", None, None, None, None, None
    [group] = draws[0].members
    return group.task_name, group.created_at, group.worker, None, group.oldest_model_step, group.reward


# The timeline


def timeline(life: Life) -> list[dict[str, Any]]:
    """Return a group's history in order: `at`, `what`, `worker`, `step`, `detail`, and the `batch` of a draw."""
    rows = []
    if life.created_at is not None:
        rows.append(_row(life.created_at, "put", life.worker, life.train_step, None))
    for draw in life.draws:
        label = "taken" if draw.lease is None else "leased"
        rows.append(_row(draw.taken_at, label, draw.worker, draw.step, _detail(draw)) | {"batch": draw.id})
    for event in life.events:
        rows.append(_row(event["at"], event["kind"].replace("_", " "), event["worker"], event["step"], event["detail"]))
    if life.row is not None and life.row["status"] == Status.ARCHIVED:
        at = max([life.row["archived_at"], *(draw.taken_at for draw in life.draws)])  # a draw is recorded afterwards
        rows.append(_row(at, "consumed", None, life.row["trained_step"], "archived"))
    rows.sort(key=lambda row: row["at"].timestamp() if row["at"] else 0.0)
    return rows


def _row(at: datetime | None, label: str, worker: str | None, step: int | None, detail: str | None) -> dict[str, Any]:
    return {"at": at, "what": label, "worker": worker, "step": step, "detail": detail, "batch": None}


def _detail(draw: Batch) -> str:
    member = draw.members[0]
    facts = [f"batch {draw.id} of {units.number_of(draw.groups, 'group')}"]
    if member.staleness is not None:
        facts.append(stale_text(member.staleness))
    if draw.lease is not None:
        facts.append(f"{draw.settled} of them consumed")
    return ", ".join(facts)


def stale_text(staleness: int) -> str:
    return f"{staleness} step{'' if staleness == 1 else 's'} stale"


def is_settled(draw: Batch) -> bool:
    """Return whether all groups of the draw were consumed."""
    return draw.lease is None or draw.settled == draw.groups


def uids_text(uids: Sequence[int]) -> str:
    """Return `group 1, group 2`."""
    return ", ".join(f"group {uid}" for uid in uids)


def place_of(life: Life) -> str:
    """Return where a group is, or how it was removed."""
    row = life.row
    if row is not None:
        if row["leased_until"] is not None:
            return f"leased by {row['leased_by'] or 'somebody'}, {units.lease(row['leased_until'], life.now)}"
        trained = "" if row["trained_step"] is None else f", trained on at step {row['trained_step']}"
        return f"{row['status']}{trained}, {stale_text(row['staleness'])}"
    if life.replaced_by:
        return f"gone: replaced by {uids_text(life.replaced_by)}"
    for draw in reversed(life.draws):
        if is_settled(draw):
            step = "" if draw.step is None else f" at step {draw.step}"
            return f"gone: trained on{step} by {draw.worker or 'somebody'}"
    return f"gone: {life.events[-1]['kind']}" if life.events else "gone"


def why_missing(tx: Transaction, uid: int) -> str:
    """Return why a group doesn't exist: how it was removed, or that there never was one."""
    life = life_of(tx, uid)
    return why_unknown(tx, uid) if life is None else place_of(life)


def why_unknown(tx: Transaction, uid: int) -> str:
    """Return why nothing is known of a group."""
    last = last_uid(tx)
    if not 1 <= uid <= last:
        return f"uids go from 1 to {last} here" if last else "there never was one here"
    return (
        "nothing is recorded of it: it left other than by a draw (expired, evicted, deleted, replaced), or its draw is "
        "no longer recorded"
    )
