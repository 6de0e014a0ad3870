"""New groups as rows, and the statements that insert them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from replaybuf.rollouts.rollout import ASIDE
from replaybuf.rules.race import PRIORITIZED, UNIFORM
from replaybuf.rules.tallies import LaneName
from replaybuf.storage.sql.engine.prepared import Row, insertion
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import group, payload
from replaybuf.storage.sql.statements import row_arrays
from replaybuf.storage.sql.statements.encoded import EncodedGroup, dump_json
from replaybuf.storage.sql.statements.lanes import Lane
from replaybuf.storage.values import NewGroup

#: Larger payloads are sent one by one: asyncpg copies what it sends for many rows once more.
_LARGE = 1 << 20

_PAYLOAD = insertion(payload, (True,) * len(payload.columns))


def group_row(
    uid: int,
    encoded: EncodedGroup,
    key: str | None,
    lanes: Mapping[LaneName, Lane],
    keys: Mapping[str, float],
    ticket: int | None,
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
        len(encoded.payload),
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
    )


def aside_since(new: NewGroup) -> float | None:
    """Return the time from which a group that takes no room is kept; None for others."""
    return new.created_at if new.status in ASIDE else None


def payload_row(uid: int, encoded: EncodedGroup) -> tuple[Any, ...]:
    """Return a new group as a row of `rb_payload`."""
    return uid, encoded.outline, encoded.prompt, encoded.payload


def insert_groups(tx: Transaction, groups: Sequence[Row], payloads: Sequence[Row]) -> None:
    """Insert rows of `rb_group`, as by `group_row`, and of `rb_payload`, as by `payload_row`."""
    if not groups:
        return
    if not (tx.dialect.is_remote and row_arrays.fit(groups, payloads)):
        tx.insert(group, groups)
        insert_payloads(tx, payloads)
    elif row_arrays.are_light(payloads):
        metadata = row_arrays.of_groups(groups)
        tx.fetch(row_arrays.INSERT_BOTH, *metadata, len(groups), *row_arrays.columns(payloads))
    else:
        tx.fetch(row_arrays.INSERT_GROUPS, *row_arrays.of_groups(groups), len(groups))
        insert_payloads(tx, payloads)


def insert_payloads(tx: Transaction, payloads: Sequence[Row]) -> None:
    """Insert rows of `rb_payload`, as by `payload_row`."""
    tx.insert(payload, [row for row in payloads if len(row[-1]) <= _LARGE])
    for row in payloads:
        if len(row[-1]) > _LARGE:
            tx.fetch(_PAYLOAD, *row)
