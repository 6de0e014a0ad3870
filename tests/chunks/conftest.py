"""Chunk buffers of every backend."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from tests.chunks.stores import Stores
from tests.postgres import new_urls


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def lend(request: pytest.FixtureRequest, kind: str, tmp_path: Path) -> Iterator[Callable[[], str]]:
    """A function that gives the URL of another empty store at each call."""
    with new_urls(kind, request, tmp_path) as lend:
        yield lend


@pytest.fixture
async def stores(kind: str, lend: Callable[[], str]) -> AsyncIterator[Stores]:
    stores = Stores(kind, lend)
    yield stores
    await stores.close()
