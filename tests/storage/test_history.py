"""Checkpoints, restores, undone draws and sweeps beside a model that copies everything, in random order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest

from replaybuf import ReplayBuffer, Status
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.past import pass_on
from tests.cancellation.conftest import take
from tests.contract.leasing import LONG
from tests.stores import TASK, build, group, sweep_now

#: A group: its priority, how often it was drawn, its status, its key.
Known = tuple[float, int, str, str | None]
_ENDS = (Tally.TAKEN, Tally.DELETED, Tally.REPLACED, Tally.SIZE, Tally.LEASED)


async def swept(buffer: ReplayBuffer) -> tuple[set[int], set[int]]:
    """Sweep all there is to sweep; the groups that have payloads, and those of which checkpoints have versions."""
    store = buffer.storage

    def work(tx: Transaction) -> tuple[set[int], set[int]]:
        while sweep_now(tx, limit=5) or pass_on(tx, 4):
            pass
        pruned = "removed_at IS NULL AND draw NOT IN (SELECT id FROM rb_batch)"
        assert tx.value(f"SELECT count(*) FROM rb_past WHERE {pruned}") == 0  # what draws had goes with their record
        kept = tx.values("SELECT uid FROM rb_past WHERE removed_at IS NOT NULL")
        return set(tx.values("SELECT uid FROM rb_payload")), set(kept)

    return await store.thread.run(lambda: store.engine.write(work))


@dataclass
class Drawn:
    """A draw that may be undone: its groups as they were, the checkpoints that were there, and its number."""

    groups: dict[int, Known]
    before: set[int]
    number: int
    undo: Callable[[], Any]


@dataclass
class Copies:
    """What a buffer holds; each checkpoint is a copy of it. `limit`, `archives` and `history` are the buffer's.

    `records` are the groups of each draw, by its number.
    """

    limit: int = 1
    archives: bool = False
    history: int = 1000
    groups: dict[int, Known] = field(default_factory=dict)
    checkpoints: dict[int, dict[int, Known]] = field(default_factory=dict)
    drawn: list[Drawn] = field(default_factory=list)
    records: dict[int, list[int]] = field(default_factory=dict)
    draws: int = 0

    def first(self, count: int) -> list[int]:
        return sorted(uid for uid, known in self.groups.items() if known[2] == "completed")[:count]

    def with_key(self, key: str | None) -> list[int]:
        return [uid for uid, known in self.groups.items() if key is not None and known[3] == key]

    def record(self, uids: list[int]) -> None:
        self.draws += 1
        if uids:
            self.records[self.draws] = uids

    def draw(self, count: int) -> dict[int, Known]:
        before = {uid: self.groups[uid] for uid in self.first(count)}
        self.record([*before])
        for uid, (priority, times, status, key) in before.items():
            if times + 1 < self.limit:
                self.groups[uid] = (priority, times + 1, status, key)
            elif self.archives:
                self.groups[uid] = (priority, times + 1, "archived", key)
            else:
                del self.groups[uid]
        return before

    def undo(self, drawn: Drawn) -> None:
        """A group whose key another one has, now or in a checkpoint since the draw, was replaced by that one."""
        self.records.pop(drawn.number, None)
        states = (self.groups, *(made for step, made in self.checkpoints.items() if step not in drawn.before))
        for uid, (priority, times, status, key) in drawn.groups.items():
            others = {known[3] for state in states for other, known in state.items() if other != uid}
            if key is not None and key in others:
                continue
            for state in states:
                state[uid] = (state[uid][0] if times + 1 < self.limit else priority, times, status, key)


class Run:
    """Random operations on a buffer and its model."""

    def __init__(self, buffer: ReplayBuffer, model: Copies, seed: int) -> None:
        self.buffer, self.model = buffer, model
        self.random = random.Random(seed)
        self.sizes: dict[int, int] = {}
        self.step = 0

    async def go_on(self, operations: int) -> None:
        calls = (self.put, self.put, self.take, self.draw, self.undo, self.change, self.lease, self.replace)
        calls += (self.checkpoint, self.checkpoint, self.restore, self.drop, self.sweep, self.prune)
        for _ in range(operations):
            call = self.random.choice(calls)
            await call()
            assert await self.found() == self.model.groups, call.__name__
            assert await self.records() == [*self.model.records.values()], call.__name__
            made = [(one.step, one.groups, one.bytes) for one in await self.buffer.checkpoints()]
            assert made == [(step, len(kept), self.size(kept)) for step, kept in self.model.checkpoints.items()]
        self.model.drawn.clear()
        await self.sweep()
        for step in list(self.model.checkpoints):
            await self.restore(step)
            assert await self.found() == self.model.groups

    def size(self, groups: dict[int, Known]) -> int:
        return sum(self.sizes[uid] for uid in groups)

    async def found(self) -> dict[int, Known]:
        items = [item async for item in self.buffer.find({})]
        return {item.uid: (item.priority, item.times_sampled, str(item.status), item.key) for item in items}

    async def records(self) -> list[list[int]]:
        """The groups of the recorded draws, in order."""
        read = self.buffer.storage.transactions.read
        drawn: dict[int, list[int]] = {}
        for batch, uid in await self.buffer.storage.thread.run(lambda: read(_drawn)):
            drawn.setdefault(batch, []).append(uid)
        return [*drawn.values()]

    async def check_counts(self) -> None:
        tallies: Counter[Tally] = Counter()
        archived = 0
        for (_, status, name), count in (await self.buffer.storage.tallies()).items():
            if status == Status.ARCHIVED:  # these were taken
                archived += count * (name == Tally.SIZE)
            else:
                tallies[name] += count
        assert tallies[Tally.PUT] == sum(tallies[name] for name in _ENDS)
        assert tallies[Tally.SIZE] + archived == len(await self.found())

    async def put(self) -> None:
        for _ in range(self.random.randint(1, 4)):
            await self._put(key=self.random.choice([None, None, "a", "b"]))

    async def _put(self, key: str | None = None, **options: Any) -> None:
        uid = await self.buffer.put(group(1, self.random.randint(1, 3)), TASK, key=key, **options)
        for replaced in self.model.with_key(key):
            del self.model.groups[replaced]
            if self.model.limit > 1:
                self.received({replaced: (0.0, 0, "", None)})
        self.model.groups[uid] = (1.0, 0, "completed", key)
        rows = await self.buffer.storage.thread.run(lambda: self.buffer.storage.transactions.read(_bytes_of))
        self.sizes |= rows

    async def take(self) -> None:
        count = self.random.randint(1, 3)
        await self.buffer.get(count, TASK)
        self.received(self.model.draw(count))

    def received(self, groups: dict[int, Known]) -> None:
        """Draws of the same groups before it aren't undone any more."""
        self.model.drawn = [one for one in self.model.drawn if not one.groups.keys() & groups.keys()]

    async def draw(self) -> None:
        if count := min(self.random.randint(1, 3), len(self.model.first(3))):
            undo = await take(self.buffer, count)
            groups = self.model.draw(count)
            self.received(groups)
            self.model.drawn.append(Drawn(groups, set(self.model.checkpoints), self.model.draws, undo))

    async def undo(self) -> None:
        if self.model.drawn:
            drawn = self.model.drawn.pop(self.random.randrange(len(self.model.drawn)))
            await drawn.undo()
            self.model.undo(drawn)

    async def change(self) -> None:
        for uid in self.model.first(99)[:: self.random.randint(1, 3)]:
            priority = self.random.random()
            self.model.groups[uid] = (priority, *self.model.groups[uid][1:])
            await self.buffer.update({"uid": uid}, priority=priority)

    async def lease(self) -> None:
        """And give it back, perhaps after a checkpoint."""
        if uids := self.model.first(2):
            self.model.record(uids)
            lease = await self.buffer.lease_batch({TASK: len(uids)}, seconds=LONG, heartbeat=False)
            if self.random.random() < 0.5:
                await self.checkpoint()
            await lease.give_back()

    async def replace(self) -> None:
        for uid in self.model.first(1):
            del self.model.groups[uid]
            self.received({uid: (0.0, 0, "", None)})
            await self._put(replaces=[uid])

    async def checkpoint(self) -> None:
        self.step += 1
        await self.buffer.checkpoint(self.step)
        self.model.checkpoints[self.step] = deepcopy(self.model.groups)

    async def restore(self, step: int | None = None) -> None:
        if self.model.checkpoints:
            step = self.random.choice(list(self.model.checkpoints)) if step is None else step
            await self.buffer.restore(step)
            self.model.groups = deepcopy(self.model.checkpoints[step])
            self.model.drawn.clear()
            await self.check_counts()

    async def drop(self) -> None:
        if self.model.checkpoints:
            step = self.random.choice(list(self.model.checkpoints))
            await self.buffer.drop_checkpoint(step)
            del self.model.checkpoints[step]

    async def sweep(self) -> None:
        payloads, kept = await swept(self.buffer)
        there = set().union(self.model.groups, *self.model.checkpoints.values())
        assert payloads == there
        assert kept <= set().union(*self.model.checkpoints.values())

    async def prune(self) -> None:
        """A draw may be undone after it."""
        await self.buffer.storage.thread.run(self.buffer.storage.sweeper.prune_history)
        for number in [*self.model.records][: -self.model.history]:
            del self.model.records[number]


def _drawn(tx: Transaction) -> list[tuple[int, int]]:
    return [(batch, uid) for batch, uid in tx.tuples("SELECT batch, uid FROM batch_groups ORDER BY batch, uid")]


def _bytes_of(tx: Transaction) -> dict[int, int]:
    return dict(tx.tuples("SELECT uid, bytes FROM groups"))


OPTIONS: dict[str, dict[str, Any]] = {
    "taken": {},
    "again": {"max_times_sampled": 2},
    "archived": {"archive": 1000},
    "pruned": {"history": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("seeds", [[1], pytest.param([0, *range(2, 100)], marks=pytest.mark.long)], ids=len)
async def test_it_is_as_if_each_checkpoint_were_a_copy(new_url: Callable[[], str], name: str, seeds: list[int]) -> None:
    """Whatever is put, drawn, undone, changed, replaced, restored, dropped and swept in between."""
    options = OPTIONS[name]
    for seed in seeds:
        async with build(new_url(), keep_checkpoints=None, **options) as buffer:
            model = Copies(options.get("max_times_sampled", 1), "archive" in options, options.get("history", 1000))
            await Run(buffer, model, seed).go_on(50)
