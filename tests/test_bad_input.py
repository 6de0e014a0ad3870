"""What can't work is refused with an error of its own that says why, and leaves the store as it was."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import sqlite3
import subprocess
import sys
import textwrap
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from sqlalchemy import make_url

from replaybuf import (
    AccessError,
    ClosedError,
    ConfigError,
    ConflictError,
    EncodeError,
    InputError,
    Lease,
    LockedError,
    MissingDriverError,
    MissingSnapshotError,
    NotADatabaseError,
    NotEmptyError,
    OrderTerm,
    QueryError,
    ReplayBufError,
    ReplayBuffer,
    ReplayBufferConfig,
    RolloutError,
    RolloutState,
    SnapshotError,
    SnapshotMismatchError,
    UnreachableError,
)
from replaybuf.lease import Leasing
from replaybuf.storage.sql.driver import redact
from tests.postgres import execute, new_database, running_server
from tests.stores import TASK, build, fill, group, numbers_of, take_all

# Arguments


@pytest.fixture(scope="module", params=["sqlite", "memory://", "pandas://", "postgresql"])
def kept_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A database that the tests of this module share, because they don't change it."""
    if request.param in ("memory://", "pandas://"):
        yield request.param
    elif request.param == "sqlite":
        yield f"sqlite:///{tmp_path_factory.mktemp('kept')}/buffer.db"
    else:
        with new_database(request.getfixturevalue("postgres_url")) as url:
            yield url


@pytest.fixture
async def kept(kept_url: str) -> AsyncIterator[ReplayBuffer]:
    async with build(kept_url) as buffer:
        if not len(buffer):
            await fill(buffer, 3)
        yield buffer


class Odd:
    """Something that nothing knows."""


def rollouts(**fields: Any) -> list[RolloutState]:
    made = RolloutState(message=[{"role": "user", "content": "?"}], status="completed", response_ids=[1])
    for name, value in fields.items():
        made.__dict__[name] = value
    return [made]


Call = Callable[[ReplayBuffer], Coroutine[Any, Any, Any]]


def put(items: Any = None, task_name: Any = TASK, **options: Any) -> Call:
    return lambda buffer: buffer.put(rollouts() if items is None else items, task_name, **options)


async def leased(
    buffer: ReplayBuffer, use: Callable[[Lease], Coroutine[Any, Any, Any]] | None = None, **options: Any
) -> None:
    """Lease a group, use the lease, and leave everything as it was."""
    lease = await buffer.lease_batch({TASK: 1}, **options)
    try:
        if use is not None:
            await use(lease)
    finally:
        await lease.give_back()
        await buffer.update({"task_name": TASK}, status="completed")  # deliveries start anew


async def entered_twice(leasing: Leasing) -> None:
    async with leasing, leasing:
        pass


def find(query: Any = None, **options: Any) -> Call:
    async def call(buffer: ReplayBuffer) -> list[Any]:
        return [item async for item in buffer.find({} if query is None else query, **options)]

    return call


def refresh(thresholds: Any, step: Any = 1, **options: Any) -> Call:
    return lambda buffer: buffer.refresh_staleness(task_stale_thresholds=thresholds, current_train_step=step, **options)


def load(state: Any) -> Call:
    async def call(buffer: ReplayBuffer) -> None:
        buffer.load_state_dict(state)

    return call


def itself() -> list[Any]:
    values: list[Any] = []
    values.append(values)
    return values


BAD: dict[str, tuple[Call, type[ReplayBufError], str]] = {
    "group: text": (put("abc"), RolloutError, "list of rollouts .* got str"),
    "group: one rollout": (put(rollouts()[0]), RolloutError, "list of rollouts .* got RolloutState"),
    "rollout: number": (put([1]), RolloutError, "exactly RolloutState, not int"),
    "rollout: dict": (put([{"status": "completed"}]), RolloutError, "exactly RolloutState, not dict"),
    "rollout: unknown status": (put(rollouts(status="done")), RolloutError, r"rollouts\[0\].status is 'done'.*aborted"),
    "rollout: staleness": (put(rollouts(seq_staleness="x")), RolloutError, "staleness can't be used"),
    "rollout: huge staleness": (put(rollouts(seq_staleness=2**70)), RolloutError, "seq_staleness is 1.181e"),
    "rollout: model steps of text": (put(rollouts(response_model_steps=["a"])), RolloutError, "training steps.*'a'"),
    "rollout: model step None": (put(rollouts(response_model_steps=[None])), RolloutError, "training steps"),
    "rollout: lone model step": (put(rollouts(response_model_steps=5)), RolloutError, "training steps"),
    "rollout: huge model step": (put(rollouts(response_model_steps=[2**63])), RolloutError, "no training step"),
    "rollout: lone response id": (put(rollouts(response_ids=5), model_step=1), RolloutError, "response_ids"),
    "value": (
        put(rollouts(extra_fields={"a": [1, Odd()]})),
        EncodeError,
        r"rollouts\[0\].extra_fields\['a'\]\[1\].*Odd",
    ),
    "value in itself": (put(rollouts(extra_fields={"a": itself()})), EncodeError, r"rollouts\[0\].extra_fields"),
    "array of objects": (put(rollouts(response_ids=np.array([Odd()]))), EncodeError, r"rollouts\[0\].response_ids"),
    "task: number": (put(task_name=5), InputError, "task_name must be a text, got int"),
    "task: empty": (put(task_name=""), InputError, "task_name is empty"),
    "task: NUL": (put(task_name="a\0b"), InputError, "NUL"),
    "task: surrogate": (put(task_name="\ud800"), InputError, "surrogate"),
    "task: long": (put(task_name="x" * 201), InputError, "201 characters; the limit is 200"),
    "model_step: text": (put(model_step="4"), InputError, "model_step must be a whole number"),
    "model_step: bool": (put(model_step=True), InputError, "model_step must be a whole number"),
    "model_step: NaN": (put(model_step=math.nan), InputError, "model_step must be a whole number"),
    "model_step: float": (put(model_step=1.5), InputError, "model_step must be a whole number"),
    "model_step: huge": (put(model_step=2**63), InputError, "model_step must be a whole number"),
    "train step: text": (put(current_train_step="5"), InputError, "current_train_step must be a whole number"),
    "train step: huge": (put(current_train_step=2**70), InputError, "current_train_step must be a whole number"),
    "threshold: 0": (put(stale_threshold=0), InputError, "stale_threshold must be positive.*None"),
    "threshold: negative": (put(stale_threshold=-3), InputError, "stale_threshold must be positive"),
    "threshold: text": (put(stale_threshold="4"), InputError, "stale_threshold must be positive"),
    "threshold: NaN": (put(stale_threshold=math.nan), InputError, "stale_threshold must be positive"),
    "threshold: bool": (put(stale_threshold=True), InputError, "stale_threshold must be positive"),
    "token threshold: 0": (
        put(token_stale_threshold=0, current_train_step=1),
        InputError,
        "token_stale_threshold must be",
    ),
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
    "tags: NUL": (put(tags={"a": "\0"}), InputError, r"tags\['a'\]"),
    "tags: name": (put(tags={1: 2}), InputError, "a tag's name must be a text, got int"),
    "tags: empty name": (put(tags={"": 2}), InputError, "a tag's name is empty"),
    "key: number": (put(key=5), InputError, "key must be a text, got int"),
    "key: empty": (put(key=""), InputError, "key is empty"),
    "get: text": (lambda b: b.get("5", TASK), InputError, "size of task 'math' must be a whole number"),  # type: ignore[arg-type]
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
    "wait: negative": (lambda b: b.wait_ready({TASK: 1}, timeout=-0.1), InputError, "timeout must be a number"),
    "count: status": (lambda b: b.count(TASK, "x"), InputError, "unknown status 'x'"),
    "count: task": (lambda b: b.count(None, "completed"), InputError, "task_name must be a text"),  # type: ignore[arg-type]
    "counts: lone task": (lambda b: b.count_statuses("math", ["completed"]), InputError, "tasks must be a list"),
    "counts: lone status": (lambda b: b.count_statuses([TASK], "completed"), InputError, "statuses must be a list"),
    "find: field": (find({"nope": 1}), QueryError, "nope: there is no field"),
    "find: operator": (find({"uid": {"$gtt": 1}}), QueryError, r"uid.\$gtt: .* did you mean \$gt"),
    "find: nothing": (find("uid"), QueryError, "expected a query"),
    "find: negative limit": (find(limit=-1), InputError, "limit must be a number of groups"),
    "find: bool limit": (find(limit=True), InputError, "limit must be a number of groups"),
    "find: order": (find(order_by="nope"), QueryError, "order_by: can't order by 'nope'"),
    "find: order twice": (find(order_by="--uid"), QueryError, "did you mean 'uid'"),
    "find: order by number": (find(order_by=5), QueryError, "order_by: expected a field name"),
    "find: order by list": (find(order_by=[[]]), QueryError, "order_by: expected a field name"),
    "find: order by term": (find(order_by=OrderTerm([])), QueryError, "can't order by"),  # type: ignore[arg-type]
    "delete: None": (lambda b: b.delete(None), QueryError, "expected a query"),  # type: ignore[arg-type]
    "delete: SQL": (lambda b: b.delete("1 = 1"), QueryError, "expected a query"),  # type: ignore[arg-type]
    "update: status": (lambda b: b.update({}, status="x"), InputError, "unknown status"),
    "update: priority": (lambda b: b.update({}, priority=math.nan), InputError, "priority must be"),
    "update: tags": (lambda b: b.update({}, tags={"a": []}), InputError, r"tags\['a'\]"),  # type: ignore[dict-item]
    "refresh: 0": (refresh({TASK: 0}), InputError, "stale_threshold must be positive"),
    "refresh: text": (refresh({TASK: "4"}), InputError, "stale_threshold must be positive"),
    "refresh: NaN": (refresh({TASK: math.nan}), InputError, "stale_threshold must be positive"),
    "refresh: list": (refresh([TASK]), InputError, "task_stale_thresholds must be a dict"),
    "refresh: step": (refresh({TASK: 4}, "a"), InputError, "current_train_step must be a whole number"),
    "refresh: NaN step": (refresh({TASK: 4}, math.nan), InputError, "current_train_step must be a whole number"),
    "refresh: huge step": (refresh({TASK: 4}, 2**70), InputError, "current_train_step must be a whole number"),
    "refresh: status": (refresh({TASK: 4}, statuses=["x"]), InputError, "unknown status"),
    "refresh: lone status": (refresh({TASK: 4}, statuses="completed"), InputError, "statuses must be a list"),
    "refresh: other task": (
        refresh({}, task_token_stale_thresholds={TASK: 3}),
        InputError,
        "task 'math' has no entry in task_stale_thresholds",
    ),
    "save: None": (lambda b: b.save(None), InputError, "path of a folder"),  # type: ignore[arg-type]
    "save: NUL": (lambda b: b.save("a\0b"), InputError, "path of a folder"),
    "save: on a file": (lambda b: b.save("/etc/passwd"), SnapshotError, "can't make the folder /etc/passwd"),
    "save: under a file": (lambda b: b.save("/etc/passwd/x"), SnapshotError, "can't make the folder"),
    "resume: nothing": (lambda b: b.resume("/no/such/folder"), MissingSnapshotError, "no snapshot in /no/such/folder"),
    "load: nothing": (load({}), SnapshotMismatchError, "expected a dict"),
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
    "give back: lists": (lambda b: leased(b, lambda lease: lease.give_back([[3]])), InputError, "uids must be uids"),
    "give back: reason": (lambda b: leased(b, lambda lease: lease.give_back(failed=3)), InputError, "failed must be"),
    "replaces: an array without dimensions": (put(rollouts(), replaces=np.array(3)), InputError, "must be a list"),
    "replaces: many": (put(rollouts(), replaces=range(5, 10**5)), ConflictError, "group 5, "),
    "load: None": (load(None), SnapshotMismatchError, "expected a dict"),
    "load: policy": (load({"policy": "lifo", "storage": {}}), SnapshotMismatchError, "'lifo'.*'fifo'"),
}


@pytest.mark.parametrize("name", list(BAD))
async def test_a_bad_argument_is_refused_and_changes_nothing(kept: ReplayBuffer, name: str) -> None:
    call, kind, message = BAD[name]
    before = [item async for item in kept.find({})]
    with pytest.raises(kind, match=f"(?s){message}"):
        await call(kept)
    assert [item async for item in kept.find({})] == before


async def test_a_state_that_is_damaged_or_no_longer_fits_is_refused(kept: ReplayBuffer) -> None:
    state = kept.state_dict()
    with pytest.raises(NotEmptyError, match="3 groups"):
        kept.load_state_dict(state)
    del state["storage"]["groups"][0]["payload"]
    async with build("sqlite://") as empty:
        with pytest.raises(SnapshotMismatchError, match="incomplete or damaged"):
            empty.load_state_dict(state)
        assert len(empty) == 0


GOOD_AT_THE_EDGE: dict[str, Call] = {
    "find: limit beyond int64": find(limit=10**30),
    "timeout beyond floats": lambda b: b.wait_ready({TASK: 1}, timeout=10**400),
    "size beyond int64": lambda b: b.is_ready({TASK: 10**30}),
    "negative size": lambda b: b.get(-5, TASK),
    "no sizes": lambda b: b.take_batch({}, timeout=1),
    "numpy threshold": refresh({"other": np.int64(4)}, np.int32(3)),
    "numpy size and timeout": lambda b: b.take_batch({TASK: np.int64(0)}, timeout=np.float32(0.5)),
    "numpy limit": find(limit=np.uint8(3)),
    "numpy beta": lambda b: b.sample({TASK: 0}, beta=np.float32(0.5)),
    "numpy seconds": lambda b: leased(b, seconds=np.float32(0.5)),
    "numpy priority": lambda b: b.update({"uid": 10**9}, priority=np.int64(2)),
    "numpy priorities": lambda b: b.update_priorities({np.int64(10**9): np.float32(0.5)}),
    "numpy tags": lambda b: b.update({"uid": 10**9}, tags={"a": np.float32(0.5), "b": np.int8(1), "c": np.True_}),
    "extend by a numpy time": lambda b: leased(b, lambda lease: lease.extend(np.float32(5))),
    "numpy uids of a lease": lambda b: leased(b, lambda lease: lease.give_back(np.array(sorted(lease.open)))),
    "a reason that no database stores": lambda b: leased(b, lambda lease: lease.give_back(failed="\0\ud800" * 9999)),
}


@pytest.mark.parametrize("name", list(GOOD_AT_THE_EDGE))
async def test_odd_arguments_that_mean_something_work(kept: ReplayBuffer, name: str) -> None:
    await GOOD_AT_THE_EDGE[name](kept)
    assert len(kept) == 3


async def test_texts_that_databases_dislike_are_stored_whole(sql_url: str) -> None:
    strange = "NUL \0, half a pair \ud83d, \x7f '\"`;--%?:x $1 \\"
    made = rollouts(rollout_id=strange, uid=strange, response=strange, finish_reason=strange, error_msg=strange)
    made[0].message = [{"role": strange, "content": strange}]
    made[0].reward = {"score": 1.0, strange: strange}
    async with build(sql_url) as buffer:
        await buffer.put(made, TASK)
        assert [item.item async for item in buffer.find({})] == [made]
        assert await buffer.get(1, TASK) == [made]


async def test_the_longest_names_fit_into_every_index(sql_url: str) -> None:
    chance = np.random.default_rng(1)
    task_name, key = ("".join(map(chr, chance.integers(0x10000, 0x1FFFF, 200))) for _ in range(2))
    async with build(sql_url) as buffer:
        await buffer.put(group(1), task_name, key=key)
        await buffer.put(group(2), task_name, key=key)
        assert numbers_of(await buffer.get(5, task_name)) == [2]


async def test_one_bad_put_among_many_fails_alone(sql_url: str) -> None:
    async with build(sql_url) as buffer:
        groups: list[Any] = [group(number) for number in range(20)]
        groups[7] = rollouts(extra_fields={"a": Odd()})
        groups[11] = rollouts(response_model_steps=[2**63])
        results = await asyncio.gather(*(buffer.put(each, TASK) for each in groups), return_exceptions=True)
        assert [n for n, result in enumerate(results) if isinstance(result, BaseException)] == [7, 11]
        assert len(await take_all(buffer)) == 18


async def test_a_put_that_only_the_database_refuses_fails_alone(sql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever slips through all checks: here, a time of creation that no driver takes."""
    async with build(sql_url) as buffer:
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


# Databases that can't be opened, written to, or believed


async def refused(url: str, kind: type[ReplayBufError], message: str, **options: Any) -> ReplayBufError:
    """That everything which a buffer does with this database ends in the same error, and that it can be closed."""
    buffer = build(url, **options)
    calls: list[Coroutine[Any, Any, Any]] = [
        buffer.put(group(1), TASK),
        buffer.get(1, TASK),
        buffer.take_batch({TASK: 1}, timeout=1),
        buffer.count_where({}),
        buffer.delete({}),
    ]
    for call in calls:
        with pytest.raises(kind, match=message) as caught:
            await call
    with pytest.raises(kind, match=message):
        len(buffer)
    await buffer.close()
    return caught.value


async def test_a_port_where_nobody_listens() -> None:
    await refused("postgresql://user@127.0.0.1:1/db", UnreachableError, "can't reach postgresql://user@127.0.0.1:1/db")


async def test_an_unknown_host() -> None:
    await refused("postgresql://user@host.invalid/db", UnreachableError, "can't reach postgresql://user@host.invalid")


async def test_a_socket_that_is_not_there(tmp_path: Path) -> None:
    await refused(f"postgresql://user@/db?host={tmp_path}", UnreachableError, "can't reach")


async def test_a_database_that_does_not_exist(postgres_url: str) -> None:
    url = make_url(postgres_url).set(database="nope").render_as_string(hide_password=False)
    await refused(url, UnreachableError, 'database "nope" does not exist; create the database first')


async def test_a_user_that_may_not_create_tables(postgres_database: str) -> None:
    role = f"reader_{os.getpid()}"
    execute(postgres_database, f"CREATE ROLE {role} LOGIN")
    try:
        url = make_url(postgres_database).set(username=role).render_as_string(hide_password=False)
        await refused(url, AccessError, "refused access: permission denied for schema public")
    finally:
        execute(postgres_database, f"DROP ROLE {role}")


async def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    await refused(f"sqlite:///{tmp_path}/no/x.db", AccessError, f"there is no folder {tmp_path}/no")
    assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240


async def test_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    await refused(f"sqlite:///{tmp_path}", AccessError, "is a folder")


async def test_a_file_that_is_no_database_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("These are notes.\n" * 100)
    await refused(f"sqlite:///{file}", NotADatabaseError, "not a database; give the path of a replaybuf database")
    assert file.read_text() == "These are notes.\n" * 100


async def test_a_database_of_someone_else_stays_as_it_is(shared_url: str) -> None:
    if shared_url.startswith("sqlite"):
        with sqlite3.connect(shared_url.removeprefix("sqlite:///")) as connection:
            connection.execute("CREATE TABLE rb_group (x)")
        connection.close()
    else:
        execute(shared_url, "CREATE TABLE rb_group (x int)")
    await refused(shared_url, NotADatabaseError, "tables named rb_group that are not replaybuf's")


@pytest.mark.parametrize("share", [0.5, 0.05])
async def test_a_truncated_database_is_noticed(tmp_path: Path, share: float) -> None:
    file = tmp_path / "buffer.db"
    async with build(f"sqlite:///{file}") as buffer:
        await fill(buffer, 300)
    os.truncate(file, int(os.path.getsize(file) * share) // 512 * 512)  # noqa: ASYNC240
    await refused(f"sqlite:///{file}", NotADatabaseError, "malformed")


async def test_a_database_locked_by_another_says_so_in_time(shared_url: str) -> None:
    from tests.test_cancellation import locked

    async with build(shared_url, lock_timeout=0.3) as buffer:
        await fill(buffer, 2)
        async with locked(shared_url):
            for call in (buffer.put(group(3), TASK), buffer.get(1, TASK), buffer.delete({})):
                async with asyncio.timeout(5):
                    with pytest.raises(LockedError, match=r"0\.3 s"):
                        await call
            assert await buffer.count_where({}) == 2  # readers don't wait
        await buffer.put(group(4), TASK)
        assert await take_all(buffer) == [0, 1, 4]


async def test_a_closed_buffer_says_so(sql_url: str, tmp_path: Path) -> None:
    buffer = build(sql_url)
    await buffer.put(group(1), TASK)
    await buffer.close()
    await buffer.close()
    calls: list[Coroutine[Any, Any, Any]] = [
        buffer.put(group(1), TASK),
        buffer.get(1, TASK),
        buffer.take_batch({TASK: 1}, timeout=5),
        buffer.wait_ready({TASK: 1}, timeout=5),
        buffer.is_ready({TASK: 1}),
        buffer.count(TASK, "completed"),
        buffer.count_where({}),
        buffer.delete({}),
        buffer.update({}, priority=1),
        refresh({TASK: 1})(buffer),
        find()(buffer),
        buffer.save(tmp_path),
        buffer.resume(tmp_path),
        buffer.__aenter__(),
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="build a new one"):
            await call
    with pytest.raises(ClosedError):
        len(buffer)
    with pytest.raises(ClosedError):
        buffer.state_dict()


async def test_a_payload_that_is_damaged_is_set_aside_and_not_lost(shared_url: str) -> None:
    async with build(shared_url) as buffer:
        await fill(buffer, 4)
        if shared_url.startswith("sqlite"):
            with sqlite3.connect(shared_url.removeprefix("sqlite:///")) as connection:
                connection.execute("UPDATE rb_payload SET data = CAST(x'00' || data AS BLOB) WHERE uid = 2")
            connection.close()
        else:
            execute(shared_url, "UPDATE rb_payload SET data = '\\x00'::bytea || data WHERE uid = 2")
        batch, _ = await buffer.take_batch({TASK: 3}, timeout=5)
        assert numbers_of(batch[TASK]) == [0, 2, 3]
        (damaged,) = [item async for item in buffer.find({})]
        assert (damaged.uid, damaged.status, damaged.item) == (2, "failed", [])
        assert "not a replaybuf payload" in (damaged.error or "")


# In processes of their own, because they change what a process may do


def run_limited(script: str, *arguments: object) -> None:
    text = textwrap.dedent(
        """
        import asyncio, os, resource, signal, sys
        import pytest
        import replaybuf
        from replaybuf import *
        from tests.stores import *
        """
    ) + textwrap.dedent(script)
    command = [sys.executable, "-W", "error", "-c", text, *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that users without any rights can reach, unlike those of pytest."""
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="rb-open-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_is_read_only_can_not_be_written_to(open_folder: Path, what: str) -> None:
    file = open_folder / "buffer.db"

    async def prepare() -> None:
        async with build(f"sqlite:///{file}") as buffer:
            await fill(buffer, 2)

    asyncio.run(prepare())
    file.chmod(0o444)
    open_folder.chmod(0o777 if what == "file" else 0o555)
    run_limited(
        """
        import replaybuf.storage.sql.watch, replaybuf.storage.sql.snapshot, sqlite3, aiosqlite
        async def main():
            buffer = build(sys.argv[1])
            for call in (buffer.put(group(1), TASK), buffer.get(1, TASK), buffer.delete({})):
                with pytest.raises(AccessError, match="read-only|can't be opened"):
                    await call
            await buffer.close()
        if os.getuid() == 0:
            asyncio.run(asyncio.sleep(0))
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        asyncio.run(main())
        """,
        f"sqlite:///{file}",
    )
    open_folder.chmod(0o755)

    async def check() -> None:
        async with build(f"sqlite:///{file}") as buffer:
            assert await take_all(buffer) == [0, 1]

    file.chmod(0o644)
    asyncio.run(check())


def test_a_full_disk_says_so_and_keeps_what_was_committed(tmp_path: Path) -> None:
    """A limit on the size of files is what comes closest to a full disk without the rights to mount one."""
    run_limited(
        """
        async def main():
            buffer = build(sys.argv[1])
            await fill(buffer, 5)
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
            acknowledged = 5
            with pytest.raises(DiskFullError, match="free some space"):
                for number in range(5, 100):
                    await buffer.put(group(number, text="x" * 50_000), TASK)
                    acknowledged += 1
            with pytest.raises(DiskFullError):
                await buffer.save(sys.argv[2])
            assert os.listdir(sys.argv[2]) == []
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            await buffer.put(group(acknowledged), TASK)
            assert await take_all(buffer) == list(range(acknowledged + 1))
            await buffer.close()
        asyncio.run(main())
        """,
        f"sqlite:///{tmp_path}/buffer.db",
        tmp_path / "snapshot",
    )


# Configs and passwords


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "the url is empty"),
        ("run.db", "for a file write sqlite:///run.db"),
        ("mysql://host/db", "'mysql' is not supported"),
        ("sqlite://run.db", "a relative file is sqlite:///run.db"),
        ("sqlite:///run?1.db", "a \\? in the name of a file is written %3F"),
        ("sqlite:///run.db?mode=ro", "SQLite urls take no options"),
        ("sqlite:///a\0b", "NUL"),
        ("postgresql://host:port/db", "can't read the database url"),
        ("postgresql://host:99999/db", "ports are from 1 to 65535"),
        ("postgresql://host/db?aplication_name=x", "no option 'aplication_name'; known are application_name"),
        ("postgresql://host/db?connect_timeout=soon", "timeout must be a number, not 'soon'"),
        ("postgresql://user:a@b@host/db", "more than one @: in a user or password it is written %40"),
    ],
)
def test_a_bad_url_says_what_would_be_right(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(url)


def test_the_known_options_of_libpq_reach_the_server(postgres_database: str) -> None:
    url = f"{postgres_database}&application_name=a%26b&connect_timeout=7&statement_cache_size=0&sslmode=prefer"
    url += "&channel_binding=prefer"

    async def main() -> None:
        async with build(url) as buffer:
            assert await buffer.put(group(1), TASK) == 1
            seen = await buffer.storage._read(  # type: ignore[attr-defined]
                lambda connection: connection.exec_driver_sql("SHOW application_name").scalar_one()
            )
            assert seen == "a&b"

    asyncio.run(main())


def test_a_missing_driver_is_named_with_the_way_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    with pytest.raises(MissingDriverError, match=r"asyncpg.*pip install 'replaybuf\[postgres\]'"):
        build("postgresql://user@host/db")


SECRETS = ["geheim", "ge@heim", "ge/heim", "ge%heim", "ge:heim", "ge?heim", "ge#heim", "ge heim", "ge&heim=x", "gé🔑"]


def shown(error: BaseException | None) -> Iterator[str]:
    """All that a traceback, a log or a debugger would show of an error."""
    while error is not None:
        yield from (str(error), repr(error), *map(repr, error.args))
        yield "".join(traceback.format_exception(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@contextmanager
def all_logs() -> Iterator[list[str]]:
    """Everything that is logged, by anyone, at any level."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    root, handler = logging.getLogger(), Keep()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield lines
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


def leaks(secret: str, texts: list[str]) -> list[str]:
    spellings = {
        secret,
        quote(secret, safe=""),
        quote(secret),
        *(part for part in re.split("[^a-z]", secret) if len(part) > 3),
    }
    return [text for text in texts if any(spelling in text for spelling in spellings)]


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("place", ["password", "query"])
async def test_a_password_is_never_shown(secret: str, place: str) -> None:
    quoted = quote(secret, safe="")
    credentials, query = (f"user:{quoted}", "") if place == "password" else ("user", f"?password={quoted}")
    url = f"postgresql://{credentials}@127.0.0.1:1/db{query}"
    texts: list[str] = [redact(url)]
    with all_logs() as lines:
        config = ReplayBufferConfig(url=url)
        buffer = config.build()
        storage: Any = buffer.storage
        texts += [
            repr(config),
            str(config),
            repr(buffer),
            str(buffer),
            repr(storage),
            repr(storage.url),
            str(storage.url),
        ]
        with pytest.raises(UnreachableError) as caught:
            await buffer.put(group(1), TASK)
        texts += shown(caught.value)
        texts += [repr(storage._state().database.engine), repr(storage._state().database.engine.pool)]
        await buffer.close()
    assert leaks(secret, texts + lines) == []


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:geheim@host:port/db",
        "postgresql://user:a@geheim@host/db",
        "postgresql://user:a@b:geheim@host/db",
        "postgresql://user:geheim@[::1/db",
        "postgresql:/user:geheim@host/db",
        "user:geheim@host/db",
        "mysql://user:geheim@host/db",
        "postgresql://user:geheim@host:99999/db",
        "postgresql://user:geheim@host/db?nope=1",
        "postgresql://user@host/db?password=geheim&nope=1",
        "postgresql://user@host:port/db?password=geheim",
    ],
)
def test_a_password_in_a_url_that_is_refused_is_not_shown(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(url)
    assert "geheim" not in "".join(text for text in shown(caught.value) if "build(url)" not in text)


def test_a_password_in_a_config_that_is_refused_is_not_shown(tmp_path: Path) -> None:
    url = "postgresql://user:geheim@host/db"
    file = tmp_path / "train.yaml"
    texts: list[str] = []
    for values in ({"url": url, "polcy": "fifo"}, {"url": [url]}, {"url": url, "lock_timeout": -1}):
        with pytest.raises(ConfigError) as caught:
            ReplayBufferConfig.from_mapping(values)
        texts += [str(caught.value), repr(caught.value)]
        with pytest.raises(ValueError, match="ReplayBufferConfig") as direct:
            ReplayBufferConfig(**values)
        texts += [str(direct.value), repr(direct.value)]
    for text in (f"url: {url}: x", f"url: '{url}", f"{url}", f"- {url}", f"url: !!python/name:{url}"):
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            ReplayBufferConfig.from_file(file)
        texts += shown(caught.value)
    assert leaks("geheim", texts) == []


def prepend(hba: str) -> None:
    Path(hba).write_text("local all guarded scram-sha-256\n" + Path(hba).read_text())


@pytest.fixture(scope="module")
def password_url() -> Iterator[str]:
    """A server that wants a password from the role `guarded`: ge@h/e%im."""
    with running_server(own=True) as url:

        async def guard() -> None:
            import asyncpg

            connection = await asyncpg.connect(url)
            await asyncio.to_thread(prepend, await connection.fetchval("SHOW hba_file"))
            await connection.execute("CREATE ROLE guarded LOGIN SUPERUSER PASSWORD 'ge@h/e%im'")
            await connection.execute("SELECT pg_reload_conf()")
            await connection.close()

        asyncio.run(guard())
        yield url


@pytest.mark.parametrize("place", ["password", "query"])
async def test_a_wrong_password_is_refused_and_not_shown(password_url: str, place: str) -> None:
    def with_password(password: str) -> str:
        url = make_url(password_url).set(username="guarded").render_as_string(hide_password=False)
        if place == "query":
            return f"{url}&password={quote(password, safe='')}"
        return url.replace("guarded:@", f"guarded:{quote(password, safe='')}@")

    async with build(with_password("ge@h/e%im")) as buffer:
        assert await buffer.put(group(1), TASK) is not None
    with all_logs() as lines:
        error = await refused(with_password("fal/sch@"), AccessError, "password authentication failed for user")
    assert leaks("fal/sch@", [*shown(error), *lines]) == []
    await refused(with_password("x"), AccessError, "password authentication failed")


# Injection

ATTACKS = [
    "'; DROP TABLE rb_group; --",
    '"; DROP TABLE rb_group; --',
    "%s %(x)s :x ? $1 %",
    "\\'; SELECT 1",
    "a.b[0].$c",
    "' OR '1'='1",
    "{}",
    "x\n",
    "\u2028',)",
    "`${x}`",
]


@pytest.mark.parametrize("attack", ATTACKS)
async def test_every_text_is_taken_as_it_is(kept_url: str, attack: str) -> None:
    """As the name of a task, a key, the name and the value of a tag, and in a query."""
    async with build(kept_url) as buffer:
        before = await buffer.count_where({"task_name": {"$ne": attack}})
        for number, tags in enumerate(({attack: attack}, {attack: 1, "x": attack}, {"x": 1}, None)):
            await buffer.put(group(number), attack, key=f"{attack}{number}", tags=tags)
        await buffer.put(group(4), attack, key=f"{attack}3", tags={"x": True})
        counts = {
            "task": await buffer.count_where({"task_name": attack}),
            "tag": await buffer.count_where({f"tags.{attack}": attack}),
            "tag ne": await buffer.count_where({f"tags.{attack}": {"$ne": attack}, "task_name": attack}),
            "tag in": await buffer.count_where({f"tags.{attack}": {"$in": [attack, 1]}}),
            "tag below": await buffer.count_where({f"tags.{attack}": {"$lte": attack}}),
            "value": await buffer.count_where({"tags.x": attack}),
            "ready": int(await buffer.is_ready({attack: 4})),
            "update": await buffer.update({f"tags.{attack}": attack}, tags={attack: attack}),
            "status": (await buffer.count_statuses([attack], ["completed"]))[attack]["completed"],  # type: ignore[index]
        }
        assert counts == {
            "task": 4,
            "tag": 1,
            "tag ne": 3,
            "tag in": 2,
            "tag below": 1,
            "value": 1,
            "ready": 1,
            "update": 1,
            "status": 4,
        }
        for call in (
            find(order_by=attack),
            find({attack: 1}),
            find({"status": attack}),
            find({"uid": {attack: 1}}),
            lambda b: b.update({}, status=attack),
            lambda b: b.get(1, attack, attack),
        ):
            with pytest.raises(ReplayBufError):
                await call(buffer)
        await buffer.refresh_staleness(task_stale_thresholds={attack: 4}, current_train_step=9)
        assert sorted(numbers_of(await buffer.get(10, attack, where={"task_name": attack}))) == [0, 1, 2, 4]
        assert await buffer.count_where({"task_name": {"$ne": attack}}) == before


@pytest.mark.parametrize("name", ["a%41.db", "a b.db", "a#b.db", "a?b.db", "a'b\".db", "a&b=c.db", "ä;.db", "-x.db"])
async def test_every_name_of_a_file_can_be_written(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name.removesuffix(".db")
    folder.mkdir()
    url = f"sqlite:///{quote(str(folder / name))}"
    async with build(url) as buffer:
        await fill(buffer, 2)
        await buffer.save(folder / "snapshot")
    assert sorted(path.name for path in folder.iterdir()) == sorted([name, "snapshot"])
    async with build("sqlite://") as copy:
        await copy.resume(folder / "snapshot")
        assert await take_all(copy) == [0, 1]


def test_a_policy_is_known_by_its_name_only() -> None:
    for policy in ("os.system", "../fifo", "fifo'", "FIFOPolicy", "", "__class__"):
        with pytest.raises(ConfigError, match="unknown policy"):
            build("sqlite://", policy=policy)
