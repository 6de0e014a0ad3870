"""What can't work is refused with an error of its own that says why, and leaves the store as it was."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import numpy as np
import pytest

from replaybuf import ReplayBufError, ReplayBuffer, ReplayBufferConfig, RolloutState
from replaybuf.errors import (
    ConfigError,
    ConflictError,
    InputError,
    QueryError,
    RolloutError,
    SnapshotError,
)
from replaybuf.rules.policies import OrderTerm
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.rollout_type import RolloutType
from tests.bad_input.conftest import Call, Odd, entered_twice, find, itself, leased, put, refresh, rollouts
from tests.reference.snapshots import load_snapshot, snapshot_of
from tests.stores import TASK, because, build, group, numbers_of, take_all


@pytest.mark.parametrize(("name", "value"), [("keep_checkpoints", 0), ("keep_checkpoints", 1.5), ("history", -1)])
def test_settings_of_what_is_kept_are_checked_by_whatever_takes_them(name: str, value: Any) -> None:
    """The config, and the classes that it builds."""
    codec = Codec(RolloutType(RolloutState))
    with pytest.raises(ConfigError, match=name):
        ReplayBufferConfig(url="memory://", **{name: value}).build()
    storage = partial(SQLStorage, "sqlite://", codec)
    made: Any = storage if name == "history" else partial(ReplayBuffer, storage())
    with pytest.raises(ConfigError, match=name):
        made(**{name: value})


LONG = 1 << 20_000  # more digits than Python shows

BAD: dict[str, tuple[Call, type[ReplayBufError], str]] = {
    "group: text": (put("abc"), RolloutError, "list of rollouts .* got str"),
    "group: one rollout": (put(rollouts()[0]), RolloutError, "list of rollouts .* got RolloutState"),
    "segments: none": (put([rollouts(), []]), RolloutError, r"items\[1\] is an empty list: .* at least one segment"),
    "segments: nested deeper": (
        put([rollouts(), [rollouts()]]),
        RolloutError,
        r"items\[1\]\[0\] is a list: .* no deeper",
    ),
    "segments: number": (put([[1]]), RolloutError, "exactly RolloutState, not int"),
    "parents: number": (put(rollouts() * 2, parents=0), RolloutError, "for each of the 2 segments; got a int"),
    "parents: too few": (put([rollouts() * 2], parents=[None]), RolloutError, "each of the 2 segments.* got 1 entries"),
    "parents: itself": (put(rollouts() * 2, parents=[None, 1]), RolloutError, r"parents\[1\] is 1; .* no circle"),
    "parents: a circle": (put(rollouts() * 2, parents=[1, 0]), RolloutError, r"parents\[0\] is 1; .* no circle"),
    "parents: not there": (put(rollouts() * 2, parents=[None, 2]), RolloutError, r"parents\[1\] is 2; .* from 0 to 1"),
    "parents: negative": (put(rollouts() * 2, parents=[None, -1]), RolloutError, r"parents\[1\] is -1; .* from 0 to 1"),
    "parents: text": (put(rollouts() * 2, parents=[None, "0"]), RolloutError, r"parents\[1\] is '0'; "),
    "parents: of another list": (
        put([rollouts()] * 2, parents=[None, 0]),
        RolloutError,
        r"parents\[1\] .* another rollout",
    ),
    "rollout: number": (put([1]), RolloutError, "exactly RolloutState, not int"),
    "rollout: dict": (put([{"status": "completed"}]), RolloutError, "exactly RolloutState, not dict"),
    "rollout: unknown status": (put(rollouts(status="done")), RolloutError, r"rollouts\[0\].status is 'done'.*aborted"),
    "rollout: staleness": (put(rollouts(seq_staleness="x")), RolloutError, "staleness can't be used"),
    "rollout: huge staleness": (put(rollouts(seq_staleness=2**70)), RolloutError, "seq_staleness is 1.181e"),
    "rollout: model steps of text": (put(rollouts(response_model_steps=["a"])), RolloutError, "training steps.*'a'"),
    "rollout: model step None": (
        put(rollouts(response_model_steps=[None])),
        RolloutError,
        "response_model_steps.0. is None",
    ),
    "rollout: lone model step": (put(rollouts(response_model_steps=5)), RolloutError, "training steps"),
    "rollout: huge model step": (put(rollouts(response_model_steps=[2**63])), RolloutError, "no training step"),
    "rollout: lone response id": (put(rollouts(response_ids=5), model_step=1), RolloutError, "response_ids"),
    "value": (
        put(rollouts(extra_fields={"a": [1, Odd()]})),
        RolloutError,
        r"rollouts\[0\].extra_fields\['a'\]\[1\].*Odd",
    ),
    "value in itself": (put(rollouts(extra_fields={"a": itself()})), RolloutError, r"rollouts\[0\].extra_fields"),
    "array of objects": (put(rollouts(response_ids=np.array([Odd()]))), RolloutError, r"rollouts\[0\].response_ids"),
    "task: number": (put(task_name=5), InputError, "task_name must be a text, got int"),
    "task: empty": (put(task_name=""), InputError, "task_name is empty"),
    "task: NUL": (put(task_name="a\0b"), InputError, "NUL"),
    "task: surrogate": (put(task_name="\ud800"), InputError, "surrogate"),
    "task: long": (put(task_name="x" * 201), InputError, "201 characters; the limit is 200"),
    "model_step: text": (put(model_step="4"), InputError, "model_step must be a whole number"),
    "model_step: bool": (put(model_step=True), InputError, "model_step must be a whole number"),
    "model_step: float": (put(model_step=1.5), InputError, "model_step must be a whole number"),
    "model_step: huge": (put(model_step=2**63), InputError, "model_step must be a whole number"),
    "train step: huge": (put(current_train_step=2**70), InputError, "current_train_step must be a whole number"),
    "threshold: 0": (put(stale_threshold=0), InputError, "stale_threshold must be positive.*None"),
    "threshold: text": (put(stale_threshold="4"), InputError, "stale_threshold must be positive"),
    "threshold: NaN": (put(stale_threshold=math.nan), InputError, "stale_threshold must be positive"),
    "threshold: bool": (put(stale_threshold=True), InputError, "stale_threshold must be positive"),
    "token threshold: 0": (
        put(token_stale_threshold=0, current_train_step=1),
        InputError,
        "token_stale_threshold must be",
    ),
    "dropped is no list": (put(dropped={}), InputError, "dropped must be a list"),
    "dropped of a refresh is no list": (refresh({}, dropped=()), InputError, "dropped must be a list"),
    "rollout: steps beyond the mask": (
        put(
            rollouts(response_ids=[1, 2], response_mask=[1]),
            model_step=1,
            current_train_step=1,
            token_stale_threshold=3,
        ),
        RolloutError,
        r"rollouts\[0\] has more response_model_steps than places in its response_mask",
    ),
    "rollout: a mask that is a dict": (
        put(rollouts(response_ids=[1], response_model_steps=[1], response_mask={"a": 1})),
        RolloutError,
        "response_mask, a dict, doesn't have a number for each token",
    ),
    "rollout: an id of thousands of digits": (put(rollouts(rollout_id=10**5000)), InputError, "more than 3,000 digits"),
    "token threshold alone": (put(token_stale_threshold=3), InputError, "needs current_train_step"),
    "priority: NaN": (put(priority=math.nan), InputError, "priority must be a finite number of at least 0, got nan"),
    "priority: inf": (put(priority=math.inf), InputError, "priority must be a finite"),
    "priority: negative": (put(priority=-1), InputError, "priority must be a finite"),
    "priority: bool": (put(priority=True), InputError, "priority must be a finite"),
    "priority: text": (put(priority="1"), InputError, "priority must be a finite"),
    "priority: beyond floats": (put(priority=10**400), InputError, "priority must be a finite"),
    "tags: list": (put(tags=[1]), InputError, "tags must be a dict, got list"),
    "tags: nested": (put(tags={"a": {"b": 1}}), InputError, r"tags\['a'\] is .*a str .*int"),
    "tags: NaN": (put(tags={"a": math.nan}), InputError, r"tags\['a'\] is nan"),
    "tags: huge": (put(tags={"a": 2**64}), InputError, r"tags\['a'\]"),
    "tags: thousands of digits": (put(tags={"a": LONG}), InputError, "too long for anything"),
    "size: thousands of digits": (put(group="a", size=LONG), InputError, "too long for anything"),
    "mix: thousands of digits": (lambda b: b.get(3, TASK, mix={"replay": LONG}), InputError, "too long for anything"),
    "annotate: thousands of digits": (lambda b: b.annotate({1: {"a": LONG}}), InputError, "too long for anything"),
    "tags: NUL": (put(tags={"a": "\0"}), InputError, r"tags\['a'\]"),
    "tags: name": (put(tags={1: 2}), InputError, "a tag's name must be a text, got int"),
    "tags: empty name": (put(tags={"": 2}), InputError, "a tag's name is empty"),
    "key: number": (put(key=5), InputError, "key must be a text, got int"),
    "key: empty": (put(key=""), InputError, "key is empty"),
    "get: text": (lambda b: b.get("5", TASK), InputError, "size of task 'math' must be a whole number"),  # type: ignore[arg-type]
    "get: less than none": (lambda b: b.get(-1, TASK), InputError, "size of task 'math' must be at least 0"),
    "take: less than none": (lambda b: b.take_batch({TASK: -1}), InputError, "size of task 'math' must be at least 0"),
    "checkpoint: negative": (lambda b: b.checkpoint(-1), InputError, "step must be a whole number of at least 0"),
    "threshold: none": (put(stale_threshold=0), InputError, "got 0; 1 draws only what the present weights have made"),
    "get: bool": (lambda b: b.get(True, TASK), InputError, "size of task 'math' must be a whole number"),
    "get: float": (lambda b: b.get(1.0, TASK), InputError, "size of task 'math' must be a whole number"),  # type: ignore[arg-type]
    "get: no task": (lambda b: b.get(1, None), InputError, "task_name must be a text"),  # type: ignore[arg-type]
    "get: status": (lambda b: b.get(1, TASK, "done"), InputError, "unknown status 'done'; there are init, completed"),
    "get: query": (lambda b: b.get(1, TASK, where={"x": 1}), QueryError, "x: there is no field 'x'; valid: uid"),
    "take: list": (lambda b: b.take_batch([TASK]), InputError, "dict of task names and sizes, got list"),  # type: ignore[arg-type]
    "take: NaN": (lambda b: b.take_batch({TASK: 1}, timeout=math.nan), InputError, "timeout must be a number"),
    "take: negative": (lambda b: b.take_batch({TASK: 1}, timeout=-1), InputError, "timeout must be a number"),
    "take: bool": (lambda b: b.take_batch({TASK: 1}, timeout=True), InputError, "timeout must be a number"),
    "take: text": (lambda b: b.take_batch({TASK: 1}, timeout="5"), InputError, "timeout must be a number"),  # type: ignore[arg-type]
    "least: too many": (
        lambda b: b.take_batch({TASK: 3}, at_least=4),
        InputError,
        f"at_least 4 of task {TASK} is more than the 3 asked for",
    ),
    "least: of another": (
        lambda b: b.take_batch({TASK: 3}, at_least={"other": 1}),
        InputError,
        "at_least 1 of task other is more than the 0 asked for",
    ),
    "least: fraction": (lambda b: b.get(3, TASK, at_least=1.5), InputError, "at_least must be a whole number"),  # type: ignore[arg-type]
    "least: bool": (lambda b: b.get(3, TASK, at_least=True), InputError, "at_least must be a whole number"),
    "least: text": (lambda b: b.lease_batch({TASK: 3}, at_least="1"), InputError, "at_least must be a whole"),  # type: ignore[arg-type]
    "least: no number": (
        lambda b: b.sample({TASK: 3}, at_least={TASK: None}),  # type: ignore[dict-item]
        InputError,
        f"the size of task '{TASK}' must be a whole number",
    ),
    "mix: no dict": (lambda b: b.get(3, TASK, mix=0.5), InputError, "mix must be a dict"),  # type: ignore[arg-type]
    "mix: key": (lambda b: b.get(3, TASK, mix={"old": 0.5}), InputError, r'mix must be \{"replay": share\}, or'),
    "mix: both keys": (lambda b: b.get(3, TASK, mix={"replay": 0.5, "fresh": 0.5}), InputError, "mix must be"),
    "mix: above 1": (lambda b: b.get(3, TASK, mix={"replay": 1.1}), InputError, "a number from 0 to 1, got 1.1"),
    "mix: negative": (lambda b: b.get(3, TASK, mix={"replay": -0.1}), InputError, "a number from 0 to 1, got -0.1"),
    "mix: NaN": (lambda b: b.get(3, TASK, mix={"replay": math.nan}), InputError, "a number from 0 to 1, got nan"),
    "mix: bool": (lambda b: b.get(3, TASK, mix={"replay": True}), InputError, "a number from 0 to 1, got True"),
    "mix: text": (lambda b: b.get(3, TASK, mix={"replay": "1"}), InputError, "a number from 0 to 1, got '1'"),  # type: ignore[dict-item]
    "mix: another task": (
        lambda b: b.sample({TASK: 3}, mix={"replay": {"other": 0.5}}),
        InputError,
        "mix names the task 'other', of which no groups are asked for",
    ),
    "mix: status": (lambda b: b.get(3, TASK, "expired", mix={"replay": 0}), InputError, "of completed groups, not of"),
    "mix: least": (
        lambda b: b.get(4, TASK, at_least=3, mix={"replay": 0.5}),
        InputError,
        f"at_least 3 of task {TASK} is more than the 2 asked for",
    ),
    "wait: negative": (lambda b: b.wait_ready({TASK: 1}, timeout=-0.1), InputError, "timeout must be a number"),
    "count: a long status": (lambda b: b.count(TASK, "x" * 10**6), InputError, "unknown status 'x{50}"),
    "count: task": (lambda b: b.count(None, "completed"), InputError, "task_name must be a text"),  # type: ignore[arg-type]
    "update: nothing": (lambda b: b.update({}), InputError, "nothing to set: give status="),
    "priorities: two elements": (lambda b: b.update_priorities({1: np.ones(2)}), InputError, "of group 1 must be"),
    "counts: lone task": (lambda b: b.count_statuses("math", ["completed"]), InputError, "tasks must be a list"),
    "counts: lone status": (lambda b: b.count_statuses([TASK], "completed"), InputError, "statuses must be a list"),
    "find: field": (find({"nope": 1}), QueryError, "nope: there is no field"),
    "find: operator": (find({"uid": {"$gtt": 1}}), QueryError, r"uid.\$gtt: .* did you mean \$gt"),
    "find: nothing": (find("uid"), QueryError, "expected a query"),
    "find: negative limit": (find(limit=-1), InputError, "limit must be a number of groups"),
    "find: bool limit": (find(limit=True), InputError, "limit must be a number of groups"),
    "find: order": (find(order_by="nope"), QueryError, "order_by: can't order by 'nope'"),
    "find: a long order": (find(order_by="x" * 10**6), QueryError, "order_by: can't order by 'x{50}"),
    "find: order twice": (find(order_by="--uid"), QueryError, "did you mean 'uid'"),
    "find: order by list": (find(order_by=[[]]), QueryError, "order_by: expected a field name"),
    "find: order by an array": (find(order_by=np.array(5)), InputError, "order_by must be a list, got array"),
    "find: order by term": (find(order_by=OrderTerm([])), QueryError, "can't order by"),  # type: ignore[arg-type]
    "delete: None": (lambda b: b.delete(None), QueryError, "expected a query"),  # type: ignore[arg-type]
    "delete: SQL": (lambda b: b.delete("1 = 1"), QueryError, "expected a query"),  # type: ignore[arg-type]
    "update: priority": (lambda b: b.update({}, priority=math.nan), InputError, "priority must be"),
    "update: tags": (lambda b: b.update({}, tags={"a": []}), InputError, r"tags\['a'\]"),  # type: ignore[dict-item]
    "refresh: 0": (refresh({TASK: 0}), InputError, "stale_threshold must be positive"),
    "refresh: list": (refresh([TASK]), InputError, "task_stale_thresholds must be a dict"),
    "refresh: huge step": (refresh({TASK: 4}, 2**70), InputError, "current_train_step must be a whole number"),
    "refresh: lone status": (refresh({TASK: 4}, statuses="completed"), InputError, "statuses must be a list"),
    "refresh: other task": (
        refresh({}, task_token_stale_thresholds={TASK: 3}),
        InputError,
        "task 'math' has no entry in task_stale_thresholds",
    ),
    "put_many: each": (lambda b: b.put_many([rollouts()], TASK, each=[5]), InputError, "each must be a list of dicts"),  # type: ignore[list-item]
    "save: None": (lambda b: b.save(None), InputError, "path of a folder"),  # type: ignore[arg-type]
    "save: NUL": (lambda b: b.save("a\0b"), InputError, "path of a folder"),
    "resume: a name too long": (
        lambda b: b.resume("x" * 300),
        SnapshotError,
        "can't look into the folder .*x+ .*too long",
    ),
    "save: a name too long": (lambda b: b.save("x" * 300), SnapshotError, "can't make the folder .*x+ .*too long"),
    "save: on a file": (lambda b: b.save("/etc/passwd"), SnapshotError, "can't make the folder /etc/passwd"),
    "save: under a file": (lambda b: b.save("/etc/passwd/x"), SnapshotError, "can't make the folder"),
    "resume: nothing": (lambda b: b.resume("/no/such/folder"), SnapshotError, "no snapshot in /no/such/folder"),
    "lease: NaN seconds": (lambda b: leased(b, seconds=math.nan), InputError, "seconds must be"),
    "lease: infinite numpy seconds": (lambda b: leased(b, seconds=np.float32("inf")), InputError, "seconds must be"),
    "lease: twice": (lambda b: entered_twice(b.lease_batch({TASK: 0})), InputError, "begun before"),
    "extend: NaN": (lambda b: leased(b, lambda lease: lease.extend(math.nan)), InputError, "seconds must be"),
    "extend: text": (lambda b: leased(b, lambda lease: lease.extend("5")), InputError, "seconds must be"),
    "acknowledge: no list": (
        lambda b: leased(b, lambda lease: lease.acknowledge(3)),
        InputError,
        "uids must be a list",
    ),
    "acknowledge: text": (lambda b: leased(b, lambda lease: lease.acknowledge("3")), InputError, "uids must be a list"),
    "acknowledge: a negative step": (
        lambda b: leased(b, lambda lease: lease.acknowledge(train_step=-5)),
        InputError,
        "train_step must be a whole number of at least 0",
    ),
    "draw: a negative step": (
        lambda b: b.get(1, TASK, current_train_step=-1),
        InputError,
        "current_train_step must be a whole number of at least 0",
    ),
    "give back: lists": (lambda b: leased(b, lambda lease: lease.give_back([[3]])), InputError, "uids must be uids"),
    "give back: reason": (lambda b: leased(b, lambda lease: lease.give_back(failed=3)), InputError, "failed must be"),
    "replaces: an array without dimensions": (put(rollouts(), replaces=np.array(3)), InputError, "must be a list"),
    "replaces: many": (put(rollouts(), replaces=range(5, 10**5)), ConflictError, "group 5, "),
    "priorities: NaN": (
        lambda b: b.update_priorities({7: math.nan}),
        InputError,
        "priority of group 7 must be a finite",
    ),
    "sample: negative beta": (lambda b: b.sample({TASK: 1}, beta=-1), InputError, "beta"),
    "sample: beta of text": (lambda b: b.sample({TASK: 1}, beta="1"), InputError, "beta"),  # type: ignore[arg-type]
    "sample: NaN beta": (lambda b: b.sample({TASK: 1}, beta=math.nan), InputError, "beta"),
    "ready: float": (lambda b: b.is_ready({TASK: 1.5}), InputError, "must be a whole number"),  # type: ignore[dict-item]
    "lease: no time": (lambda b: leased(b, seconds=0), InputError, "seconds must be"),
    "update: query": (lambda b: b.update({"nope": 1}, priority=1), QueryError, "nope: there is no field"),
    "delete: query": (
        lambda b: b.delete({"$and": [{}, {"staleness": {"$gt": "x"}}]}),
        QueryError,
        r"\$and\[1\]\.staleness",
    ),
    "count: query": (lambda b: b.count_where({"nope": 1}), QueryError, "nope: there is no field"),
    "refresh: retryable of another task": (
        refresh({}, expired_groups_retryable_by_task={TASK: True}),
        InputError,
        "task 'math' has no entry in task_stale_thresholds",
    ),
    "threshold of an empty group": (put([], stale_threshold=0), InputError, "stale_threshold must be positive"),
}


async def test_bad_arguments_are_refused_and_change_nothing(kept: ReplayBuffer) -> None:
    before = [item async for item in kept.find({})]
    for name, (call, kind, message) in BAD.items():
        with pytest.raises(kind, match=f"(?s){message}") as caught:
            await call(kept)
        assert len(str(caught.value)) < 1000, name
        assert [item async for item in kept.find({})] == before, name


class Silent:
    def __repr__(self) -> str:
        raise ValueError("this can't be shown")


#: Calls with a value of any kind in one place.
ANYWHERE: list[Callable[[Any], Call]] = [
    put,
    lambda value: put([value]),
    lambda value: put(task_name=value),
    *(
        partial(lambda name, value: put(**{name: value}), name)
        for name in ("key", "tags", "priority", "status", "model_step", "stale_threshold", "group", "size")
    ),
    lambda value: put(tags={"a": value}),
    lambda value: put(rollouts() * 2, parents=[None, value]),
    lambda value: put(timeout=value),
    lambda value: lambda b: b.get(1, value),
    lambda value: lambda b: b.get(value, TASK),
    lambda value: lambda b: b.get(1, TASK, value),
    lambda value: lambda b: b.get(1, TASK, where=value),
    lambda value: lambda b: b.get(1, TASK, at_least=value),
    lambda value: lambda b: b.get(1, TASK, mix=value),
    lambda value: lambda b: b.get(1, TASK, mix={"replay": value}),
    lambda value: lambda b: leased(b, seconds=value),
    lambda value: lambda b: leased(b, deferred=[value]),
    lambda value: find({"reward": value}),
    lambda value: find({"reward": {"$in": value}}),
    lambda value: find(order_by=value),
    lambda value: find(limit=value),
    lambda value: refresh({TASK: value}),
    lambda value: lambda b: b.update_priorities({1: value}),
    lambda value: lambda b: b.annotate({1: {"a": value}}),
    lambda value: lambda b: b.count_statuses(value, []),
    lambda value: lambda b: b.checkpoint(value),
    lambda value: lambda b: b.save(value),
]


@pytest.mark.parametrize("value", [reduce(lambda inner, _: [inner], range(5000), []), Silent()], ids=["deep", "silent"])
async def test_what_has_no_repr_is_refused_as_anything_else_is(kept: ReplayBuffer, value: Any) -> None:
    for call in ANYWHERE:
        with pytest.raises(ReplayBufError):
            await call(value)(kept)


async def test_a_state_that_is_damaged_or_no_longer_fits_is_refused(kept: ReplayBuffer) -> None:
    state = snapshot_of(kept)
    with pytest.raises(SnapshotError, match="3 groups", check=because("not empty")):
        load_snapshot(kept, state)
    async with build("sqlite://") as empty:
        with pytest.raises(SnapshotError, match="damaged"):
            load_snapshot(empty, state[:9000])
        assert len(empty) == 0


GOOD_AT_THE_EDGE: dict[str, Call] = {
    "find: limit beyond int64": find(limit=10**30),
    "timeout beyond floats": lambda b: b.wait_ready({TASK: 1}, timeout=10**400),
    "size beyond int64": lambda b: b.is_ready({TASK: 10**30}),
    "no sizes": lambda b: b.take_batch({}, timeout=1),
    "numpy threshold": refresh({"other": np.int64(4)}, np.int32(3)),
    "numpy size and timeout": lambda b: b.take_batch({TASK: np.int64(0)}, timeout=np.float32(0.5)),
    "numpy limit": find(limit=np.uint8(3)),
    "numpy beta": lambda b: b.sample({TASK: 0}, beta=np.float32(0.5)),
    "numpy seconds": lambda b: leased(b, seconds=np.float32(0.5)),
    "numpy priority": lambda b: b.update({"uid": 10**9}, priority=np.int64(2)),
    "priorities of one element": lambda b: b.update_priorities({10**9: np.ones(1), 10**9 + 1: np.ones((1, 1))}),
    "numpy priorities": lambda b: b.update_priorities({np.int64(10**9): np.float32(0.5)}),
    "numpy tags": lambda b: b.update({"uid": 10**9}, tags={"a": np.float32(0.5), "b": np.int8(1), "c": np.True_}),
    "extend by a numpy time": lambda b: leased(b, lambda lease: lease.extend(np.float32(5))),
    "numpy uids of a lease": lambda b: leased(b, lambda lease: lease.give_back(np.array(sorted(lease.open)))),
    "a reason that no database stores": lambda b: leased(b, lambda lease: lease.give_back(failed="\0\ud800" * 9999)),
}


async def test_odd_arguments_that_mean_something_work(kept: ReplayBuffer) -> None:
    for name, call in GOOD_AT_THE_EDGE.items():
        await call(kept)
        assert len(kept) == 3, name


async def test_texts_that_databases_dislike_are_stored_whole(url: str) -> None:
    strange = "NUL \0, half a pair \ud83d, \x7f '\"`;--%?:x $1 \\"
    made = rollouts(rollout_id=strange, uid=strange, response=strange, finish_reason=strange, error_msg=strange)
    made[0].message = [{"role": strange, "content": strange}]
    made[0].reward = {"score": 1.0, strange: strange}
    async with build(url) as buffer:
        await buffer.put(made, TASK)
        assert [item.item async for item in buffer.find({})] == [made]
        assert await buffer.get(1, TASK) == [made]


async def test_the_longest_names_fit_into_every_index(url: str) -> None:
    chance = np.random.default_rng(1)
    task_name, key = ("".join(map(chr, chance.integers(0x10000, 0x1FFFF, 200))) for _ in range(2))
    async with build(url) as buffer:
        await buffer.put(group(1), task_name, key=key)
        await buffer.put(group(2), task_name, key=key)
        assert numbers_of(await buffer.get(5, task_name)) == [2]


async def test_a_put_that_only_the_database_refuses_fails_alone(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever slips through all checks: here, a time of creation that no driver takes."""
    async with build(url) as buffer:
        await buffer.count_where({})
        storage_put = buffer.storage.put

        async def spoilt(new: Any) -> int:
            if new.rollouts[0].rollout_id == 3:
                new.created_at = Odd()
            return await storage_put(new)

        monkeypatch.setattr(buffer.storage, "put", spoilt)
        results = await asyncio.gather(*(buffer.put(group(n), TASK) for n in range(8)), return_exceptions=True)
        assert [n for n, result in enumerate(results) if isinstance(result, BaseException)] == [3]
        assert sorted(await take_all(buffer)) == [0, 1, 2, 4, 5, 6, 7]
