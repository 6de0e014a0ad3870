"""Calls that are cancelled, and loops that are closed."""

from __future__ import annotations

import ast
import asyncio
import gc
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replaybuf import ReplayBuffer
from tests.faults import operations
from tests.faults.conftest import Figures
from tests.faults.copies import look
from tests.faults.operations import OFTEN, OPERATIONS, Operation, rarely
from tests.stores import TASK, build, group, number_of, take_all

# To be cancelled while it waits, or when the answer is there and not yet seen.
MOMENTS = ["at once", "when it is done"]


class CancelledAt:
    """Awaits something, and cancels the task that does so at the n-th time that it waits."""

    def __init__(self, call: Awaitable[Any], number: int, moment: str) -> None:
        self._call, self._number, self._moment = call, number, moment
        self.waits = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        inner = self._call.__await__()
        answer: Any = None
        problem: BaseException | None = None
        while True:
            try:
                waited_for = inner.send(answer) if problem is None else inner.throw(problem)
            except StopIteration as result:
                return result.value
            self.waits += 1
            if self.waits == self._number:
                self._cancel(waited_for)
            answer, problem = None, None
            try:
                answer = yield waited_for
            except BaseException as error:
                problem = error

    def _cancel(self, waited_for: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._moment == "at once" or waited_for is None:
            task.cancel()
        else:
            waited_for.add_done_callback(lambda _: task.cancel())


async def ended(call: Awaitable[Any], number: int, moment: str) -> tuple[bool, int, Any]:
    """Whether the call was cancelled; how often it waited; its result."""
    cancelled = CancelledAt(call, number, moment)

    async def run() -> Any:
        return await cancelled

    try:
        result = await asyncio.create_task(run())
    except asyncio.CancelledError:
        return True, cancelled.waits, None
    return False, cancelled.waits, result


#: How a call ends: given the call, whether it was cancelled, and how often it waited.
End = Callable[[Coroutine[Any, Any, Any]], Awaitable[tuple[bool, int]]]


def cancelled_at(number: int, moment: str = "") -> End:
    """It is cancelled at its n-th wait; at the 0th: never."""

    async def end(call: Coroutine[Any, Any, Any]) -> tuple[bool, int]:
        was_cancelled, waits, _ = await ended(call, number, moment)
        return was_cancelled, waits

    return end


async def not_begun(call: Coroutine[Any, Any, Any]) -> tuple[bool, int]:
    call.close()
    return True, 0


async def after(url: str, operation: Operation, end: End) -> tuple[Any, bool, int]:
    """What is in a new database after an operation that ends so; whether it was cancelled; and how often it waited."""
    await operations.fill(url)
    async with build(url, **operation.options) as buffer:
        ready = await operation.ready(buffer) if operation.ready else None
        cancelled, waits = await end(operation.run(buffer, ready))  # type: ignore[arg-type]
        await buffer.count_where({})  # it goes on, and what was cancelled is settled
        state = await seen(buffer)
    return state if operation in DRAWING else swept(await look(url)), cancelled, waits


async def seen(buffer: ReplayBuffer) -> Any:
    """All groups, with what was counted: a draw that is undone leaves nothing else behind but time that has passed."""
    items = [replace(item, created_at=0.0) async for item in buffer.find({})]
    return items, +Counter(await buffer.storage.tallies())


NAMES = sorted(set(OPERATIONS) - {"sweep", "leases end", "draw prompts"})
#: Whoever is cancelled in drawing has nothing: all is as before.
DRAWING = [OPERATIONS[name] for name in ("take", "take at random", "take again", "lease")]


#: At each await in one of the ways, or in both.
WAYS = pytest.mark.parametrize("ways", [1, pytest.param(2, marks=pytest.mark.long)])


@WAYS
@pytest.mark.parametrize("name", rarely(NAMES, OFTEN))
async def test_what_is_cancelled_is_done_or_undone(
    new_url: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, ways: int, figures: Figures
) -> None:
    monkeypatch.chdir(tmp_path)
    operation = OPERATIONS[name]
    before, _, _ = await after(new_url(), operation, not_begun)
    done_state, _, waits = await after(new_url(), operation, cancelled_at(0))
    assert waits > 0
    for number in range(1, waits + 1):
        for moment in [MOMENTS[number % 2], MOMENTS[number % 2 - 1]][:ways]:
            state, cancelled, _ = await after(new_url(), operation, cancelled_at(number, moment))
            figures.add(faults=1)
            allowed = [done_state] if not cancelled else [before] if operation in DRAWING else [before, done_state]
            assert state in allowed, (number, moment)


async def a_lease_of_a_block(buffer: ReplayBuffer) -> None:
    async with buffer.lease_batch({TASK: 2}, timeout=5, seconds=60):
        await asyncio.sleep(0)


async def a_find(buffer: ReplayBuffer) -> None:
    async for item in buffer.find({}, limit=3):
        assert item.item


@pytest.mark.parametrize("moment", MOMENTS)
async def test_prompts_whose_draw_is_cancelled_are_handed_out_again(
    new_url: Callable[[], str], moment: str, figures: Figures
) -> None:
    """At whatever await: each prompt of the dataset is drawn once, by the one or the other."""
    waits, number = 1, 0
    while number < waits:
        number += 1
        async with build(new_url()) as buffer:
            prompts = operations.prompts_of(buffer)
            cancelled, waits, handed_out = await ended(prompts.draw(3), number, moment)
            handed_out = handed_out or []
            while further := await prompts.draw(4):
                handed_out += further
            drawn_numbers = sorted(number_of(prompt.group) for prompt in handed_out)
        lost_numbers, doubled = set(range(100, 110)) - set(drawn_numbers), len(drawn_numbers) - len(set(drawn_numbers))
        figures.add(faults=1, prompts=10, skipped=len(lost_numbers), doubled=doubled)
        assert cancelled
        assert drawn_numbers == list(range(100, 110))


READS: dict[str, Callable[[ReplayBuffer], Awaitable[Any]]] = {
    "find": a_find,
    "wait_ready in vain": lambda buffer: buffer.wait_ready({TASK: 200}, timeout=0.1),
    "save": lambda buffer: buffer.save("snapshot"),
    "take_batch in vain": lambda buffer: buffer.take_batch({TASK: 200}, timeout=0.1),
    "lease in vain": lambda buffer: buffer.lease_batch({TASK: 200}, timeout=0.1).__aenter__(),
    "put in vain": lambda buffer: buffer.put(group(100), TASK, replaces=[10_000]),
}
DRAWS: dict[str, Callable[[ReplayBuffer], Awaitable[Any]]] = {
    "sample": lambda buffer: buffer.sample({TASK: 2}, timeout=5, beta=0.5),
    "lease_batch as a block": a_lease_of_a_block,
}


@pytest.mark.parametrize("name", [*READS, *DRAWS])
async def test_groups_of_a_cancelled_call_are_all_there(
    new_url: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, figures: Figures
) -> None:
    """Reads, waits and draws that are cancelled leave the groups as they are, in their order, in the same buffer."""
    monkeypatch.chdir(tmp_path)
    call = (READS | DRAWS)[name]
    async with build(new_url()) as buffer:
        waits, number, taken_count = 1, 0, 0
        for number in range(operations.COUNT):
            await buffer.put(group(number), TASK, tags={"a": 1})
        number = 0
        while number < waits:
            number += 1
            for moment in MOMENTS:
                cancelled, waits, _ = await ended(_quiet(call(buffer)), number, moment)
                figures.add(faults=1)
                taken_count += 0 if cancelled or name in READS else 2
        remaining = await take_all(buffer)
    figures.add(groups=operations.COUNT, doubled=len(remaining) - len(set(remaining)))
    assert remaining == list(range(taken_count, operations.COUNT))


async def _quiet(call: Awaitable[Any]) -> Any:
    """What can't be had is as good as cancelled."""
    try:
        return await call
    except (TimeoutError, RuntimeError):
        raise asyncio.CancelledError from None


#: How long the database goes on by itself between the stop and the close, in seconds.
PAUSES = [0.0, 0.15]
# Several calls, which are done or not each for itself; and those that are no calls of a buffer.
OTHERS = ["put several", "put evicting", "sweep", "leases end", "draw prompts", "checkpoint in pieces"]
OF_LOOPS = rarely((name for name in OPERATIONS if name not in OTHERS), {"put", "take", "acknowledge"})


def left_in(pause: float) -> End:
    """Its loop is closed as soon as it waits. The tasks that its task has begun have begun by then, too."""

    def leave(call: Coroutine[Any, Any, Any]) -> None:
        loop = asyncio.new_event_loop()
        task = loop.create_task(call)
        _stop_after(loop, rounds=3)
        loop.run_forever()
        time.sleep(pause)
        loop.close()
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # closing it like this is bad style

    async def end(call: Coroutine[Any, Any, Any]) -> tuple[bool, int]:
        await asyncio.to_thread(leave, call)
        del call
        await asyncio.sleep(0.05)  # until the thread has let go of it, too
        gc.collect()  # that is what tells of a call that nobody can go on with
        return True, 0

    return end


def _stop_after(loop: asyncio.AbstractEventLoop, rounds: int) -> None:
    if rounds:
        loop.call_soon(_stop_after, loop, rounds - 1)
    else:
        loop.stop()


def swept(state: dict[str, Any]) -> dict[str, Any]:
    """Return what is there but for what the sweep removes sooner or later, as the versions of dropped checkpoints."""
    checkpoint_ids = {ast.literal_eval(row.split(",")[0] + "}")["id"] for row in state["rb_checkpoint"]}

    def passed_on(until: re.Match[str]) -> str:
        return until[0] if int(until[1]) in checkpoint_ids else "'until': None}"

    past = [re.sub(r"'until': (\d+)}$", passed_on, row) for row in state["rb_past"]]
    return state | {"rb_past": [row for row in past if "'draw': 0" not in row or "'until': None}" not in row]}


@pytest.mark.parametrize("name", OF_LOOPS)
async def test_what_its_loop_has_left_is_done_or_undone(
    new_url: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, figures: Figures
) -> None:
    monkeypatch.chdir(tmp_path)
    operation = OPERATIONS[name]
    states = [(await after(new_url(), operation, end))[0] for end in (not_begun, cancelled_at(0))]
    for pause in PAUSES:
        state, _, _ = await after(new_url(), operation, left_in(pause))
        figures.add(faults=1)
        assert state in (states[:1] if operation in DRAWING else states)
