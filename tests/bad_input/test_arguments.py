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
    build_with: Any = storage if name == "history" else partial(ReplayBuffer, storage())
    with pytest.raises(ConfigError, match=name):
        build_with(**{name: value})


LONG = 1 << 20_000  # more digits than Python shows
NAN, INF, HUGE = math.nan, math.inf, 2**70


def puts(name: str, *values: Any) -> list[Call]:
    """Puts with each of these values in the place of an option."""
    return [put(**{name: value}) for value in values]


def of(**fields: Any) -> Call:
    """A put of a rollout with these fields."""
    return put(rollouts(**fields))


def gets(name: str, *values: Any) -> list[Call]:
    return [partial(lambda value, b: b.get(3, TASK, **{name: value}), value) for value in values]


def leases(use: Callable[[Any], Any]) -> Call:
    """A use of a lease."""
    return lambda b: leased(b, use)


#: What is refused, by its error: what is said, and calls that say so.
BAD: dict[type[ReplayBufError], list[tuple[Any, ...]]] = {
    InputError: [
        ("more than 3,000 digits", of(rollout_id=10**5000)),
        ("task_name must be a text, got int", put(task_name=5)),
        ("task_name is empty", put(task_name="")),
        ("NUL|surrogate", put(task_name="a\0b"), put(task_name="\ud800")),
        ("201 characters; the limit is 200", put(task_name="x" * 201)),
        ("task_name must be a text", lambda b: b.get(1, None), lambda b: b.count(None, "completed")),
        ("model_step must be a whole number", *puts("model_step", "4", True, 1.5, 2**63)),
        ("current_train_step must be a whole number", *puts("current_train_step", HUGE), refresh({TASK: 4}, HUGE)),
        ("stale_threshold must be positive", *puts("stale_threshold", "4", NAN, True)),
        ("stale_threshold must be positive", put([], stale_threshold=0), refresh({TASK: 0})),
        (
            "stale_threshold must be positive.*got 0; 1 draws only what the present weights have made.*None",
            *puts("stale_threshold", 0),
        ),
        ("token_stale_threshold must be", put(token_stale_threshold=0, current_train_step=1)),
        ("needs current_train_step", put(token_stale_threshold=3)),
        ("dropped must be a list", put(dropped={}), refresh({}, dropped=())),
        ("priority must be a finite number of at least 0, got", *puts("priority", NAN, INF, -1, True, "1", 10**400)),
        ("priority must be", lambda b: b.update({}, priority=NAN)),
        ("priority of group 7 must be a finite", lambda b: b.update_priorities({7: NAN})),
        ("of group 1 must be", lambda b: b.update_priorities({1: np.ones(2)})),
        ("tags must be a dict, got list", put(tags=[1])),
        (r"tags\['a'\] is .*a str .*int", put(tags={"a": {"b": 1}})),
        (r"tags\['a'\] is nan", put(tags={"a": NAN})),
        (r"tags\['a'\]", put(tags={"a": 2**64}), put(tags={"a": "\0"})),
        (r"tags\['a'\]", lambda b: b.update({}, tags={"a": []})),
        ("a tag's name must be a text, got int", put(tags={1: 2})),
        ("a tag's name is empty", put(tags={"": 2})),
        (
            "too long for anything",
            *(put(tags={"a": LONG}), put(group="a", size=LONG), lambda b: b.annotate({1: {"a": LONG}})),
            *gets("mix", {"replay": LONG}),
        ),
        ("key must be a text, got int", put(key=5)),
        ("key is empty", put(key="")),
        (
            "size of task 'math' must be a whole number",
            *(partial(lambda size, b: b.get(size, TASK), size) for size in ("5", True, 1.0)),
            lambda b: b.is_ready({TASK: 1.5}),
        ),
        (
            "size of task 'math' must be a whole number of at least 0",
            lambda b: b.get(-1, TASK),
            lambda b: b.take_batch({TASK: -1}),
        ),
        ("unknown status 'done'; there are init, completed", lambda b: b.get(1, TASK, "done")),
        ("unknown status 'x{50}", lambda b: b.count(TASK, "x" * 10**6)),
        ("dict of task names and sizes, got list", lambda b: b.take_batch([TASK])),
        (
            "timeout must be a number",
            *(partial(lambda time, b: b.take_batch({TASK: 1}, timeout=time), time) for time in (NAN, -1, True, "5")),
            lambda b: b.wait_ready({TASK: 1}, timeout=-0.1),
        ),
        (f"at_least 4 of task {TASK} is more than the 3 asked for", *gets("at_least", 4)),
        ("at_least 1 of task other is more than the 0 asked for", lambda b: b.sample({TASK: 3}, at_least={"other": 1})),
        ("at_least must be a whole number", *gets("at_least", 1.5, True, "1")),
        ("the size of task 'math' must be a whole number", lambda b: b.sample({TASK: 3}, at_least={TASK: None})),
        ("mix must be a dict", *gets("mix", 0.5)),
        (r'mix must be \{"replay": share\}, or', *gets("mix", {"old": 0.5}, {"replay": 0.5, "fresh": 0.5})),
        ("a number from 0 to 1, got", *gets("mix", *({"replay": share} for share in (1.1, -0.1, NAN, True, "1")))),
        (
            "mix names the task 'other', of which no groups are asked for",
            lambda b: b.sample({TASK: 3}, mix={"replay": {"other": 0.5}}),
        ),
        ("of completed groups, not of", lambda b: b.get(3, TASK, "expired", mix={"replay": 0})),
        (
            f"at_least 3 of task {TASK} is more than the 2 asked for",
            lambda b: b.get(4, TASK, at_least=3, mix={"replay": 0.5}),
        ),
        ("beta", *(partial(lambda beta, b: b.sample({TASK: 1}, beta=beta), beta) for beta in (-1, "1", NAN))),
        ("nothing to set: give status=", lambda b: b.update({})),
        ("tasks must be a list", lambda b: b.count_statuses("math", ["completed"])),
        (
            "statuses must be a list",
            lambda b: b.count_statuses([TASK], "completed"),
            refresh({TASK: 4}, statuses="completed"),
        ),
        ("limit must be a whole number of at least 0", find(limit=-1), find(limit=True)),
        ("order_by must be a list, got array", find(order_by=np.array(5))),
        ("task_stale_thresholds must be a dict", refresh([TASK])),
        (
            "task 'math' has no entry in task_stale_thresholds",
            refresh({}, task_token_stale_thresholds={TASK: 3}),
            refresh({}, expired_groups_retryable_by_task={TASK: True}),
        ),
        ("each must be a list of dicts", lambda b: b.put_many([rollouts()], TASK, each=[5])),
        ("step must be a whole number of at least 0", lambda b: b.checkpoint(-1)),
        ("current_train_step must be a whole number of at least 0", *gets("current_train_step", -1)),
        ("path of a folder", lambda b: b.save(None), lambda b: b.save("a\0b")),
        (
            "seconds must be",
            *(partial(lambda time, b: leased(b, seconds=time), time) for time in (NAN, np.float32("inf"), 0)),
            *(leases(partial(lambda time, lease: lease.extend(time), time)) for time in (NAN, "5")),
        ),
        ("begun before", lambda b: entered_twice(b.lease_batch({TASK: 0}))),
        (
            "uids must be a list",
            leases(lambda lease: lease.acknowledge(3)),
            leases(lambda lease: lease.acknowledge("3")),
        ),
        ("train_step must be a whole number of at least 0", leases(lambda lease: lease.acknowledge(train_step=-5))),
        ("uids must be uids", leases(lambda lease: lease.give_back([[3]]))),
        ("failed must be", leases(lambda lease: lease.give_back(failed=3))),
        ("must be a list", put(rollouts(), replaces=np.array(3))),
    ],
    RolloutError: [
        ("list of rollouts .* got str", put("abc")),
        ("list of rollouts .* got RolloutState", put(rollouts()[0])),
        (r"items\[1\] is an empty list: .* at least one segment", put([rollouts(), []])),
        (r"items\[1\]\[0\] is a list: .* no deeper", put([rollouts(), [rollouts()]])),
        ("exactly RolloutState, not int", put([[1]]), put([1])),
        ("exactly RolloutState, not dict", put([{"status": "completed"}])),
        ("for each of the 2 segments; got a int", put(rollouts() * 2, parents=0)),
        ("each of the 2 segments.* got 1 entries", put([rollouts() * 2], parents=[None])),
        (r"parents\[1\] is 1; .* no circle", put(rollouts() * 2, parents=[None, 1])),
        (r"parents\[0\] is 1; .* no circle", put(rollouts() * 2, parents=[1, 0])),
        (r"parents\[1\] is (2|-1); .* from 0 to 1", *(put(rollouts() * 2, parents=[None, n]) for n in (2, -1))),
        (r"parents\[1\] is '0'; ", put(rollouts() * 2, parents=[None, "0"])),
        (r"parents\[1\] .* another rollout", put([rollouts()] * 2, parents=[None, 0])),
        (r"rollouts\[0\].status is 'done'.*aborted", of(status="done")),
        ("staleness can't be used", of(seq_staleness="x")),
        ("seq_staleness is 1180591620717411303424, ", of(seq_staleness=HUGE)),
        ("number of training steps", of(seq_staleness=LONG)),
        ("training steps", *(of(response_model_steps=steps) for steps in (["a"], 5, [None]))),
        ("no training step", of(response_model_steps=[2**63]), of(response_model_steps=[LONG])),
        ("response_ids", put(rollouts(response_ids=5), model_step=1)),
        (r"rollouts\[0\].extra_fields\['a'\]\[1\].*Odd", of(extra_fields={"a": [1, Odd()]})),
        (r"rollouts\[0\].extra_fields", of(extra_fields={"a": itself()})),
        (r"rollouts\[0\].response_ids", of(response_ids=np.array([Odd()]))),
        (
            r"rollouts\[0\] has more response_model_steps than places in its response_mask",
            put(
                rollouts(response_ids=[1, 2], response_mask=[1]),
                model_step=1,
                current_train_step=1,
                token_stale_threshold=3,
            ),
        ),
        (
            "response_mask numbers, for each token",
            of(response_ids=[1], response_model_steps=[1], response_mask={"a": 1}),
        ),
    ],
    QueryError: [
        (
            "nope: there is no field",
            *(find({"nope": 1}), lambda b: b.count_where({"nope": 1}), lambda b: b.update({"nope": 1}, priority=1)),
            lambda b: b.get(1, TASK, where={"nope": 1}),
        ),
        (r"uid.\$gtt: .* did you mean \$gt", find({"uid": {"$gtt": 1}})),
        ("expected a query", find("uid"), lambda b: b.delete(None), lambda b: b.delete("1 = 1")),
        (r"\$and\[1\]\.staleness", lambda b: b.delete({"$and": [{}, {"staleness": {"$gt": "x"}}]})),
        ("order_by: can't order by '(nope|x{50})", find(order_by="nope"), find(order_by="x" * 10**6)),
        ("order_by: can't order by", find(order_by=OrderTerm([]))),
        ("did you mean 'uid'", find(order_by="--uid")),
        ("order_by: expected a field name", find(order_by=[[]])),
    ],
    SnapshotError: [
        ("can't make the folder .*x+ .*too long", lambda b: b.save("x" * 300)),
        ("can't look into the folder .*x+ .*too long", lambda b: b.resume("x" * 300)),
        ("can't make the folder /etc/passwd", lambda b: b.save("/etc/passwd"), lambda b: b.save("/etc/passwd/x")),
        ("no snapshot in /no/such/folder", lambda b: b.resume("/no/such/folder")),
    ],
    ConflictError: [
        ("group 5, ", put(rollouts(), replaces=range(5, 10**5))),
    ],
}


async def test_bad_arguments_are_refused_and_change_nothing(kept: ReplayBuffer) -> None:
    before = [item async for item in kept.find({})]
    for kind, rows in BAD.items():
        for message, *calls in rows:
            for number, call in enumerate(calls):
                with pytest.raises(kind, match=f"(?s){message}") as caught:
                    await call(kept)
                assert len(str(caught.value)) < 1000, (message, number)
                assert [item async for item in kept.find({})] == before, (message, number)


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
    "timeout beyond floats": lambda b: b.wait_ready({TASK: 1}, timeout=10**400),
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
    new_group = rollouts(rollout_id=strange, uid=strange, response=strange, finish_reason=strange, error_msg=strange)
    new_group[0].message = [{"role": strange, "content": strange}]
    new_group[0].reward = {"score": 1.0, strange: strange}
    async with build(url) as buffer:
        await buffer.put(new_group, TASK)
        assert [item.item async for item in buffer.find({})] == [new_group]
        assert await buffer.get(1, TASK) == [new_group]


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

        async def spoilt(new_group: Any) -> int:
            if new_group.rollouts[0].rollout_id == 3:
                new_group.created_at = Odd()
            return await storage_put(new_group)

        monkeypatch.setattr(buffer.storage, "put", spoilt)
        results = await asyncio.gather(*(buffer.put(group(n), TASK) for n in range(8)), return_exceptions=True)
        assert [n for n, result in enumerate(results) if isinstance(result, BaseException)] == [3]
        assert sorted(await take_all(buffer)) == [0, 1, 2, 4, 5, 6, 7]
