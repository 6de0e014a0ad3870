"""New groups as rows: encoded payloads and metadata, their sizes and columns, and their INSERTs.

Rows are dicts of columns, which leave out what is NULL.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any

from pydantic_core import to_json
from sqlalchemy import Table

from replaybuf.common.units import brief
from replaybuf.rules import transitions
from replaybuf.rules.transitions import LaneName, Tally
from replaybuf.storage.places.store import EXTENT_BYTES, Extent, FileBatch
from replaybuf.storage.sql.engine.dialect import check_row
from replaybuf.storage.sql.engine.postgres_dialect import NOW, PostgresDialect
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import group, payload
from replaybuf.storage.sql.statements.counts import Counts, add_step
from replaybuf.storage.sql.statements.lanes import Lane
from replaybuf.storage.sql.statements.rows import GroupRow
from replaybuf.storage.values import NewGroup
from replaybuf.values.codec.payload import Codec
from replaybuf.values.codec.payload_format import Texts
from replaybuf.values.rollouts.group_fields import fields_of
from replaybuf.values.rollouts.marks import Marks
from replaybuf.values.rollouts.outline import outline
from replaybuf.values.rollouts.rollout import ASIDE
from replaybuf.values.rollouts.rollout_type import RolloutType

#: A row's values by column, in the driver's form: JSON as text.
Row = dict[str, Any]

#: Larger payloads together, or texts, are sent faster as rows, and not while the answer to COMMIT is awaited.
_MOST_SENT = 1 << 19
#: Larger payloads are sent one by one: asyncpg's executemany makes another copy.
_LARGE_BYTES = 1 << 20

_logger = logging.getLogger("replaybuf.rewards")


@dataclass(slots=True)
class EncodedGroup:
    """A group ready to be inserted; `tokens` is the number of its response tokens.

    If its arrays are in a file, at `extent`, the `payload` is the head followed by the extent. `leaving` has the groups
    that its put has removed, if it has a `dropped` list.
    """

    group: NewGroup
    payload: bytes | bytearray
    extent: Extent | None
    oldest_step: int | None
    mixed: bool
    reward: float | None
    marks: str
    outline: str
    prompt: str | None
    tokens: int
    rest: EncodedGroup | None = None
    leaving: Sequence[GroupRow] | None = None

    @property
    def nbytes(self) -> int:
        """The size of the whole payload."""
        return len(self.payload) if self.extent is None else len(self.payload) - EXTENT_BYTES + self.extent.size


def encode_group(codec: Codec, group: NewGroup, apart: FileBatch | None = None) -> EncodedGroup:
    """Return the group with payload and metadata encoded. Raises RolloutError, and StorageError if it fits no row.

    With `apart`, the tail of a large payload is queued there.
    """
    if group.rest is not None:
        encoded = encode_group(codec, replace(group, rest=None), apart)
        return replace(encoded, group=group, rest=encode_group(codec, group.rest))
    threshold = math.inf if apart is None else max(1, apart.threshold)
    if group.payload is not None:
        split = codec.split(group.payload)
    else:
        parents = None if group.segments is None else group.segments.parents
        split = codec.encode_split(group.rollouts, group.fetched, sealed_from=threshold, parents=parents)
    if apart is None or split.size < threshold:
        return describe(group, group.rollouts, split.joined(), codec.rollout_type)
    extent = apart.add(split)
    return describe(group, group.rollouts, split.head + extent.packed(), codec.rollout_type, extent=extent)


def describe(
    group: NewGroup,
    rollouts: Sequence[Any],
    payload: bytes | bytearray,
    kind: RolloutType,
    extent: Extent | None = None,
) -> EncodedGroup:
    """Return a group whose rollouts were encoded as `payload`. Raises StorageError if it fits no row."""
    fields = group.fields or fields_of(rollouts, kind)
    marks = Marks.of(rollouts, kind, group.status if group.train_step is None else None, fields, group.segments)
    records, prompt = outline(rollouts, kind, Texts(payload).find, fields)
    if None in marks.reward:
        _warn_of_unreadable(group.task_name, [rollout.reward for rollout in fields], marks.reward, kind)
    encoded = EncodedGroup(
        group=group,
        payload=payload,
        extent=extent,
        oldest_step=marks.oldest_step,
        mixed=marks.mixed,
        reward=marks.mean_reward,
        marks=dump_json(marks.to_json()),
        outline=dump_json(records),
        prompt=prompt,
        tokens=sum([record["response_tokens"] for record in records]),
    )
    values = (payload, encoded.outline, encoded.marks, prompt, *(group.tags or {}).values())
    check_row(f"task {group.task_name}: the group of {len(group.rollouts)} rollouts", values)
    return encoded


def _warn_of_unreadable(task: str, rewards: Sequence[Any], numbers: Sequence[float | None], kind: RolloutType) -> None:
    """Warn once per buffer of a reward that isn't a number, which means and orders silently treat as None."""
    key = kind.reward_key
    values = [reward.get(key, reward) if isinstance(reward, dict) else reward for reward in rewards]
    place = next((at for at, value in enumerate(values) if value is not None and numbers[at] is None), None)
    if place is None or kind.warned_of_reward:
        return
    kind.warned_of_reward = True
    _logger.warning(
        "task %s: the reward of rollouts[%d] is %s. It is stored as it is, but means, orders and SQL take it for none. "
        "Put finite numbers, or name the part of a dict that counts (reward_key= in the config)",
        brief(task),
        place,
        brief(repr(rewards[place])),
    )


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


def first_steps(groups: Iterable[EncodedGroup], lanes: Mapping[LaneName, Lane]) -> dict[int, int]:
    """Return the train steps of lanes that get their first one by these puts, by lane id."""
    steps: dict[int, int] = {}
    for new in (encoded.group for encoded in groups):
        home = lanes[(new.task_name, new.status)]
        if new.train_step is not None and home.step is None:
            steps.setdefault(home.id, new.train_step)
    return steps


def counts_of(groups: Iterable[EncodedGroup], lanes: Mapping[LaneName, Lane]) -> Counts:
    """Return the counts of these groups as put, and of their bytes."""
    counts: Counts = Counter()
    numbers: Counter[LaneName] = Counter()
    for encoded in groups:
        name = encoded.group.task_name, encoded.group.status
        numbers[name] += 1
        counts[(lanes[name].id, Tally.BYTES)] += encoded.nbytes
    for (task, status), n in numbers.items():
        add_step(counts, lanes, task, transitions.put(status), n)
    return counts


def aside_since(new: NewGroup) -> float | None:
    """Return the start of the retention of a group that takes no room; None for others, and for rollouts of prompts."""
    of_prompt = new.part is not None and isinstance(new.part.name, int)
    return new.created_at if new.status in ASIDE and not of_prompt else None


# INSERTs


def insert_groups(tx: Transaction, groups: Sequence[Row], payloads: Sequence[Row]) -> None:
    """Insert rows of `rb_group` and `rb_payload`; where each statement is a round trip, short ones with COMMIT."""
    # What is sent with COMMIT comes last.
    if tx.dialect.is_remote and _size(payloads, "data", "outline") <= _MOST_SENT:
        _send_rows(tx, payload, payloads)
    else:
        insert_payloads(tx, payloads)
    # The moment since when a group is set aside is the server's, because hosts' clocks differ.
    if tx.dialect.is_remote and _size(groups, "marks", "tags") <= _MOST_SENT:
        _send_rows(tx, group, groups, moment="archived_at")
    else:
        insert_rows(tx, group, groups, moment="archived_at")


def _size(rows: Iterable[Row], *long_columns: str) -> int:
    return sum([len(row[name]) for row in rows for name in long_columns if name in row])


def insert_payloads(tx: Transaction, payloads: Sequence[Row]) -> None:
    """Insert rows of `rb_payload`."""
    insert_rows(tx, payload, [row for row in payloads if len(row["data"]) <= _LARGE_BYTES])
    for row in payloads:
        if len(row["data"]) > _LARGE_BYTES:
            insert_rows(tx, payload, [row])


def insert_rows(tx: Transaction, table: Table, rows: Sequence[Row], *, moment: str | None = None) -> None:
    """Insert rows into a table; where it is given, the column `moment` gets the present one."""
    if len(rows) == 1:
        tx.change(_insertion(table, tuple(rows[0]), moment), **rows[0])
    elif rows:
        names = tuple(dict.fromkeys(chain.from_iterable(rows)))
        uniform = {*map(len, rows)} == {len(names)}
        values = map(itemgetter(*names), rows) if uniform else ([row.get(name) for name in names] for row in rows)
        tx.each(_insertion(table, names, moment), [*values])


@lru_cache(maxsize=256)
def _insertion(table: Table, names: Sequence[str], moment: str | None) -> str:
    """Return the INSERT of these columns; `sqlite3` takes longer to bind a None than a number."""
    values = (f"{{moment:{name}}}" if name == moment else f":{name}" for name in names)
    return f"{{insert}} INTO {table.name} ({', '.join(names)}) VALUES ({', '.join(values)})"


def _send_rows(tx: Transaction, table: Table, rows: Sequence[Row], *, moment: str | None = None) -> None:
    """Insert rows as `insert_rows` does, with the next statement or with COMMIT (`Transaction.send`)."""
    names = tuple(dict.fromkeys(chain.from_iterable(rows)))
    values: Row = {name: [row.get(name) for row in rows] for name in names}
    if table is payload:
        sizes = [*map(len, values["data"])]
        values |= {"data": b"".join(values["data"]), "ends": [*accumulate(sizes)], "sizes": sizes}
    tx.send(_joint_insertion(table, names, moment), **values)


@lru_cache(maxsize=256)
def _joint_insertion(table: Table, names: Sequence[str], moment: str | None) -> str:
    """Return the INSERT of rows whose columns are arrays; payloads are one value, which the server cuts."""
    values = []
    for column in map(table.c.__getitem__, names):
        kind, _, _ = column.type.compile(dialect=PostgresDialect.compiler).partition(" COLLATE")
        value = f"unnest(CAST(:{column.name} AS {kind}[]))"
        if column is payload.c.data:
            end, size = "unnest(CAST(:ends AS int[]))", "unnest(CAST(:sizes AS int[]))"
            value = f"substr(CAST(:data AS bytea), {end} - {size} + 1, {size})"
        elif column.name == moment:  # a NULL stays one
            value = f"{value} * 0 + {NOW}"
        values.append(value)
    # The unnests aren't in FROM, where PostgreSQL would spill large ones to a file.
    return f"INSERT INTO {table.name} ({', '.join(names)}) SELECT {', '.join(values)}"
