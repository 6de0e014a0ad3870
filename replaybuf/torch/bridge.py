"""A synchronous caller's way to coroutines: an event loop in a thread that a process has for all of them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_loops: dict[int, asyncio.AbstractEventLoop] = {}  # of this process; a forked one has none of its own yet


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the coroutine's result. An interrupted caller cancels it."""
    if os.getpid() not in _loops:
        loop = _loops[os.getpid()] = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="replaybuf-torch", daemon=True).start()
    future = asyncio.run_coroutine_threadsafe(coroutine, _loops[os.getpid()])
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
