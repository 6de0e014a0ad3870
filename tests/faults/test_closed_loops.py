"""Event loops that are stopped and closed while a call waits, which is never cancelled: it is done or undone."""

from __future__ import annotations

import ast
import asyncio
import gc
import time
from collections.abc import Callable
from typing import Any

import pytest

from replaybuf import ReplayBuffer
from tests.faults import operations
from tests.faults.copies import look
from tests.faults.figures import Figures
from tests.faults.operations import OPERATIONS, Operation
from tests.faults.test_cancelled import DRAWING, seen
from tests.stores import build

#: How long the database goes on by itself between the stop and the close, in seconds.
PAUSES = [0.0, 0.15]
# Several calls, which are done or not each for itself; and those that are no calls of a buffer.
OTHERS = ["put several", "put evicting", "sweep", "leases end", "draw prompts", "checkpoint in pieces"]
SOME = ["put", "take", "lease", "acknowledge", "refresh"]
NAMES = [
    *SOME,
    *(pytest.param(name, marks=pytest.mark.long) for name in OPERATIONS if name not in (*SOME, *OTHERS)),
]


def leave(buffer: ReplayBuffer, operation: Operation, ready: Any, pause: float) -> bool:
    """Begin an operation in a loop that is closed as soon as it waits; whether it was done before.

    The tasks that its task has begun have begun by then, too.
    """
    loop = asyncio.new_event_loop()
    task: asyncio.Task[Any] = loop.create_task(operation.run(buffer, ready))  # type: ignore[arg-type]
    _stop_after(loop, rounds=3)
    loop.run_forever()
    time.sleep(pause)
    loop.close()
    if not task.done():
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # closing it like this is bad style
    return task.done()


def _stop_after(loop: asyncio.AbstractEventLoop, rounds: int) -> None:
    if rounds:
        loop.call_soon(_stop_after, loop, rounds - 1)
    else:
        loop.stop()


def after(url: str, operation: Operation, pause: float) -> Any:
    """What is in a new database after an operation whose loop was closed, and in the buffer when it has settled."""
    asyncio.run(operations.fill(url))
    buffer = build(url, **operation.options)
    runner = asyncio.Runner()  # the loop in which the buffer is used before and after
    try:
        ready = runner.run(operation.ready(buffer)) if operation.ready else None  # type: ignore[arg-type]
        leave(buffer, operation, ready, pause)
        gc.collect()  # that is what tells of a call that nobody can go on with

        async def settled() -> Any:
            await asyncio.sleep(0.05)
            await buffer.count_where({})
            return await seen(buffer)

        found = runner.run(settled())
        runner.run(buffer.close())
    finally:
        runner.close()
    return found if operation in DRAWING else swept(asyncio.run(look(url)))


async def whole(url: str, operation: Operation, *, done: bool) -> Any:
    """What is in a new database after the whole operation, or before it."""
    await operations.fill(url)
    async with build(url, **operation.options) as buffer:
        ready = await operation.ready(buffer) if operation.ready else None
        if done:
            await operation.run(buffer, ready)
        found = await seen(buffer)
    return found if operation in DRAWING else swept(await look(url))


def swept(state: dict[str, Any]) -> dict[str, Any]:
    """Return what is there but for what the sweep removes sooner or later."""
    made = {ast.literal_eval(row.split(",")[0] + "}")["id"] for row in state["rb_checkpoint"]}
    past, ends = state["rb_past"], [f"'until': {one}}}" for one in made]
    kept = [row for row in past if "'draw': 0" not in row or any(end in row for end in ends)]
    return state | {"rb_past": kept}


@pytest.mark.parametrize("name", NAMES)
def test_what_its_loop_has_left_is_done_or_undone(
    new_url: Callable[[], str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch, name: str, figures: Figures
) -> None:
    monkeypatch.chdir(tmp_path)
    operation = OPERATIONS[name]
    before, done = (asyncio.run(whole(new_url(), operation, done=done)) for done in (False, True))
    for pause in PAUSES:
        found = after(new_url(), operation, pause)
        figures.add(faults=1)
        assert found in ([before] if operation in DRAWING else [before, done])
