"""A pair of buffers, one over the model, and the state machine of random calls on both."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import replaybuf.buffer.putting
from replaybuf import ReplayBuffer, Status
from replaybuf.buffer.lease import Lease
from replaybuf.errors import SnapshotError
from replaybuf.rules.limits import Rules
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.values import NewGroup, StorageItem
from tests.contract.harness import CODEC
from tests.postgres import new_urls
from tests.reference.backend import Reference
from tests.reference.snapshots import plain_state, read_snapshot, snapshot_of
from tests.side_by_side.seen import (
    TASKS,
    all_items,
    by_task,
    caught,
    changes,
    everything,
    expected_views,
    make_group,
    make_prompt,
    orders,
    outcome,
    plain_error,
    puts,
    queries,
    read_views,
    rules,
    seen,
    sizes,
    some_uids,
    sometimes,
    statuses,
    tasks,
)
from tests.stores import because


class Pair(RuleBasedStateMachine):
    """The buffers, what runs an operation on both, and what must be the same.

    Subclasses say of which kind the database of the other one is, and for which test.
    """

    kind: str
    request: pytest.FixtureRequest

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp(prefix="rb-side-"))
        self.databases = ExitStack()
        self.new_url = self.databases.enter_context(new_urls(self.kind, self.request, self.folder))
        self.clock = patch.object(replaybuf.buffer.putting, "time", _Clock())

    @initialize(rules=rules, first=st.lists(puts, min_size=4, max_size=8))
    def begin(self, rules: Rules, first: list[dict[str, Any]]) -> None:
        self.clock.start()
        self.rules = rules
        self.begin_with_new()
        self.put_at_once(first)

    def buffer(self, storage: Any) -> ReplayBuffer:
        return ReplayBuffer(storage, put_timeout=0)

    def teardown(self) -> None:
        if hasattr(self, "other"):  # else the example ended before it began
            self.clock.stop()
            self.run(self.other.close())
        self.databases.close()
        self.run(self.loop.shutdown_default_executor())
        self.loop.close()
        shutil.rmtree(self.folder)

    def run(self, call: Awaitable[Any]) -> Any:
        """Await a call in the machine's loop. (`asyncio.Runner` writes a `repr` of the whole result each time.)"""
        return self.loop.run_until_complete(call)

    def both(self, operation: Callable[[ReplayBuffer], Awaitable[Any]]) -> Any:
        """Run an operation on both buffers; its result, or error, which has to be the same."""
        replaybuf.buffer.putting.time.now += 1
        expected, actual = (self.run(outcome(operation, buffer)) for buffer in (self.reference, self.other))
        assert actual == expected
        return actual

    def each(self, operation: Callable[[ReplayBuffer], Awaitable[Any]]) -> tuple[Any, Any]:
        """Run an operation on both buffers; what it gives, or the error, for either."""
        replaybuf.buffer.putting.time.now += 1
        expected, actual = (self.run(caught(operation, buffer)) for buffer in (self.reference, self.other))
        return expected, actual

    def put_at_once(self, new_puts: list[dict[str, Any]]) -> None:
        rules, next_uid = self.reference.storage.rules, self.reference.storage._next_uid
        new_puts = [_independent(options, next_uid) for options in new_puts]
        if rules.limits.capacity is not None and (
            rules.remover.is_race or any(options["replaces"] or options.get("key") is not None for options in new_puts)
        ):
            # Puts that are committed together evict together: by the same chances, but not the same groups; and what
            # one of them replaces is evicted then, or not yet.
            for options in new_puts:
                self.put_one(options)
            return

        async def operation(buffer: ReplayBuffer) -> Any:
            calls = [buffer.put(**(options | {"items": make_group(options["items"])})) for options in new_puts]
            return [plain_error(result) for result in await asyncio.gather(*calls, return_exceptions=True)]

        self.both(operation)

    def put_one(self, options: dict[str, Any]) -> None:
        async def operation(buffer: ReplayBuffer) -> Any:
            rollouts, dropped = make_group(options["items"]), list[StorageItem]()
            uid = await buffer.put(**(options | {"items": rollouts, "dropped": dropped}))
            return uid, rollouts, seen({"": sorted(dropped, key=lambda item: item.uid)})

        self.both(operation)

    def discard_partial_responses(self) -> None:
        self.run(self.other.close())
        self.begin_with_new()

    def begin_with_new(self) -> None:
        self.leases: list[tuple[Lease, Lease]] = []
        self.reference = self.buffer(Reference(CODEC, self.rules))
        self.url = self.new_url()
        self.open_other()

    def open_other(self) -> None:
        self.other = self.buffer(SQLStorage(self.url, CODEC, self.rules))

    @invariant()
    def same(self) -> None:
        expected, actual = (self.run(everything(buffer)) for buffer in (self.reference, self.other))
        assert actual["items"] == expected["items"]
        assert actual == expected
        views = self.run(self.other.storage._read(read_views))
        items = self.run(all_items(self.reference))
        for row in views["groups"]:
            del row["trained_step"]  # see `seen.fields`
        leased = {row["uid"] for row in views["groups"] if row.pop("leased_until") is not None}
        for name, rows in expected_views(items).items():
            assert [row for row in views[name] if row["uid"] not in leased] == rows, name


def _independent(options: dict[str, Any], next_uid: int) -> dict[str, Any]:
    """A put as one of several at once, for which it is a matter of time which are committed together.

    It names no group that comes with it, and isn't dropped when that would remove one.
    """
    options = options | {"replaces": [uid for uid in options.get("replaces", ()) if uid < next_uid]}
    kept_options: dict[str, Any] = {"expired_groups_retryable": True, "keep_unfit": True}
    return options | kept_options if options["replaces"] or "key" in options else options


class _Clock:
    """The time as both buffers see it: equal for the same operation."""

    def __init__(self) -> None:
        import time

        self.now = 1_000_000
        self.monotonic = time.monotonic

    def time(self) -> float:
        return float(self.now)


class Keeping(Pair):
    """Checkpoints, snapshots, state dicts, and opening again."""

    @rule(
        step=st.integers(0, 2),
        way=st.sampled_from(["checkpoint", "checkpoint", "restore", "restore", "drop"]),
    )
    def keep_or_restore(self, step: int, way: str) -> None:
        async def operation(buffer: ReplayBuffer) -> Any:
            if way == "checkpoint":
                checkpoint = await buffer.checkpoint(step)
                return checkpoint.step, checkpoint.groups
            if way == "drop":
                return await buffer.drop_checkpoint(step)
            checkpoint = await buffer.restore(step)
            return checkpoint.step, checkpoint.groups, [checkpoint.step for checkpoint in await buffer.checkpoints()]

        self.both(operation)
        self.same_state()

    @rule(way=st.sampled_from(["snapshot", "reopen"]), crossed=st.booleans())
    def persist(self, way: str, crossed: bool) -> None:
        """Both go on from what they have left behind, or both from what the database has."""
        if way == "snapshot":
            self.save_and_resume(crossed)
        else:
            self.run(self.other.close())
            self.open_other()
            for _, lease in self.leases:
                lease.storage, lease._putting = self.other.storage, self.other.putting

    def save_and_resume(self, crossed: bool) -> None:
        folders = [self.folder / "reference", self.folder / "other"]
        for buffer, folder in zip((self.reference, self.other), folders, strict=True):
            self.run(buffer.save(folder))
            filled = self.reference.storage.state().groups or self.run(buffer.checkpoints())
            with pytest.raises(SnapshotError, check=because("not empty")) if filled else nullcontext():
                self.run(buffer.resume(folder))
        self.discard_partial_responses()
        self.run(self.reference.resume(folders[crossed]))
        self.run(self.other.resume(folders[1]))

    def same_state(self) -> None:
        """What the database holds is what the model holds, next uids included."""
        expected = self.reference.storage.state()
        actual = read_snapshot(snapshot_of(self.other), CODEC)
        assert plain_state(actual, payloads=False) == plain_state(expected, payloads=False)
        assert actual.next_uid == expected.next_uid


class Leasing(Pair):
    """Leases of groups and prompts, and how they end."""

    @precondition(lambda self: len(self.reference) > 1)
    @rule(
        wanted=st.dictionaries(tasks, sizes, min_size=1),
        status=statuses,
        where=sometimes,
        failures=st.sampled_from([0, 0, 1, 2]),
        way=st.sampled_from([None, "acknowledge", "extend"]),
    )
    def lease(self, wanted: dict[str, int], status: Status, where: Any, failures: int, way: str | None) -> None:
        """Groups are leased, after others may have failed with them, and perhaps settled at once."""

        async def leased(buffer: ReplayBuffer) -> Lease:
            for failure in range(failures + 1):
                lease = await buffer.lease_batch(
                    wanted, group_status=status, where=where, seconds=1000, heartbeat=False
                )
                if failure < failures:
                    await lease.give_back(failed=f"failure {failure}")
            return lease

        pair = self.each(leased)
        expected, actual = (seen(result.items) if isinstance(result, Lease) else plain_error(result) for result in pair)
        assert actual == expected
        if isinstance(pair[0], Lease):
            self.leases.append(pair)
            if way is not None:
                self.settle_both(pair, None, way)

    @precondition(lambda self: self.leases)
    @rule(
        number=st.integers(0, 9),
        part=st.none() | st.lists(st.integers(0, 3), max_size=2),
        way=st.sampled_from(["acknowledge", "acknowledge", "give back", "failed", "extend"]),
        priority=st.sampled_from([None, 0, 0.5, 1e3]),
    )
    def settle(self, number: int, part: list[int] | None, way: str, priority: float | None) -> None:
        """A part of a lease, or all that is open, perhaps with a new priority."""
        pair = self.leases[number % len(self.leases)]
        open_uids = sorted(pair[0].open)
        uids = None if part is None else [open_uids[place] for place in part if place < len(open_uids)]
        if priority is not None:
            self.both(lambda buffer: buffer.update_priorities(dict.fromkeys(open_uids, priority)))

        self.settle_both(pair, uids, way)

    def settle_both(self, pair: tuple[Lease, Lease], uids: list[int] | None, way: str) -> None:
        async def settled(lease: Lease) -> Any:
            if way == "acknowledge":
                return await lease.acknowledge(uids)
            if way == "extend":
                return await lease.extend(2000)
            return await lease.give_back(uids, failed="bad" if way == "failed" else None)

        expected, actual = self.each(lambda buffer: settled(pair[0] if buffer is self.reference else pair[1]))
        assert plain_error(actual) == plain_error(expected)
        assert pair[1].open == pair[0].open

    @rule(numbers=st.lists(st.integers(0, 9), max_size=3), behind=st.sampled_from([0, 0, 0, 1]), keep=st.booleans())
    def claim(self, numbers: list[int], behind: int, keep: bool) -> None:
        """Prompts are claimed, and one of them is finished."""

        async def claimed(buffer: ReplayBuffer) -> Any:
            now = await buffer.cursors.read("data")
            prompts = [NewGroup(TASKS[0], Status.INIT, 0, make_prompt(number), 1.0) for number in numbers]
            moved_cursor = replace(
                now, version=now.version - behind, position=now.position + len(numbers), value=bytes(numbers)
            )
            return await buffer.cursors.claim(prompts, moved_cursor, 1000)

        pair = self.each(claimed)
        expected, actual = (seen(result.items) if isinstance(result, Lease) else result for result in pair)
        assert actual == expected
        if not isinstance(pair[0], Lease):
            return
        self.leases.append(pair)
        uids = sorted(pair[0].open)[:1]

        async def finished(buffer: ReplayBuffer) -> Any:
            lease = pair[0] if buffer is self.reference else pair[1]
            prompt = make_prompt(7)
            settle = lease.save if keep else lease.finish
            return await settle(prompt, TASKS[0], replaces=uids)

        if uids:
            self.both(finished)


class SideBySide(Leasing, Keeping):
    """All operations: of few rules, because hypothesis draws these alike, and whole examples without some of them."""

    @precondition(lambda self: len(self.reference) < 30)
    @rule(many=st.lists(puts, min_size=1, max_size=6))
    def put(self, many: list[dict[str, Any]]) -> None:
        self.put_at_once(many)
        self.put_one(many[0])

    @precondition(lambda self: len(self.reference) > 1)
    @rule(size=sizes, task=tasks, status=statuses, where=sometimes)
    def get(self, size: int, task: str, status: Status, where: Any) -> None:
        self.both(lambda buffer: buffer.get(size, task, status, where=where))

    @precondition(lambda self: len(self.reference) > 1)
    @rule(wanted=st.dictionaries(tasks, sizes), status=statuses, timeout=st.sampled_from([0, 0.001]))
    def take_batch(self, wanted: dict[str, int], status: Status, timeout: float) -> None:
        self.both(lambda buffer: buffer.take_batch(wanted, group_status=status, timeout=timeout))

    @rule(
        many=st.lists(puts, min_size=2, max_size=6),
        wanted=st.dictionaries(tasks, st.integers(1, 3), min_size=1),
        wheres=st.lists(st.none() | sometimes, min_size=1, max_size=4),
        beta=st.sampled_from([None, 0, 0.5, 1]),
        priorities=st.lists(st.sampled_from([0, 0.25, 1, 1e3]), min_size=1, max_size=4),
    )
    def replay(
        self,
        many: list[dict[str, Any]],
        wanted: dict[str, int],
        wheres: list[Any],
        beta: float | None,
        priorities: list[float],
    ) -> None:
        """What a prioritized trainer does: groups are drawn with weights, several times, and get new priorities."""
        for options in many if len(self.reference) < 10 else []:
            self.put_one({name: value for name, value in options.items() if name in ("items", "task_name", "priority")})

        async def operation(buffer: ReplayBuffer) -> Any:
            draws = [await buffer.sample(wanted, where=where, beta=beta) for where in wheres]
            uids = [item.uid for items in draws[-1].values() for item in items]
            updated = await buffer.update_priorities(dict(zip([*uids, 1, 2, 3], priorities, strict=False)))
            return [seen(items) for items in draws], updated

        self.both(operation)

    @rule(
        many=st.lists(puts, min_size=1, max_size=6),
        steps=st.lists(st.integers(0, 9), min_size=1, max_size=2),
        sequence=by_task,
        token=by_task,
        retryable=st.dictionaries(tasks, st.booleans()),
        chosen=st.none() | st.none() | st.lists(st.sampled_from(Status), max_size=4),
        then_get=sizes,
    )
    def train(
        self,
        many: list[dict[str, Any]],
        steps: list[int],
        sequence: dict[str, int | None],
        token: dict[str, int | None],
        retryable: dict[str, bool],
        chosen: list[Status] | None,
        then_get: int,
    ) -> None:
        """What a trainer does: groups of the last step's model come in, a refresh (or two), and a batch is taken."""
        for options in many if len(self.reference) < 30 else []:
            fresh = {name: value for name, value in options.items() if "threshold" not in name}
            self.put_one(fresh | {"model_step": steps[0] - 1, "current_train_step": steps[0]})
        rules = dict.fromkeys(token) | sequence
        for step in steps:
            self.both(
                lambda buffer, step=step: buffer.refresh_staleness(
                    task_stale_thresholds=rules,
                    task_token_stale_thresholds=token,
                    expired_groups_retryable_by_task={
                        task: value for task, value in retryable.items() if task in rules
                    },
                    current_train_step=step,
                    statuses=chosen,
                )
            )
            self.same()
        self.both(lambda buffer: buffer.get(then_get, TASKS[0]))

    @precondition(lambda self: len(self.reference) > 1)
    @rule(query=queries, changes=changes)
    def update(self, query: Any, changes: dict[str, Any]) -> None:
        self.both(lambda buffer: buffer.update(query, **changes))

    @precondition(lambda self: len(self.reference) > 1)
    @rule(query=queries, uids=some_uids)
    def delete(self, query: Any, uids: Any) -> None:
        self.both(lambda buffer: buffer.delete({"$and": [query, uids]}))

    @rule(query=queries, order_by=orders, limit=st.none() | st.integers(0, 3))
    def read(self, query: Any, order_by: list[str], limit: int | None) -> None:
        async def operation(buffer: ReplayBuffer) -> Any:
            uids = [item.uid async for item in buffer.find(query, order_by=order_by, limit=limit)]
            return uids, await buffer.count_where(query)

        self.both(operation)
