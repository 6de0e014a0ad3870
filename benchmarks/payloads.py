"""Payloads apart: groups of arrays with a folder or an object store, in pairs with what that replaces."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import text

from benchmarks import groups
from benchmarks.databases import (
    TASK,
    drain,
    engine_of,
    fill,
    new_database,
    new_folder,
    open_buffer,
    put_all,
    until_swept,
)
from benchmarks.million import multiply
from benchmarks.table import Pairs, Row, Settings, cost, in_turn, number
from replaybuf import ReplayBuffer, RolloutState, Status
from replaybuf.storage.places.store import FILES, file_name
from replaybuf.storage.sql.tasks.file_batch import FILE_BYTES
from replaybuf.storage.sql.tasks.handles import load_all

BATCH = 64
SIZES = {"100 KB": 100, "2 MB": 2000}
COUNTS = {"100 KB": 1024, "2 MB": 64}


async def run(settings: Settings) -> AsyncIterator[Row]:
    """Yield rows for SQLite with a folder, PostgreSQL with a folder, an object store, and deferred fields."""
    for kind in settings.databases:
        for size in SIZES:
            async for row in _folder(settings, kind, size):
                yield row
        yield await _synced(settings, kind)
        yield await _deferred(settings, kind)
    async for row in _objects(settings):
        yield row
    if "sqlite" in settings.databases:
        async for row in _large(settings):
            yield row


@asynccontextmanager
async def _apart(kind: str, **options: Any) -> AsyncIterator[ReplayBuffer]:
    """Yield an open buffer whose large payloads are in a folder."""
    async with (
        new_database(kind) as url,
        new_folder() as folder,
        open_buffer(url, payloads=str(folder), **options) as one,
    ):
        yield one


async def _folder(settings: Settings, kind: str, size: str) -> AsyncIterator[Row]:
    """Yield puts and takes with a folder, beside a bare file and beside the database alone."""
    count, kilobytes = settings.size(COUNTS[size], COUNTS[size] // 4), SIZES[size]

    def make() -> list[RolloutState]:
        return groups.arrays(kilobytes)

    async with _apart(kind) as apart, new_database(kind) as url, open_buffer(url) as whole, new_folder() as folder:
        with BareFile(folder / "bare", count * (kilobytes + 8) * 1000) as bare:
            parts = [groups.CODEC.encode_split(make()).tail for _ in range(count)]
            pairs = await _puts(settings, apart, make, count, lambda: bare.put(parts))
            yield _row(kind, f"{size} put", count, pairs, "a bare file, fdatasync every 64", _AIMS_PUT, size)
        fresh = await _beside(settings, apart, whole, make, count)
        yield _row(kind, f"{size} put", count, fresh[0], "in the database", _AIMS_DATABASE, size)
        yield _row(
            kind, f"{size} taken, get({min(BATCH, count)})", count, fresh[1], "in the database", _AIMS_TAKE, size
        )


_AIMS_PUT = {("sqlite", "100 KB"): 0.5, ("sqlite", "2 MB"): 0.8}
_AIMS_TAKE = {("sqlite", "100 KB"): 2.0, ("postgresql", "2 MB"): 2.0}
_AIMS_DATABASE = {("postgresql", "2 MB"): 1.3}


def _row(
    kind: str, what: str, count: int, pairs: Pairs, yardstick: str, aims: dict[tuple[str, str], float], size: str
) -> Row:
    middle, shown = pairs.ratio(faster=True)
    (mine, theirs), aim = pairs.median, aims.get((kind, size))
    return Row(
        "payloads",
        f"{kind} with a folder: {what}",
        f"{number(count / mine)}/s",
        f"{yardstick} {number(count / theirs)}/s",
        shown,
        "" if aim is None else f">= {aim}",
        None if aim is None else middle >= aim,
    )


async def _puts(
    settings: Settings, buffer: ReplayBuffer, make: Callable[[], Any], count: int, theirs: Callable[[], object]
) -> Pairs:
    """Measure puts beside a yardstick; everything is removed between rounds."""
    fresh: list[list[Any]] = []

    async def empty() -> None:
        await drain(buffer, lambda: buffer.get(512, TASK))
        await until_swept(buffer)
        await buffer.storage.thread.run(buffer.storage.files.tend)

    async def before() -> None:
        await empty()
        if not fresh:
            fresh.append([make() for _ in range(count)])

    pairs = await in_turn(lambda: put_all(buffer, fresh.pop()), theirs, settings.rounds, before=before, warm_up=2)
    await empty()
    return pairs


async def _beside(
    settings: Settings, apart: ReplayBuffer, whole: ReplayBuffer, make: Callable[[], Any], count: int
) -> tuple[Pairs, Pairs]:
    """Measure puts and takes of the same groups, in both buffers in turn."""
    puts, takes = Pairs([], []), Pairs([], [])
    for turn in range(settings.rounds + 1):
        for buffer in (apart, whole) if turn % 2 else (whole, apart):
            fresh = [make() for _ in range(count)]
            put = await cost(lambda buffer=buffer, fresh=fresh: put_all(buffer, fresh))
            taken = await cost(lambda buffer=buffer: drain(buffer, lambda: buffer.get(BATCH, TASK)))
            await until_swept(buffer)
            if turn:
                for pairs, one in ((puts, put), (takes, taken)):
                    (pairs.ours if buffer is apart else pairs.theirs).append(one.seconds)
    return puts, takes


async def _synced(settings: Settings, kind: str) -> Row:
    """Return puts that wait for the disk beside those that don't (PostgreSQL always waits)."""
    count = settings.size(COUNTS["100 KB"], 256)
    async with _apart(kind, durability="full") as full, _apart(kind) as normal:
        for one in (full, normal):
            await fill(one, groups.arrays, count)
            await drain(one, lambda one=one: one.get(512, TASK))
            await until_swept(one)

        def put(buffer: ReplayBuffer) -> Callable[[], Any]:
            return lambda: put_all(buffer, fresh.pop())

        fresh: list[list[Any]] = []

        async def before() -> None:
            if not fresh:
                fresh.append([groups.arrays() for _ in range(count)])

        pairs = await in_turn(put(full), put(normal), settings.rounds, before=before)
    middle, shown = pairs.ratio(faster=True)
    mine, theirs = pairs.median
    return Row(
        "payloads",
        f'{kind} with a folder: 100 KB put, durability="full"',
        f"{number(count / mine)}/s",
        f'"normal" {number(count / theirs)}/s',
        shown,
        ">= 0.8",
        middle >= 0.8,
    )


async def _deferred(settings: Settings, kind: str) -> Row:
    """Return a lease of groups with a field of 20 MB that isn't read, beside one that reads it."""
    count = settings.size(16, 4)
    heavy = np.random.default_rng(0).integers(0, 64, (10_000, 1000), dtype=np.int16)

    def make() -> list[RolloutState]:
        return [RolloutState(message=[], tokens=np.arange(4000), routed_experts=heavy, status=Status.COMPLETED)]

    async with _apart(kind) as buffer:
        await put_all(buffer, [make() for _ in range(count)])

        async def lease(deferred: Sequence[str]) -> None:
            leased = await buffer.lease_batch({TASK: count}, timeout=60, deferred=deferred)
            await leased.give_back()

        pairs = await in_turn(lambda: lease(["routed_experts"]), lambda: lease([]), settings.rounds)
        leased = await buffer.lease_batch({TASK: count}, deferred=["routed_experts"])
        handles = [item.item[0].routed_experts for item in leased.items[TASK]]
        loaded = await cost(lambda: load_all(handles[:1]))
        await leased.acknowledge()
    mine, theirs = pairs.median
    _, shown = pairs.ratio(faster=True)
    return Row(
        "payloads",
        f"{kind} with a folder: {count} groups leased, a field of 20 MB deferred",
        f"{number(mine * 1000)} ms, one loaded in {number(loaded.seconds * 1000)} ms",
        f"read with the groups {number(theirs * 1000)} ms",
        shown,
    )


async def _large(settings: Settings) -> AsyncIterator[Row]:
    """Yield the same calls with 200 GB in sparse files, beside an empty folder."""
    count, seed = settings.size(1_000_000, 100_000), 1000
    calls: dict[str, Pairs] = {}
    async with (
        new_database("sqlite") as large,
        new_database("sqlite") as empty,
        new_folder() as full_folder,
        new_folder() as empty_folder,
    ):
        async with open_buffer(large, payloads=str(full_folder)) as buffer:
            await fill(buffer, lambda: groups.arrays(200), seed)
            await multiply(buffer, seed, count)
            await buffer.storage.thread.run(lambda: _spread(buffer, full_folder, count))
        for turn in range(settings.rounds + 1):
            for place, (url, folder) in enumerate(((large, full_folder), (empty, empty_folder))):
                for name, one in (await _calls(url, str(folder))).items():
                    pairs = calls.setdefault(name, Pairs([], []))
                    if turn:
                        (pairs.theirs if place else pairs.ours).append(one)
    for name, pairs in calls.items():
        mine, theirs = pairs.median
        middle, shown = pairs.ratio(faster=False)
        yield Row(
            "payloads",
            f"sqlite with a folder of {count * 0.0002:,.0f} GB, {count:,} groups: {name}",
            f"{number(mine * 1000)} ms",
            f"empty {number(theirs * 1000)} ms",
            shown,
            "<= 1.3",
            middle <= 1.3,
        )


async def _spread(buffer: ReplayBuffer, folder: Path, count: int) -> None:
    """Spread the rows over files of 4 MiB, which are sparse. What the rows say is where it was put."""
    files = count * 200_000 // FILE_BYTES
    async with engine_of(buffer).connect() as connection:
        [place] = (await connection.execute(text("SELECT id FROM rb_place"))).scalars()
        for number in range(files):
            await connection.execute(
                text("INSERT INTO rb_file (id, place, bytes, groups) VALUES (:id, :place, :bytes, 20)"),
                {"id": number, "place": place, "bytes": FILE_BYTES},
            )
            with (folder / FILES / file_name(number)).open("wb") as file:
                file.truncate(FILE_BYTES)
        await connection.execute(text("UPDATE rb_payload SET file = uid % :files WHERE uid > 1000"), {"files": files})
        await connection.commit()


async def _calls(url: str, folder: str) -> dict[str, float]:
    """Open a buffer, put, take the newest and sweep; return the seconds of each."""
    taken: dict[str, float] = {}
    fresh = [groups.arrays() for _ in range(512)]
    start = time.perf_counter()
    async with open_buffer(url, policy="lifo", payloads=folder) as buffer:
        taken["open"] = time.perf_counter() - start
        taken["512 puts of 100 KB"] = (await cost(lambda: put_all(buffer, fresh))).seconds

        async def take() -> None:
            for _ in range(8):
                await buffer.get(BATCH, TASK)

        taken["8 times get(64)"] = (await cost(take)).seconds
        start = time.perf_counter()
        await until_swept(buffer)
        taken["until swept"] = time.perf_counter() - start
    return taken


async def _objects(settings: Settings) -> AsyncIterator[Row]:
    """Yield puts and takes with an object store, beside bare requests of the same bytes."""
    import obstore
    from obstore.store import S3Store

    count = settings.size(256, 64)
    with object_server() as endpoint:
        bare = S3Store("bench", endpoint=endpoint, client_options={"allow_http": True})
        async with new_database("sqlite") as url, open_buffer(url, payloads="s3://bench/run") as buffer:
            [store] = buffer.storage.files.reader.stores.values()
            bodies: list[bytes] = []

            def record(files: Sequence[tuple[str, Sequence[Any]]], *, sync: bool) -> None:
                bodies.extend(b"".join(buffers) for _, buffers in files)
                write(files, sync=sync)

            write = store.write
            store.write = record  # type: ignore[method-assign]
            await put_all(buffer, [groups.arrays() for _ in range(count)])
            store.write = write  # type: ignore[method-assign]
            await drain(buffer, lambda: buffer.get(BATCH, TASK))

            async def put_bare() -> None:
                for number_, body in enumerate(bodies):
                    obstore.put(bare, f"bare/{number_}", body, use_multipart=False)

            async def get_bare() -> None:
                for number_ in range(len(bodies)):
                    obstore.get(bare, f"bare/{number_}").bytes()

            puts, takes = Pairs([], []), Pairs([], [])
            for turn in range(settings.rounds + 1):
                fresh = [groups.arrays() for _ in range(count)]
                mine = await cost(lambda fresh=fresh: put_all(buffer, fresh))
                theirs = await cost(put_bare)
                taken = await cost(lambda: drain(buffer, lambda: buffer.get(BATCH, TASK)))
                got = await cost(get_bare)
                if turn:
                    for pairs, ours, other in ((puts, mine, theirs), (takes, taken, got)):
                        pairs.ours.append(ours.seconds)
                        pairs.theirs.append(other.seconds)
    for what, pairs in (("put", puts), ("taken", takes)):
        middle, shown = pairs.ratio(faster=True)
        ours, other = pairs.median
        yield Row(
            "payloads",
            f"sqlite with an object store (moto's server): 100 KB {what}, {len(bodies)} requests for {count}",
            f"{number(count / ours)}/s",
            f"obstore, the same bytes {number(count / other)}/s",
            shown,
            ">= 0.8",
            middle >= 0.8,
        )


@contextmanager
def object_server() -> Iterator[str]:
    """Run moto's S3 server, in a process of its own, with a bucket `bench`, and set the environment that names it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.environ |= {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }
    try:
        for attempt in range(100):
            try:
                urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bench", method="PUT")).close()
                break
            except OSError:
                if attempt == 99 or server.poll() is not None:
                    raise
                time.sleep(0.1)
        yield endpoint
    finally:
        server.terminate()
        server.wait()


class BareFile:
    """The same bytes written over in one file whose pages are in the cache, with fdatasync after every 64 groups."""

    def __init__(self, path: Path, size: int) -> None:
        self._number = os.open(path, os.O_RDWR | os.O_CREAT)
        block = bytes(1 << 20)
        for _ in range(0, size, len(block)):
            os.write(self._number, block)

    def __enter__(self) -> BareFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._number)

    def put(self, payloads: Sequence[Sequence[Any]]) -> None:
        """Write payloads, given as the buffers that each is made of."""
        at = 0
        for start in range(0, len(payloads), 64):
            for buffers in payloads[start : start + 64]:
                at += os.pwritev(self._number, [memoryview(one).cast("B") for one in buffers], at)
            os.fdatasync(self._number)
