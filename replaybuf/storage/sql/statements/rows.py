"""Rows of groups as read, and their decoding; their columns in queries; scoped keys."""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from pydantic_core import from_json
from sqlalchemy import JSON

from replaybuf.common.checks import INT64
from replaybuf.errors import DecodeError
from replaybuf.rules.query import FIELDS as QUERIED
from replaybuf.storage.decoding import DAMAGE, Deferral, damaged, decode_stored
from replaybuf.storage.places.store import EXTENT_BYTES
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema import STALENESS
from replaybuf.storage.sql.schema.tables import group
from replaybuf.storage.sql.statements.lanes import Lane
from replaybuf.storage.values import Part, StorageItem
from replaybuf.values.codec.payload import Codec
from replaybuf.values.codec.payload_format import has_size, is_apart
from replaybuf.values.rollouts.rollout import Status
from replaybuf.values.rollouts.segments import entries_of

#: The columns of the query language's fields, as text of SQL, of groups `g` and their lanes `l`.
FIELDS = {name: f"g.{name}" for name in (*QUERIED, "tags")} | {
    "timestamp_id": "g.uid",
    "task_name": "l.task_name",
    "status": "l.status",
    "staleness": STALENESS,
}
_NULLABLE = {name for name, kind in QUERIED.items() if kind.nullable}


def sort_key(field: str, column: str, *, descending: bool) -> str:
    """Return a term of ORDER BY for a field, whose missing values come last."""
    return f"{column} {'DESC' if descending else 'ASC'}{' NULLS LAST' if field in _NULLABLE else ''}"


#: The columns of a group, as values in the driver's form.
StoredValues: Any = namedtuple("StoredValues", [column.name for column in group.columns])  # type: ignore[misc]
COLUMNS: tuple[str, ...] = StoredValues._fields
_WIDTH = len(COLUMNS)
# As `StoredValues._make`, without a call of Python for each group of a draw.
_stored_values = partial(tuple.__new__, StoredValues)
#: All columns of a group `g`, as text of SQL, with JSON as text: it is parsed on demand, and may be damaged.
STORED = ", ".join(
    f"CAST(g.{column.name} AS text)" if isinstance(column.type, JSON) else f"g.{column.name}"
    for column in group.columns
)

_SELECT_ROWS = f"""SELECT {STORED}, l.task_name, l.status, l.step{{payload}}
FROM rb_group g JOIN rb_lane l ON l.id = g.lane {{joined}} WHERE l.buffer = :buffer AND"""  # noqa: S608
_WITHOUT_PAYLOADS = _SELECT_ROWS.format(payload="", joined="")
_WITH_PAYLOADS = _SELECT_ROWS.format(payload=", p.data", joined="LEFT JOIN rb_payload p ON p.uid = g.uid")


#: Stands for the task in the keys of groups that fill.
ANY_TASK = ""


def scoped_key(buffer: str | None, task_name: str, key: str | None) -> str | None:
    """Return a put's key with its task and buffer as one text, short enough for a PostgreSQL index (2,700 bytes)."""
    return None if key is None else json.dumps([task_name, key, buffer], ensure_ascii=False)


def rescoped_key(scoped: str, buffer: str | None, shift: int) -> str:
    """Return a scoped key moved to another buffer, where uids are higher by `shift`."""
    task_name, key, _, *place = json.loads(scoped)
    new_key = key + shift if isinstance(key, int) else key  # the uid of a prompt in flight
    return json.dumps([task_name, new_key, buffer, *place], ensure_ascii=False)


def key_of(scoped: str | None) -> str | None:
    """Return the put's key in a scoped key."""
    return None if scoped is None else str(json.loads(scoped)[1])


def name_key(buffer: str | None, name: str | int) -> str:
    """Return the key of a whole group that was filled."""
    return json.dumps([ANY_TASK, name, buffer], ensure_ascii=False)


def part_key(buffer: str | None, part: Part) -> str:
    """Return the key of a rollout of a group that fills, which has its place there."""
    before, behind = part_key_around(buffer, part)
    return f"{before}{part.index}{behind}"


def part_key_around(buffer: str | None, part: Part) -> tuple[str, str]:
    """Return what stands before and behind the index in the key of a rollout of a group that fills."""
    place = json.dumps([ANY_TASK, part.name, buffer, part.size, part.least], ensure_ascii=False)
    return f"{place[:-1]}, ", f", {json.dumps(part.task_name, ensure_ascii=False)}]"


def part_of(scoped: str) -> Part | None:
    """Return the place of a rollout in a group that fills, by its key; None for another group's key."""
    _, name, _, *place = json.loads(scoped)
    return Part(name, *place) if place else None


#: The lane, the draws and the deliveries of a group, of its `values`: groups of one state take the same steps.
STATE = attrgetter("lane", "times_sampled", "deliveries")
_NEEDED = tuple(column.name for column in group.columns if not column.nullable)
_needed_values = attrgetter(*_NEEDED)


@dataclass(slots=True)
class GroupRow:
    """A row of `rb_group` with its lane's names and step, and the payload if read.

    `values` are those of all columns (`StoredValues`), with JSON as text, which may be damaged. If the payload is only
    a head, `tail` is its rest once read: bytes, blocks by number if only some were read, or the error of the read.
    `is_afresh`: drawn at random, and not by its sampling key.
    """

    uid: int
    lane: int
    task_name: str
    status: Status
    step: int | None
    values: Any
    payload: bytes | None = None
    found_in: Lane | None = None
    probability: float | None = None
    weight: float | None = None
    tail: Any = None
    is_afresh: bool = False

    @classmethod
    def of(cls, row: Sequence[Any]) -> GroupRow:
        """Return a row of the columns STORED, the lane's task, status and step, and optionally the payload."""
        task_name, status, step, *data = row[_WIDTH:]
        return cls(row[0], row[1], task_name, Status(status), step, _stored_values(row[:_WIDTH]), *data)

    @classmethod
    def drawn(cls, rows: Iterable[Sequence[Any]], home: Lane) -> list[GroupRow]:
        """Return rows of the columns STORED and the payload, in a known lane."""
        names = home.task_name, home.status, home.step
        return [cls(row[0], row[1], *names, _stored_values(row[:_WIDTH]), row[_WIDTH], home) for row in rows]

    def column(self, name: str) -> Any:
        """Return the value of a column; JSON as text."""
        return getattr(self.values, name)

    def parsed(self, name: str) -> Any:
        """Return the value of a column with JSON. Raises DecodeError."""
        try:
            return _value_from_json(self.column(name))
        except DAMAGE as error:
            raise damaged(self.uid, error) from error

    def check_size(self) -> None:
        """Raise DecodeError if the payload, which is valid, isn't of the size that the group has: it is another's."""
        size, payload = self.values.bytes, self.payload
        if payload is None or len(payload) == size or type(size) is not int:  # a damaged number says nothing
            return
        if not has_size(payload, size):
            raise DecodeError(f"group {self.uid}: its payload is another group's: it isn't of {size} bytes")

    @property
    def home(self) -> Lane:
        """The lane that the group was drawn from."""
        assert self.found_in is not None
        return self.found_in

    @property
    def incomplete(self) -> str:
        """Why a draw sets the group aside: it has no payload, or NULL in a NOT NULL column. "" if it can be drawn."""
        if None in _needed_values(self.values):
            missing = ", ".join(name for name in _NEEDED if self.column(name) is None)
            return f"group {self.uid}: its metadata is damaged ({missing} missing)"
        if type(self.payload) is bytes:
            return ""
        damage = "missing" if self.payload is None else f"damaged: it is no bytes but {type(self.payload).__name__}"
        return f"the payload of group {self.uid} is {damage}"

    @property
    def whole(self) -> bytes | None:
        """The payload with its arrays that are kept apart, if they were read."""
        if self.payload is None or self.tail is None or isinstance(self.tail, (dict, DecodeError)):
            return self.payload
        return self.payload[:-EXTENT_BYTES] + bytes(self.tail)

    @property
    def is_apart(self) -> bool:
        """Whether the arrays of the payload are kept apart."""
        return self.payload is not None and is_apart(self.payload)

    @property
    def priority(self) -> float:
        return float(self.values.priority)

    @property
    def times_sampled(self) -> int:
        return int(self.values.times_sampled)

    @property
    def deliveries(self) -> int:
        return int(self.values.deliveries)

    @property
    def is_leased(self) -> bool:
        return self.values.lease is not None

    @property
    def staleness(self) -> int:
        pinned = self.values.pinned_staleness
        return int(pinned) if pinned is not None else (self.step or 0) - int(self.values.oldest_step) - 1

    @property
    def refreshed_to(self) -> int | None:
        """The train step of the rollouts' last staleness refresh; None: never since put or expiry."""
        return self.step if self.values.pinned_staleness is None else self.values.pinned_step

    def decode(self, codec: Codec, deferral: Deferral | None = None) -> StorageItem:
        """Return the stored group with its rollouts, whose arrays share the row's payload: call once.

        The payload stays as stored as long as the arrays aren't written to. With a `deferral`, handles replace some
        arrays. Raises DecodeError.
        """
        arguments = self.uid, self.payload, self.values.marks, self.refreshed_to
        rollouts, segments = decode_stored(codec, *arguments, tail=self.tail, deferral=deferral)
        self.check_size()
        item = self.item(rollouts if segments is None else entries_of(rollouts, segments))
        item.segments = segments
        return item

    def item(self, rollouts: list[Any], error: str | None = None) -> StorageItem:
        """Return the group with these rollouts. Raises DecodeError."""
        try:
            values = self.values
            tags, scoped = values.tags, values.scoped_key
            return StorageItem(
                uid=self.uid,
                timestamp_id=self.uid,
                task_name=self.task_name,
                status=self.status,
                staleness=self.staleness,
                priority=values.priority,
                times_sampled=values.times_sampled,
                created_at=values.created_at,
                reward=values.reward,
                tags=None if tags is None else _tags_from_json(tags),
                key=None if scoped is None else key_of(scoped),
                error=error or values.error,
                deliveries=values.deliveries,
                item=rollouts,
                probability=self.probability,
                weight=self.weight,
                worker=values.worker,
                trained_step=values.trained_step,
                part=part_of(scoped) if self.status == Status.FILLING and scoped is not None else None,
            )
        except DAMAGE as problem:
            raise damaged(self.uid, problem) from problem


def read_rows(tx: Transaction, condition: str, *, payloads: bool = False, **values: Any) -> list[GroupRow]:
    """Return the groups of the buffer, leased or not, that meet a condition on groups `g` and lanes `l`, by uid."""
    select = _WITH_PAYLOADS if payloads else _WITHOUT_PAYLOADS
    rows = tx.tuples(f"{select} {condition}", buffer=tx.scope.buffer, **values)
    return sorted(map(GroupRow.of, rows), key=lambda row: row.uid)


def decode_leniently(rows: Iterable[GroupRow], codec: Codec, deferral: Deferral | None = None) -> list[StorageItem]:
    """Return stored groups; undecodable ones have an `error`, and no rollouts."""
    items = []
    for row in rows:
        try:
            items.append(row.decode(codec, deferral))
        except DecodeError as error:
            items.append(row.item([], str(error)))
    return items


def _tags_from_json(text: str) -> dict[str, Any]:
    """Return tags from JSON, where PostgreSQL writes large floats as whole numbers; integers have 64 bits."""
    tags = from_json(text)
    return {name: value if type(value) is not int or value in INT64 else float(value) for name, value in tags.items()}


def _value_from_json(text: str | None) -> Any:
    """Return the value of a JSON column. Raises ValueError."""
    return None if text is None else from_json(text)
