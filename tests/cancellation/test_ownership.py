"""Who owns the result of a call: its caller, or the database's thread, which undoes it. Without a database."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import pytest

from replaybuf.errors import ClosedError, FencedError, LockedError, ReplayBufError, StorageError, UnreachableError
from replaybuf.storage.sql.engine import thread as module
from replaybuf.storage.sql.engine.outage import OutcomeUnknownError
from replaybuf.storage.sql.engine.thread import DatabaseThread
from tests.stores import until


async def nothing() -> None:
    """The last work of a thread."""


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[DatabaseThread]:
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.001)
    thread = DatabaseThread("replaybuf-test")
    yield thread
    thread.close(nothing, 10)


class Work:
    """A work in the database's thread, and its undo; each is noted, and may wait for leave, or fail at first.

    An undo that has failed waits for leave when it is made again.
    """

    def __init__(self, *errors: Exception, undo_errors: tuple[Exception, ...] = ()) -> None:
        self.errors, self.undo_errors = [*errors], [*undo_errors]
        self.begun, self.may_end, self.may_undo = threading.Event(), threading.Event(), threading.Event()
        self.may_end.set()
        self.may_undo.set()
        self.calls: list[str] = []

    async def __call__(self) -> str:
        self.calls.append("work")
        self.begun.set()
        await asyncio.to_thread(self.may_end.wait, 30)
        if self.errors:
            raise self.errors.pop(0)
        return "result"

    async def undo(self, _result: Any) -> None:
        await asyncio.to_thread(self.may_undo.wait, 30)
        self.calls.append("undo")
        if self.undo_errors:
            self.may_undo.clear()
            raise self.undo_errors.pop(0)


async def cancelled(call: asyncio.Task[Any]) -> None:
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def cancelled_while_it_runs(thread: DatabaseThread, work: Work) -> None:
    """Run a work whose caller goes meanwhile, and let it end."""
    work.may_end.clear()
    call = asyncio.create_task(thread.run(work, undo=work.undo))
    assert await asyncio.to_thread(work.begun.wait, 30)
    await cancelled(call)
    work.may_end.set()


def offered(thread: DatabaseThread) -> None:
    """Wait, with a busy loop, until a result is offered to its caller."""
    deadline = time.monotonic() + 30
    while not any((call := reference()) is not None and call.outcome for reference in [*thread.unreceived.values()]):
        assert time.monotonic() < deadline
        time.sleep(0.001)


async def test_what_is_cancelled_before_it_has_begun_is_not_done(thread: DatabaseThread) -> None:
    work, busy = Work(), threading.Event()
    thread.post(busy.wait, 30)
    call = asyncio.create_task(thread.run(work, undo=work.undo))
    await asyncio.sleep(0)
    await cancelled(call)
    busy.set()
    await thread.run(nothing)
    assert work.calls == []


async def test_what_a_blocking_call_has_given_up_is_not_done(thread: DatabaseThread) -> None:
    """When its time is over: it ends where it waits first."""
    busy, ran = threading.Event(), threading.Event()

    async def work() -> None:
        await asyncio.sleep(0)
        ran.set()

    async def others_have_ended() -> None:
        if other_tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(other_tasks)

    thread.post(busy.wait, 30)
    with pytest.raises(LockedError):
        await asyncio.to_thread(thread.run_blocking, work, 0.01)
    busy.set()
    await thread.run(others_have_ended)
    assert not ran.is_set()


async def test_a_later_call_finds_that_of_a_caller_that_has_gone_undone(thread: DatabaseThread) -> None:
    work, later = Work(), Work()
    work.may_end.clear()
    work.may_undo.clear()
    call = asyncio.create_task(thread.run(work, undo=work.undo))
    assert await asyncio.to_thread(work.begun.wait, 30)
    await cancelled(call)
    next_call = asyncio.create_task(thread.run(later))
    await asyncio.sleep(0.01)
    work.may_end.set()
    await asyncio.sleep(0.01)
    assert later.calls == []
    work.may_undo.set()
    assert await next_call == "result"
    assert work.calls == ["work", "undo"]


@pytest.mark.parametrize("error", [UnreachableError("away"), LockedError("the database is locked")])
async def test_an_undo_that_fails_is_made_again_and_awaited_at_the_end(
    thread: DatabaseThread, error: ReplayBufError
) -> None:
    """Of the process: later calls don't wait for it."""
    work = Work(undo_errors=(error,))
    await cancelled_while_it_runs(thread, work)
    await thread.run(nothing)
    assert work.calls == ["work", "undo"]
    await waits_for_undo(work, lambda: asyncio.to_thread(thread.run_blocking, thread.drain_all, 30))


async def test_an_undo_that_fails_by_a_defect_is_given_up(thread: DatabaseThread) -> None:
    """Later calls don't wait for it for ever."""
    work = Work(undo_errors=(ValueError("a value that can't be there"),))
    await cancelled_while_it_runs(thread, work)
    async with asyncio.timeout(10):
        await thread.run(nothing)


async def test_who_catches_up_waits_for_an_undo_that_is_made_again(thread: DatabaseThread) -> None:
    """As long as it may: a restore undoes nothing of the run that it begins."""
    work = Work(undo_errors=(UnreachableError("away"),))
    await thread.run(lambda: thread.settle(lambda: work.undo(None)))
    await thread.run(lambda: thread.catch_up(0.0))
    assert work.calls == ["undo"]
    await waits_for_undo(work, lambda: thread.run(lambda: thread.catch_up(30)))


async def waits_for_undo(work: Work, call: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Check that a call ends when an undo that has failed was made again."""
    waiting = asyncio.create_task(call())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    work.may_undo.set()
    await waiting
    assert work.calls[-2:] == ["undo", "undo"]


async def test_closing_gives_an_undo_up_that_a_damaged_file_refuses(thread: DatabaseThread) -> None:
    async def refused() -> None:
        raise StorageError("damaged", reason="not a database")

    await thread.run(lambda: thread.settle(refused))
    async with asyncio.timeout(60):
        await asyncio.to_thread(thread.close, nothing, 1000)


async def test_an_undo_that_is_fenced_off_is_not_made_again(thread: DatabaseThread) -> None:
    work = Work(undo_errors=(FencedError("restored"),))

    await thread.run(lambda: thread.settle(lambda: work.undo(None)))
    await asyncio.to_thread(thread.run_blocking, thread.drain_all, 30)
    assert work.calls == ["undo"]


@pytest.mark.parametrize("committed", [True, False])
async def test_what_is_in_doubt_is_undone_if_it_was_committed(thread: DatabaseThread, committed: bool) -> None:
    async def was_committed() -> bool:
        return committed

    work = Work(OutcomeUnknownError("the answer was lost", was_committed, "result"))
    with pytest.raises(OutcomeUnknownError):
        await thread.run(work, undo=work.undo)
    await asyncio.to_thread(thread.run_blocking, thread.drain_all, 30)
    assert work.calls == ["work"] + ["undo"] * committed


def test_what_a_loop_has_left_is_undone(thread: DatabaseThread) -> None:
    work = Work()
    work.may_end.clear()
    loop = asyncio.new_event_loop()
    call = loop.create_task(thread.run(work, undo=work.undo))
    call._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    work.may_end.set()
    thread.run_blocking(thread.drain_all, 30)
    assert work.calls == ["work", "undo"]


async def test_what_is_offered_when_the_thread_closes_is_received(
    thread: DatabaseThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the caller's loop comes to it in time."""
    monkeypatch.setattr(module, "_RECEIVING_SECONDS", 60.0)
    work = Work()
    call = asyncio.create_task(thread.run(work, undo=work.undo))
    await asyncio.sleep(0)
    assert work.begun.wait(30)  # and this loop is busy until the result is offered
    offered(thread)
    closing = threading.Thread(target=thread.close, args=(nothing, 10))
    closing.start()
    time.sleep(0.05)  # noqa: ASYNC251
    assert await call == "result"
    await asyncio.to_thread(closing.join)
    assert work.calls == ["work"]


async def test_what_nobody_receives_is_undone_before_the_thread_ends(
    thread: DatabaseThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its last work, which ends the connections."""
    monkeypatch.setattr(module, "_RECEIVING_SECONDS", 0.0)
    work = Work()

    async def last() -> None:
        work.calls.append("last")

    call = asyncio.create_task(thread.run(work, undo=work.undo))
    await asyncio.sleep(0)
    offered(thread)
    closing = threading.Thread(target=thread.close, args=(last, 30))
    closing.start()
    closing.join()  # and this loop is busy for so long
    with pytest.raises(ClosedError):
        await call
    assert work.calls == ["work", "undo", "last"]


async def test_a_result_that_is_offered_to_a_caller_that_goes_is_undone_without_a_complaint(
    thread: DatabaseThread,
) -> None:
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    work = Work()
    call = asyncio.create_task(thread.run(work, undo=work.undo))
    await asyncio.sleep(0)
    offered(thread)
    await cancelled(call)
    await thread.run(nothing)
    await asyncio.sleep(0)
    assert work.calls == ["work", "undo"]
    assert complaints == []


@pytest.mark.parametrize("call", ["run", "run_blocking", "post"])
async def test_a_closed_thread_refuses_calls(call: str) -> None:
    thread = DatabaseThread("replaybuf-test")
    thread.close(nothing, 10)
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "run": lambda: thread.run(nothing),
        "run_blocking": lambda: asyncio.to_thread(thread.run_blocking, nothing, 10),
        "post": lambda: asyncio.to_thread(thread.post, print),
    }
    with pytest.raises(ClosedError):
        await calls[call]()


def test_closing_that_never_ends_says_that_writes_may_not_be_stored(thread: DatabaseThread) -> None:
    async def stand_still() -> None:
        await asyncio.Event().wait()

    with pytest.raises(UnreachableError, match=r"within 0\.3 s.*may be stored, or not") as caught:
        thread.close(stand_still, 0.1)
    assert caught.value.in_doubt


async def test_what_is_called_while_the_thread_closes_is_refused(thread: DatabaseThread) -> None:
    """What runs goes on to its end, as does the undo of what nobody has received."""
    work, late = Work(), Work()
    work.may_end.clear()
    call = asyncio.create_task(thread.run(work))
    assert await asyncio.to_thread(work.begun.wait, 30)
    closing = asyncio.create_task(asyncio.to_thread(thread.close, nothing, 30))
    await until(lambda: thread._ending)
    with pytest.raises(ClosedError):
        await thread.run(late)
    work.may_end.set()
    assert await call == "result"
    await closing
    assert late.calls == []
