"""The portable state of a buffer: returned by `state_dict`, and loadable into any database.

It has the groups with their worker names, and the state needed to continue; not the history of draws.

Groups are written as they are read: expired responses are already reset, and staleness is a plain number. Leased groups
are written as if returned, because their consumers don't have the other store.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from replaybuf.codec.payload import Codec
from replaybuf.codec.stored import Places
from replaybuf.errors import DecodeError, SnapshotError
from replaybuf.places.store import FileLostError
from replaybuf.rollouts.rollout import ASIDE, Status
from replaybuf.rules import transitions
from replaybuf.rules.limits import Rules
from replaybuf.rules.policies import KEYS, PRIORITIZED, UNIFORM, Clock
from replaybuf.rules.transitions import LaneName, Tally
from replaybuf.storage.sql.copies.whole import in_batches, keeping_files, read_whole
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import group, lane
from replaybuf.storage.sql.statements.buffer_facts import last_uid, read_cursors, read_tallies
from replaybuf.storage.sql.statements.counts import add_counts
from replaybuf.storage.sql.statements.cursors import write_cursors
from replaybuf.storage.sql.statements.fence import check_fence, join, next_ticket, set_next_ticket
from replaybuf.storage.sql.statements.files import name_files
from replaybuf.storage.sql.statements.inserts import insert_groups
from replaybuf.storage.sql.statements.lanes import CLOCKS, Lane, all_lanes, need_lanes, start_steps
from replaybuf.storage.sql.statements.new_rows import (
    Apart,
    EncodedGroup,
    bytes_of,
    check_size,
    describe,
    group_row,
    payload_row,
)
from replaybuf.storage.sql.statements.ordering import new_keys
from replaybuf.storage.sql.statements.restore import check_no_groups, free_shift, make_room, raise_uid
from replaybuf.storage.sql.statements.rows import GroupRow, scoped_key, select_rows
from replaybuf.storage.values import UNSET, Cursor, NewGroup, StorageItem, Unset

if TYPE_CHECKING:
    from replaybuf.storage.sql.tasks.payload_files import PayloadFiles
    from replaybuf.storage.sql.tasks.transactions import Transactions


FORMAT = "replaybuf-state-3"

_METADATA = [f.name for f in fields(StorageItem) if f.name not in ("item", "probability", "weight")]
#: Metadata that states of older versions lack.
_LATER = ("worker", "trained_step")


@dataclass(slots=True)
class StoredGroup:
    """A group with its payload, its sampling keys, and the time when it was archived (seconds since the epoch).

    `ticket` is its sampling id. `due` are the indices of rollouts that expire at the next refresh because they were
    EXPIRED when put without a train step; UNSET in states of older versions.
    """

    item: StorageItem
    payload: bytes
    ticket: int
    keys: dict[str, float] = field(default_factory=dict)
    archived_at: float | None = None
    due: Sequence[int] | Unset = ()


@dataclass(slots=True)
class BufferState:
    """All state of a store: groups, the next uid and ticket, tallies, races in use, cursors, train steps."""

    groups: list[StoredGroup]
    next_uid: int
    tallies: dict[tuple[str, Status, Tally], int]
    clocks: dict[tuple[str, Status, str], Clock]
    next_ticket: int
    cursors: list[Cursor]
    steps: dict[LaneName, int]


def pack_state(state: BufferState) -> dict[str, Any]:
    """Return the state as plain values and bytes."""
    # Empty races at time 0 are left out: they begin with the first group.
    lanes = {(group.item.task_name, group.item.status) for group in state.groups}
    lanes |= {(task, status) for (task, status, _), clock in state.clocks.items() if clock != Clock()}
    return {
        "format": FORMAT,
        "groups": [
            {name: getattr(group.item, name) for name in _METADATA}
            | {"status": str(group.item.status), "payload": group.payload, "ticket": group.ticket}
            | {"keys": dict(group.keys), "archived_at": group.archived_at}
            | ({} if isinstance(group.due, Unset) else {"due": [*group.due]})
            for group in sorted(state.groups, key=lambda group: group.item.uid)
        ],
        "next_uid": state.next_uid,
        "next_ticket": state.next_ticket,
        "tallies": sorted([task, str(status), str(name), n] for (task, status, name), n in state.tallies.items() if n),
        "races": sorted(
            [task, str(status), key, clock.time, clock.idle_time]
            for (task, status, key), clock in state.clocks.items()
            if (task, status) in lanes
        ),
        "cursors": sorted([one.name, one.version, one.position, one.value] for one in state.cursors),
        "steps": sorted([task, str(status), step] for (task, status), step in state.steps.items()),
    }


def unpack_state(state: dict[str, Any]) -> BufferState:
    """Return the state packed by `pack_state`. Raises SnapshotError for anything else."""
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise SnapshotError(f"expected a state dict of format {FORMAT!r}, got {found!r}", reason="mismatch")
    try:
        return BufferState(
            groups=[_stored_group(record) for record in state["groups"]],
            next_uid=int(state["next_uid"]),
            tallies={(str(task), Status(status), Tally(name)): int(n) for task, status, name, n in state["tallies"]},
            clocks={
                (str(task), Status(status), str(key)): Clock(float(time), float(idle))
                for task, status, key, time, idle in state["races"]
            },
            next_ticket=int(state["next_ticket"]),
            cursors=[
                Cursor(str(name), int(version), int(position), bytes(value))
                for name, version, position, value in state["cursors"]
            ],
            steps={  # states of older versions have none
                (str(task), Status(status)): int(step) for task, status, step in state.get("steps", ())
            },
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotError(f"the state dict is incomplete or damaged: {error!r}", reason="mismatch") from error


def _stored_group(record: dict[str, Any]) -> StoredGroup:
    record = dict.fromkeys(_LATER) | record
    values = {name: record[name] for name in _METADATA} | {"status": Status(record["status"])}
    keys = {str(name): float(key) for name, key in record["keys"].items() if name in KEYS}
    item, ticket = StorageItem(**values), int(record["ticket"])
    due = [int(place) for place in record["due"]] if "due" in record else UNSET
    return StoredGroup(item, bytes(record["payload"]), ticket, keys, record["archived_at"], due)


# Saving and loading


async def save_state(transactions: Transactions, codec: Codec) -> dict[str, Any]:
    """Return the portable state of a buffer, with whole payloads."""
    async with keeping_files(transactions.engine, transactions.scope) as kept:
        groups, homes, places, state = await transactions.read(_read_state)
        for rows in in_batches(groups, lambda row: row.column("bytes") or 0):
            stored = [row for row in rows if row.payload is not None]
            payloads = await read_whole([row.payload or b"" for row in stored], places, kept=kept)
            for row, payload in zip(stored, payloads, strict=True):
                row.payload = payload
    return await transactions.compute(partial(_pack, codec.as_stored(), transactions.scope.rules, homes, state), groups)


def _read_state(tx: Transaction) -> tuple[list[GroupRow], dict[LaneName, Lane], Places, BufferState]:
    """Return the rows of a buffer's groups, its lanes by name, all places, and the rest of its state."""
    name = tx.scope.buffer or ""
    tallies = Counter(read_tallies(tx, name))
    homes = {one.name: one for one in (Lane.of(row) for row in all_lanes(tx) if not row.leased)}
    groups = select_rows(payloads=True).where(lane.c.buffer == tx.scope.buffer).order_by(group.c.uid)
    rows = [GroupRow.of(row) for row in tx.tuples(groups)]
    for one in homes.values():
        one.clocks = {race: clock for race, clock in one.clocks.items() if race not in one.preparing}
    clocks = {(*name, key): clock for name, one in homes.items() for key, clock in one.clocks.items()}
    next_uid = last_uid(tx) + 1
    join(tx)
    steps = {name: one.step for name, one in homes.items() if one.step is not None}
    state = BufferState([], next_uid, tallies, clocks, next_ticket(tx), read_cursors(tx, name), steps)
    return rows, homes, tx.places(), state


def _pack(
    codec: Codec, rules: Rules, homes: Mapping[LaneName, Lane], state: BufferState, rows: Sequence[GroupRow]
) -> dict[str, Any]:
    tallies = Counter(state.tallies)
    for found in rows:
        home = homes[(found.task_name, found.status)]
        stored = _stored(found, codec, home)
        if found.column("lease") is not None:
            stored = _given_back(stored, rules, home, tallies)
        state.groups.append(stored)
    return pack_state(replace(state, tallies=tallies))


def _stored(row: GroupRow, codec: Codec, home: Lane) -> StoredGroup:
    """Return a group with its payload as it would be read."""
    keys = {name: row.column(name) for name in KEYS if name in home.clocks}
    data, item, due = row.payload or b"", row.item([]), list[int]()
    try:
        marks = row.parsed("marks")
        due = [place for place, is_due in enumerate(marks.get("due") or ()) if is_due]
        if row.refreshed_to is not None or marks.get("expired") or marks.get("masked") is not None:
            data = codec.encode(row.decode(codec).item)
    except DecodeError as error:
        item = row.item([], str(error))
    return StoredGroup(item, data, row.ticket, keys, row.column("archived_at"), due)


def _given_back(
    stored: StoredGroup, rules: Rules, home: Lane, tallies: Counter[tuple[str, Status, Tally]]
) -> StoredGroup:
    """Return a leased group as after the end of its lease."""
    step = transitions.unleased(stored.item)
    times, deliveries = stored.item.times_sampled + step.draws, stored.item.deliveries + step.deliveries
    item = replace(stored.item, times_sampled=times, deliveries=deliveries)
    tallies.update({(item.task_name, status, name): n for (status, name), n in step.counts.items()})
    keys = new_keys(rules, home, [(item.uid, stored.ticket, item.priority)])[item.uid]
    archived_at = time.time() if item.status in ASIDE else None
    return StoredGroup(item, stored.payload, stored.ticket, keys, archived_at, stored.due)


async def load_state(transactions: Transactions, files: PayloadFiles, codec: Codec, state: dict[str, Any]) -> None:
    """Load a portable state into an empty buffer; large payloads are kept apart if those of new groups are."""
    loaded, copying = unpack_state(state), codec.as_stored()
    await transactions.read(check_no_groups)
    while True:
        encoded: list[EncodedGroup] = []
        try:
            for groups in in_batches(loaded.groups, lambda one: len(one.payload)):
                encoded += await transactions.compute(partial(_encoded, copying, files.batch()), groups)
            load = partial(_load, loaded=loaded, encoded=encoded)
            await transactions.engine.write(load, transactions.scope, fenced=False)
        except FileLostError:
            continue
        transactions.committed()
        return


def _load(tx: Transaction, loaded: BufferState, encoded: Sequence[EncodedGroup]) -> None:
    check_fence(tx)
    make_room(tx)
    shift = free_shift(tx, loaded.next_uid - 1)
    names = {(one.item.task_name, one.item.status) for one in loaded.groups}
    names |= {(task, status) for task, status, _ in (*loaded.tallies, *loaded.clocks)} | loaded.steps.keys()
    lanes = need_lanes(tx, names)
    used = {(one.item.task_name, one.item.status) for one in loaded.groups}
    used |= {(task, status) for task, status, _ in loaded.clocks}
    _set_clocks(tx, {name: lanes[name] for name in used}, loaded.clocks)
    for new in encoded:
        check_size(tx, new)
    keyed = [
        (one.item.uid + shift, new, scoped_key(tx.scope.buffer, one.item.task_name, one.item.key), one.ticket)
        for one, new in zip(loaded.groups, encoded, strict=True)
    ]
    groups = [
        group_row(uid, one, key, lanes, {}, ticket if ticket != uid else None, 0) for uid, one, key, ticket in keyed
    ]
    name_files(tx, (encoded.extent for _, encoded, *_ in keyed if encoded.extent is not None))
    insert_groups(tx, groups, [payload_row(uid, encoded) for uid, encoded, *_ in keyed])
    rest = [
        [*(getattr(one.item, name) for name in _REST), one.archived_at, *map(one.keys.get, KEYS), one.item.uid + shift]
        for one in loaded.groups
    ]
    columns = ", ".join(f"{name} = :{name}" for name in (*_REST, "archived_at", *KEYS))
    tx.each(f"UPDATE rb_group SET {columns} WHERE uid = :uid", rest)  # noqa: S608
    counts = {(lanes[(task, status)].id, name): n for (task, status, name), n in loaded.tallies.items()}
    add_counts(tx, counts)
    add_counts(tx, bytes_of(encoded, lanes))
    raise_uid(tx, loaded.next_uid - 1 + shift)
    set_next_ticket(tx, loaded.next_ticket)
    write_cursors(tx, loaded.cursors)
    # The staleness of the loaded groups is pinned: only these lanes have a step.
    tx.change("UPDATE rb_lane SET step = NULL WHERE buffer = :buffer AND NOT leased", buffer=tx.scope.buffer)
    start_steps(tx, {lanes[name].id: step for name, step in loaded.steps.items()})


#: The columns of a group that a new group lacks.
_REST = ("times_sampled", "deliveries", "error", "reward", "trained_step")


def _set_clocks(tx: Transaction, lanes: dict[LaneName, Lane], clocks: dict[tuple[str, Status, str], Clock]) -> None:
    """Set the clocks of the races in use, and no others."""
    for name, one in lanes.items():
        uniform, prioritized = clocks.get((*name, UNIFORM)), clocks.get((*name, PRIORITIZED))
        values = {
            CLOCKS[UNIFORM]: uniform.time if uniform else None,
            CLOCKS[PRIORITIZED]: prioritized.time if prioritized else None,
            "idle_clock": prioritized.idle_time if prioritized else None,
        }
        changes = ", ".join(f"{name} = :{name}" for name in values)
        tx.change(f"UPDATE rb_lane SET {changes} WHERE id = :id", id=one.id, **values)  # noqa: S608


def _encoded(codec: Codec, apart: Apart | None, groups: Sequence[StoredGroup]) -> list[EncodedGroup]:
    """Return groups ready to be inserted; their tails that are kept apart are written when this returns."""
    encoded = [_encoded_one(codec, apart, one) for one in groups]
    if apart is not None:
        apart.flush()
    return encoded


def _encoded_one(codec: Codec, apart: Apart | None, stored: StoredGroup) -> EncodedGroup:
    item = stored.item
    new = NewGroup(
        item.task_name,
        item.status,
        item.staleness,
        [],
        item.created_at,
        priority=item.priority,
        tags=item.tags,
        key=item.key,
        worker=item.worker,
    )
    try:
        rollouts = codec.decode(stored.payload)
    except DecodeError:
        return describe(new, [], stored.payload, codec.rollout_type)
    split = codec.split(stored.payload)
    if apart is None or split.size < apart.threshold:
        return describe(new, rollouts, stored.payload, codec.rollout_type, due=stored.due)
    extent = apart.add(split)
    return describe(new, rollouts, split.head + extent.packed(), codec.rollout_type, due=stored.due, extent=extent)
