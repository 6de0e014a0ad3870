"""Random interleavings agree with a model."""

from __future__ import annotations

import asyncio
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
    capacity: int | None
    max_staleness: int | None
    session: int = field(default=-1, init=False)
    version: int = field(default=-1, init=False)
    begun: dict[str, list[tuple[int, int]]] = field(default_factory=dict, init=False)
    next: dict[str, int] = field(default_factory=dict, init=False)
    chunks: list[tuple[str, int, int]] = field(default_factory=list, init=False)  # worker, start, version

    def put(self, worker: str, index: int, session: int, version: int) -> str | None:
        if self.session < 0:
            self.session, self.version = session, version
        if session != self.session:
            return "session"
        expected = self.next.get(worker, index)
        if index != expected:
            return "duplicate" if index < expected else "gap"
        self.next[worker] = index + 1
        fragments = self.begun.setdefault(worker, [])
        fragments.append((index, version))
        if len(fragments) == self.size:
            self.begun[worker] = []
            self.chunks.append((worker, fragments[0][0], min(version for _, version in fragments)))
            if self.capacity is not None and len(self.chunks) > self.capacity:
                self.chunks.remove(min(self.chunks, key=lambda chunk: chunk[2]))
        return None

    def advance(self, version: int) -> None:
        self.version = max(self.version, version)

    def fresh(self, chunks: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
        """The chunks that may be drawn; when the others leave is another matter."""
        oldest = -1 if self.max_staleness is None else self.version - self.max_staleness
        return [chunk for chunk in chunks if chunk[2] >= oldest]


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
    capacity=st.one_of(st.none(), st.integers(1, 3)),
    max_staleness=st.one_of(st.none(), st.integers(0, 3)),
)
STEPS = st.lists(st.one_of(PUTS, PUTS, PUTS, PUTS, ADVANCES, OPENS), min_size=20, max_size=40)
FIXTURES = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=12, suppress_health_check=FIXTURES)
@given(model=MODELS, steps=STEPS)
def test_model__random_interleavings_agree(kind: str, lend: Callable[[], str], model: Model, steps: list[Any]) -> None:
    options = {"capacity": model.capacity, "max_staleness": model.max_staleness}
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
                came = None
                try:
                    await chunks.put(0, worker=worker, index=index, session=session, version=version)
                except FragmentError as error:
                    came = error.reason
                assert came == model.put(worker, index, session, version)
            elif model.session >= 0:
                await chunks.advance(*args)
                model.advance(*args)
            found = [(chunk.worker, chunk.start, chunk.version) for chunk in await stored(chunks)]
            assert model.fresh(found) == model.fresh(model.chunks)
        chunks = buffers[0]
        assert {worker: await chunks.expected(worker) for worker in model.next} == model.next
    finally:
        await stores.close()
