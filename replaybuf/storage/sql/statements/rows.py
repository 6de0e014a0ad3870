"""Groups as rows: encoding a group into rows, and reading it back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import to_json

from replaybuf.codec.payload import Codec
from replaybuf.errors import DecodeError
from replaybuf.rollouts.marks import Marks
from replaybuf.rollouts.outline import outline, prompt_preview
from replaybuf.rollouts.rollout import Status
from replaybuf.rollouts.rollout_type import RolloutType
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.lanes import Lane
from replaybuf.storage.values import NewGroup, StorageItem

#: What damaged metadata of a group raises.
_DAMAGE: Final = (AttributeError, LookupError, TypeError, ValueError)


@dataclass(slots=True)
class EncodedGroup:
    """A group ready to be inserted."""

    group: NewGroup
    payload: bytes
    oldest_step: int | None
    mixed: bool
    reward: float | None
    marks: str
    outline: str
    prompt: str | None


def encode_group(codec: Codec, group: NewGroup) -> EncodedGroup:
    """Return the group with payload and metadata encoded; CPU work only. Raises EncodeError."""
    return describe(group, group.rollouts, codec.encode(group.rollouts, group.fetched or {}), codec.rollout_type)


def describe(group: NewGroup, rollouts: Sequence[Any], payload: bytes, kind: RolloutType) -> EncodedGroup:
    """Return the metadata of a group whose rollouts were encoded as `payload`."""
    marks = Marks.of(rollouts, kind)
    return EncodedGroup(
        group=group,
        payload=payload,
        oldest_step=marks.oldest_step,
        mixed=marks.mixed,
        reward=marks.mean_reward,
        marks=dump_json(marks.to_json()),
        outline=dump_json(outline(rollouts, kind)),
        prompt=prompt_preview(rollouts, kind) if rollouts else None,
    )


def most_bytes(encoded: EncodedGroup) -> int:
    """Return a bound for the bytes that the group takes in a row, tags apart: each character may take four."""
    texts = len(encoded.outline) + len(encoded.marks) + len(encoded.prompt or "")
    return len(encoded.payload) + 4 * texts


def check_size(tx: Transaction, encoded: EncodedGroup) -> None:
    """Raise TooLargeError when the database can't store the group, or could not send it back in one row."""
    new = encoded.group
    what = f"task {new.task_name}: the group of {len(new.rollouts)} rollouts"
    values = (encoded.payload, encoded.outline, encoded.prompt, encoded.marks, *(new.tags or {}).values())
    tx.dialect.row_limit(tx.connection).check(what, values)


def dump_json(value: Any) -> str:
    """Return JSON text that both databases accept."""
    return to_json(value).decode()


@dataclass(slots=True)
class GroupRow:
    """A row of `rb_group` with the lane's names and step, and the payload where it was read."""

    uid: int
    lane: int
    task_name: str
    status: Status
    step: int | None
    columns: dict[str, Any]
    payload: bytes | None = None
    verified: bool = False
    found_in: Lane | None = None
    probability: float | None = None
    weight: float | None = None

    @classmethod
    def of(cls, row: Mapping[Any, Any]) -> GroupRow:
        columns = dict(row)
        return cls(
            uid=columns["uid"],
            lane=columns["lane"],
            task_name=columns.pop("task_name"),
            status=Status(columns.pop("status")),
            step=columns.pop("step"),
            payload=columns.pop("data", None),
            columns=columns,
        )

    @property
    def home(self) -> Lane:
        """The lane that the group was drawn from."""
        assert self.found_in is not None
        return self.found_in

    @property
    def times_sampled(self) -> int:
        return int(self.columns["times_sampled"])

    @property
    def deliveries(self) -> int:
        return int(self.columns["deliveries"])

    @property
    def ticket(self) -> int:
        """The number by which random draws know the group."""
        ticket = self.columns["ticket"]
        return self.uid if ticket is None else int(ticket)

    @property
    def staleness(self) -> int:
        pinned = self.columns["pinned_staleness"]
        if pinned is not None:
            return int(pinned)
        return (self.step or 0) - int(self.columns["oldest_step"]) - 1

    @property
    def refreshed_to(self) -> int | None:
        """The train step to which the rollouts' staleness was last refreshed; None: never since put or expiry."""
        if self.columns["pinned_staleness"] is None:
            return self.step
        return self.columns["pinned_step"]  # type: ignore[no-any-return]

    def decode(self, codec: Codec) -> StorageItem:
        """Return the stored group with its rollouts, whose arrays live in the row's payload: ask once.

        As long as nobody writes to them, the payload is what was stored. Raises DecodeError.
        """
        if self.payload is None:
            raise DecodeError(f"group {self.uid}: its payload is missing")
        rollouts = codec.decode(self.payload, verified=self.verified, owned=True)
        try:
            marks = Marks.from_json(self.columns["marks"])
            if len(rollouts) != len(marks.oldest):
                raise DecodeError(
                    f"group {self.uid}: {len(rollouts)} rollouts in the payload, {len(marks.oldest)} expected"
                )
            marks.apply(rollouts, self.refreshed_to, codec.rollout_type)
            return self._item(rollouts)
        except DecodeError:
            raise
        except _DAMAGE as error:
            raise self._damaged(error) from error

    def item(self, rollouts: list[Any], error: str | None = None) -> StorageItem:
        """Return the group with these rollouts. Raises DecodeError."""
        try:
            return self._item(rollouts, error)
        except _DAMAGE as problem:
            raise self._damaged(problem) from problem

    def _damaged(self, error: Exception) -> DecodeError:
        return DecodeError(f"group {self.uid}: its metadata is damaged ({type(error).__name__}: {error})")

    def _item(self, rollouts: list[Any], error: str | None = None) -> StorageItem:
        columns = self.columns
        return StorageItem(
            uid=self.uid,
            timestamp_id=self.uid,
            task_name=self.task_name,
            status=self.status,
            staleness=self.staleness,
            priority=columns["priority"],
            times_sampled=columns["times_sampled"],
            created_at=columns["created_at"],
            reward=columns["reward"],
            tags=columns["tags"],
            key=key_of(columns["scoped_key"]),
            error=error or columns["error"],
            deliveries=columns["deliveries"],
            item=rollouts,
            probability=self.probability,
            weight=self.weight,
        )


def decode_leniently(rows: Iterable[GroupRow], codec: Codec) -> list[StorageItem]:
    """Return stored groups; those that can't be decoded have an `error`, and no rollouts."""
    items = []
    for row in rows:
        try:
            items.append(row.decode(codec))
        except DecodeError as error:
            items.append(row.item([], str(error)))
    return items


def scoped_key(buffer: str | None, task_name: str, key: str | None) -> str | None:
    """Return a put's key with its task and buffer as one text, short enough for a PostgreSQL index (2,700 bytes)."""
    return None if key is None else json.dumps([task_name, key, buffer], ensure_ascii=False)


def rescoped_key(scoped: str, buffer: str | None) -> str:
    """Return a scoped key moved to another buffer."""
    task_name, key, _ = json.loads(scoped)
    return json.dumps([task_name, key, buffer], ensure_ascii=False)


def key_of(scoped: str | None) -> str | None:
    """Return the put's key in a scoped key."""
    return None if scoped is None else str(json.loads(scoped)[1])
