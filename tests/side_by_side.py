"""Two buffers side by side: one in memory, which says what is right, and one over another storage.

A hypothesis state machine runs the same random operations on both and compares all that can be seen of them after each:
results, errors, groups with their rollouts, counts, and the SQL views of databases.
"""

from __future__ import annotations

import asyncio
import copy
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import replaybuf.buffer
from replaybuf import OrderTerm, ReplayBuffer, ReplayPolicy, RolloutState, Status
from replaybuf.errors import ReplayBufError
from replaybuf.policy import FIFOPolicy, StalenessPolicy
from replaybuf.storage.memory import MemoryStorage
from replaybuf.testing.harness import CODEC, plain
from tests.places import Place
from tests.query.strategies import queries
from tests.view_rows import expected_views

TASKS = ("a", "b")


def _policy(name_: str, *terms: str) -> type[ReplayPolicy]:
    class Policy(ReplayPolicy):
        name = name_
        order = tuple(OrderTerm(term.removeprefix("-"), term.startswith("-")) for term in (*terms, "timestamp_id"))

    return Policy


POLICIES = (
    FIFOPolicy,
    StalenessPolicy,
    _policy("lifo", "-timestamp_id"),
    _policy("best_first", "-reward"),
    _policy("freshest", "staleness", "-reward"),
    _policy("important", "-priority", "-staleness"),
)

small = st.integers(-1, 9)
tasks = st.sampled_from(TASKS)
statuses = st.sampled_from([Status.COMPLETED] * 6 + [Status.ABORTED, Status.EXPIRED, *Status])
thresholds = st.none() | st.integers(1, 6)
tokens = st.none() | st.lists(st.integers(0, 3), max_size=3)
rollouts = st.fixed_dictionaries(
    {
        "status": statuses,
        "response_model_steps": st.none() | st.lists(small, max_size=3) | st.lists(small, min_size=1, max_size=3),
        "response_ids": tokens,
        "response_mask": st.none() | st.lists(st.integers(0, 1), max_size=4),
        "seq_staleness": st.integers(-2, 6),
        "reward": st.sampled_from([None, 0.5, 1, {"score": 0.25}, {"score": None}, float("nan"), -1.0]),
        "arrays": st.booleans(),
    },
    optional={
        "input_ids": tokens,
        "labels": tokens,
        "prompt_ids": tokens,
        "finish_reason": st.sampled_from([None, "stop", "length"]),
        "response": st.none() | st.text(max_size=3),
        "rollout_id": st.sampled_from([7, "seven", "\x00\udfff", 2**60]),
        "mm_info": st.just({"image": b"\x00"}),
    },
)
groups = st.lists(rollouts, min_size=1, max_size=3)
puts = st.fixed_dictionaries(
    {"items": groups, "task_name": tasks},
    optional={
        "model_step": small,
        "current_train_step": small,
        "stale_threshold": thresholds,
        "token_stale_threshold": thresholds,
        "expired_groups_retryable": st.booleans(),
        "priority": st.sampled_from([0, 0.5, 1, 2]),
        "tags": st.none()
        | st.dictionaries(st.sampled_from(["a", 'b"']), st.sampled_from([0, 1, 1.5, True, None, "a"])),
        "key": st.sampled_from(["k", "l", '"\\']),
    },
)
by_task = st.fixed_dictionaries({}, optional=dict.fromkeys(TASKS, thresholds))
orders = st.lists(
    st.sampled_from(
        [sign + name for sign in ("", "-") for name in ("staleness", "reward", "priority", "status", "uid")]
    ),
    max_size=2,
)


def make_group(specs: list[dict[str, Any]]) -> list[RolloutState]:
    """New rollouts as drawn; the same again at each call."""
    made = []
    for spec in copy.deepcopy(specs):
        if spec.pop("arrays"):
            spec = {name: np.array(v, np.int32) if isinstance(v, list) else v for name, v in spec.items()}
        made.append(RolloutState(message=[{"role": "user", "content": "?"}], **spec))
    return made


class SideBySide(RuleBasedStateMachine):
    """The machine. Subclasses say where the other buffer is."""

    place: Place

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = Path(tempfile.mkdtemp(prefix="rb-side-"))
        self.clock = patch.object(replaybuf.buffer, "time", _Clock())
        self.clock.start()

    @initialize(policy=st.sampled_from(POLICIES))
    def begin(self, policy: type[ReplayPolicy]) -> None:
        self.policy = policy()
        self.reference = self.buffer(MemoryStorage(CODEC))
        self.other = self.buffer(self.place.new())

    def buffer(self, storage: Any) -> ReplayBuffer:
        return ReplayBuffer(self.policy, storage, CODEC.rollout_type)

    def teardown(self) -> None:
        self.runner.run(self.other.close())
        self.runner.close()
        self.place.leave()
        self.clock.stop()
        shutil.rmtree(self.folder)

    def both(self, operation: Callable[[ReplayBuffer], Awaitable[Any]]) -> Any:
        """Run an operation on both buffers; its result, or error, which has to be the same."""
        replaybuf.buffer.time.now += 1
        expected, got = (self.runner.run(_outcome(operation, one)) for one in (self.reference, self.other))
        assert got == expected
        return got

    # Putting and taking

    @rule(put=puts)
    def put(self, put: dict[str, Any]) -> None:
        async def operation(buffer: ReplayBuffer) -> Any:
            given = make_group(put["items"])
            return await buffer.put(**(put | {"items": given})), given

        self.both(operation)

    @rule(many=st.lists(puts, min_size=2, max_size=5))
    def put_at_once(self, many: list[dict[str, Any]]) -> None:
        async def operation(buffer: ReplayBuffer) -> Any:
            calls = [buffer.put(**(put | {"items": make_group(put["items"])})) for put in many]
            return [_plain_error(result) for result in await asyncio.gather(*calls, return_exceptions=True)]

        self.both(operation)

    @rule(size=st.integers(-1, 4), task=tasks, status=statuses, where=st.none() | queries)
    def get(self, size: int, task: str, status: Status, where: Any) -> None:
        self.both(lambda buffer: buffer.get(size, task, status, where=where))

    @rule(sizes=st.dictionaries(tasks, st.integers(0, 3)), status=statuses, timeout=st.sampled_from([0, 0.001]))
    def take_batch(self, sizes: dict[str, int], status: Status, timeout: float) -> None:
        self.both(lambda buffer: buffer.take_batch(sizes, group_status=status, timeout=timeout))

    # Changing

    @rule(
        step=st.integers(0, 9),
        sequence=by_task,
        token=by_task,
        retryable=st.dictionaries(tasks, st.booleans()),
        chosen=st.none() | st.lists(st.sampled_from(Status), max_size=3),
    )
    def refresh(self, step: int, sequence: Any, token: Any, retryable: Any, chosen: Any) -> None:
        self.both(
            lambda buffer: buffer.refresh_staleness(
                task_stale_thresholds=dict.fromkeys(token) | sequence,
                task_token_stale_thresholds=token,
                expired_groups_retryable_by_task={t: r for t, r in retryable.items() if t in (token | sequence)},
                current_train_step=step,
                statuses=chosen,
            )
        )

    @rule(step=st.integers(0, 9), threshold=thresholds)
    def refresh_all(self, step: int, threshold: int | None) -> None:
        by_task = dict.fromkeys(TASKS, threshold)
        self.both(lambda buffer: buffer.refresh_staleness(task_stale_thresholds=by_task, current_train_step=step))

    @rule(
        query=queries,
        changes=st.fixed_dictionaries(
            {},
            optional={
                "status": statuses,
                "priority": st.sampled_from([0, 1, 3]),
                "tags": st.sampled_from([None, {"a": 1}]),
            },
        ),
    )
    def update(self, query: Any, changes: dict[str, Any]) -> None:
        self.both(lambda buffer: buffer.update(query, **changes))

    @rule(query=queries)
    def delete(self, query: Any) -> None:
        self.both(lambda buffer: buffer.delete(query))

    # Reading

    @rule(query=queries, order_by=orders, limit=st.none() | st.integers(0, 3))
    def find(self, query: Any, order_by: list[str], limit: int | None) -> None:
        async def operation(buffer: ReplayBuffer) -> Any:
            return [item.uid async for item in buffer.find(query, order_by=order_by, limit=limit)]

        self.both(operation)

    @rule(query=queries)
    def count_where(self, query: Any) -> None:
        self.both(lambda buffer: buffer.count_where(query))

    # Persistence

    @rule(crossed=st.booleans())
    def save_and_resume(self, crossed: bool) -> None:
        """Both go on from a snapshot: their own, or that of the other."""
        folders = [self.folder / "reference", self.folder / "other"]
        for buffer, folder in zip((self.reference, self.other), folders, strict=True):
            self.runner.run(buffer.save(folder))
        self.begin_anew()
        for buffer, folder in zip((self.reference, self.other), reversed(folders) if crossed else folders, strict=True):
            self.runner.run(buffer.resume(folder))

    @rule(crossed=st.booleans())
    def carry_state(self, crossed: bool) -> None:
        """The same by state dicts."""
        states = [buffer.state_dict() for buffer in (self.reference, self.other)]
        assert [record | {"payload": b""} for record in states[0]["storage"]["groups"]] == [
            record | {"payload": b""} for record in states[1]["storage"]["groups"]
        ]
        self.begin_anew()
        for buffer, state in zip((self.reference, self.other), reversed(states) if crossed else states, strict=True):
            buffer.load_state_dict(state)

    def begin_anew(self) -> None:
        self.runner.run(self.other.close())
        self.reference = self.buffer(MemoryStorage(CODEC))
        self.other = self.buffer(self.place.new())

    @rule()
    def reopen(self) -> None:
        """The other is closed, and opened again where it keeps its data."""
        if self.place.durable:
            self.runner.run(self.other.close())
            self.other = self.buffer(self.place.again())

    # What must be the same at any time

    @invariant()
    def same(self) -> None:
        expected, got = (self.runner.run(_everything(one)) for one in (self.reference, self.other))
        assert got["items"] == expected["items"]
        assert got == expected
        views = self.runner.run(self.place.views())
        if views is not None:
            items = self.runner.run(_items(self.reference))
            for name, rows in expected_views(items).items():
                assert views[name] == rows, name


class _Clock:
    """The time as both buffers see it: equal for the same operation."""

    def __init__(self) -> None:
        import time

        self.now = 1_000_000
        self.monotonic = time.monotonic

    def time(self) -> float:
        return float(self.now)


async def _outcome(operation: Callable[[ReplayBuffer], Awaitable[Any]], buffer: ReplayBuffer) -> Any:
    try:
        return plain(await operation(buffer))
    except ReplayBufError as error:
        return _plain_error(error)


def _plain_error(result: Any) -> Any:
    return (type(result).__name__, str(result)) if isinstance(result, BaseException) else result


async def _items(buffer: ReplayBuffer) -> list[Any]:
    return [item async for item in buffer.find({})]


async def _everything(buffer: ReplayBuffer) -> dict[str, Any]:
    items = await _items(buffer)
    return {
        "items": [plain({name: getattr(item, name) for name in type(item).__slots__}) for item in items],
        "len": len(buffer),
        "counts": await buffer.count_statuses(TASKS, Status),
        "dropped": [await buffer.dropped(task) for task in TASKS],
        "ready": await buffer.is_ready({"a": 2, "b": 1}),
    }
