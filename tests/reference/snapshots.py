"""What a snapshot holds, read from its file; and the same of the model, so that both can be compared."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from replaybuf import ReplayBuffer
from replaybuf.buffer.sync import run
from replaybuf.errors import DecodeError
from replaybuf.rules.policies import Race
from replaybuf.rules.transitions import LaneName, Tally
from replaybuf.storage.decoding import decode_stored
from replaybuf.storage.sql.copies.snapshot_file import SNAPSHOT_FILE
from replaybuf.storage.values import Cursor, StorageItem
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.rollout import Status

_METADATA = [part.name for part in fields(StorageItem) if part.name not in ("item", "probability", "weight")]
_GROUPS = """SELECT g.*, l.task_name, l.status, l.step, p.data
FROM rb_group g JOIN rb_lane l ON l.id = g.lane LEFT JOIN rb_payload p ON p.uid = g.uid ORDER BY g.uid"""


@dataclass(slots=True)
class StoredGroup:
    """A group with its payload, its ticket and sampling key, since when it is set aside, and who expires next."""

    item: StorageItem
    payload: bytes
    ticket: int
    random_key: float | None = None
    archived_at: float | None = None
    due: list[int] = field(default_factory=list)


@dataclass(slots=True)
class BufferState:
    """All that a buffer holds: groups, the next uid and ticket, tallies, races, cursors, train steps."""

    groups: list[StoredGroup]
    next_uid: int
    tallies: Counter[tuple[str, Status, Tally]]
    races: dict[LaneName, Race]
    next_ticket: int
    cursors: list[Cursor]
    steps: dict[LaneName, int]


def held_by(buffer: ReplayBuffer) -> dict[str, Any]:
    """All that a buffer holds, leased groups as if given back, except its next uid; to be compared."""
    return plain_state(read_snapshot(snapshot_of(buffer), buffer.storage.codec))


def snapshot_of(buffer: ReplayBuffer[Any]) -> bytes:
    """The content of a snapshot. Blocks."""
    with TemporaryDirectory() as folder:
        return run(buffer.save(folder)).read_bytes()


def load_snapshot(buffer: ReplayBuffer[Any], state: bytes) -> None:
    """Load the content of a snapshot. Blocks."""
    with TemporaryDirectory() as folder:
        Path(folder, SNAPSHOT_FILE).write_bytes(state)
        run(buffer.resume(folder))


def read_snapshot(data: bytes, codec: Codec) -> BufferState:
    """What is in a snapshot file with this content."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.deserialize(data)
        connection.row_factory = sqlite3.Row
        rows = connection.execute

        lanes = list(rows("SELECT * FROM rb_lane WHERE NOT leased"))
        races = {
            (row["task_name"], Status(row["status"])): Race(
                row["race"], int(row["seed"]), row["clock"], row["idle_clock"]
            )
            for row in lanes
            if row["race"] is not None
        }
        tallies: Counter[tuple[str, Status, Tally]] = Counter()
        for task, status, name, amount in rows(
            "SELECT l.task_name, l.status, t.name, t.amount FROM rb_tally t JOIN rb_lane l ON l.id = t.lane"
            " WHERE t.name <> 'bytes'"
        ):
            tallies[(task, Status(status), Tally(name))] += amount
        [(last_uid,)] = rows("SELECT number FROM rb_info WHERE name = 'uid'")
        shift = sum(row["ticket_shift"] for row in rows("SELECT ticket_shift FROM rb_buffer"))
        return BufferState(
            [_group(dict(row), codec, races) for row in rows(_GROUPS)],
            last_uid + 1,
            tallies,
            races,
            last_uid + 1 - shift,
            [Cursor(*row) for row in rows("SELECT name, version, position, value FROM rb_cursor ORDER BY name")],
            {(row["task_name"], Status(row["status"])): row["step"] for row in lanes if row["step"] is not None},
        )


def _group(row: dict[str, Any], codec: Codec, races: dict[LaneName, Race]) -> StoredGroup:
    marks, uid, payload, status = json.loads(row["marks"]), row["uid"], row["data"], Status(row["status"])
    pinned = row["pinned_staleness"]
    refreshed_to = row["step"] if pinned is None else row["pinned_step"]
    if refreshed_to is not None or marks.get("expired") or marks.get("masked"):
        with contextlib.suppress(DecodeError):  # as damaged as it was
            payload = codec.encode(decode_stored(codec, uid, payload, row["marks"], refreshed_to)[0])
    item = StorageItem(
        timestamp_id=uid,
        status=status,
        staleness=(row["step"] or 0) - row["oldest_step"] - 1 if pinned is None else pinned,
        tags=None if row["tags"] is None else json.loads(row["tags"]),
        key=None if row["scoped_key"] is None else json.loads(row["scoped_key"])[1],
        **{name: row[name] for name in _METADATA if name in row and name not in ("status", "tags")},
    )
    return StoredGroup(
        item,
        payload,
        row["ticket"] or uid,
        row["random_key"] if (item.task_name, status) in races else None,
        row["archived_at"],
        [place for place, is_due in enumerate(marks.get("due") or ()) if is_due],
    )


def plain_state(state: BufferState, *, payloads: bool = True) -> dict[str, Any]:
    """A state as values that are equal if the states are.

    Empty races at time 0 are left out: they begin with the first group; and the steps of tasks and statuses without a
    group, of which a database may know more: a put that was counted and not stored names one, too. Without `payloads`,
    which are equal when decoded, not as bytes, it isn't compared when a group was set aside, either.
    """
    lanes = {(group.item.task_name, group.item.status) for group in state.groups}
    lanes |= {name for name, race in state.races.items() if race.time or race.idle_time}
    return {
        "groups": [
            {name: getattr(group.item, name) for name in _METADATA}
            | {"ticket": group.ticket, "random_key": group.random_key, "due": group.due}
            | {"payload": group.payload if payloads else None}
            | {"archived_at": group.archived_at if payloads else group.archived_at is not None}
            for group in sorted(state.groups, key=lambda group: group.item.uid)
        ],
        "next_ticket": state.next_ticket,
        "tallies": {name: n for name, n in state.tallies.items() if n},
        "races": {name: race for name, race in state.races.items() if name in lanes},
        "cursors": sorted((cursor.name, cursor.version, cursor.position, cursor.value) for cursor in state.cursors),
        "steps": {name: step for name, step in state.steps.items() if name in lanes},
    }
