"""The life of a group in sentences: its put, draws, leases, events, and where it is now."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from replaybuf.common import units
from replaybuf.common.checks import INT64
from replaybuf.common.units import time_of
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.group_metadata import buffers_of, read_metadata
from replaybuf.storage.sql.inspection.run_records import Batch, annotations_of, batches_with
from replaybuf.storage.sql.statements.buffer_facts import last_uid
from replaybuf.values.rollouts.statuses import Status


@dataclass(frozen=True, slots=True)
class Origin:
    """The recorded facts of a group's put, also after its removal: from its row, or a draw's.

    Only the buffer is set for a group known from an event or its successor alone.
    """

    buffer: str
    task_name: str
    created_at: datetime | None
    worker: str | None
    train_step: int | None
    oldest_model_step: int | None
    reward: float | None


@dataclass(frozen=True, slots=True)
class Life:
    """The recorded history of a group.

    `row` is its row in the view `groups` with its trained step, None after its removal. `replaces` are the groups
    that its put replaced, as far as recorded (`schema.tables`), or `made_from` the rollouts that filled it;
    `replaced_by` are the groups whose put replaced it, and `rollout_of` those that were filled by it.
    `annotations` are their means in each draw. An event has the time `at`, `kind`, `worker`, `step` and `detail`.
    """

    uid: int
    origin: Origin
    row: dict[str, Any] | None
    draws: Sequence[Batch]
    annotations: Sequence[Mapping[str, float]]
    events: Sequence[dict[str, Any]]
    replaces: Sequence[int]
    made_from: Sequence[int]
    replaced_by: Sequence[int]
    rollout_of: Sequence[int]
    now: datetime
    several: bool


def life_of(tx: Transaction, uid: int) -> Life | None:
    """Return the history of a group of any buffer, or None when nothing is recorded of it."""
    if uid not in INT64:
        return None
    rows, buffers = tx.rows(_ROW, uid=uid), buffers_of(tx)
    for buffer in [rows[0]["buffer"]] if rows else buffers:
        draws = batches_with(tx, buffer, uid)
        events = tx.rows(_EVENTS[tx.dialect.name].format(uid=int(uid)), buffer=buffer)
        recorded_events = [row | {"at": time_of(row["at"])} for row in events]
        successors = tx.tuples(_SUCCESSORS[tx.dialect.name].format(uid=int(uid)), buffer=buffer)
        if rows or draws or recorded_events or successors:
            break
    else:
        return None
    current = next(iter(read_metadata(tx, [uid])), None)
    made_from = rows[0]["made_from"] if rows else None
    earlier = sorted(json.loads(made_from) if isinstance(made_from, str) else made_from or ())
    replaces, filled_by = ([], earlier) if rows and rows[0]["is_filled"] else (earlier, [])
    origin = _origin(buffer, rows[0] if rows else None, draws)
    by_draw = annotations_of(tx, draws)
    annotated = [by_draw.get((draw.id, uid), {}) for draw in draws]
    replaced_by = [successor for successor, is_filled in successors if not is_filled]
    rollout_of = [successor for successor, is_filled in successors if is_filled]
    related = (replaces, filled_by, replaced_by, rollout_of)
    return Life(uid, origin, current, draws, annotated, recorded_events, *related, tx.now(), len(buffers) > 1)


# The key of a group that was filled is of no task (`name_key`).
_IS_FILLED = """substr(g.scoped_key, 1, 4) = '["",'"""
_ROW = f"""
SELECT
    l.buffer AS buffer, l.task_name AS task_name, g.created_at AS put_at, g.worker AS worker, g.put_step AS put_step,
    g.oldest_step AS oldest_step, g.reward AS reward, g.made_from AS made_from, {_IS_FILLED} AS is_filled
FROM rb_group g JOIN rb_lane l ON l.id = g.lane WHERE g.uid = :uid"""  # noqa: S608
_EVENT = "SELECT happened_at AS at, kind, worker, step, detail FROM rb_event e WHERE buffer = :buffer AND {there}"
_EVENTS = {
    "sqlite": _EVENT.format(there="EXISTS (SELECT 1 FROM json_each(e.uids) WHERE value = {uid}) ORDER BY id"),
    "postgresql": _EVENT.format(there="e.uids @> '{uid}' ORDER BY id"),
}
# A replacing group has a higher uid than the replaced one.
_REPLACING = f"""
SELECT g.uid AS uid, {_IS_FILLED} FROM rb_group g JOIN rb_lane l ON l.id = g.lane
WHERE g.uid > {{{{uid}}}} AND g.made_from IS NOT NULL AND l.buffer = :buffer AND {{there}} ORDER BY g.uid"""  # noqa: S608
_SUCCESSORS = {
    "sqlite": _REPLACING.format(there="EXISTS (SELECT 1 FROM json_each(g.made_from) WHERE value = {uid})"),
    "postgresql": _REPLACING.format(there="g.made_from @> '{uid}'"),
}


def _origin(buffer: str, row: dict[str, Any] | None, draws: Sequence[Batch]) -> Origin:
    if row is not None:
        at, step = time_of(row["put_at"]), row["put_step"]
        return Origin(row["buffer"], row["task_name"], at, row["worker"], step, row["oldest_step"], row["reward"])
    if not draws:
        return Origin(buffer, "", None, None, None, None, None)
    [group] = draws[0].members
    return Origin(buffer, group.task_name, group.created_at, group.worker, None, group.oldest_model_step, group.reward)


# The timeline

#: Texts for kinds of events in a group's history; other kinds are shown by their names.
_KINDS = {"lease_lapsed": "lease over, back"}


def timeline(life: Life) -> list[dict[str, Any]]:
    """Return a group's history in order: `at`, `what`, `worker`, `step`, `detail`, and the `batch` of a draw."""
    put = life.origin
    rows = []
    if put.created_at is not None:
        rows.append(_row(put.created_at, "put", put.worker, put.train_step, None))
    for draw, annotated in zip(life.draws, life.annotations, strict=True):
        label = "taken" if draw.lease is None else "leased"
        rows.append(_row(draw.taken_at, label, draw.worker, draw.step, _detail(draw, annotated)) | {"batch": draw.id})
        if draw.lease is not None and draw.settled == draw.groups:
            rows.append(_row(draw.taken_at, "consumed", draw.worker, draw.step, "its lease was acknowledged since"))
    for event in life.events:
        label = _KINDS.get(event["kind"], event["kind"].replace("_", " "))
        rows.append(_row(event["at"], label, event["worker"], event["step"], event["detail"]))
    if life.row is not None and life.row["status"] == Status.ARCHIVED:
        at = max([life.row["archived_at"], *(draw.taken_at for draw in life.draws)])  # a draw is recorded afterwards
        rows = [row for row in rows if row["what"] != "consumed"]
        rows.append(_row(at, "consumed", None, life.row["trained_step"], "archived"))
    rows.sort(key=lambda row: row["at"].timestamp() if row["at"] else 0.0)
    return rows


def _row(at: datetime | None, label: str, worker: str | None, step: int | None, detail: str | None) -> dict[str, Any]:
    return {"at": at, "what": label, "worker": worker, "step": step, "detail": detail, "batch": None}


def _detail(draw: Batch, annotations: Mapping[str, float]) -> str:
    member = draw.members[0]
    facts = [f"batch {draw.id} of {units.number_of(draw.groups, 'group')}"]
    if member.staleness is not None:
        facts.append(stale_text(member.staleness))
    if draw.lease is not None and draw.settled < draw.groups:
        facts.append(f"{draw.settled} of them consumed")
    return ", ".join([*facts, units.annotated(annotations)] if annotations else facts)


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
    if life.rollout_of:
        return f"gone: now a rollout of {uids_text(life.rollout_of)}"
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
