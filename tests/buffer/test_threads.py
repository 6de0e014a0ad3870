"""One buffer from many threads and event loops."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock

import pytest

from replaybuf import RolloutState, Status
from replaybuf.buffer.lease_renewal import Heartbeats
from replaybuf.errors import StorageError
from replaybuf.storage.values import Leased
from replaybuf.values.rollouts import normalise
from tests.cancellation.ways import end_background_work
from tests.stores import TASK, build, fill, group, opened, take_all, until


def run_threads(*functions: object) -> None:
    """Run coroutine functions at once, each in a thread and an event loop of its own."""
    problems: list[BaseException] = []
    together = threading.Barrier(len(functions))

    def run(function: object) -> None:
        try:
            together.wait(10)
            asyncio.run(function())  # type: ignore[operator]
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert problems == []


def test_a_buffer_that_is_opened_by_several_threads_at_once_is_opened_once(url: str) -> None:
    for round_ in range(5):
        with opened(url) as buffer:

            def worker(number: int, buffer: object = buffer) -> object:
                async def work() -> None:
                    await buffer.put(group(number), TASK)  # type: ignore[attr-defined]

                return work

            run_threads(*(worker(n) for n in range(6)))
            assert sorted(asyncio.run(take_all(buffer))) == list(range(6)), round_


async def test_no_change_is_missed_between_looking_and_waiting(shared_url: str) -> None:
    """The commit of another process comes just after this one has looked, while another waiter has noticed it."""
    async with build(shared_url) as buffer, build(shared_url) as other:
        await other.count_where({})
        tallies, first = buffer.storage.fenced_tallies, True  # type: ignore[attr-defined]

        async def look_and_commit() -> Any:
            nonlocal first
            found = await tallies()
            if first:
                first = False
                bystander = asyncio.create_task(buffer.wait_ready({"other": 1}, timeout=30))
                await asyncio.sleep(0.1)
                await other.put(group(1), TASK)
                await asyncio.sleep(0.2)
                bystander.cancel()
            return found

        buffer.storage.fenced_tallies = look_and_commit  # type: ignore[attr-defined]
        started = time.monotonic()
        await buffer.wait_ready({TASK: 1}, timeout=20)
        assert time.monotonic() - started < 5


async def test_long_groups_are_prepared_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another thread: several would hold up the event loop together, each for its turn with the interpreter."""
    prepare, at_once, most = normalise._normalise, 0, 0

    def counted(*arguments: Any) -> Any:
        nonlocal at_once, most
        assert threading.current_thread() is not threading.main_thread()
        at_once += 1
        most = max(most, at_once)
        time.sleep(0.01)
        at_once -= 1
        return prepare(*arguments)

    monkeypatch.setattr(normalise, "_normalise", counted)
    async with build("memory://") as buffer:
        long = [RolloutState(message=[], response_ids=[1] * 20_000, status=Status.COMPLETED) for _ in range(4)]
        await asyncio.gather(*(buffer.put([rollout], TASK) for rollout in long))
        assert len(buffer) == 4
    assert most == 1


def test_a_storage_error_is_one_error_for_each_caller() -> None:
    """Callers in several loops don't share an exception, whose traceback would grow in all of them."""
    with opened("sqlite:////no/such/folder/x.db") as buffer:

        async def failing() -> list[BaseException]:
            results = await asyncio.gather(*(buffer.put(group(n), TASK) for n in range(3)), return_exceptions=True)
            return [result for result in results if isinstance(result, BaseException)]

        errors = asyncio.run(failing())
        assert all(isinstance(error, StorageError) for error in errors)
        assert len({id(error) for error in errors}) == 3


async def test_a_batch_is_freed_when_its_taker_drops_it(shared_url: str) -> None:
    """No thread of the store keeps what it returned last."""
    async with build(shared_url) as buffer:
        await fill(buffer, 2)
        await end_background_work(buffer)  # its calls would free it
        batch = await buffer.get(1, TASK, where={"uid": {"$gte": 1}})
        rollout = weakref.ref(batch[0][0])
        del batch

        async def is_freed() -> bool:
            return rollout() is None

        await until(is_freed, 2)


# The thread that extends leases


async def test_a_heartbeat_that_fails_leaves_the_others_alone(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its storage raises."""
    async with build(url) as buffer:
        await fill(buffer, 2)
        failing, other = [await buffer.lease_batch({TASK: 1}, seconds=0.2) for _ in range(2)]
        extend, extended = buffer.storage.extend, []

        async def fail_or_note(leased: Leased, uids: Sequence[int], seconds: float) -> float:
            if leased.token == failing.token:
                raise RuntimeError
            extended.append(leased.token)
            return await extend(leased, uids, seconds)

        monkeypatch.setattr(buffer.storage, "extend", fail_or_note)

        async def went_on() -> bool:
            return len(extended) > 4

        await until(went_on)
        await other.acknowledge()


def test_a_heart_whose_last_lease_is_dropped_as_it_looks_comes_to_rest() -> None:
    heart = Heartbeats()
    there = MagicMock()
    there.__len__.return_value = 1
    there.items.return_value = there.values.return_value = []
    heart._leases = there
    assert heart._wait() is None
