"""Calls of a synchronous buffer: their results, errors, and what happens to what they return."""

from __future__ import annotations

import asyncio
import gc
import itertools
import pydoc
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from replaybuf import FullError, Lease, NotReadyError, ReplayBuffer, ReplayBufferConfig
from replaybuf.buffer.sync import SyncLease, SyncReplayBuffer, run
from replaybuf.errors import ClosedError, InputError, QueryError
from tests.stores import TASK, group, number_of, numbers_of


@pytest.fixture
def buffer(url: str) -> Iterator[SyncReplayBuffer]:
    """A synchronous buffer over a new, empty store."""
    with ReplayBufferConfig(url=url, policy="fifo").build_sync() as buffer:
        yield buffer


def fill(buffer: SyncReplayBuffer, count: int, first: int = 0) -> list[int]:
    return [buffer.put(group(number), TASK) or 0 for number in range(first, first + count)]


def found(buffer: SyncReplayBuffer, query: Any = None, **options: Any) -> list[int]:
    return [number_of(item.item) for item in buffer.find(query or {}, **options)]


def test_groups_go_in_and_come_out(buffer: SyncReplayBuffer) -> None:
    fill(buffer, 6)
    assert (len(buffer), bool(buffer), buffer.count(TASK, "completed")) == (6, True, 6)
    assert numbers_of(buffer.get(1, TASK)) == [0]
    batch, counts = buffer.take_batch({TASK: 2}, timeout=10)
    assert (numbers_of(batch[TASK]), counts) == ([1, 2], {TASK: 2})
    [item] = buffer.sample({TASK: 1})[TASK]
    assert number_of(item.item) == 3
    assert buffer.update({"task_name": TASK}, tags={"seen": True}) == 2
    assert buffer.delete({"tags.seen": True}) == 2
    assert buffer.metrics()["tasks"][TASK]["put"] == 6


def test_a_lease_is_acknowledged_given_back_or_settled_by_hand(buffer: SyncReplayBuffer) -> None:
    fill(buffer, 4)
    with buffer.lease_batch({TASK: 1}) as lease:
        assert numbers_of(lease.batch[TASK]) == [0]
        assert (lease.counts, len(lease.open), lease.lost, lease.seconds) == ({TASK: 1}, 1, False, 60)
    for error in (ZeroDivisionError, KeyboardInterrupt):
        with pytest.raises(error), buffer.lease_batch({TASK: 1}):
            raise error
    assert found(buffer) == [1, 2, 3]
    assert [item.deliveries for item in buffer.find({})] == [1, 0, 0]
    lease = buffer.lease_batch({TASK: 3}).begin()
    first, second, third = sorted(lease.open)
    lease.extend(30)
    assert lease.finish(group(10), TASK, replaces=[first]) is not None
    saved = lease.save(group(11), TASK, replaces=[second])
    assert lease.open == {saved, third}
    assert lease.give_back([third]) == 1
    lease.acknowledge([saved] if saved else [])
    assert found(buffer) == [3, 10]
    with pytest.raises(InputError):
        lease.acknowledge([third])


def test_errors_keep_their_types_and_a_readable_traceback(buffer: SyncReplayBuffer) -> None:
    with pytest.raises(NotReadyError, match="task math: 0 completed groups there, 4 needed") as caught:
        buffer.take_batch({TASK: 4}, timeout=0.01)
    assert isinstance(caught.value, TimeoutError)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[1:4] == ["call", "run", "take_batch"]
    with pytest.raises(QueryError):
        buffer.find({"nothing": 1})
    with pytest.raises(TypeError, match=r"put_options.* 'priorty'"):
        buffer.put(group(1), TASK, priorty=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'timout'"):
        buffer.get(1, TASK, timout=2)  # type: ignore[call-arg]


def test_a_full_buffer_and_a_closed_one_refuse() -> None:
    buffer = ReplayBufferConfig(url="memory://", capacity=1, on_full="block").build_sync()
    fill(buffer, 1)
    with pytest.raises(FullError):
        buffer.put(group(1), TASK, timeout=0.01)
    buffer.close()
    buffer.close()
    with pytest.raises(ClosedError):
        buffer.put(group(1), TASK)
    with pytest.raises(ClosedError), buffer:
        pass


def test_find_reads_as_it_goes_and_may_be_left(buffer: SyncReplayBuffer) -> None:
    fill(buffer, 40)
    assert found(buffer, order_by="-uid", limit=3) == [39, 38, 37]
    items = buffer.find({})
    assert number_of(next(items).item) == 0
    items.close()
    assert list(items) == []
    abandoned = buffer.find({})
    next(abandoned)
    del abandoned
    gc.collect()
    assert len(found(buffer)) == 40


def test_the_asynchronous_buffer_is_the_same_one(buffer: SyncReplayBuffer) -> None:
    fill(buffer, 1)
    assert asyncio.run(buffer.asynchronous.count(TASK, "completed")) == 1
    assert run(buffer.asynchronous.count(TASK, "completed")) == 1
    assert repr(buffer) == f"Sync{buffer.asynchronous!r}"


def test_a_call_inside_a_call_is_refused_instead_of_waiting_for_itself(buffer: SyncReplayBuffer) -> None:
    async def inside() -> int:
        return buffer.count(TASK, "completed")

    with pytest.raises(InputError, match="await it there"):
        run(inside())


# Threads and loops


def test_a_lease_is_renewed_while_a_coroutine_blocks_the_thread_of_all_calls(
    buffer: SyncReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(buffer, 1)
    storage, renewed = buffer.asynchronous.storage, threading.Event()
    extend = storage.extend

    async def noted(*arguments: Any, **options: Any) -> float:
        renewed.set()
        return await extend(*arguments, **options)

    async def block() -> None:
        assert renewed.wait(30)

    monkeypatch.setattr(storage, "extend", noted)
    lease = buffer.lease_batch({TASK: 1}, seconds=3).begin()
    run(block())
    lease.acknowledge()


def test_threads_share_a_buffer_and_no_group_goes_to_two(buffer: SyncReplayBuffer) -> None:
    def work(first: int) -> list[int]:
        numbers: list[int] = []
        for start in range(first, first + 40, 10):
            fill(buffer, 10, start)
            numbers += numbers_of(buffer.get(7, TASK))
        return numbers

    with ThreadPoolExecutor(4) as pool:
        numbers = [*itertools.chain(*pool.map(work, range(0, 4000, 1000)))]
    numbers += numbers_of(buffer.get(1000, TASK))
    assert sorted(numbers) == sorted(1000 * n + i for n in range(4) for i in range(40))


def test_closing_ends_the_waits_of_other_threads(buffer: SyncReplayBuffer) -> None:
    threading.Timer(0.2, buffer.close).start()
    with pytest.raises(ClosedError):
        buffer.wait_ready({TASK: 1}, timeout=20)


async def test_calls_inside_a_running_loop_work(buffer: SyncReplayBuffer) -> None:
    """As in a notebook: they block the loop meanwhile, and wait for nothing that it does."""
    fill(buffer, 3)
    with buffer.lease_batch({TASK: 1}) as lease:
        assert numbers_of(lease.batch[TASK]) == [0]
    assert found(buffer) == [1, 2]
    assert numbers_of(await buffer.asynchronous.get(2, TASK)) == [1, 2]
    with pytest.raises(NotReadyError):
        buffer.take_batch({TASK: 1}, timeout=0.05)


def test_help_shows_the_signature_and_the_docstring_without_await() -> None:
    text = pydoc.render_doc(
        SyncReplayBuffer,
        renderer=pydoc.plaintext,  # type: ignore[attr-defined]
    )
    assert "put(self, items: 'Sequence[R]', task_name: 'str', *, replaces: 'Iterable[int]' = ()" in text
    assert "Store a group of rollouts and return its uid; when it returns, the group is committed." in text
    assert "with buffer.lease_batch(" in text
    assert not {"async", "await"} & set(text.replace("(", " ").split())


@pytest.mark.parametrize(("face", "kind"), [(SyncReplayBuffer, ReplayBuffer), (SyncLease, Lease)])
def test_a_synchronous_class_has_every_call(face: type, kind: type) -> None:
    assert {name for name in dir(kind) if not name.startswith("_")} <= {*dir(face)}
