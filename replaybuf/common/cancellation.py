"""Calls that finish their work before a cancellation takes effect, or may never end; waits for the first of several."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def shielded(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; a cancelled caller waits for its end first, to know the state of the store.

    However often it is cancelled: scopes of anyio, for one, do it again and again. Only for work that lasts no longer
    than a transaction, or has a timeout of its own.
    """
    try:
        task = asyncio.create_task(work)
    except RuntimeError:  # the event loop is closed
        work.close()
        raise
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = cancelled or error
    if cancelled is None:
        return task.result()
    try:
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio logs no warning
        raise cancelled
    finally:
        del cancelled  # its traceback refers to this frame


async def first_of(
    *works: Coroutine[Any, Any, Any], tasks: Sequence[asyncio.Task[Any]] = (), timeout: float | None = None
) -> list[Any]:
    """Wait until one of these is done, for up to `timeout` seconds; then cancel the `works`.

    Return the results of the works, None for those that were cancelled. Raises the first of their errors.
    """
    begun = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait([*begun, *tasks], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in begun:
            task.cancel()
        outcomes = await shielded(_outcomes(begun))
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return [None if isinstance(outcome, BaseException) else outcome for outcome in outcomes]


async def _outcomes(tasks: Sequence[asyncio.Task[Any]]) -> list[Any]:
    return await asyncio.gather(*tasks, return_exceptions=True)


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Return the result of a blocking function, run in a daemon thread, which doesn't delay the end of the process."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    answers: list[T] = []  # not a future's result, which asyncio's debug log would show
    errors: list[BaseException] = []

    def call() -> None:
        try:
            answers.append(function())
        except BaseException as error:
            errors.append(error if isinstance(error, Exception) else RuntimeError(type(error).__name__))
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(
        target=contextvars.copy_context().run, args=(call,), name="replaybuf-blocking", daemon=True
    ).start()
    await ended.wait()
    if errors:
        raise errors[0]
    return answers[0]
