"""Laws of the contract through the synchronous face: each call is made by a thread that blocks.

Those whose calls don't wait: threads can't be cancelled, which the laws of waiting do to their callers.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from replaybuf.buffer.putting import PUT_TIMEOUT
from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.rules.policies import ReplayPolicy
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.sync import Items, SyncCursors, SyncLease, SyncLeasing, SyncReplayBuffer
from tests.contract.archiving import ArchiveLaws
from tests.contract.checkpointing import CheckpointLaws
from tests.contract.claiming import ClaimLaws, SettlingLaws
from tests.contract.expiring import ExpiryLaws
from tests.contract.filling import EvictionLaws
from tests.contract.harness import CODEC, NewStorage, Open, OpenBuffer, rules_of
from tests.contract.persistence import PersistenceLaws
from tests.contract.putting import PuttingLaws
from tests.contract.querying import ChangingLaws, QueryingLaws
from tests.contract.refreshing import RefreshingLaws
from tests.contract.replacing import ReplacingLaws
from tests.contract.reusing import ReuseLaws
from tests.contract.taking import CountingLaws, TakingLaws
from tests.contract.tallying import MetricsLaws

pytestmark = pytest.mark.long

_END = object()
_THREADS = ThreadPoolExecutor(100)  # laws have that many callers at once


class InThreads:
    """A synchronous object for laws that `await`: its calls are made in threads."""

    def __init__(self, synchronous: Any) -> None:
        self._synchronous = synchronous

    def __getattr__(self, name: str) -> Any:
        theirs = inspect.getattr_static(type(self._synchronous.asynchronous), name, None)
        if inspect.iscoroutinefunction(theirs):
            return functools.partial(_in_thread, getattr(self._synchronous, name))
        if hasattr(self._synchronous, name):
            found = getattr(self._synchronous, name)
            return (lambda *args, **kwargs: _wrapped(found(*args, **kwargs))) if callable(found) else _wrapped(found)
        return getattr(self._synchronous.asynchronous, name)

    def __len__(self) -> int:
        return len(self._synchronous)

    def __bool__(self) -> bool:
        return bool(self._synchronous)

    async def __aenter__(self) -> Any:
        return _wrapped(await _run(self._synchronous.__enter__))

    async def __aexit__(self, *error: Any) -> None:
        await _run(self._synchronous.__exit__, *error)

    def __await__(self) -> Generator[Any, None, Any]:
        return _in_thread(self._synchronous.begin).__await__()

    async def aclose(self) -> None:
        await _run(self._synchronous.close)

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> Any:
        item = await _run(next, self._synchronous, _END)
        if item is _END:
            raise StopAsyncIteration
        return item


async def _run(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(_THREADS, functools.partial(call, *args, **kwargs))


async def _in_thread(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _wrapped(await _run(call, *args, **kwargs))


def _wrapped(value: Any) -> Any:
    return (
        InThreads(value) if isinstance(value, (Items, SyncCursors, SyncLease, SyncLeasing, SyncReplayBuffer)) else value
    )


class ThroughSync(
    PuttingLaws,
    ExpiryLaws,
    TakingLaws,
    CountingLaws,
    ReuseLaws,
    EvictionLaws,
    ArchiveLaws,
    MetricsLaws,
    ReplacingLaws,
    QueryingLaws,
    ChangingLaws,
    RefreshingLaws,
    SettlingLaws,
    CheckpointLaws,
    ClaimLaws,
    PersistenceLaws,
):
    test_a_cancelled_take_loses_nothing = None  # of a task; test_sync_processes.py has the one of Ctrl-C

    @pytest_asyncio.fixture
    async def open_buffer(self, open_storage: Open) -> OpenBuffer:
        async def open_one(
            policy: str | ReplayPolicy = "fifo",
            codec: Any = CODEC,
            storage: SQLStorage | None = None,
            *,
            put_timeout: float | None = PUT_TIMEOUT,
            **rules: Any,
        ) -> Any:
            opened = await open_storage(codec, storage, rules_of(policy, **rules))
            return InThreads(SyncReplayBuffer(ReplayBuffer(opened, codec.rollout_type, put_timeout=put_timeout)))

        return open_one


class TestMemory(ThroughSync):
    @pytest.fixture
    def new_storage(self) -> NewStorage:
        return lambda codec, rules: SQLStorage("memory://", codec, rules)


class TestSqlite(ThroughSync):
    @pytest.fixture
    def new_storage(self, tmp_path: Path) -> NewStorage:
        numbers = count()
        return lambda codec, rules: SQLStorage(f"sqlite:///{tmp_path}/{next(numbers)}.db", codec, rules)
