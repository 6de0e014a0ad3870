"""Calls that finish their work before a cancellation takes effect."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; a cancelled caller waits for its end first, however often it is cancelled.

    For work that must not be left half done, and lasts no longer than a transaction, or than a call in a thread.
    """
    try:
        task = asyncio.create_task(work)
    except RuntimeError:  # the loop was closed
        work.close()
        raise
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled():
        task.exception()  # retrieved, so that asyncio logs no warning
    raise cancelled
