"""Deferred fields: handles take the place of their arrays, and load what was put, wherever the payload is."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import attrs
import msgspec
import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict
from sqlalchemy import select, update

from replaybuf import (
    ArrayHandle,
    LeaseLostError,
    ReplayBuffer,
    ReplayBufferConfig,
    RolloutState,
    Status,
    load_all,
    load_into,
)
from replaybuf.errors import DecodeError, EncodeError, InputError
from replaybuf.segments.folder import FolderStore
from replaybuf.storage.sql.engine.sqlite_dialect import SqliteDialect
from replaybuf.storage.sql.schema.tables import garbage, payload
from replaybuf.storage.sql.statements.upkeep import sweep
from tests.stores import TASK

#: The settings by which payloads are kept somewhere.
PLACES = ["sqlite", "sqlite, folder", "sqlite, objects", "memory", "postgresql", "postgresql, folder"]
APART = [place for place in PLACES if "folder" in place]
LARGE = 40_000  # items


def experts(number: int = 0, size: int = LARGE) -> np.ndarray[Any, Any]:
    return np.arange(number, number + size, dtype=np.int32).reshape(-1, 8)


def rollout(number: int = 0, **extra: Any) -> RolloutState:
    return RolloutState(
        message=[],
        rollout_id=number,
        prompt_ids=[1, 2],
        response_ids=[3, 4],
        response_mask=[1, 1],
        response_model_steps=[1, 8],
        logprobs=[-0.5, -0.25],
        routed_experts=experts(number),
        extra_fields=extra,
        reward=1.0,
        status=Status.COMPLETED,
    )


@dataclass
class Kept:
    """Where the payloads of a test are."""

    url: str
    payloads: str = "database"

    def config(self, **options: Any) -> ReplayBufferConfig[Any]:
        return ReplayBufferConfig(url=self.url, payloads=self.payloads, **({"policy": "fifo"} | options))

    @asynccontextmanager
    async def opened(self, **options: Any) -> AsyncIterator[ReplayBuffer[Any]]:
        async with self.config(**options).build() as buffer:
            yield buffer

    def segments(self) -> list[Path]:
        return sorted(Path(self.payloads, "segments").glob("*.seg"))


def kept_at(place: str, request: pytest.FixtureRequest, folder: Path) -> Kept:
    database, _, apart = place.partition(", ")
    url = {"sqlite": f"sqlite:///{folder}/buffer.db", "memory": "memory://"}.get(database)
    payloads = "database"
    if apart == "folder":
        payloads = str(folder / "payloads")
        Path(payloads).mkdir()
    elif apart:
        payloads = str(request.getfixturevalue("bucket"))
    return Kept(url or str(request.getfixturevalue("lent_database")), payloads)


@pytest.fixture(params=PLACES)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Kept:
    return kept_at(request.param, request, tmp_path)


@pytest.fixture(params=[place for place in PLACES if place != "memory"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Kept:
    """Payloads that other processes can read."""
    return kept_at(request.param, request, tmp_path)


@pytest.fixture(params=[place for place in PLACES if place != "memory" and "objects" not in place])
def on_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Kept:
    """Payloads that a test can damage."""
    return kept_at(request.param, request, tmp_path)


@pytest.fixture(params=APART)
def apart(request: pytest.FixtureRequest, tmp_path: Path) -> Kept:
    return kept_at(request.param, request, tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Kept:
    (tmp_path / "payloads").mkdir()
    return Kept(f"sqlite:///{tmp_path}/buffer.db", str(tmp_path / "payloads"))


@pytest.fixture
def file(tmp_path: Path) -> Kept:
    return Kept(f"sqlite:///{tmp_path}/buffer.db")


async def lent(buffer: ReplayBuffer[Any], count: int = 1, deferred: Any = ("routed_experts",)) -> Any:
    """A lease, and the first rollouts of its groups."""
    lease = await buffer.lease_batch({TASK: count}, deferred=list(deferred), timeout=0)
    return lease, [item.item[0] for item in lease.items[TASK]]


def same(found: Any, expected: np.ndarray[Any, Any]) -> bool:
    return (
        type(found) is np.ndarray
        and (found.dtype, found.shape) == (expected.dtype, expected.shape)
        and found.flags.fnc == expected.flags.fnc
        and bytes(found.tobytes()) == expected.tobytes()
    )


# What load returns

ARRAYS = {
    "one byte": np.array([7], np.uint8),
    "half": np.linspace(0, 1, 30_000, dtype=np.float16),
    "nan": np.full(9_000, np.nan, np.float64),
    "big-endian": np.arange(9_000, dtype=">i4"),
    "complex": np.arange(4_000, dtype=np.complex64).reshape(2, 2, -1),
    "bool": np.arange(50_000) % 3 == 0,
    "columns first": np.asfortranarray(np.arange(30_000, dtype=np.int16).reshape(100, 300)),
    "part": np.arange(60_000, dtype=np.int32)[::2],
    "no items": np.zeros((0, 7), np.float32),
    "no axes": np.array(1.5, np.float32),
    "text": np.array(["a", "bcd"] * 500),
    "times": np.arange(5_000).astype("M8[s]"),
    "records": np.zeros(2_000, [("at", "<i8"), ("weight", "<f4")]),
}


@pytest.mark.parametrize("name", ARRAYS)
async def test_load_returns_the_array_that_was_put(folder: Kept, name: str) -> None:
    array = ARRAYS[name]
    async with folder.opened() as buffer:
        await buffer.put([rollout(only=array)], TASK)
        _, [found] = await lent(buffer, deferred=["extra_fields"])
        handle = found.extra_fields["only"]
        assert type(handle) is ArrayHandle
        assert (handle.dtype, handle.shape, handle.nbytes) == (str(array.dtype), array.shape, array.nbytes)
        loaded = handle.load()
        assert same(loaded, np.ascontiguousarray(array).reshape(array.shape) if name == "part" else array)
        assert loaded.flags.writeable
        assert same(await handle.load_async(), loaded)


async def test_large_and_small_arrays_wherever_the_payloads_are(kept: Kept) -> None:
    nested = {"deep": [{"pixels": experts(5)}, experts(6)], "small": np.arange(3), "lists": [1, [2.5, "three"]]}
    async with kept.opened() as buffer:
        await buffer.put([rollout(**nested), rollout(1)], TASK)
        lease, [found] = await lent(buffer, deferred=["routed_experts", "extra_fields"])
        extra = found.extra_fields
        assert same(found.routed_experts.load(), experts())
        assert same(extra["deep"][0]["pixels"].load(), experts(5))
        assert same(extra["deep"][1].load(), experts(6))
        assert same(extra["small"].load(), np.arange(3))
        assert extra["lists"] == [1, [2.5, "three"]]
        assert found.logprobs == [-0.5, -0.25]
        await lease.acknowledge()


async def test_arrays_of_other_fields_are_read_at_once(kept: Kept) -> None:
    async with kept.opened() as buffer:
        await buffer.put([rollout(pixels=experts(9)), rollout(1, pixels=experts(8))], TASK)
        async with buffer.lease_batch({TASK: 1}, deferred=["extra_fields"], timeout=0) as lease:
            first, second = lease.items[TASK][0].item
            assert same(first.routed_experts, experts())
            assert same(second.routed_experts, experts(1))
            assert same(first.extra_fields["pixels"].load(), experts(9))
            assert same(second.extra_fields["pixels"].load(), experts(8))


async def test_compressed_payloads(kept: Kept) -> None:
    """They can't be read in part, so their handles have the bytes with them."""
    async with kept.opened(compression="zstd") as buffer:
        await buffer.put([rollout(pixels=np.zeros(90_000))], TASK)
        _, [found] = await lent(buffer, deferred=["routed_experts", "extra_fields"])
        assert same(found.routed_experts.load(), experts())
        assert same(pickle.loads(pickle.dumps(found.extra_fields["pixels"])).load(), np.zeros(90_000))


class Image:
    """A class with a converter, which does something with its array."""

    def __init__(self, pixels: np.ndarray[Any, Any]) -> None:
        self.mean = float(pixels.mean())
        self.pixels = pixels


CONVERTED: dict[Any, Any] = {Image: ("image", lambda image: {"p": image.pixels}, lambda stored: Image(stored["p"]))}


async def test_converters_get_arrays(kept: Kept) -> None:
    """They are users' functions, which know no handles: their values are read at once."""
    async with kept.opened(converters=CONVERTED) as buffer:
        await buffer.put([rollout(images=[Image(experts(2)), Image(experts(3))], after=experts(4))], TASK)
        async with buffer.lease_batch({TASK: 1}, deferred=["extra_fields"], timeout=0) as lease:
            extra = lease.items[TASK][0].item[0].extra_fields
            assert [one.mean for one in extra["images"]] == [experts(2).mean(), experts(3).mean()]
            assert same(extra["after"].load(), experts(4))


@pytest.mark.torch
async def test_tensors(kept: Kept) -> None:
    torch = pytest.importorskip("torch")
    tensors = {
        "bfloat16": torch.arange(30_000).to(torch.bfloat16).reshape(3, -1),
        "int16": torch.arange(30_000, dtype=torch.int16),
        "small": torch.ones(2, 2),
        "conj": torch.arange(9_000).to(torch.complex64).conj(),
    }
    async with kept.opened() as buffer:
        await buffer.put([rollout(**tensors)], TASK)
        _, [found] = await lent(buffer, deferred=["extra_fields"])
        for name, expected in tensors.items():
            handle = pickle.loads(pickle.dumps(found.extra_fields[name]))
            assert (handle.dtype, handle.shape) == (str(expected.dtype).removeprefix("torch."), (*expected.shape,))
            loaded = handle.load()
            assert loaded.dtype == expected.dtype
            assert torch.equal(loaded, expected)
            loaded.resolve_conj().add_(1)


async def test_find(kept: Kept) -> None:
    async with kept.opened() as buffer:
        for number in range(3):
            await buffer.put([rollout(number)], TASK)
        found = [item async for item in buffer.find({"task_name": TASK}, deferred=["routed_experts"])]
        loaded = load_all([item.item[0].routed_experts for item in found])
        assert all(same(one, experts(number)) for number, one in enumerate(loaded))


# Which groups and fields


async def test_names_that_are_no_fields(file: Kept) -> None:
    async with file.opened() as buffer:
        with pytest.raises(InputError, match="no field 'routed_expert'; did you mean routed_experts"):
            buffer.lease_batch({TASK: 1}, deferred=["routed_expert"])
        with pytest.raises(InputError, match="no field 'x'; it has "):
            buffer.find({}, deferred=["x"])
        with pytest.raises(InputError, match="deferred must be a list"):
            buffer.lease_batch({TASK: 1}, deferred="routed_experts")
        for name in ("response_ids", "response_mask", "response_model_steps"):
            with pytest.raises(InputError, match=f"{name} is needed to mask.*defer the fields with large tensors"):
                buffer.lease_batch({TASK: 1}, deferred=[name])


async def test_fields_of_dicts(kept: Kept) -> None:
    """Any name will do: a rollout that lacks the field has nothing to be deferred."""
    async with kept.opened(rollout_type=dict) as buffer:
        await buffer.put([{"status": Status.COMPLETED, "pixels": experts()}, {"status": Status.COMPLETED}], TASK)
        async with buffer.lease_batch({TASK: 1}, deferred=["pixels", "other"], timeout=0) as lease:
            first, second = lease.items[TASK][0].item
            assert same(first["pixels"].load(), experts())
            assert "pixels" not in second


async def test_expired_and_masked_groups(kept: Kept) -> None:
    """A refresh masks tokens and expires groups as if nothing were deferred."""
    async with kept.opened() as buffer:
        for task in (TASK, "other"):
            await buffer.put([rollout(), rollout(1)], task)
        await buffer.refresh_staleness(
            task_stale_thresholds={TASK: 50, "other": 1}, task_token_stale_thresholds={TASK: 1}, current_train_step=9
        )
        lease, _ = await lent(buffer)
        _, second = load_into(lease.items[TASK])[0].item
        assert second.response_mask == [0, 1]
        assert same(second.routed_experts, experts(1))
        lease = await buffer.lease_batch({"other": 1}, group_status="expired", deferred=["routed_experts"], timeout=0)
        [item] = lease.items["other"]
        assert [(one.status, one.routed_experts) for one in item.item] == [(Status.EXPIRED, None)] * 2


async def test_rollouts_with_handles_are_refused_by_a_put(kept: Kept) -> None:
    async with kept.opened() as buffer:
        await buffer.put([rollout()], TASK)
        _, [found] = await lent(buffer)
        with pytest.raises(EncodeError, match=r"rollouts\[0\]\.routed_experts.*handle.*load_into"):
            await buffer.put([found], TASK)
        load_into(found)
        await buffer.put([found], TASK)


# Other processes


def load_elsewhere(pickled: bytes, answers: Any) -> None:
    try:
        answers.put([np.asarray(one).tobytes() for one in load_all(pickle.loads(pickled))])
    except Exception as error:
        answers.put(repr(error))


def elsewhere(pickled: bytes, method: str = "spawn") -> Any:
    context: Any = multiprocessing.get_context(method)
    answers = context.Queue()
    process = context.Process(target=load_elsewhere, args=(pickled, answers))
    process.start()
    try:
        return answers.get(timeout=60)
    finally:
        process.join()


async def test_handles_load_in_another_process_without_the_config(
    shared: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was named by a relative path, and the other process is in another folder."""
    if shared.url.startswith("sqlite"):
        monkeypatch.chdir(tmp_path)
        shared.url = "sqlite:///buffer.db"
    async with shared.opened() as buffer:
        await buffer.put([rollout(4, small=np.arange(2))], TASK)
        _, [found] = await lent(buffer, deferred=["routed_experts", "extra_fields"])
        sent = pickle.dumps([found.routed_experts, found.extra_fields["small"]])
        monkeypatch.chdir("/")
        assert await asyncio.to_thread(elsewhere, sent) == [experts(4).tobytes(), np.arange(2).tobytes()]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_a_forked_process_loads_for_itself(shared: Kept) -> None:
    async with shared.opened() as buffer:
        await buffer.put([rollout()], TASK)
        _, [found] = await lent(buffer)
        found.routed_experts.load()
        sent = pickle.dumps([found.routed_experts])
        said = await asyncio.to_thread(elsewhere, sent, "fork")
        if shared.payloads.startswith("s3://"):  # the threads of obstore don't survive a fork
            assert "PayloadStoreError" in said
            assert "'spawn' or 'forkserver'" in said
        else:
            assert said == [experts().tobytes()]


async def test_a_handle_outlives_the_buffer_that_it_came_from(shared: Kept) -> None:
    async with shared.opened() as buffer:
        await buffer.put([rollout()], TASK)
        found = [item async for item in buffer.find({}, deferred=["routed_experts"])]
    assert same(found[0].item[0].routed_experts.load(), experts())


async def test_a_handle_of_a_buffer_in_memory_is_for_its_own_process() -> None:
    async with Kept("memory://").opened() as buffer:
        await buffer.put([rollout()], TASK)
        _, [found] = await lent(buffer)
        said = await asyncio.to_thread(elsewhere, pickle.dumps([found.routed_experts]))
        assert "InputError" in said
        assert "only its own process can read" in said
    with pytest.raises(InputError, match="only its own process can read, as long as it is open"):
        found.routed_experts.load()


async def test_no_password_is_in_a_handle(postgres_database: str) -> None:
    """Another process needs it from its own environment; here the open buffer reads."""
    place = urlsplit(postgres_database)
    url = place._replace(netloc=f"{place.username}:s3cr3t@{place.netloc.rpartition('@')[2]}").geturl()
    async with Kept(url).opened() as buffer:
        await buffer.put([rollout()], TASK)
        _, [found] = await lent(buffer)
        sent = pickle.dumps([found.routed_experts])
        assert b"s3cr3t" not in sent
        assert "s3cr3t" not in repr(found)
        assert b"***" not in sent
        assert same(found.routed_experts.load(), experts())
        assert await asyncio.to_thread(elsewhere, sent) == [experts().tobytes()]


async def test_a_place_that_another_host_does_not_reach(folder: Kept, tmp_path: Path) -> None:
    async with folder.opened() as buffer:
        await buffer.put([rollout()], TASK)
        _, [found] = await lent(buffer)
        there, away = Path(folder.payloads), tmp_path / "unmounted"
        there.rename(away)  # noqa: ASYNC240
        said = await asyncio.to_thread(elsewhere, pickle.dumps([found.routed_experts]))
        away.rename(there)
        assert "PayloadStoreError" in said
        assert folder.payloads in said
        assert "mount it" in said
        assert same(found.routed_experts.load(), experts())


async def test_a_database_that_another_host_does_not_have(file: Kept, tmp_path: Path) -> None:
    async with file.opened() as buffer:
        await buffer.put([rollout()], TASK)
        _, [found] = await lent(buffer)
    (tmp_path / "buffer.db").unlink()
    said = await asyncio.to_thread(elsewhere, pickle.dumps([found.routed_experts]))
    assert "Error" in said
    assert "buffer.db" in said
    assert not (tmp_path / "buffer.db").exists()


# Many at once


async def test_load_all_keeps_the_order_over_groups_places_and_databases(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    found: list[ArrayHandle] = []
    for place in PLACES[:-1]:
        (tmp_path / place).mkdir()
        kept = kept_at(place, request, tmp_path / place)
        buffer = await request.node.stack.enter_async_context(kept.opened())
        number = len(found)
        await buffer.put([rollout(number), rollout(number + 1)], TASK)
        await buffer.put([rollout(number + 2)], TASK)
        lease, _ = await lent(buffer, 2)
        found += [one.routed_experts for item in lease.items[TASK] for one in item.item]
    order = [*range(0, len(found), 2), *range(1, len(found), 2), 0]
    loaded = load_all(found[place] for place in order)
    assert all(same(one, experts(place)) for place, one in zip(order, loaded, strict=True))
    assert loaded[0] is not loaded[-1]


@pytest.fixture(autouse=True)
async def stack(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Buffers that are closed at the end of a test: `request.node.stack`."""
    async with AsyncExitStack() as request.node.stack:
        yield


async def test_what_is_no_handle(file: Kept) -> None:
    with pytest.raises(InputError, match="must be ArrayHandles, got ndarray"):
        load_all([experts()])  # type: ignore[list-item]
    with pytest.raises(InputError, match="timeout"):
        load_all([], timeout=-1)
    assert load_all([]) == []


async def test_only_the_wanted_bytes_are_read(folder: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def counting(store: FolderStore, ranges: Any, timeout: float) -> list[Any]:
        read.append(sum(one.size for one in ranges))
        return original(store, ranges, timeout)

    original = FolderStore.read
    async with folder.opened() as buffer:
        for number in range(4):
            await buffer.put([rollout(number, pixels=experts(7, 8 * LARGE))], TASK)
        monkeypatch.setattr(FolderStore, "read", counting)
        lease, found = await lent(buffer, 4, ["routed_experts", "extra_fields"])
        assert sum(read) == 0
        await lease.give_back()
        _, found = await lent(buffer, 4, ["extra_fields"])
        assert sum(read) == 4 * experts().nbytes
        read.clear()
        load_all(one.extra_fields["pixels"] for one in found[1:3])
        assert read == [2 * experts(0, 8 * LARGE).nbytes]  # in one call


async def test_only_the_wanted_bytes_are_read_from_the_database(file: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def counting(dialect: Any, tx: Any, ranges: Any) -> list[bytes | None]:
        found = original(dialect, tx, ranges)
        read.extend(len(part or b"") for part in found)
        return found

    original = SqliteDialect.read_ranges
    async with file.opened() as buffer:
        await buffer.put([rollout(pixels=experts(7, 8 * LARGE))], TASK)
        monkeypatch.setattr(SqliteDialect, "read_ranges", counting)
        _, [found] = await lent(buffer, deferred=["routed_experts", "extra_fields"])
        assert sum(read) <= 64 << 10
        read.clear()
        found.routed_experts.load()
        assert read == [experts().nbytes]


# After the lease


async def test_a_handle_after_its_lease_never_gives_wrong_data(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the space wasn't reused it gives what was put; once the row is swept it says that it is too late."""
    monkeypatch.setattr("replaybuf.storage.sql.tasks.open_segments.SEGMENT_BYTES", 300_000)
    async with kept.opened() as buffer:
        await buffer.put([rollout(3)], TASK)
        lease, [found] = await lent(buffer)
        await lease.acknowledge()
        handle = found.routed_experts
        for number in range(20):
            try:
                assert same(handle.load(), experts(3))
            except LeaseLostError:
                break
            await sweep_all(buffer)
            await buffer.put([rollout(number + 100)], TASK)
            await buffer.get(1, TASK)
        with pytest.raises(LeaseLostError, match="Load before the lease is acknowledged"):
            handle.load()


async def sweep_all(buffer: ReplayBuffer[Any]) -> None:
    """Let what has left be swept, and empty segments be written over, without the time of grace."""
    storage: Any = buffer.storage
    await storage.thread.run(lambda: _sweep(storage))


async def _sweep(storage: Any) -> None:

    def forget(tx: Any) -> None:
        tx.execute(update(garbage).values(removed_at=0.0))

    await storage.sweeper.stop()  # which would be in the way
    await storage.engine.write(forget, fenced=False)
    await storage.engine.write(lambda tx: sweep(tx, time.time(), 100), fenced=False)
    while await storage.encoding.tend():
        pass


@pytest.mark.parametrize("size", [LARGE, LARGE // 2, 3 * LARGE])
async def test_a_handle_into_a_segment_that_was_written_over(
    folder: Kept, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Whatever is at its place now: another payload's frame, or the middle of one."""
    monkeypatch.setattr("replaybuf.storage.sql.tasks.open_segments.SEGMENT_BYTES", 300_000)
    async with folder.opened() as buffer:
        for number in range(2):
            await buffer.put([rollout(number)], TASK)
        lease, found = await lent(buffer, 2)
        old = [one.routed_experts for one in found]
        await lease.acknowledge()
        before = {file.name: file.stat().st_ino for file in folder.segments()}
        lost = 0
        for number in range(12):
            await buffer.put([rollout(0).model_copy(update={"routed_experts": experts(50 + number, size)})], TASK)
            await buffer.get(1, TASK)
            await sweep_all(buffer)
            lost = 0
            for place, handle in enumerate(old):
                try:
                    assert same(handle.load(), experts(place))
                except LeaseLostError:
                    lost += 1
        assert lost
        assert {file.name: file.stat().st_ino for file in folder.segments()}.items() & before.items()


# Damage


async def test_damage_of_a_deferred_array_is_an_error_of_load_alone(on_disk: Kept) -> None:
    async with on_disk.opened() as buffer:
        await buffer.put([rollout(pixels=experts(10**6)), rollout(1)], TASK)
        await turn_bits(buffer, on_disk, experts(10**6).tobytes()[5000:5016])
        lease, _ = await lent(buffer, deferred=["routed_experts", "extra_fields"])
        first, second = lease.items[TASK][0].item
        assert same(first.routed_experts.load(), experts())
        assert same(second.routed_experts.load(), experts(1))
        with pytest.raises(DecodeError, match="its checksum doesn't match"):
            first.extra_fields["pixels"].load()
        with pytest.raises(DecodeError):
            load_into(lease.items)
        assert type(first.routed_experts) is ArrayHandle  # nothing was changed


async def test_damage_elsewhere_sets_the_group_aside(on_disk: Kept) -> None:
    async with on_disk.opened() as buffer:
        await buffer.put([rollout(pixels=experts(10**6))], TASK)
        await buffer.put([rollout(2, pixels=experts(11))], TASK)
        await turn_bits(buffer, on_disk, experts(10**6).tobytes()[5000:5016])
        lease = await buffer.lease_batch({TASK: 1}, deferred=["routed_experts"], timeout=0)
        assert [item.item[0].rollout_id for item in lease.items[TASK]] == [2]
        failed = [item async for item in buffer.find({"status": "failed"}, deferred=["routed_experts"])]
        assert len(failed) == 1
        assert "checksum" in (failed[0].error or "")


async def turn_bits(buffer: ReplayBuffer[Any], kept: Kept, around: bytes) -> None:
    """Damage the bytes that are like these, in a segment or in the payload's row."""
    turned = bytes(one ^ 1 for one in around)
    for path in kept.segments():
        content = path.read_bytes()
        if (at := content.find(around)) >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(turned)
            return

    def change(tx: Any) -> None:
        for row in tx.execute(select(payload.c.uid, payload.c.data)).all():
            data = bytes(row.data)
            if around in data:
                changed = data.replace(around, turned)
                tx.execute(update(payload).where(payload.c.uid == row.uid).values(data=changed))

    storage: Any = buffer.storage
    await storage.thread.run(lambda: storage.engine.write(change, fenced=False))


# The whole in place of handles


class Model(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True, frozen=True, extra="allow")
    status: Status = Status.COMPLETED
    pixels: Any = None


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True, slots=True)
class Data:
    status: Status
    pixels: Any
    more: tuple[Any, ...] = ()


@attrs.frozen
class Attrs:
    status: Status
    pixels: Any


class Struct(msgspec.Struct, frozen=True):
    status: Status
    pixels: Any


@dataclass
class Holding:
    pixels: Any
    status: Status = Status.COMPLETED
    others: dict[str, Any] = field(default_factory=dict)


DONE = Status.COMPLETED
HOLDERS: dict[str, tuple[type, Callable[[Any, Any], Any], Callable[[Any], list[Any]]]] = {
    "dict": (dict, lambda a, b: {"status": DONE, "pixels": [a, {"b": b}]},
             lambda r: [r["pixels"][0], r["pixels"][1]["b"]]),
    "model": (Model, lambda a, b: Model(pixels=a, more={"b": (b, 1)}), lambda r: [r.pixels, r.more["b"][0]]),
    "frozen dataclass": (Data, lambda a, b: Data(DONE, a, (b, "x")), lambda r: [r.pixels, r.more[0]]),
    "attrs": (Attrs, lambda a, b: Attrs(DONE, [a, b]), lambda r: r.pixels),
    "struct": (Struct, lambda a, b: Struct(DONE, [a, b]), lambda r: r.pixels),
    "frozen struct, at the top": (Struct, lambda a, b: Struct(DONE, a), lambda r: [r.pixels]),
    "named tuple": (Holding, lambda a, b: Holding(Pair(a, deque([b]))), lambda r: [r.pixels.left, r.pixels.right[0]]),
    "objects": (Holding, lambda a, b: Holding(objects(a, b)), lambda r: [*r.pixels]),
    "nested": (Holding, lambda a, b: Holding([Data(DONE, a)], others={"m": Model(pixels=b)}),
               lambda r: [r.pixels[0].pixels, r.others["m"].pixels]),
}  # fmt: skip


def objects(*items: Any) -> np.ndarray[Any, Any]:
    array = np.empty(len(items), object)
    for place, item in enumerate(items):
        array[place] = item
    return array


@pytest.mark.parametrize("name", HOLDERS)
async def test_load_into_finds_handles_in_rollouts_of_every_class(folder: Kept, name: str) -> None:
    kind, make, arrays = HOLDERS[name]
    fields = ["pixels", "more"] if kind in (dict, Model, Data) else ["pixels"] + ["others"] * (kind is Holding)
    async with folder.opened(rollout_type=kind, types=[Data, Model, Pair]) as buffer:
        await buffer.put([make(experts(1), experts(2)), make(experts(3), np.arange(2))], TASK)
        async with buffer.lease_batch({TASK: 1}, deferred=fields, timeout=0) as lease:
            rollouts = lease.items[TASK][0].item
            assert all(type(one) is ArrayHandle for rollout in rollouts for one in arrays(rollout))
            assert load_into(lease.items) is lease.items
            found = [one for rollout in rollouts for one in arrays(rollout)]
            expected = [experts(1), experts(2), experts(3), np.arange(2)]
            wanted = expected if len(found) == 4 else expected[::2]
            assert all(map(same, found, wanted))


async def test_load_into_loads_each_handle_once_and_in_one_request(
    folder: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with folder.opened() as buffer:
        for number in range(5):
            await buffer.put([rollout(number)], TASK)
        lease, found = await lent(buffer, 5)
        calls: list[int] = []
        original = FolderStore.read
        monkeypatch.setattr(
            FolderStore, "read", lambda store, ranges, t: (calls.append(len(ranges)), original(store, ranges, t))[1]
        )
        found[0].extra_fields["again"] = found[0].routed_experts
        load_into([*lease.items[TASK], found])
        assert calls == [5]
        assert found[0].extra_fields["again"] is found[0].routed_experts
        assert all(same(one.routed_experts, experts(number)) for number, one in enumerate(found))


# The synchronous face, and cancellation


def test_the_synchronous_face(kept: Kept) -> None:
    with kept.config().build_sync() as buffer:
        buffer.put([rollout(2)], TASK)
        with buffer.lease_batch({TASK: 1}, deferred=["routed_experts"], timeout=0) as lease:
            [item] = load_into(lease.items[TASK])
            assert same(item.item[0].routed_experts, experts(2))
        buffer.put([rollout(3)], TASK)
        [item] = buffer.find({}, deferred=["routed_experts"])
        assert same(item.item[0].routed_experts.load(), experts(3))


async def test_a_cancelled_lease_gives_its_groups_back(apart: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled while the arrays of other fields are being read."""
    begun, go_on = threading.Event(), threading.Event()
    original = FolderStore.read

    def slow(store: FolderStore, ranges: Any, timeout: float) -> list[Any]:
        begun.set()
        go_on.wait(30)
        return original(store, ranges, timeout)

    async with apart.opened() as buffer:
        await buffer.put([rollout(pixels=experts(1))], TASK)
        monkeypatch.setattr(FolderStore, "read", slow)
        leasing = asyncio.ensure_future(lent(buffer, deferred=["extra_fields"]))
        await asyncio.to_thread(begun.wait, 30)
        leasing.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await leasing
        monkeypatch.undo()
        _, [found] = await lent(buffer)
        assert same(found.routed_experts.load(), experts())
