"""The portable state of a store: returned by `state_dict`, and loadable into any database.

It has the groups with their workers' names, and what the store needs to continue; not the history of draws.

Groups are stored as they are read: expired responses are already reset, and staleness is a plain number. Leased groups
are stored as if released, because their consumers don't know the other store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from replaybuf.errors import NotEmptyError, SnapshotMismatchError
from replaybuf.rollouts.rollout import Status
from replaybuf.rules.policies import KEYS, Clock
from replaybuf.rules.transitions import LaneName, Tally
from replaybuf.storage.values import UNSET, Cursor, StorageItem, Unset

FORMAT = "replaybuf-state-3"

_METADATA = [f.name for f in fields(StorageItem) if f.name not in ("item", "probability", "weight")]
#: Fields that states of older versions lack.
_LATER = ("worker", "trained_step")


@dataclass(slots=True)
class StoredGroup:
    """A group with its payload, its sampling keys, and when it was archived (seconds since the epoch).

    `ticket` is its sampling id. `due` are the positions of the rollouts that expire at the next refresh because they
    were put as EXPIRED without a train step; UNSET in states of older versions.
    """

    item: StorageItem
    payload: bytes
    ticket: int
    keys: dict[str, float] = field(default_factory=dict)
    archived_at: float | None = None
    due: Sequence[int] | Unset = ()


@dataclass(slots=True)
class BufferState:
    """The state of a store: groups, the next uid and sampling id, tallies, virtual times, cursors, train steps."""

    groups: list[StoredGroup]
    next_uid: int
    tallies: dict[tuple[str, Status, Tally], int]
    clocks: dict[tuple[str, Status, str], Clock]
    next_ticket: int
    cursors: list[Cursor]
    steps: dict[LaneName, int]


def pack_state(state: BufferState) -> dict[str, Any]:
    """Return the state as plain values and bytes."""
    # Random orders with neither groups nor time passed are left out: they begin with the first group.
    lanes = {(group.item.task_name, group.item.status) for group in state.groups}
    lanes |= {(task, status) for (task, status, _), clock in state.clocks.items() if clock != Clock()}
    return {
        "format": FORMAT,
        "groups": [
            {name: _plain(getattr(group.item, name)) for name in _METADATA}
            | {"payload": group.payload, "ticket": group.ticket}
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
    """Return the state packed by `pack_state`. Raises SnapshotMismatchError for anything else."""
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise SnapshotMismatchError(f"expected a state dict of format {FORMAT!r}, got {found!r}")
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
            steps={  # missing in states of older versions
                (str(task), Status(status)): int(step) for task, status, step in state.get("steps", ())
            },
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotMismatchError(f"the state dict is incomplete or damaged: {error!r}") from error


def _stored_group(record: dict[str, Any]) -> StoredGroup:
    record = dict.fromkeys(_LATER) | record
    values = {name: record[name] for name in _METADATA} | {"status": Status(record["status"])}
    keys = {str(name): float(key) for name, key in record["keys"].items() if name in KEYS}
    item, ticket = StorageItem(**values), int(record["ticket"])
    due = [int(place) for place in record["due"]] if "due" in record else UNSET
    return StoredGroup(item, bytes(record["payload"]), ticket, keys, record["archived_at"], due)


def check_empty(count: int, steps: Sequence[int]) -> None:
    """Raise NotEmptyError when there are groups or checkpoints (of these steps)."""
    if count:
        raise NotEmptyError(
            f"the buffer holds {count} groups: resume into an empty buffer, or go on with this one as it is "
            "(an opened database already has everything that was committed)"
        )
    if steps:
        raise NotEmptyError(
            f"the buffer has checkpoints of the steps {', '.join(map(str, steps))}: restore one, or drop them first"
        )


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Status) else value
