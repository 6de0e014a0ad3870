"""Random interleavings agree with a model."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaybuf.errors import FragmentError
from tests.chunks.stores import Stores, stored


@dataclass
class Model:
    """What a chunk buffer does, in the plainest way."""

    size: int
    drop: bool
    max_chunks: int | None
    max_staleness: int | None
    put_begins: bool
    session: int = field(default=-1, init=False)
    version: int = field(default=-1, init=False)
    begun: dict[str, list[tuple[int, int]]] = field(default_factory=dict, init=False)
    next: dict[str, int] = field(default_factory=dict, init=False)
    chunks: list[tuple[str, int, int]] = field(default_factory=list, init=False)  # worker, start, version
    dropped: Counter[str] = field(default_factory=Counter, init=False)

    def put(self, worker: str, index: int, session: int, version: int) -> str | bool:
        if session < self.session or (session > self.session >= 0 and not self.put_begins):
            return self._refuse("session")
        if session > self.session:
            self.session, self.version = session, version
            self.begun, self.next, self.chunks = {}, {}, []
        expected = self.next.get(worker, index)
        if index < expected:
            return self._refuse("duplicate")
        if index > expected:
            if not self.drop:
                return "gap"
            self.dropped["gap"] += 1
            self.begun[worker] = []
        self.next[worker] = index + 1
        fragments = self.begun.setdefault(worker, [])
        fragments.append((index, version))
        if len(fragments) == self.size:
            self.begun[worker] = self._make(worker, fragments)
        return True

    def _refuse(self, kind: str) -> str | bool:
        if not self.drop:
            return kind
        self.dropped[kind] += 1
        return False

    def _make(self, worker: str, fragments: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Make a chunk, or let its first fragments leave if they are too stale; return those that begin the next."""
        stale = [
            place
            for place, (_, version) in enumerate(fragments)
            if self.max_staleness is not None and version < self.version - self.max_staleness
        ]
        if stale:
            self.dropped["stale"] += 1
            return fragments[stale[-1] + 1 :]
        self.chunks.append((worker, fragments[0][0], min(version for _, version in fragments)))
        if self.max_chunks is not None and len(self.chunks) > self.max_chunks:
            self.chunks.remove(min(self.chunks, key=lambda chunk: chunk[2]))
        return []

    def _leave_stale(self) -> None:
        if self.max_staleness is not None:
            good = [chunk for chunk in self.chunks if chunk[2] >= self.version - self.max_staleness]
            self.dropped["stale"] += len(self.chunks) - len(good)
            self.chunks = good

    def advance(self, version: int) -> None:
        self.version = max(self.version, version)
        self._leave_stale()


PUTS = st.tuples(
    st.just("put"),
    st.sampled_from(["a", "b"]),
    st.sampled_from([0, 0, 0, 0, 0, 0, -1, -2, 1, 3]),
    st.sampled_from([0, 0, 0, 0, 0, 0, 0, 0, -1, 1]),
    st.integers(0, 6),
)
ADVANCES = st.tuples(st.just("advance"), st.integers(0, 8))
OPENS = st.tuples(st.just("open"))


MODELS = st.builds(
    Model,
    size=st.integers(1, 3),
    drop=st.booleans(),
    max_chunks=st.one_of(st.none(), st.integers(1, 3)),
    max_staleness=st.one_of(st.none(), st.integers(0, 3)),
    put_begins=st.booleans(),
)
STEPS = st.lists(st.one_of(PUTS, PUTS, PUTS, PUTS, ADVANCES, OPENS), min_size=20, max_size=40)
FIXTURES = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=12, suppress_health_check=FIXTURES)
@given(model=MODELS, steps=STEPS)
def test_model__random_interleavings_agree(kind: str, lend: Callable[[], str], model: Model, steps: list[Any]) -> None:
    options = {
        "max_chunks": model.max_chunks,
        "max_staleness": model.max_staleness,
        "on_problem": "drop" if model.drop else "error",
        "begin_sessions": "put" if model.put_begins else "advance",
    }
    asyncio.run(agree(Stores(kind, lend), model, options, steps))


async def agree(stores: Stores, model: Model, options: dict[str, Any], steps: list[Any]) -> None:
    try:
        buffers = [stores.open(model.size, **options), stores.open(model.size, **options)]
        for number, (what, *args) in enumerate(steps):
            chunks = buffers[number % 2]
            if what == "open":
                buffers[number % 2] = stores.open(model.size, **options)
            elif what == "put":
                worker, by, sessions, version = args
                session = max(0, model.session + sessions) if model.session >= 0 else 1
                index = max(0, model.next.get(worker, 2) + by)
                try:
                    came: str | bool = await chunks.put(0, worker=worker, index=index, session=session, version=version)
                except FragmentError as error:
                    came = error.reason
                assert came == model.put(worker, index, session, version)
            elif model.session >= 0:
                await chunks.advance(*args)
                model.advance(*args)
            found = [(chunk.worker, chunk.start, chunk.version) for chunk in await stored(chunks)]
            assert found == model.chunks
        chunks = buffers[0]
        assert {worker: await chunks.expected(worker) for worker in model.next} == model.next
        assert {kind: n for kind, n in (await chunks.dropped()).items() if n} == +model.dropped
    finally:
        await stores.close()
