"""Checks of the texts of a SQLite file. (PostgreSQL doesn't accept any that can't be read.)

A damaged page may leave a text that is no longer UTF-8 or JSON: every query that reads it then fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pydantic_core import from_json
from sqlalchemy import select, update

from replaybuf.codec.payload import Texts
from replaybuf.codec.stored import joined, read_tails
from replaybuf.doctor.check_groups import set_groups_aside
from replaybuf.doctor.findings import Check, CheckContext, Finding, fine, groups, repairable
from replaybuf.errors import DecodeError
from replaybuf.rollouts.marks import Marks
from replaybuf.rollouts.outline import outline, prompt_preview
from replaybuf.rollouts.statuses import Status
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.group_payloads import AS_DICTS, read_places
from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.storage.sql.schema.tables import group, lane, payload
from replaybuf.units import some

_TEXTS = "texts"

#: The text columns by table, and whether they are JSON.
_COLUMNS = {
    "rb_group": {"marks": True, "tags": True, "scoped_key": True, "error": False},
    "rb_payload": {"outline": True, "prompt": False},
}
#: Their replacements where the payload can't be read either.
_NOTHING: dict[str, Any] = {"marks": {"oldest": [], "newest": [], "reward": []}, "outline": [], "prompt": None}


class BadText(NamedTuple):
    """A text of a group that can't be read."""

    uid: int
    table: str
    column: str


def _unreadable(tx: ReadTransaction) -> Iterator[BadText]:
    """Yield the texts that aren't UTF-8, or not the JSON that they should be."""
    for table, columns in _COLUMNS.items():
        casts = ", ".join(f"CAST({name} AS BLOB)" for name in columns)  # the raw bytes
        for uid, *values in tx.table(f"SELECT uid, {casts} FROM {table} ORDER BY uid")[1]:  # noqa: S608
            for (name, is_json), value in zip(columns.items(), values, strict=True):
                if value is not None and not _is_readable(value, is_json=is_json):
                    yield BadText(uid, table, name)


def _is_readable(value: bytes, *, is_json: bool) -> bool:
    try:
        if is_json:
            from_json(value)
        else:
            value.decode()
    except ValueError:
        return False
    return True


def find_texts(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether tags, marks, keys, previews and reasons are valid texts, and valid JSON where they should be."""
    bad = list(_unreadable(tx))
    if not bad:
        return [fine(_TEXTS, "all can be read")]
    return [repairable(_TEXTS, f"texts of {_count(bad)} are damaged, and queries that meet them fail: {_some(bad)}")]


def repair_texts(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Make previews and marks anew from the payload; remove tags, keys and reasons that can't be read.

    Groups whose payload can't be read either are set aside. Raises PayloadStoreError.
    """
    bad, reasons = list(_unreadable(tx)), {}
    for one in bad:
        value, reason = _made_anew(tx, one)
        table = group if one.table == "rb_group" else payload
        tx.execute(update(table).where(table.c.uid == one.uid).values({one.column: value}))
        if reason:
            reasons[one.uid] = reason
    return [f"mended texts of {_count(bad)}: {_some(bad)}", *set_groups_aside(tx, reasons)] if bad else []


def _made_anew(tx: Transaction, bad: BadText) -> tuple[Any, str | None]:
    """Return the replacement of a text, and why its group must be set aside, if it must."""
    if bad.column not in _NOTHING:
        return None, None
    status, data = _status_and_payload(tx, bad.uid)
    [tail] = read_tails([data], read_places(tx))
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


def _count(bad: Sequence[BadText]) -> str:
    return groups(len({one.uid for one in bad}))


def _some(bad: Sequence[BadText]) -> str:
    return some([f"{one.column} of {one.uid}" for one in bad])


CHECKS = (Check(_TEXTS, find_texts, repair_texts),)
