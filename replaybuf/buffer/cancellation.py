"""Calls that finish their work before a cancellation takes effect."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
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
