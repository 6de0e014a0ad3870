"""Repairs of texts, and of groups whose payloads are damaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select, update

from replaybuf.codec.tails import joined, read_tails
from replaybuf.codec.texts import Texts
from replaybuf.doctor.check_payloads import BadText, count_of, reasons_of, set_aside_already, some_of, unreadable
from replaybuf.doctor.findings import CheckContext
from replaybuf.doctor.mend_groups import set_groups_aside
from replaybuf.errors import DecodeError
from replaybuf.rollouts.marks import Marks
from replaybuf.rollouts.outline import outline, prompt_preview
from replaybuf.rollouts.statuses import Status
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.group_payloads import AS_DICTS
from replaybuf.storage.sql.schema.tables import group, lane, payload
from replaybuf.storage.sql.statements.rows import uid_in

#: Replacements of texts where the payload can't be read either.
_NOTHING: dict[str, Any] = {"marks": {"oldest": [], "newest": [], "reward": []}, "outline": [], "prompt": None}
_MENDED_AT_ONCE = 50


def repair_texts(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Make previews and marks anew from the payload; remove tags, keys and reasons that can't be read.

    Groups whose payload can't be read either are set aside. Raises PayloadStoreError.
    """
    bad, reasons = list(unreadable(tx)), {}
    for one in bad:
        value, reason = _made_anew(tx, one)
        table = group if one.table == "rb_group" else payload
        tx.execute(update(table).where(table.c.uid == one.uid).values({one.column: value}))
        if reason:
            reasons[one.uid] = reason
    return [f"mended texts of {count_of(bad)}: {some_of(bad)}", *set_groups_aside(tx, reasons)] if bad else []


def _made_anew(tx: Transaction, bad: BadText) -> tuple[Any, str | None]:
    """Return the replacement of a text, and why its group must be set aside, if it must."""
    if bad.column not in _NOTHING:
        return None, None
    status, data = _status_and_payload(tx, bad.uid)
    [tail] = read_tails([data], tx.places())
    try:
        rollouts = AS_DICTS.decode(joined(data, tail))
    except DecodeError as error:
        return _NOTHING[bad.column], str(error)
    if bad.column == "marks":
        return marks_anew(rollouts, status).to_json(), None
    kind = AS_DICTS.rollout_type
    if bad.column == "prompt":
        return prompt_preview(rollouts, kind), None
    return outline(rollouts, kind, Texts(data).find), None


def marks_anew(rollouts: Sequence[Any], status: str) -> Marks:
    """Return the marks of a group, rebuilt from its rollouts. In an EXPIRED group all rollouts count as expired."""
    if status != Status.EXPIRED:
        return Marks.of(rollouts, AS_DICTS.rollout_type)
    nothing: list[Any] = [None] * len(rollouts)
    staleness = [int(rollout.get("seq_staleness", 0) or 0) for rollout in rollouts]
    return Marks(nothing, nothing, nothing, [True] * len(rollouts), staleness)


def _status_and_payload(tx: Transaction, uid: int) -> tuple[str, bytes]:
    of = payload.outerjoin(group, group.c.uid == payload.c.uid).outerjoin(lane, lane.c.id == group.c.lane)
    row = tx.execute(select(lane.c.status, payload.c.data).select_from(of).where(payload.c.uid == uid)).first()
    return (row.status or "", row.data) if row else ("", b"")


def repair_checksums(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Set aside groups that were found damaged, and still are."""
    left = sorted(context.damaged.keys() - set_aside_already(tx, context.damaged))
    reasons: dict[int, str] = {}
    for start in range(0, len(left), _MENDED_AT_ONCE):
        query = select(group.c.uid, payload.c.data).outerjoin_from(group, payload, payload.c.uid == group.c.uid)
        rows = tx.execute(query.where(uid_in(tx, left[start : start + _MENDED_AT_ONCE]))).all()
        reasons |= reasons_of(rows, tx.places(), context.out_of_reach)
    return set_groups_aside(tx, reasons)
