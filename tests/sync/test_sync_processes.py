"""Synchronous buffers in programs: forked and spawned, interrupted, ended without closing, and dropped."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
from typing import Any

import pytest

from replaybuf import ReplayBufferConfig
from replaybuf.buffer.background import _BlockingCall, _start
from replaybuf.buffer.sync import SyncReplayBuffer
from tests.scripts import run as run_script
from tests.stores import TASK, group, numbers_of


def build(url: str, **options: Any) -> SyncReplayBuffer:
    return ReplayBufferConfig(url=url, **({"policy": "fifo"} | options)).build_sync()


def fill(buffer: SyncReplayBuffer, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        buffer.put(group(number), TASK)


BEGINNING = """
    import signal
    from tests.sync.test_sync_processes import *
    buffer = build(url)
"""

FORK = """
    import logging
    fill(buffer, 5)
    waiting = threading.Thread(target=lambda: buffer.wait_ready({"other": 1}, timeout=20), daemon=True)
    waiting.start()
    items = buffer.find({})
    next(items)
    time.sleep(0.1)

    def child():
        global items
        fill(buffer, 5, 100)
        assert len(buffer.get(1, TASK, where={"uid": {"$gt": 5}}, timeout=10)) == 1
        buffer.wait_ready({TASK: 5}, timeout=10)
        with buffer.lease_batch({TASK: 1}) as lease:
            lease.give_back()
        assert len(list(items)) >= 4
        del items
        gc.collect()

    pid = forked(child, lambda: sys.exit(0))
    fill(buffer, 5, 5)
    assert os.waitpid(pid, 0)[1] == 0
    fill(buffer, 5, 10)
    assert len(list(items)) >= 4
    assert len(buffer.get(1000, TASK)) == 19
    buffer.put(group(1), "other")
    waiting.join(15)
    assert not waiting.is_alive()
    buffer.close()
"""


def test_a_fork_uses_the_buffer_while_its_parent_goes_on(shared_url: str) -> None:
    """Also one that was made while another thread of the parent waits in a call."""
    run_script(BEGINNING + FORK, shared_url)


def test_a_fork_in_a_handler_doesnt_go_on_with_its_parents_call(shared_url: str) -> None:
    output = run_script(
        BEGINNING
        + """
    fill(buffer, 1)
    child = None
    def fork(*_):
        global child
        child = os.fork()
        if child == 0:
            signal.alarm(20)
    signal.signal(signal.SIGUSR1, fork)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1)).start()
    try:
        print(buffer.take_batch({TASK: 2}, timeout=1))
    except ClosedError as error:
        assert child == 0 and "forked meanwhile" in str(error)
        assert buffer.count(TASK, "completed") == 1
        os._exit(3)
    except NotReadyError:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """,
        shared_url,
    )
    assert output == "3\n"


# Interrupts


def test_ctrl_c_ends_a_waiting_take_and_loses_nothing(shared_url: str) -> None:
    output = run_script(
        BEGINNING
        + """
    fill(buffer, 3)
    try:
        print("ready", flush=True)
        buffer.take_batch({TASK: 4}, timeout=30)
    except KeyboardInterrupt:
        print("interrupted", len(buffer), numbers_of(buffer.get(4, TASK)))
    buffer.close()
    """,
        shared_url,
        send=signal.SIGINT,
    )
    assert output == "interrupted 3 [0, 1, 2]\n"


def test_ctrl_c_at_the_end_of_a_leases_block_gives_back_what_it_had_not_begun_to_acknowledge(shared_url: str) -> None:
    """The thread of blocking calls is busy, so that the end of the block has to wait for it."""
    output = run_script(
        BEGINNING
        + """
    from replaybuf.buffer import background

    def busy():
        print("ready", flush=True)
        time.sleep(0.3)

    fill(buffer, 1)
    try:
        with buffer.lease_batch({TASK: 1}, seconds=60) as lease:
            background._background.loop.call_soon_threadsafe(busy)
    except KeyboardInterrupt:
        print("interrupted", sorted(lease.open), numbers_of(buffer.get(1, TASK)))
    buffer.close()
    """,
        shared_url,
        send=signal.SIGINT,
    )
    assert output == "interrupted [] [0]\n"


LATE = """
    import asyncio, signal
    from replaybuf.buffer.sync import run

    class Watchdog(Exception): pass

    raised = Watchdog()
    def bark(*_): raise raised
    signal.signal(signal.SIGALRM, HANDLER)

    async def ends_although_cancelled():
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            return "result"

    try:
        print(run(ends_although_cancelled()), flush=True)
        WAIT
    except (Watchdog, KeyboardInterrupt) as error:
        print("then", type(error).__name__)
        assert error is raised or HANDLER is not bark
    print(run(asyncio.sleep(0.1, "on")))
"""


@pytest.mark.parametrize(
    ("handler", "wait", "error"),
    [
        ("bark", "run(asyncio.sleep(30))", "Watchdog"),
        ("signal.default_int_handler", "time.sleep(30)", "KeyboardInterrupt"),  # as Ctrl-C
    ],
)
def test_a_result_that_comes_with_an_exception_of_a_signal_is_returned_and_the_exception_follows_once(
    handler: str, wait: str, error: str
) -> None:
    """In what the caller does next, also if that is a call that waits."""
    output = run_script(LATE.replace("HANDLER", handler).replace("WAIT", wait), "-")
    assert output == f"result\nthen {error}\non\n"


@pytest.mark.parametrize("begun", [False, True])
def test_a_call_that_is_interrupted_before_its_first_step_ends(begun: bool) -> None:
    async def never() -> None:
        raise AssertionError

    call, loop = _BlockingCall(never()), _start().loop

    def begin_and_cancel() -> None:
        if begun:
            call.begin()
        call.cancel()

    loop.call_soon_threadsafe(begin_and_cancel)
    assert call.ended.acquire(timeout=10)
    assert isinstance(call.error, asyncio.CancelledError)


@pytest.mark.parametrize("inside", ["Thread", pytest.param("new_event_loop", marks=pytest.mark.long)])
def test_a_handler_may_call_while_the_first_call_starts_the_thread(inside: str) -> None:
    output = run_script(
        """
        import asyncio, signal, threading
        from replaybuf.buffer.sync import run

        module = asyncio if sys.argv[2] == "new_event_loop" else threading
        original = getattr(module, sys.argv[2])

        def interrupted(*args, **options):
            setattr(module, sys.argv[2], original)
            signal.raise_signal(signal.SIGUSR1)
            return original(*args, **options)

        setattr(module, sys.argv[2], interrupted)
        signal.signal(signal.SIGUSR1, lambda *_: print(run(asyncio.sleep(0, "inner"))))
        print(run(asyncio.sleep(0, "outer")))
        time.sleep(0.1)
        print(sum(thread.name == "replaybuf-sync" for thread in threading.enumerate()))
        """,
        "-",
        inside,
    )
    assert output == "inner\nouter\n1\n"


# Ends

#: What becomes of a store that nobody closes is in `tests/buffer/test_forks.py`.
ENDS = {
    "open": "fill(buffer, 3)",
    "a generator that is left in the middle": """
    fill(buffer, 3)
    def items():
        with build(url) as own, own.lease_batch({TASK: 1}, seconds=0.1), build(url) as other:
            found = other.find({})
            try:
                yield next(found)
            finally:
                found.close()
    left = items()
    next(left)
    """,
    "closed in __del__": """
    class Trainer:
        def __init__(self):
            self.buffer, self.refused, self.exit = buffer, ClosedError, os._exit
        def __del__(self):
            self.buffer.close()
            try:
                len(self.buffer.get(1, "math"))
            except self.refused as error:
                if "interpreter shuts down" in str(error):
                    return
            self.exit(4)
    fill(buffer, 3)
    trainer = Trainer()
    """,
}


@pytest.mark.parametrize("end", ENDS)
def test_a_program_that_ends_without_closing_ends_quietly_and_loses_nothing(shared_url: str, end: str) -> None:
    run_script(BEGINNING + "\n    " + ENDS[end].strip() + "\n", shared_url)
    with build(shared_url) as buffer:
        assert sorted(numbers_of(buffer.get(3, TASK, timeout=10))) == [0, 1, 2]


def test_a_buffer_that_is_dropped_lets_go_of_its_database(shared_url: str) -> None:
    """The one thread of all synchronous calls stays."""

    def use() -> None:
        fill(build(shared_url), 1)

    threads_before = set(threading.enumerate())
    use()
    assert [thread.name for thread in threading.enumerate()].count("replaybuf-sync") == 1
    deadline = time.monotonic() + 10
    while names := [
        thread.name
        for thread in set(threading.enumerate()) - threads_before
        if thread.name.startswith(("replaybuf-database", "replaybuf-codec"))
    ]:
        gc.collect()
        assert time.monotonic() < deadline, names
        time.sleep(0.01)
