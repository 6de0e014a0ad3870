"""A store that the tests share, because they leave it as it was."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from replaybuf import ReplayBuffer
from tests.postgres import new_url
from tests.stores import build, fill


@pytest.fixture(scope="module", params=["sqlite", "memory://", "postgresql"])
def kept_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A database that the tests of this module share, because they don't change it."""
    if request.param == "memory://":
        yield request.param
    else:
        yield from new_url(request.param, request, tmp_path_factory.mktemp("kept"))


@pytest.fixture
async def kept(kept_url: str) -> AsyncIterator[ReplayBuffer]:
    async with build(kept_url) as buffer:
        if not len(buffer):
            await fill(buffer, 3)
        yield buffer
