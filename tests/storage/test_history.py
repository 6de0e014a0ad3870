"""Checkpoints, restores, undone draws and sweeps beside a model that copies everything, in random order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest

from replaybuf import ReplayBuffer, Status
from replaybuf.errors import ConflictError
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.past import pass_on
from tests.cancellation.conftest import end_background_work, take
from tests.contract.leasing import LONG
from tests.storage.history_model import SIZE, THRESHOLD, Copies, Drawn, Group, State
from tests.stores import TASK, build, group, sweep_now

#: What the model takes from the buffer, to find it again after a restore.
_REST = ("timestamp_id", "tags", "created_at", "reward", "error", "deliveries", "worker", "trained_step", "part")
_ENDS = (Tally.TAKEN, Tally.EVICTED, Tally.DELETED, Tally.REPLACED, Tally.SIZE, Tally.LEASED)


async def swept(buffer: ReplayBuffer) -> tuple[set[int], set[int]]:
    """Sweep all there is to sweep; the groups that have payloads, and those of which checkpoints have versions."""
    store = buffer.storage

    def work(tx: Transaction) -> tuple[set[int], set[int]]:
        while sweep_now(tx, limit=5) or pass_on(tx, 4):
            pass
        pruned = "removed_at IS NULL AND draw NOT IN (SELECT id FROM rb_batch)"
        assert tx.value(f"SELECT count(*) FROM rb_past WHERE {pruned}") == 0  # what draws had goes with their record
        past = tx.values("SELECT uid FROM rb_past WHERE removed_at IS NOT NULL")
        return set(tx.values("SELECT uid FROM rb_payload")), set(past)

    return await store.thread.run(lambda: store.engine.write(work))


class Run:
    """Random operations on a buffer and its model."""

    def __init__(self, buffer: ReplayBuffer, model: Copies, seed: int) -> None:
        self.buffer, self.model = buffer, model
        self.random = random.Random(seed)
        self.sizes: dict[int, int] = {}
        self.made = 0
        self.names: list[str] = []

    async def go_on(self, operations: int) -> None:
        changing = (self.put, self.put, self.fill, self.take, self.draw, self.draw, self.change, self.lease)
        changing += (self.replace, self.delete, self.refresh)
        calls = (*changing, self.undo, self.undo, self.checkpoint, self.checkpoint)
        calls += (self.restore, self.drop, self.sweep, self.prune)
        for _ in range(operations):
            call = self.random.choice(calls)
            await call()
            await self.check(call.__name__, changes=call in changing)
            assert await self.records() == [*self.model.records.values()], call.__name__
            actual = [(cut.step, cut.groups, cut.bytes) for cut in await self.buffer.checkpoints()]
            expected = self.model.checkpoints.items()
            assert actual == [(step, len(state.groups), self.size(state)) for step, state in expected], call.__name__
        self.model.drawn.clear()
        await self.sweep()
        for step in list(self.model.checkpoints):
            await self.restore(step)
            await self.check(f"restore {step}", changes=False)

    async def check(self, operation: str, *, changes: bool) -> None:
        """Compare the buffer with the model. A call that changes no groups leaves the rest of them as it was."""
        expected = self.model.now.seen()
        items = {item.uid: item async for item in self.buffer.find({})}
        actual = {
            uid: (str(item.status), item.priority, item.times_sampled, item.key, item.staleness)
            for uid, item in items.items()
        }
        unsure = {uid for uid, (*_, staleness) in expected.items() if staleness is None}
        actual |= {uid: (*actual[uid][:-1], None) for uid in unsure & actual.keys()}
        assert actual == expected, operation
        for uid, item in items.items():
            state = {name: getattr(item, name) for name in _REST}
            state["content"] = [(row.rollout_id, row.response, [*row.response_model_steps]) for row in item.item]
            assert changes or state == self.model.groups[uid].rest, (operation, uid, state, self.model.groups[uid].rest)
            self.model.groups[uid].rest = state

    def size(self, state: State) -> int:
        return sum(self.sizes[uid] for uid in state.groups)

    async def records(self) -> list[list[int]]:
        """The groups of the recorded draws, in order."""
        read = self.buffer.storage.transactions.read
        by_batch: dict[int, list[int]] = {}
        for batch, uid in await self.buffer.storage.thread.run(lambda: read(_drawn)):
            by_batch.setdefault(batch, []).append(uid)
        return [*by_batch.values()]

    async def check_counts(self) -> None:
        tallies: Counter[Tally] = Counter()
        aside_count = 0
        for (_, status, name), count in (await self.buffer.storage.tallies()).items():
            if status in (Status.ARCHIVED, Status.FILLING):  # these were taken, or aren't put yet
                aside_count += count * (name == Tally.SIZE)
            else:
                tallies[name] += count
        assert tallies[Tally.PUT] == sum(tallies[name] for name in _ENDS)
        assert tallies[Tally.SIZE] + aside_count == len(self.model.groups)

    async def put(self) -> None:
        for _ in range(self.random.randint(1, 3)):
            await self._put(key=self.random.choice([None, None, "a", "b"]))

    async def _put(self, key: str | None = None, replaced: tuple[int, ...] = ()) -> None:
        step = self.model.now.step
        model = step - self.random.randint(1, 4)
        rollouts, steps = group(model, self.random.randint(1, 3)), {"model_step": model, "current_train_step": step}
        tags = self.random.choice([None, {"source": "a"}, {"source": "b", "level": 1}])
        uid = await self.buffer.put(rollouts, TASK, key=key, tags=tags, replaces=replaced, **steps)
        assert uid is not None
        self.model.put(uid, Group("completed", key, model), replaced)
        await self.read_sizes()

    async def fill(self) -> None:
        """Put a rollout of a group; the last one makes it whole. One whose group has left is refused."""
        if not self.names or self.random.random() < 0.5:
            self.names.append(f"group {len(self.names)}")
        name, step = self.random.choice(self.names), self.model.now.step
        parts = {row.index: uid for uid, row in self.model.groups.items() if row.key == name and row.index is not None}
        model = self.model.groups[next(iter(parts.values()))].model if parts else step - 2
        steps = {"model_step": model, "current_train_step": step}
        try:
            uid = await self.buffer.put(group(1), TASK, group=name, size=SIZE, **steps)
        except ConflictError:
            assert not parts
            self.names.remove(name)
            return
        assert uid is not None
        assert not self.model.now.named((name, None))
        if len(parts) + 1 < SIZE:
            index = next(index for index in range(SIZE) if index not in parts)
            self.model.put(uid, Group("filling", name, model, step - model - 1, index=index))
        else:
            self.model.put(uid, Group("completed", name, model), parts.values())
        await self.read_sizes()

    async def read_sizes(self) -> None:
        self.sizes |= await self.buffer.storage.thread.run(lambda: self.buffer.storage.transactions.read(_bytes_of))

    async def take(self) -> None:
        count = self.random.randint(1, 3)
        assert len(await self.buffer.get(count, TASK)) == len(self.model.draw(count))

    async def draw(self) -> None:
        if count := min(self.random.randint(1, 3), len(self.model.first(3))):
            undo = await take(self.buffer, count)
            groups, steps = self.model.draw(count), set(self.model.checkpoints)
            self.model.drawn.append(Drawn(groups, self.model.now.step, steps, self.model.draws, undo))

    async def undo(self) -> None:
        if self.model.drawn:
            undone = self.model.drawn.pop(self.random.randrange(len(self.model.drawn)))
            await undone.undo()
            self.model.undo(undone)

    async def change(self) -> None:
        for uid in self.model.first(99)[:: self.random.randint(1, 3)]:
            self.model.groups[uid].priority = priority = self.random.random()
            tags = {"tags": {"source": "c"}} if priority < 0.5 else {}
            await self.buffer.update({"uid": uid}, priority=priority, **tags)

    async def lease(self) -> None:
        """And acknowledge it or give it back, perhaps after a checkpoint."""
        if uids := self.model.first(2):
            lease = await self.buffer.lease_batch({TASK: len(uids)}, seconds=LONG, heartbeat=False)
            if self.random.random() < 0.5:
                await self.checkpoint()
            if self.random.random() < 0.5:
                await lease.acknowledge()
                self.model.draw(len(uids))
            else:
                await lease.give_back(failed=self.random.choice([None, "out of memory"]))
                self.model.record(uids)

    async def replace(self) -> None:
        for uid in self.model.first(1):
            await self._put(replaced=(uid,))

    async def delete(self) -> None:
        if uids := [uid for uid in self.model.groups if self.random.random() < 0.15]:
            await self.buffer.delete({"uid": {"$in": uids}})
            self.model.remove(uids)

    async def refresh(self) -> None:
        step = self.model.now.step + self.random.randint(1, 3)
        expired = await self.buffer.refresh_staleness({TASK: THRESHOLD}, step)
        assert expired == {TASK: self.model.refresh(step)}

    async def checkpoint(self) -> None:
        self.made += 1
        await self.buffer.checkpoint(self.made)
        self.model.checkpoints[self.made] = deepcopy(self.model.now)

    async def restore(self, step: int | None = None) -> None:
        if self.model.checkpoints:
            step = self.random.choice(list(self.model.checkpoints)) if step is None else step
            await self.buffer.restore(step)
            self.model.restore(step)
            await self.check_counts()

    async def drop(self) -> None:
        if self.model.checkpoints:
            step = self.random.choice(list(self.model.checkpoints))
            await self.buffer.drop_checkpoint(step)
            del self.model.checkpoints[step]

    async def sweep(self) -> None:
        payloads, past = await swept(self.buffer)
        needed = set[int]().union(*(state.groups for state in self.model.checkpoints.values()))
        assert payloads == needed.union(self.model.groups)
        assert past <= needed

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
    "bounded": {"history": 2, "capacity": 6},
}


@pytest.mark.parametrize("name", OPTIONS)
# These two runs find most mistakes that were made on purpose (`tests/mutations`).
@pytest.mark.parametrize(
    ("seeds", "operations"),
    [([9, 16], 25), pytest.param(range(100), 50, marks=pytest.mark.long)],
    ids=["short", "long"],
)
async def test_it_is_as_if_each_checkpoint_were_a_copy(
    new_url: Callable[[], str], name: str, seeds: Sequence[int], operations: int
) -> None:
    """Whatever is put, filled, drawn, undone, changed, refreshed, replaced, restored, dropped and swept in between."""
    for seed in seeds:
        async with build(new_url(), keep_checkpoints=None, **OPTIONS[name]) as buffer:
            await buffer.storage.open()
            await end_background_work(buffer)  # which would prune at any time
            await Run(buffer, Copies(**OPTIONS[name]), seed).go_on(operations)
