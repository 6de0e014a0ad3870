"""Copies of the whole reference backend: step checkpoints, restores, states."""

from __future__ import annotations

import time
from copy import deepcopy
from dataclasses import dataclass

from replaybuf.rules.query import LogicNode
from replaybuf.storage.values import Checkpoint, Cursor, missing_checkpoint
from tests.reference.groups import Groups
from tests.reference.loans import Loans
from tests.reference.snapshots import BufferState, StoredGroup

_ALL = LogicNode("$and", ())


@dataclass(slots=True)
class World:
    """Everything that a restore brings back: the groups, the loans, the ticket of the next group, the cursors."""

    groups: Groups
    loans: Loans
    next_ticket: int
    cursors: dict[str, Cursor]

    def copy(self) -> World:
        return deepcopy(self, {id(shared): shared for shared in (self.groups.codec, self.groups.rules)})


class Checkpoints:
    """The checkpoints by step, in the order in which they were made."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Checkpoint, World]] = {}

    def make(self, step: int, world: World, keep: int | None) -> Checkpoint:
        """Keep a copy of the world under this step, and at most `keep` checkpoints in all."""
        groups = world.groups
        checkpoint = Checkpoint(step, time.time(), len(groups.payloads), sum(map(len, groups.payloads.values())))
        self._kept.pop(step, None)
        self._kept[step] = (checkpoint, world.copy())
        for old_step in list(self._kept)[: 0 if keep is None else -keep]:
            del self._kept[old_step]
        return checkpoint

    def all(self) -> list[Checkpoint]:
        return [checkpoint for checkpoint, _ in self._kept.values()]

    def get(self, step: int) -> tuple[Checkpoint, World]:
        """Return a checkpoint and a copy of its world. Raises CheckpointError."""
        if step not in self._kept:
            raise missing_checkpoint(step, list(self._kept))
        checkpoint, world = self._kept[step]
        return checkpoint, world.copy()

    def drop(self, step: int) -> None:
        self.get(step)
        del self._kept[step]


# As a state


def state_of(world: World, next_uid: int) -> BufferState:
    """Return the world as a state, leased groups as if they had been given back."""
    world = world.copy()
    world.loans.return_all()
    groups, races = world.groups, world.groups.races
    group_states = [
        StoredGroup(
            groups.item(uid),
            groups.payloads[uid],
            races.ticket(uid),
            races.keys.get(uid),
            groups.archived_at.get(uid),
            sorted(groups.due.get(uid, ())),
        )
        for uid in groups.table.select(_ALL)
    ]
    cursors = list(world.cursors.values())
    return BufferState(group_states, next_uid, groups.tallies, races.races, world.next_ticket, cursors, groups.steps)


def load(groups: Groups, state: BufferState) -> None:
    """Load the groups of a state into an empty `Groups`."""
    for group in state.groups:
        uid = group.item.uid
        groups.payloads[uid] = group.payload
        groups.table.add(group.item)
        if group.ticket != uid:
            groups.races.tickets[uid] = group.ticket
        if group.random_key is not None:
            groups.races.keys[uid] = group.random_key
        if group.archived_at is not None:
            groups.archived_at[uid] = group.archived_at
        if group.due:
            groups.due[uid] = {*group.due}
    groups.races.load(state.races, {(row.item.task_name, row.item.status) for row in state.groups})
    groups.tallies = state.tallies
    groups.steps = dict(state.steps)
