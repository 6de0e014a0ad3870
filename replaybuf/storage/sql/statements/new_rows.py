"""New groups as rows: encoded payloads and metadata, their sizes and their columns."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic_core import to_json

from replaybuf.codec.payload import Codec
from replaybuf.codec.payload_format import SplitPayload
from replaybuf.codec.texts import Texts
from replaybuf.places.store import EXTENT_BYTES, Extent
from replaybuf.rollouts.group_fields import GroupFields
from replaybuf.rollouts.marks import Marks
from replaybuf.rollouts.outline import add_unreadable, outline, prompt_preview
from replaybuf.rollouts.rewards import numeric_parts
from replaybuf.rollouts.rollout import ASIDE
from replaybuf.rollouts.rollout_type import RolloutType
from replaybuf.rules.transitions import LaneName, Tally
from replaybuf.rules.words import brief, listed
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.inserts import Row
from replaybuf.storage.sql.statements.lanes import Lane
from replaybuf.storage.values import NewGroup

_logger = logging.getLogger("replaybuf.rewards")


@dataclass(slots=True)
class EncodedGroup:
    """A group ready to be inserted; `tokens` is the number of its response tokens.

    If its arrays are in a file, at `extent`, the `payload` is the head followed by the extent.
    """

    group: NewGroup
    payload: bytes
    extent: Extent | None
    oldest_step: int | None
    mixed: bool
    reward: float | None
    marks: str
    outline: str
    prompt: str | None
    tokens: int

    @property
    def nbytes(self) -> int:
        """The size of the whole payload."""
        return len(self.payload) if self.extent is None else len(self.payload) - EXTENT_BYTES + self.extent.size


class Apart(Protocol):
    """Writes the tails of payloads to files."""

    threshold: int

    def add(self, split: SplitPayload) -> Extent:
        """Queue the tail of a payload; return its extent."""

    def flush(self) -> None:
        """Write all queued tails."""


def encode_group(codec: Codec, group: NewGroup, apart: Apart | None = None) -> EncodedGroup:
    """Return the group with payload and metadata encoded. Raises RolloutError.

    With `apart`, the tail of a large payload is queued there.
    """
    if group.payload is not None:
        split = codec.split(group.payload)
    else:
        split = codec.encode_split(group.rollouts, group.fetched or {}, sealed=apart is not None)
    if apart is None or split.size < max(1, apart.threshold):
        return describe(group, group.rollouts, split.joined(), codec.rollout_type)
    extent = apart.add(split)
    return describe(group, group.rollouts, split.head + extent.packed(), codec.rollout_type, extent=extent)


def encode_groups(codec: Codec, apart: Apart | None, groups: Sequence[NewGroup]) -> list[EncodedGroup]:
    """Return the groups encoded as by `encode_group`, after writing their tails."""
    encoded = [encode_group(codec, one, apart) for one in groups]
    if apart is not None:
        apart.flush()
    return encoded


def describe(
    group: NewGroup,
    rollouts: Sequence[Any],
    payload: bytes,
    kind: RolloutType,
    extent: Extent | None = None,
) -> EncodedGroup:
    """Return the metadata of a group whose rollouts were encoded as `payload`."""
    fields = group.fields or GroupFields.of(rollouts, kind)
    marks = Marks.of(rollouts, kind, group.status if group.train_step is None else None, fields)
    records = outline(rollouts, kind, Texts(payload).find, fields)
    if None in marks.reward:
        add_unreadable(records, rollouts, kind)
        _warn_of_unreadable(group.task_name, rollouts, records, kind)
    return EncodedGroup(
        group=group,
        payload=payload,
        extent=extent,
        oldest_step=marks.oldest_step,
        mixed=marks.mixed,
        reward=marks.mean_reward,
        marks=dump_json(marks.to_json()),
        outline=dump_json(records),
        prompt=prompt_preview(rollouts, kind) if rollouts else None,
        tokens=sum(record["response_tokens"] for record in records),
    )


def _warn_of_unreadable(
    task: str, rollouts: Sequence[Any], records: Sequence[dict[str, Any]], kind: RolloutType
) -> None:
    """Warn once per buffer of a reward that isn't a number, which means and orders silently treat as None."""
    found = [(place, record["unreadable"]) for place, record in enumerate(records) if "unreadable" in record]
    if not found or kind.warned_of_reward:
        return
    kind.warned_of_reward = True
    place, what = found[0]
    parts = numeric_parts(kind.get(rollouts[place], "reward"))
    advice = f"Name the part that counts, reward_key= in the config: {listed(parts)}" if parts else "Put finite ones"
    _logger.warning(
        "task %s: the reward of rollouts[%d] is %s. It is stored as it is, but means, orders and SQL take it for none. "
        "%s. `replaybuf stats` counts such rewards",
        brief(task),
        place,
        what,
        advice,
    )


def most_bytes(encoded: EncodedGroup) -> int:
    """Return an upper bound of the bytes of a group in a row, without tags, at four bytes per character."""
    texts = len(encoded.outline) + len(encoded.marks) + len(encoded.prompt or "")
    return len(encoded.payload) + 4 * texts


def check_size(tx: Transaction, encoded: EncodedGroup) -> None:
    """Raise StorageError when the group exceeds what the database can store, or return in one row."""
    new = encoded.group
    what = f"task {new.task_name}: the group of {len(new.rollouts)} rollouts"
    values = (encoded.payload, encoded.outline, encoded.prompt, encoded.marks, *(new.tags or {}).values())
    tx.dialect.row_limit(tx).check(what, values)


def dump_json(value: Any) -> str:
    """Return JSON text that both databases accept."""
    return to_json(value).decode()


def group_row(
    uid: int,
    encoded: EncodedGroup,
    key: str | None,
    lanes: Mapping[LaneName, Lane],
    random_key: float | None,
    ticket: int | None,
    since: int,
    made_from: Sequence[int] = (),
) -> Row:
    """Return a new group as a row of `rb_group`."""
    new, oldest = encoded.group, encoded.oldest_step
    home = lanes[(new.task_name, new.status)]
    # A group with the staleness of its lane's train step follows the lane from now on.
    follows = (
        oldest is not None
        and new.train_step is not None
        and home.step == new.train_step
        and new.staleness == new.train_step - oldest - 1
    )
    row: Row = {
        "uid": uid,
        "lane": home.id,
        "oldest_step": oldest,
        "pinned_staleness": None if follows else new.staleness,
        "mixed": encoded.mixed,
        "priority": new.priority,
        "times_sampled": new.times_sampled,
        "created_at": new.created_at,
        "reward": encoded.reward,
        "bytes": encoded.nbytes,
        "marks": encoded.marks,
        "tags": dump_json(new.tags) if new.tags else None,
        "scoped_key": key,
        "error": new.error,
        "deliveries": new.deliveries,
        "archived_at": aside_since(new),
        "ticket": ticket,
        "made_from": dump_json(list(made_from)) if made_from else None,
        "worker": new.worker,
        "put_step": new.put_step,
        "trained_step": new.trained_step,
        "since": since,
        "random_key": random_key,
    }
    return {name: value for name, value in row.items() if value is not None}


def payload_row(uid: int, encoded: EncodedGroup) -> Row:
    """Return a new group as a row of `rb_payload`."""
    row: Row = {"uid": uid, "outline": encoded.outline, "prompt": encoded.prompt, "data": encoded.payload}
    if encoded.extent is not None:
        row |= {"file": encoded.extent.file, "size": encoded.extent.size}
    return row


def bytes_of(groups: Iterable[EncodedGroup], lanes: Mapping[LaneName, Lane]) -> Counter[tuple[int, Tally]]:
    """Return the changes of the tallies of bytes by new groups."""
    counts: Counter[tuple[int, Tally]] = Counter()
    for one in groups:
        counts[(lanes[(one.group.task_name, one.group.status)].id, Tally.BYTES)] += one.nbytes
    return counts


def aside_since(new: NewGroup) -> float | None:
    """Return the start of the retention of an archived, filtered or failed group; None for others."""
    return new.created_at if new.status in ASIDE else None
