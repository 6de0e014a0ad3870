"""Chunk buffers of every backend."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from tests.chunks.stores import Stores


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def lend(request: pytest.FixtureRequest, kind: str, tmp_path: Path) -> Iterator[Callable[[], str]]:
    """A function that gives the URL of another empty store at each call."""
    numbers = iter(range(10**6))
    if kind == "postgresql":
        with request.getfixturevalue("postgres_databases").lent() as lend_one:
            yield lend_one
    elif kind == "sqlite":
        yield lambda: f"sqlite:///{tmp_path}/chunks-{next(numbers)}.db"
    else:
        yield lambda: f"{kind}://"


@pytest.fixture
async def stores(kind: str, lend: Callable[[], str]) -> AsyncIterator[Stores]:
    stores = Stores(kind, lend)
    yield stores
    await stores.close()
