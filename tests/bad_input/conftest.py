"""A store that the tests share, because they leave it as it was."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from replaybuf import (
    ReplayBuffer,
)
from tests.postgres import new_database
from tests.stores import build, fill


@pytest.fixture(scope="module", params=["sqlite", "memory://", "postgresql"])
def kept_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A database that the tests of this module share, because they don't change it."""
    if request.param == "memory://":
        yield request.param
    elif request.param == "sqlite":
        yield f"sqlite:///{tmp_path_factory.mktemp('kept')}/buffer.db"
    else:
        with new_database(request.getfixturevalue("postgres_url")) as url:
            yield url


@pytest.fixture
async def kept(kept_url: str) -> AsyncIterator[ReplayBuffer]:
    async with build(kept_url) as buffer:
        if not len(buffer):
            await fill(buffer, 3)
        yield buffer
