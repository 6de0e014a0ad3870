"""One buffer from many threads, loops and processes, and programs that end without closing it."""

from __future__ import annotations

import asyncio
import gc
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from replaybuf import (
    AsyncReplayBufferConfig,
    FIFOPolicy,
    ReplayBufError,
    ReplayBufferConfig,
    RolloutState,
    Status,
    StorageError,
    SyncReplayBufferConfig,
)
from replaybuf.buffer.heartbeat import Heart
from replaybuf.rollouts import normalise
from replaybuf.storage.values import Leased
from tests.stores import TASK, build, fill, group, number_of, numbers_of, opened, take_all, until


@pytest.fixture(params=["sqlite", "sqlite in memory", "memory://", "pandas://", "postgresql"])
def any_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "sqlite":
            return f"sqlite:///{tmp_path}/buffer.db"
        case "sqlite in memory":
            return "sqlite:///:memory:"
        case "postgresql":
            return str(request.getfixturevalue("postgres_database"))
        case _:
            return str(request.param)


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


def test_threads_with_loops_of_their_own_share_a_buffer(any_url: str) -> None:
    taken: list[int] = []
    with opened(any_url) as buffer:

        def worker(first: int) -> object:
            async def work() -> None:
                for start in range(first, first + 40, 10):
                    await fill(buffer, 10, start)
                    await buffer.wait_ready({TASK: 1}, timeout=0.1) if len(buffer) else None
                    batch, _ = await buffer.take_batch({TASK: 7})
                    taken.extend(numbers_of(batch[TASK]))
                    assert await buffer.count(TASK, "completed") >= 0
                    [item.uid async for item in buffer.find({}, limit=3)]

            return work

        run_threads(*(worker(1000 * n) for n in range(4)))
        taken += asyncio.run(take_all(buffer))
    assert sorted(taken) == sorted(1000 * n + i for n in range(4) for i in range(40))


def test_a_buffer_that_is_opened_by_several_threads_at_once_is_opened_once(any_url: str) -> None:
    for round_ in range(5):
        with opened(any_url) as buffer:

            def worker(number: int, buffer: object = buffer) -> object:
                async def work() -> None:
                    await buffer.put(group(number), TASK)  # type: ignore[attr-defined]

                return work

            run_threads(*(worker(n) for n in range(6)))
            assert sorted(asyncio.run(take_all(buffer))) == list(range(6)), round_


def test_a_put_in_one_thread_wakes_a_wait_in_another(any_url: str) -> None:
    with opened(any_url) as buffer:
        got: list[int] = []

        async def consume() -> None:
            batch, _ = await buffer.take_batch({TASK: 2}, timeout=20)
            got.extend(numbers_of(batch[TASK]))

        async def produce() -> None:
            await asyncio.sleep(0.2)
            await fill(buffer, 2)

        started = time.monotonic()
        run_threads(consume, produce)
        assert got == [0, 1]
        assert time.monotonic() - started < 5


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


# Processes


def run(script: str, *arguments: object, expect: int = 0, send: signal.Signals | None = None) -> str:
    """Run a script in which every warning is an error; it has to end by itself, without a word on stderr."""
    text = textwrap.dedent(
        """
        import asyncio, gc, multiprocessing, os, pickle, sys, threading, time
        from replaybuf import *
        from tests.stores import *
        url = sys.argv[1]
        """
    ) + textwrap.dedent(script)
    command = [sys.executable, "-W", "error", "-c", text, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if send is not None:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(send)
    try:
        out, problems = process.communicate(timeout=40)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert problems == "" or send is not None
    assert process.returncode == expect
    return out + (problems if send is not None else "")


FORK = """
    async def child():
        await fill(buffer, 5, 100)
        assert len(buffer) >= 5
        await buffer.wait_ready({TASK: 5}, timeout=10)
        gc.collect()
        {close}

    buffer = build(url)
    asyncio.run(fill(buffer, 5))
    pid = os.fork()
    if pid == 0:
        try:
            asyncio.run(child())
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        {exit}
    asyncio.run(fill(buffer, 5, 5))
    assert os.waitpid(pid, 0)[1] == 0
    started = time.monotonic()
    asyncio.run(fill(buffer, 5, 10))
    assert sorted(asyncio.run(take_all(buffer))) == [*range(15), *range(100, 105)]
    assert time.monotonic() - started < 5
    asyncio.run(buffer.close())
"""


@pytest.mark.parametrize(
    ("close", "leave"), [("await buffer.close()", "os._exit(0)"), ("pass", "os._exit(0)"), ("pass", "sys.exit(0)")]
)
def test_a_fork_uses_the_buffer_while_its_parent_goes_on(shared_url: str, close: str, leave: str) -> None:
    run(FORK.replace("{close}", close).replace("{exit}", leave), shared_url)


def test_a_buffer_in_memory_can_not_follow_a_fork() -> None:
    """Instead of an empty one appearing in its place."""
    run(
        """
        buffer = build(url)
        asyncio.run(fill(buffer, 5))
        pid = os.fork()
        if pid == 0:
            try:
                asyncio.run(buffer.count_where({}))
            except StorageError as error:
                os._exit(0 if "fork" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0
        assert len(buffer) == 5
        asyncio.run(buffer.close())
        """,
        "sqlite:///:memory:",
    )


def test_spawned_processes_get_the_config(shared_url: str) -> None:
    run(
        """
        from multiprocessing import get_context
        from tests.test_loops_and_forks import put_from_config
        if __name__ == "__main__":
            config = ReplayBufferConfig(url=url, policy=FIFOPolicy)
            children = [get_context("spawn").Process(target=put_from_config, args=(config, n)) for n in range(2)]
            for child in children: child.start()
            for child in children: child.join()
            assert [child.exitcode for child in children] == [0, 0]
            buffer = config.build()
            assert sorted(asyncio.run(take_all(buffer))) == [0, 1]
            asyncio.run(buffer.close())
        """,
        shared_url,
    )


def put_from_config(config: ReplayBufferConfig, number: int) -> None:
    async def main() -> None:
        async with config.build() as buffer:
            await buffer.put(group(number), TASK)

    asyncio.run(main())


@pytest.mark.parametrize("kind", [ReplayBufferConfig, SyncReplayBufferConfig, AsyncReplayBufferConfig])
@pytest.mark.parametrize("policy", ["fifo", FIFOPolicy])
def test_configs_can_be_pickled(kind: type[ReplayBufferConfig], policy: object) -> None:
    config = kind(url="sqlite:///run.db", policy=policy, rollout_type=dict)  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("used", [False, True])
def test_a_buffer_can_not_be_pickled_and_says_what_can(any_url: str, used: bool) -> None:
    with opened(any_url) as buffer:
        if used:
            asyncio.run(buffer.count_where({}))
        with pytest.raises(TypeError, match="pickle its config") as caught:
            pickle.dumps(buffer)
        assert isinstance(caught.value, ReplayBufError)


ENDS = {
    "open": "buffer = build(url); asyncio.run(fill(buffer, 3))",
    "never used": "buffer = build(url); other = build(url); asyncio.run(fill(other, 3)); asyncio.run(other.close())",
    "collected": "asyncio.run(fill(build(url), 3)); gc.collect(); time.sleep(0.1); gc.collect()",
    "in a global cycle": "buffer = build(url); buffer.itself = buffer; asyncio.run(fill(buffer, 3))",
    "in a class": """
        class Trainer:
            def __init__(self): self.buffer = build(url)
            def __del__(self): pass
        trainer = Trainer(); trainer.me = trainer; asyncio.run(fill(trainer.buffer, 3))
    """,
    "sys.exit": """
        buffer = build(url)
        async def main():
            await fill(buffer, 3)
            sys.exit(0)
        asyncio.run(main())
    """,
    "a waiting take in a daemon": """
        buffer = build(url); asyncio.run(fill(buffer, 3))
        def consume():
            try: asyncio.run(buffer.take_batch({"none": 4}, timeout=None))
            except BaseException: pass
        threading.Thread(target=consume, daemon=True).start()
        time.sleep(0.2)
    """,
    "closed in an exit handler": """
        import atexit
        buffer = build(url); asyncio.run(fill(buffer, 3))
        atexit.register(lambda: asyncio.run(buffer.close()))
    """,
    "puts and takes in an exit handler": """
        import atexit
        buffer = build(url); asyncio.run(fill(buffer, 2))
        def last():
            async def main():
                await asyncio.wait_for(buffer.put(group(2), TASK), 5)
                assert len(await asyncio.wait_for(buffer.get(1, TASK), 5)) == 1
                await buffer.put(group(0), TASK)
                await buffer.close()
            asyncio.run(main())
        atexit.register(last)
    """,
}


@pytest.mark.parametrize("end", list(ENDS))
def test_a_program_that_ends_without_closing_ends_quietly_and_loses_nothing(shared_url: str, end: str) -> None:
    started = time.monotonic()
    run(ENDS[end], shared_url)
    assert time.monotonic() - started < 20
    with opened(shared_url) as buffer:
        assert sorted(asyncio.run(take_all(buffer))) == [0, 1, 2]


def test_a_keyboard_interrupt_ends_a_waiting_take_and_loses_nothing(shared_url: str) -> None:
    out = run(
        """
        buffer = build(url)
        async def main():
            await fill(buffer, 3)
            print("ready", flush=True)
            try:
                await buffer.take_batch({TASK: 4}, timeout=30)
            finally:
                print(len(buffer), flush=True)
        try:
            asyncio.run(main())
        except KeyboardInterrupt:
            print("interrupted", len(buffer), flush=True)
            asyncio.run(buffer.close())
        """,
        shared_url,
        send=signal.SIGINT,
    )
    assert out == "3\ninterrupted 3\n"


def test_a_buffer_that_is_dropped_lets_go_of_its_thread(shared_url: str) -> None:
    def use() -> None:
        buffer = build(shared_url)
        asyncio.run(fill(buffer, 1))

    before = set(threading.enumerate())
    for _ in range(3):
        use()
    deadline = time.monotonic() + 10
    while names := [t.name for t in threading.enumerate() if t not in before and t.name.startswith("replaybuf")]:
        gc.collect()
        assert time.monotonic() < deadline, names
        time.sleep(0.01)


def test_a_dropped_buffer_finishes_what_its_callers_wait_for(shared_url: str) -> None:
    async def use() -> list[int]:
        return [number_of(g) for g in await build(shared_url).get(1, TASK)]

    with opened(shared_url) as buffer:
        asyncio.run(fill(buffer, 5))
    for number in range(5):
        gc.collect()
        assert asyncio.run(use()) == [number]


def test_a_storage_error_is_one_error_for_each_caller() -> None:
    """Callers in several loops don't share an exception, whose traceback would grow in all of them."""
    with opened("sqlite:////no/such/folder/x.db") as buffer:

        async def failing() -> list[BaseException]:
            results = await asyncio.gather(*(buffer.put(group(n), TASK) for n in range(3)), return_exceptions=True)
            return [result for result in results if isinstance(result, BaseException)]

        errors = asyncio.run(failing())
        assert all(isinstance(error, StorageError) for error in errors)
        assert len({id(error) for error in errors}) == 3


def test_a_fork_does_not_keep_the_leases_of_its_parent_alive(shared_url: str) -> None:
    """Its heartbeat is for its own."""
    run(
        """
        async def child():
            async with buffer.lease_batch({TASK: 1}, seconds=0.2) as lease:
                extended = []
                extend = buffer.storage.extend
                async def note(leased, *args):
                    extended.append(leased.token)
                    return await extend(leased, *args)
                buffer.storage.extend = note
                while len(extended) < 3:
                    await asyncio.sleep(0.01)
                assert set(extended) == {lease.token}, (extended, lease)

        async def parent():
            await fill(buffer, 5)
            return await buffer.lease_batch({TASK: 1}, seconds=0.2)

        buffer = build(url)
        lease = asyncio.run(parent())
        pid = os.fork()
        if pid == 0:
            try:
                asyncio.run(child())
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        asyncio.run(lease.acknowledge())
        asyncio.run(buffer.close())
        """,
        shared_url,
    )


async def test_a_heartbeat_that_fails_leaves_the_others_alone(any_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its storage raises."""
    async with build(any_url) as buffer:
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
    heart = Heart()
    there = MagicMock()
    there.__len__.return_value = 1
    there.items.return_value = there.values.return_value = []
    heart._leases = there
    assert heart._wait() is None
