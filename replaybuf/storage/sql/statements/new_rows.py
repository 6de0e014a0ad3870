"""New groups as rows: encoded payloads and metadata, and the statements that insert them."""

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
from replaybuf.rules.circumstances import brief, listed
from replaybuf.rules.policies import PRIORITIZED, UNIFORM
from replaybuf.rules.transitions import LaneName, Tally
from replaybuf.storage.sql.engine.transaction import Row, Transaction, insertion
from replaybuf.storage.sql.schema.tables import group, payload
from replaybuf.storage.sql.statements import row_arrays
from replaybuf.storage.sql.statements.files import name_files
from replaybuf.storage.sql.statements.lanes import Lane
from replaybuf.storage.values import UNSET, NewGroup, Unset

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
    *,
    due: Sequence[int] | Unset = UNSET,
    extent: Extent | None = None,
) -> EncodedGroup:
    """Return the metadata of a group whose rollouts were encoded as `payload`.

    `due` are the indices of rollouts that expire at the next refresh, for a group copied from another store.
    """
    fields = group.fields or GroupFields.of(rollouts, kind)
    marks = Marks.of(rollouts, kind, group.status if group.train_step is None else None, fields)
    if not isinstance(due, Unset):
        marks.due = [place in due for place in range(len(rollouts))] if due else None
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


#: Larger payloads are sent one by one: asyncpg's executemany makes another copy.
_LARGE = 1 << 20

_PAYLOAD = insertion(payload, (True,) * len(payload.columns))


def group_row(
    uid: int,
    encoded: EncodedGroup,
    key: str | None,
    lanes: Mapping[LaneName, Lane],
    keys: Mapping[str, float],
    ticket: int | None,
    since: int,
    made_from: Sequence[int] = (),
) -> tuple[Any, ...]:
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
    return (
        uid,
        home.id,
        oldest,
        None if follows else new.staleness,  # pinned_staleness
        None,  # pinned_step
        encoded.mixed,
        new.priority,
        new.times_sampled,
        new.created_at,
        encoded.reward,
        encoded.nbytes,
        encoded.marks,
        dump_json(new.tags) if new.tags else None,
        key,
        new.error,
        keys.get(UNIFORM),
        keys.get(PRIORITIZED),
        new.deliveries,
        None,  # lease
        None,  # leased_until
        aside_since(new),
        ticket,
        dump_json(list(made_from)) if made_from else None,
        new.worker,
        new.put_step,
        None,  # holder
        new.trained_step,
        since,
    )


def bytes_of(groups: Iterable[EncodedGroup], lanes: Mapping[LaneName, Lane]) -> Counter[tuple[int, Tally]]:
    """Return the changes of the tallies of bytes by new groups."""
    counts: Counter[tuple[int, Tally]] = Counter()
    for one in groups:
        counts[(lanes[(one.group.task_name, one.group.status)].id, Tally.BYTES)] += one.nbytes
    return counts


def aside_since(new: NewGroup) -> float | None:
    """Return the start of the retention of an archived, filtered or failed group; None for others."""
    return new.created_at if new.status in ASIDE else None


def _at_present(tx: Transaction, row: Row) -> Row:
    """Return a row of `rb_group` with the server's time for the start of its retention, if it has one."""
    place = _ARCHIVED_AT
    if row[place] is None or not tx.dialect.is_remote:
        return row
    return (*row[:place], tx.dialect.clock(tx), *row[place + 1 :])


_ARCHIVED_AT = list(group.columns.keys()).index("archived_at")


def payload_row(uid: int, encoded: EncodedGroup) -> tuple[Any, ...]:
    """Return a new group as a row of `rb_payload`."""
    extent = encoded.extent
    where = (None, None) if extent is None else (extent.file, extent.size)
    return uid, encoded.outline, encoded.prompt, *where, encoded.payload


def insert_groups(tx: Transaction, groups: Sequence[Row], new: Sequence[tuple[int, EncodedGroup]]) -> None:
    """Insert rows of `rb_group`, as by `group_row`, and the payloads of these groups, given with their uids."""
    if not groups:
        return
    name_files(tx, (one.extent for _, one in new if one.extent is not None))
    payloads = [payload_row(uid, one) for uid, one in new]
    if not (tx.dialect.is_remote and row_arrays.fit(groups, payloads)):
        tx.insert(group, [_at_present(tx, row) for row in groups])
        insert_payloads(tx, payloads)
    elif row_arrays.are_light(len(row[row_arrays.DATA]) for row in payloads):
        metadata = row_arrays.of_groups(groups)
        tx.fetch(row_arrays.INSERT_BOTH, *metadata, len(groups), *row_arrays.columns(payloads))
    else:
        tx.fetch(row_arrays.INSERT_GROUPS, *row_arrays.of_groups(groups), len(groups))
        insert_payloads(tx, payloads)


def insert_payloads(tx: Transaction, payloads: Sequence[Row]) -> None:
    """Insert rows of `rb_payload`, as by `payload_row`."""
    tx.insert(payload, [row for row in payloads if len(row[row_arrays.DATA]) <= _LARGE])
    for row in payloads:
        if len(row[row_arrays.DATA]) > _LARGE:
            tx.fetch(_PAYLOAD, *row)
