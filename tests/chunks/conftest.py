"""Chunk buffers over every backend, and fragments that can be told apart."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from replaybuf import ReplayBuffer
from replaybuf.errors import FragmentError
from replaybuf.integrations.chunks import Chunk, ChunkBuffer, ChunkBufferConfig, Selection
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


W = "w"


class Stores:
    """Chunk buffers over one store: `open` gives another one, as another process or a later run would have it."""

    def __init__(self, kind: str, lend: Callable[[], str]) -> None:
        self._kind = kind
        self._lend = lend
        self._opened: list[ChunkBuffer] = []
        self.renew()

    def renew(self) -> None:
        """From now on another, empty store."""
        self._url = self._lend()
        self._shared: Any = None

    def open(
        self, fragments_per_chunk: int = 3, *, buffer_type: type[ReplayBuffer] = ReplayBuffer, **options: Any
    ) -> ChunkBuffer:
        config = ChunkBufferConfig(url=self._url, fragments_per_chunk=fragments_per_chunk, **options)
        storage = config.build().buffer.storage
        if self._kind == "memory":
            storage = self._shared = storage if self._shared is None else self._shared
        chunks = ChunkBuffer(buffer_type(storage), config)
        self._opened.append(chunks)
        return chunks

    async def close(self) -> None:
        for chunks in self._opened:
            await chunks.close()
        self._opened.clear()


async def send(chunks: ChunkBuffer, indices: Any, *, worker: str = W, session: int = 1, version: int = 0) -> bool:
    for index in indices:
        await chunks.put({"n": index}, worker=worker, index=index, session=session, version=version)
    return True


async def stored(chunks: ChunkBuffer) -> list[Chunk]:
    """The chunks that there are, in the order in which they were made."""
    return [Chunk.of(item) async for item in chunks.buffer.find({"task_name": chunks.name, "status": "completed"})]


async def starts(chunks: ChunkBuffer) -> list[int]:
    return [chunk.start for chunk in await stored(chunks)]


def numbers(chunk: Chunk) -> list[int]:
    return [fragment["n"] for fragment in chunk.fragments]


def same(first: Selection, second: Selection) -> bool:
    return first.number == second.number and list(map(repr, first)) == list(map(repr, second))


async def problem(call: Awaitable[Any]) -> FragmentError:
    with pytest.raises(FragmentError) as caught:
        await call
    return caught.value
