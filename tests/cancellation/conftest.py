"""A buffer that has to leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator

import pytest

from replaybuf import ReplayBuffer
from tests.cancellation.ways import no_connection_out
from tests.stores import build


@pytest.fixture
async def buffer(url: str, caplog: pytest.LogCaptureFixture) -> AsyncIterator[ReplayBuffer]:
    """A buffer that has to leave nothing behind: no thread, no connection, no complaint of asyncio's."""
    before = set(threading.enumerate())
    async with build(url) as buffer:
        yield buffer
        await no_connection_out(buffer)
    gc.collect()
    await asyncio.sleep(0)
    assert [record for record in caplog.records if record.name in ("asyncio", "concurrent.futures")] == []
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert not [name for name in left if name.startswith(("replaybuf", "Connection"))]
