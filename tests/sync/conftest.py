"""The stores of these tests, and groups in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from replaybuf import ReplayBufferConfig
from replaybuf.buffer.sync import SyncReplayBuffer


@pytest.fixture
def open_sync() -> Iterator[Callable[..., SyncReplayBuffer]]:
    """A function that opens a synchronous buffer; it is closed after the test."""
    with ExitStack() as stack:

        def open_one(url: str, **options: Any) -> SyncReplayBuffer:
            config = ReplayBufferConfig(url=url, **({"policy": "fifo"} | options))
            return stack.enter_context(config.build_sync())

        yield open_one


@pytest.fixture
def buffer(url: str, open_sync: Callable[..., SyncReplayBuffer]) -> SyncReplayBuffer:
    """A synchronous buffer over a new, empty store."""
    return open_sync(url)
