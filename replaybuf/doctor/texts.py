"""Whether the texts of a SQLite file can be read. (PostgreSQL doesn't take others.)

A damaged page may leave a text that isn't UTF-8 or no JSON any more: every query that meets it fails then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, select, text, update

from replaybuf.codec.payload import Codec
from replaybuf.doctor.finding import Check, Finding, Look, fine, groups, repairable, some
from replaybuf.doctor.groups import put_aside
from replaybuf.doctor.mending import marks_anew
from replaybuf.errors import DecodeError
from replaybuf.rollouts.outline import outline, prompt_preview
from replaybuf.rollouts.rollout_type import RolloutType
from replaybuf.storage.sql.schema.tables import group, lane, payload

_TEXTS = "texts"

#: The columns with texts by table, and whether they are JSON.
_COLUMNS = {
    "rb_group": {"marks": True, "tags": True, "scoped_key": True, "error": False},
    "rb_payload": {"outline": True, "prompt": False},
}
#: What takes their place where the payload can't be read either.
_NOTHING: dict[str, Any] = {"marks": {"oldest": [], "newest": [], "reward": []}, "outline": [], "prompt": None}
_codec = Codec(RolloutType(dict))


class _Bad(NamedTuple):
    uid: int
    table: str
    column: str

    def __str__(self) -> str:
        return f"{self.column} of {self.uid}"


def _unreadable(connection: Connection) -> Iterator[_Bad]:
    for table, columns in _COLUMNS.items():
        casts = ", ".join(f"CAST({name} AS BLOB)" for name in columns)  # whatever is in there, as it is
        for uid, *values in connection.execute(text(f"SELECT uid, {casts} FROM {table} ORDER BY uid")):  # noqa: S608
            for (name, is_json), value in zip(columns.items(), values, strict=True):
                if value is not None and not _is_readable(value, is_json=is_json):
                    yield _Bad(uid, table, name)


def _is_readable(value: bytes, *, is_json: bool) -> bool:
    try:
        decoded = value.decode()
        if is_json:
            json.loads(decoded)
    except ValueError:
        return False
    return True


def look_at_texts(connection: Connection, look: Look) -> Sequence[Finding]:
    """Whether tags, marks, keys, previews and reasons are texts, and JSON where they should be."""
    bad = list(_unreadable(connection))
    if not bad:
        return [fine(_TEXTS, "all can be read")]
    count = groups(len({found.uid for found in bad}))
    return [repairable(_TEXTS, f"texts of {count} are damaged, and queries that meet them fail: {some(bad)}")]


def repair_texts(connection: Connection, look: Look) -> Sequence[str]:
    """Make previews and marks anew from the payload; tags, keys and reasons that can't be read are taken away."""
    done, reasons = [], {}
    for found in list(_unreadable(connection)):
        value, reason = _made_anew(connection, found)
        table = group if found.table == "rb_group" else payload
        change = update(table).where(table.c.uid == found.uid)
        connection.execute(change.values({found.column: value}))
        done.append(found)
        if reason:
            reasons[found.uid] = reason
    if not done:
        return []
    return [
        f"mended texts of {groups(len({found.uid for found in done}))}: {some(done)}",
        *put_aside(connection, reasons),
    ]


def _made_anew(connection: Connection, found: _Bad) -> tuple[Any, str | None]:
    """What takes the place of a text; why its group must be set aside, if it must."""
    if found.column not in _NOTHING:
        return None, None
    status, data = _status_and_payload(connection, found.uid)
    try:
        rollouts = _codec.decode(data)
    except DecodeError as error:
        return _NOTHING[found.column], str(error)
    if found.column == "marks":
        return marks_anew(rollouts, status).to_json(), None
    return outline(rollouts) if found.column == "outline" else prompt_preview(rollouts), None


def _status_and_payload(connection: Connection, uid: int) -> tuple[str, bytes]:
    of = payload.outerjoin(group, group.c.uid == payload.c.uid).outerjoin(lane, lane.c.id == group.c.lane)
    row = connection.execute(select(lane.c.status, payload.c.data).select_from(of).where(payload.c.uid == uid)).first()
    return (row.status or "", row.data) if row else ("", b"")


CHECKS = (Check(_TEXTS, look_at_texts, repair_texts),)
