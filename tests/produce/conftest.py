"""Databases for the tests of production, and a look at what they leave behind."""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import AsyncIterator

import pytest

from replaybuf import ReplayBuffer
from replaybuf.produce import Sampler
from tests.produce.scripted import prompts
from tests.stores import TASK, build


@pytest.fixture
async def buffer(url: str) -> AsyncIterator[ReplayBuffer]:
    """A buffer that keeps filtered groups, so that every prompt can be accounted for."""
    async with build(url, unfit=1000) as buffer:
        yield buffer


@pytest.fixture
def sampler(buffer: ReplayBuffer) -> Sampler:
    """Of 60 prompts, each twice, once."""
    return Sampler(buffer, prompts(60), TASK, prompt_repeat_k=2, epochs=1)


@pytest.fixture
async def _nothing_left(caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    gc.collect()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() - before - {asyncio.current_task()} == set()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> None:
    """A test that has an event loop leaves no task behind, and nothing for asyncio to complain of."""
    if inspect.iscoroutinefunction(request.function):
        request.getfixturevalue("_nothing_left")
