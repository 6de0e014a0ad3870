"""Forks, threads and programs that end without closing."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from replaybuf import AsyncReplayBufferConfig, ReplayBufferConfig, RolloutState, Status, SyncReplayBufferConfig
from replaybuf.errors import InputError, StorageError
from replaybuf.rules.policies import FIFOPolicy
from replaybuf.storage.sql import lifecycle
from replaybuf.storage.sql.engine.sqlite_raw import ForkGuard
from replaybuf.storage.sql.tasks import transactions
from replaybuf.storage.values import Leased
from replaybuf.values.rollouts import normalise
from tests.cancellation.conftest import end_background_work
from tests.scripts import run
from tests.stores import TASK, build, fill, group, number_of, opened, take_all, until

IN_MEMORY = """
    import pytest

    async def refused():
        for call in (
            lambda: buffer.put(group(1), TASK),
            lambda: buffer.get(1, TASK),
            lambda: buffer.take_batch({TASK: 1}, timeout=5),
            lambda: buffer.wait_ready({TASK: 1}, timeout=5),
            lambda: buffer.count_where({}),
            lambda: buffer.refresh_staleness(task_stale_thresholds={TASK: 4}, current_train_step=9),
            lambda: buffer.metrics(),
            lambda: buffer.lease_batch({TASK: 1}, timeout=5),
            buffer.__aenter__,
        ):
            with pytest.raises(StorageError, match="memory of the process that was forked"):
                await call()
        with pytest.raises(StorageError):
            len(buffer)
        await buffer.close()

    buffer = build(url)
    asyncio.run(fill(buffer, 5))
    assert os.waitpid(forked(lambda: asyncio.run(refused())), 0)[1] == 0
    asyncio.run(fill(buffer, 5, 5))
    assert len(buffer) == 10
    asyncio.run(buffer.close())
"""


def test_a_buffer_in_memory_can_not_follow_a_fork() -> None:
    """Instead of an empty one appearing in its place, or a copy from which nothing comes back."""
    run(IN_MEMORY, "memory://")


def test_a_fork_does_not_keep_the_leases_of_its_parent_alive(shared_url: str) -> None:
    """Its heartbeat is for its own."""
    run(
        """
        async def child():
            async with buffer.lease_batch({TASK: 1}, seconds=0.2) as lease:
                extended = []
                extend = buffer.storage.extend
                async def note(leased, *args, **options):
                    extended.append(leased.token)
                    return await extend(leased, *args, **options)
                buffer.storage.extend = note
                while len(extended) < 3:
                    await asyncio.sleep(0.01)
                assert set(extended) == {lease.token}, (extended, lease)

        async def parent():
            await fill(buffer, 5)
            return await buffer.lease_batch({TASK: 1}, seconds=0.2)

        buffer = build(url)
        lease = asyncio.run(parent())
        assert os.waitpid(forked(lambda: asyncio.run(child())), 0)[1] == 0
        asyncio.run(lease.acknowledge())
        asyncio.run(buffer.close())
        """,
        shared_url,
    )


@pytest.mark.parametrize("whose", ["buffer", pytest.param("build(url)", marks=pytest.mark.long)])
def test_a_fork_in_the_middle_of_another_threads_transactions_finds_no_locks(shared_url: str, whose: str) -> None:
    """It would seem to SQLite that the child holds those that the parent held."""
    run(
        f"""
        async def go_on():
            while not over.is_set():
                await buffer.put(group(1), TASK)
                await buffer.get(1, TASK)

        over = threading.Event()
        buffer = build(url)
        asyncio.run(fill(buffer, 1))
        thread = threading.Thread(target=lambda: asyncio.run(go_on()))
        thread.start()
        for _ in range(5):
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)
                asyncio.run({whose}.put(group(2), "other"))
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
        over.set()
        thread.join()
        assert asyncio.run(buffer.count("other", "completed")) == 5
        asyncio.run(buffer.close())
        """.replace("signal.alarm", "__import__('signal').alarm"),
        shared_url,
    )


@pytest.mark.parametrize("begins", ["before", "after"])
def test_a_fork_goes_on_when_its_parent_has_closed(shared_url: str, begins: str) -> None:
    """Beside another process that opens the database then: SQLite would give each a WAL of its own."""
    run(
        """
        import signal

        def child():
            signal.alarm(60)
            os.read(started[0], 1)
            if begins == "before":
                asyncio.run(buffer.put(group(2), TASK))
            os.write(used[1], b"x")
            os.read(closed[0], 1)
            for number in range(3, 6):
                asyncio.run(buffer.put(group(number), TASK))
                os.write(put[1], b"x")
                os.read(others[0], 1)
            os.write(put[1], b"x")

        def another():
            async def puts():
                signal.alarm(60)
                os.read(put[0], 1)
                async with build(url) as own:
                    for number in range(6, 9):
                        await own.put(group(number), TASK)
                        os.write(others[1], b"x")
                        os.read(put[0], 1)
            asyncio.run(puts())

        begins = sys.argv[2]
        started, used, closed, put, others = (os.pipe() for _ in range(5))
        unopened = forked(another)
        buffer = build(url)
        asyncio.run(buffer.put(group(1), TASK))
        opened = forked(child)
        os.write(started[1], b"x")
        os.read(used[0], 1)
        asyncio.run(buffer.close())
        os.write(closed[1], b"x")
        assert [os.waitpid(pid, 0)[1] for pid in (opened, unopened)] == [0, 0]
        buffer = build(url)
        assert sorted(asyncio.run(take_all(buffer))) == [1, *([2] if begins == "before" else []), *range(3, 9)]
        asyncio.run(buffer.close())
        """,
        shared_url,
        begins,
    )


@pytest.mark.parametrize("when", ["the transactions end", "the child has its locks"])
def test_a_signal_handler_that_raises_in_a_fork_stops_no_later_call(tmp_path: Path, when: str) -> None:
    """While the fork waits until then. The exception itself is lost, as Python's forks have it."""
    run(
        """
        import signal
        from replaybuf.storage.sql.engine import sqlite_raw

        class Interrupted(Exception):
            pass

        def interrupt(*_):
            raise Interrupted

        class Poll:
            def register(self, _):
                pass

            def poll(self, _):
                signal.raise_signal(signal.SIGALRM)

        def child():
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)
            try:
                asyncio.run(buffer.put(group(2), TASK))
            except StorageError as error:
                assert error.reason == "forked", error
                assert when == "the transactions end"
            else:
                assert when == "the child has its locks"

        when, sqlite_raw.LONGEST_SECONDS = sys.argv[2], 1000.0
        signal.signal(signal.SIGALRM, interrupt)
        ignored = []
        sys.unraisablehook = lambda problem: ignored.append(problem.exc_type)
        buffer = build(url)
        asyncio.run(fill(buffer, 1))
        if when == "the transactions end":
            wait_for, waits = threading.Condition.wait_for, []

            def interrupted(self, holds, seconds):
                waits.append(seconds)
                if len(waits) == 2:  # the first is for those that wait themselves
                    signal.raise_signal(signal.SIGALRM)
                return wait_for(self, holds, seconds)

            threading.Condition.wait_for = interrupted
        else:
            select, sqlite_raw.select.poll = sqlite_raw.select.poll, Poll
        others = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]
        pid = forked(child)
        if when == "the transactions end":
            threading.Condition.wait_for = wait_for
        else:
            sqlite_raw.select.poll = select
        assert ignored == [Interrupted], ignored
        assert os.waitpid(pid, 0)[1] == 0
        asyncio.run(asyncio.wait_for(buffer.put(group(3), TASK), 100))
        assert os.waitpid(forked(lambda: asyncio.run(buffer.put(group(4), TASK))), 0)[1] == 0
        for number in others:
            os.close(number)
        assert sorted(asyncio.run(take_all(buffer))) == [0, *([2] if "locks" in when else []), 3, 4]
        asyncio.run(buffer.close())
        """,
        f"sqlite:///{tmp_path}/b.db",
        when,
    )


@pytest.mark.parametrize("free", [0, 1, 2, 3])
def test_a_fork_without_free_file_descriptors_writes_nothing_that_would_be_lost(tmp_path: Path, free: int) -> None:
    """It can't have locks of its own: the parent, and then another process, would delete what it goes on with."""
    run(
        """
        import resource

        def child():
            for number in taken:
                os.close(number)
            os.read(closed[0], 1)
            with contextlib.suppress(StorageError):
                asyncio.run(buffer.put(group(2), TASK))
                os._exit(2)
            async def again():
                async with build(url):
                    pass
            with contextlib.suppress(StorageError):
                asyncio.run(again())
                os._exit(3)
            # Nor can a fork of its own.
            assert os.waitstatus_to_exitcode(os.waitpid(forked(grandchild), 0)[1]) == 0

        def grandchild():
            with contextlib.suppress(StorageError):
                asyncio.run(buffer.put(group(2), TASK))
                os._exit(4)

        import contextlib
        free, closed, taken = int(sys.argv[2]), os.pipe(), []
        sys.unraisablehook = lambda problem: print(problem)
        buffer = build(url)
        asyncio.run(buffer.put(group(1), TASK))
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, most))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(free):
            os.close(taken.pop())
        opened = forked(child)
        for number in taken:
            os.close(number)
        asyncio.run(buffer.close())
        buffer = build(url)
        asyncio.run(buffer.put(group(3), TASK))
        os.write(closed[1], b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(opened, 0)[1]) == 0
        assert sorted(asyncio.run(take_all(buffer))) == [1, 3]
        asyncio.run(buffer.close())
        """,
        f"sqlite:///{tmp_path}/b.db",
        free,
    )


def test_a_transaction_that_waits_for_a_fork_comes_before_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes of rewards fork all the time, in many threads: some fork or other is always under way."""
    guard, order, wait_for = ForkGuard(), list[str](), threading.Condition.wait_for
    waiting = {name: threading.Event() for name in ("transaction", "fork")}

    def noted(condition: Any, *arguments: Any) -> bool:
        waiting[threading.current_thread().name].set()
        return wait_for(condition, *arguments)

    def begin() -> None:
        with guard:
            order.append("transaction")

    def fork() -> None:
        guard.before()
        order.append("fork")
        guard.after_in_parent()

    guard.before()
    monkeypatch.setattr(threading.Condition, "wait_for", noted)
    threads = [threading.Thread(target=work, name=name) for work, name in ((begin, "transaction"), (fork, "fork"))]
    for thread in threads:
        thread.start()
        assert waiting[thread.name].wait(60)
    guard.after_in_parent()
    for thread in threads:
        thread.join()
    assert order == ["transaction", "fork"]


def test_a_connection_that_fails_to_open_beside_a_fork_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its close blocks forks within a block that does; the fork waits for both."""
    guard, waits, wait_for = ForkGuard(), threading.Event(), threading.Condition.wait_for

    def noted(condition: Any, holds: Any, seconds: float) -> bool:
        if not holds():
            waits.set()
        return wait_for(condition, holds, seconds)

    forking = threading.Thread(target=lambda: (guard.before(), guard.after_in_parent()))
    with guard:
        monkeypatch.setattr(threading.Condition, "wait_for", noted)
        forking.start()
        assert waits.wait(60)
        waits.clear()
        with guard.while_closing():
            pass
        assert not waits.is_set()
    forking.join()


def test_a_signal_handler_that_raises_in_a_child_before_it_has_its_locks_leaves_it_without(tmp_path: Path) -> None:
    """And its own forks: what they commit might be lost."""
    run(
        """
        import signal
        from replaybuf.storage.sql.engine import sqlite_raw

        def interrupt(*_):
            raise KeyboardInterrupt

        def refused():
            signal.alarm(60)
            for own in (buffer, build(url)):
                try:
                    asyncio.run(own.put(group(2), TASK))
                except StorageError as error:
                    assert error.reason == "forked"
                else:
                    raise AssertionError

        def child():
            sqlite_raw._lock_as_open = lock
            refused()
            assert os.waitpid(forked(refused), 0)[1] == 0

        signal.signal(signal.SIGUSR1, interrupt)
        sys.unraisablehook = lambda _: None
        lock, sqlite_raw._lock_as_open = sqlite_raw._lock_as_open, lambda *_: signal.raise_signal(signal.SIGUSR1)
        buffer = build(url)
        asyncio.run(buffer.put(group(1), TASK))
        sqlite_raw.LONGEST_SECONDS = 0.5
        assert os.waitpid(forked(child), 0)[1] == 0
        asyncio.run(buffer.close())
        """,
        f"sqlite:///{tmp_path}/b.db",
    )


def test_a_fork_during_a_save_does_not_keep_the_snapshot_from_its_end(shared_url: str, tmp_path: Path) -> None:
    run(
        """
        def fork_once(*_):
            if not pids:
                pids.append(forked(lambda: os.read(over[0], 1)))

        pids, over = [], os.pipe()
        buffer = build(url)
        asyncio.run(fill(buffer, 300))
        asyncio.run(buffer.save(sys.argv[2], progress=fork_once))
        assert pids
        os.write(over[1], b"x")
        assert os.waitpid(pids[0], 0)[1] == 0
        other = build(url, name="other")
        asyncio.run(other.resume(sys.argv[2]))
        assert len(other) == 300
        for opened in (buffer, other):
            asyncio.run(opened.close())
        """,
        shared_url,
        tmp_path / "saved",
    )


def test_a_fork_of_a_fork_that_has_closed_all_files_leaves_the_new_ones_alone(shared_url: str, tmp_path: Path) -> None:
    """As daemons do: the numbers that connections and locks had are other files' then."""
    run(
        """
        def child():
            os.closerange(3, 100)
            files = [open(f"{sys.argv[2]}/{number}", "w+") for number in range(30)]
            assert os.waitpid(forked(lambda: grandchild(files)), 0)[1] == 0
            for file in files:
                file.close()

        def grandchild(files):
            for number, file in enumerate(files):
                file.write(str(number))
                file.close()
            for number in range(30):
                with open(f"{sys.argv[2]}/{number}") as file:
                    assert file.read() == str(number)

        buffer = build(url)
        asyncio.run(fill(buffer, 1))
        assert os.waitpid(forked(child), 0)[1] == 0
        asyncio.run(buffer.close())
        """,
        shared_url,
        tmp_path,
    )


def test_forks_of_forks_have_no_more_descriptors_than_forks(tmp_path: Path) -> None:
    run(
        """
        def generation(number):
            numbers.append(len(os.listdir("/proc/self/fd")))
            if number < 5:
                assert os.waitpid(forked(lambda: generation(number + 1)), 0)[1] == 0
            else:
                assert len({*numbers[1:]}) == 1, numbers

        numbers = []
        buffer = build(url)
        asyncio.run(buffer.put(group(1), TASK))
        generation(0)
        asyncio.run(buffer.close())
        """,
        f"sqlite:///{tmp_path}/b.db",
    )


def test_a_lock_that_another_thread_holds_is_free_in_a_fork() -> None:
    run(
        """
        from replaybuf.common.forks import ProcessLock

        def hold():
            with lock:
                held.set()
                assert over.wait(60)

        def child():
            with lock, lock:
                pass

        lock = ProcessLock()
        with lock:
            pid = os.fork()
        if pid == 0:
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0

        lock, held, over = ProcessLock(), threading.Event(), threading.Event()
        thread = threading.Thread(target=hold)
        thread.start()
        assert held.wait(60)
        assert os.waitpid(forked(child), 0)[1] == 0
        over.set()
        thread.join()
        child()
        """
    )


def test_a_fork_while_another_thread_opens_a_buffer_opens_it_anew(shared_url: str) -> None:
    run(
        """
        from replaybuf.storage.sql import lifecycle

        class Slow(lifecycle.DatabaseThread):
            def __init__(self, name):
                if threading.current_thread() is opening:
                    begun.set()
                    assert go_on.wait(60)
                super().__init__(name)

        begun, go_on = threading.Event(), threading.Event()
        lifecycle.DatabaseThread = Slow
        buffer = build(url)
        opening = threading.Thread(target=lambda: asyncio.run(buffer.put(group(1), TASK)))
        opening.start()
        assert begun.wait(60)
        child = forked(lambda: asyncio.run(asyncio.wait_for(buffer.put(group(2), TASK), 60)))
        go_on.set()
        assert os.waitpid(child, 0)[1] == 0
        opening.join()
        assert sorted(asyncio.run(take_all(buffer))) == [1, 2]
        asyncio.run(buffer.close())
        """,
        shared_url,
    )


@pytest.mark.parametrize("shared_url", ["postgresql"], indirect=True)
def test_a_fork_does_not_keep_the_locks_of_a_parent_that_was_killed(shared_url: str) -> None:
    """The server notices its end, though the fork has inherited its connections."""
    run(
        """
        import signal

        def parent():
            async def stop_in_a_transaction():
                await buffer.put(group(1), TASK)
                async def work():
                    async with buffer.storage.engine.transaction(write=True, alone=True) as step:
                        await step(lambda tx: tx.value("SELECT 1"))
                        forked(lambda: os.read(over[0], 1))
                        os.write(inside[1], b"x")
                        await asyncio.sleep(100)
                await buffer.storage.thread.run(work)
            asyncio.run(stop_in_a_transaction())

        inside, over = os.pipe(), os.pipe()
        buffer = build(url, lock_timeout=20)
        pid = forked(parent)
        os.read(inside[0], 1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        asyncio.run(buffer.put(group(2), TASK))
        os.write(over[1], b"x")
        assert sorted(asyncio.run(take_all(buffer))) == [1, 2]
        asyncio.run(buffer.close())
        """,
        shared_url,
    )


@pytest.mark.parametrize("kind", [ReplayBufferConfig, SyncReplayBufferConfig, AsyncReplayBufferConfig])
def test_configs_can_be_pickled(kind: type[ReplayBufferConfig]) -> None:
    config = kind(url="sqlite:///run.db", policy=FIFOPolicy, rollout_type=dict)
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_buffer_can_not_be_pickled_and_says_what_can() -> None:
    with opened("memory://") as buffer, pytest.raises(InputError, match="pickle its config"):
        pickle.dumps(buffer)


def test_a_buffer_that_is_opened_by_several_threads_at_once_is_opened_once(url: str) -> None:
    """Each with an event loop of its own."""
    together = threading.Barrier(6)

    def work(number: int) -> None:
        together.wait(10)
        asyncio.run(buffer.put(group(number), TASK))

    for round_ in range(3):
        with opened(url) as buffer, ThreadPoolExecutor(6) as pool:
            list(pool.map(work, range(6)))
            assert sorted(asyncio.run(take_all(buffer))) == list(range(6)), round_


async def test_no_change_is_missed_between_looking_and_waiting(shared_url: str) -> None:
    """The commit of another process comes just after this one has looked, while another waiter has noticed it."""
    async with build(shared_url) as buffer, build(shared_url) as other:
        await other.count_where({})
        tallies, first = buffer.storage.fenced_tallies, True  # type: ignore[attr-defined]

        async def look_and_commit() -> Any:
            nonlocal first
            by_task = await tallies()
            if first:
                first = False
                bystander = asyncio.create_task(buffer.wait_ready({"other": 1}, timeout=30))
                await asyncio.sleep(0.1)
                await other.put(group(1), TASK)
                await asyncio.sleep(0.2)
                bystander.cancel()
            return by_task

        buffer.storage.fenced_tallies = look_and_commit  # type: ignore[attr-defined]
        started = time.monotonic()
        await buffer.wait_ready({TASK: 1}, timeout=20)
        assert time.monotonic() - started < 5


async def test_long_groups_are_prepared_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another thread: several would hold up the event loop together, each for its turn with the interpreter."""
    prepare, at_once, most_at_once = normalise._normalise, 0, 0

    def counted(*arguments: Any) -> Any:
        nonlocal at_once, most_at_once
        assert threading.current_thread() is not threading.main_thread()
        at_once += 1
        most_at_once = max(most_at_once, at_once)
        time.sleep(0.01)
        at_once -= 1
        return prepare(*arguments)

    monkeypatch.setattr(normalise, "_normalise", counted)
    async with build("memory://") as buffer:
        long = [RolloutState(message=[], response_ids=[1] * 20_000, status=Status.COMPLETED) for _ in range(4)]
        await asyncio.gather(*(buffer.put([rollout], TASK) for rollout in long))
        assert len(buffer) == 4
    assert most_at_once == 1


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

        await until(lambda: rollout() is None, 2)


# The thread that extends leases


async def test_a_heartbeat_that_fails_leaves_the_others_alone(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its storage raises."""
    async with build(url) as buffer:
        await fill(buffer, 2)
        failing, other = [await buffer.lease_batch({TASK: 1}, seconds=0.2) for _ in range(2)]
        extend, extended = buffer.storage.extend, []

        async def fail_or_note(leased: Leased, *args: Any, **options: Any) -> float:
            if leased.token == failing.token:
                raise RuntimeError
            extended.append(leased.token)
            return await extend(leased, *args, **options)

        monkeypatch.setattr(buffer.storage, "extend", fail_or_note)

        await until(lambda: len(extended) > 4)
        await other.acknowledge()


ENDS = {
    "in a class": """
        class Trainer:
            def __init__(self): self.buffer = build(url)
            def __del__(self): pass
        trainer = Trainer(); trainer.me = trainer; asyncio.run(fill(trainer.buffer, 3))
    """,
    "a waiting take in a daemon": """
        buffer = build(url); asyncio.run(fill(buffer, 3))
        def consume():
            try: asyncio.run(buffer.take_batch({"none": 4}, timeout=None))
            except BaseException: pass
        threading.Thread(target=consume, daemon=True).start()
        time.sleep(0.2)
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
    run(ENDS[end], shared_url)
    with opened(shared_url) as buffer:
        assert sorted(asyncio.run(take_all(buffer))) == [0, 1, 2]


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


class Slow:
    """What a converter takes for ever to store."""


async def test_closing_doesnt_wait_for_a_converter_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    started, go_on = threading.Event(), threading.Event()

    def store(_: Slow) -> int:
        started.set()
        go_on.wait(60)
        return 0

    monkeypatch.setattr(transactions, "_ENDING_SECONDS", 0.01)
    buffer = build("memory://", converters={Slow: ("slow", store, lambda _: Slow())}, rollout_type=dict)
    putting = asyncio.create_task(buffer.put([{"response": Slow()}], TASK))
    await asyncio.to_thread(started.wait, 30)
    putting.cancel()
    monkeypatch.setattr(lifecycle, "_CLOSE_SECONDS", 0.1)
    closing = asyncio.create_task(buffer.close())
    try:
        await asyncio.wait([closing], timeout=30)
        assert closing.done()
    finally:
        go_on.set()
        await asyncio.gather(closing, putting, return_exceptions=True)


def test_a_dropped_buffer_finishes_what_its_callers_wait_for(shared_url: str) -> None:
    async def use() -> list[int]:
        return [number_of(g) for g in await build(shared_url).get(1, TASK)]

    with opened(shared_url) as buffer:
        asyncio.run(fill(buffer, 5))
    for number in range(5):
        gc.collect()
        assert asyncio.run(use()) == [number]
