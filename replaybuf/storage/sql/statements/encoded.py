"""Groups on their way into rows: payload and metadata as they will be stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from replaybuf.codec.payload import Codec
from replaybuf.codec.texts import Texts
from replaybuf.rollouts.marks import Marks
from replaybuf.rollouts.outline import outline, prompt_preview
from replaybuf.rollouts.rollout_type import RolloutType
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.values import NewGroup


@dataclass(slots=True)
class EncodedGroup:
    """A group ready to be inserted; `tokens` are those of its responses."""

    group: NewGroup
    payload: bytes
    oldest_step: int | None
    mixed: bool
    reward: float | None
    marks: str
    outline: str
    prompt: str | None
    tokens: int


def encode_group(codec: Codec, group: NewGroup) -> EncodedGroup:
    """Return the group with payload and metadata encoded; CPU work only. Raises EncodeError."""
    payload = codec.encode(group.rollouts, group.fetched or {}) if group.payload is None else group.payload
    return describe(group, group.rollouts, payload, codec.rollout_type)


def describe(group: NewGroup, rollouts: Sequence[Any], payload: bytes, kind: RolloutType) -> EncodedGroup:
    """Return the metadata of a group whose rollouts were encoded as `payload`."""
    marks, records = Marks.of(rollouts, kind), outline(rollouts, kind, Texts(payload).find)
    return EncodedGroup(
        group=group,
        payload=payload,
        oldest_step=marks.oldest_step,
        mixed=marks.mixed,
        reward=marks.mean_reward,
        marks=dump_json(marks.to_json()),
        outline=dump_json(records),
        prompt=prompt_preview(rollouts, kind) if rollouts else None,
        tokens=sum(record["response_tokens"] for record in records),
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
