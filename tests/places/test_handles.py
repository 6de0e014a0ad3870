"""Handles of arrays: where they can be loaded, and many at once."""

from __future__ import annotations

import asyncio
import os
import pickle
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict

from replaybuf import LeaseLostError, ReplayBuffer, Status, load_into
from replaybuf.errors import DecodeError, InputError, PayloadStoreError
from replaybuf.storage.sql.statements.past import sweep
from replaybuf.storage.sql.tasks.handles import ArrayHandle, load_all
from tests.places.arrays import PLACES, Kept, experts, kept_at, lent, rollout, same
from tests.scripts import forked, run
from tests.stores import TASK

LOAD = """
    import numpy as np
    from replaybuf.storage.sql.tasks.handles import load_all
    for one in load_all(pickle.loads(bytes.fromhex(url))):
        print(np.asarray(one).tobytes().hex())
"""


def elsewhere(pickled: bytes) -> list[bytes]:
    """What handles load in a process that knows nothing but them."""
    return [bytes.fromhex(line) for line in run(LOAD, pickled.hex()).splitlines()]


async def test_handles_load_in_another_process_without_the_config(
    shared: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was named by a relative path, and the other process is in another folder."""
    if shared.url.startswith("sqlite"):
        monkeypatch.chdir(tmp_path)
        shared.url = "sqlite:///buffer.db"
    async with shared.opened() as buffer:
        await buffer.put([rollout(4, small=np.arange(2))], TASK)
        _, [lent_rollout] = await lent(buffer, deferred=["routed_experts", "extra_fields"])
        pickled = pickle.dumps([lent_rollout.routed_experts, lent_rollout.extra_fields["small"]])
        monkeypatch.chdir("/")
        assert await asyncio.to_thread(elsewhere, pickled) == [experts(4).tobytes(), np.arange(2).tobytes()]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("shared", ["sqlite", "postgresql, folder"], indirect=True)
async def test_a_forked_process_loads_for_itself(shared: Kept) -> None:
    async with shared.opened() as buffer:
        await buffer.put([rollout()], TASK)
        _, [lent_rollout] = await lent(buffer)
        lent_rollout.routed_experts.load()
        pickled = pickle.dumps(lent_rollout.routed_experts)

        def load() -> None:
            assert same(pickle.loads(pickled).load(), experts())

        assert await asyncio.to_thread(lambda: os.waitpid(forked(load), 0)[1]) == 0


async def test_a_handle_outlives_the_buffer_that_it_came_from(shared: Kept) -> None:
    async with shared.opened() as buffer:
        await buffer.put([rollout()], TASK)
        items = [item async for item in buffer.find({}, deferred=["routed_experts"])]
    handle = items[0].item[0].routed_experts
    assert same(handle.load(), experts())
    assert same(await asyncio.to_thread(handle.load), experts())


async def test_handles_of_payloads_in_the_database_carry_their_bytes(in_file: Kept, tmp_path: Path) -> None:
    """Neither the lease, nor the buffer that they came from, nor the file is needed."""
    async with in_file.opened() as buffer:
        await buffer.put([rollout()], TASK)
        lease, [lent_rollout] = await lent(buffer)
        await lease.acknowledge()
    (tmp_path / "buffer.db").unlink()
    handle = lent_rollout.routed_experts
    assert (handle.dtype, handle.shape) == ("int32", experts().shape)
    assert same(handle.load(), experts())
    assert await asyncio.to_thread(elsewhere, pickle.dumps([handle])) == [experts().tobytes()]


async def test_a_place_that_another_host_does_not_reach(in_folder: Kept, tmp_path: Path) -> None:
    async with in_folder.opened() as buffer:
        await buffer.put([rollout()], TASK)
        _, [lent_rollout] = await lent(buffer)
        mounted, unmounted = Path(in_folder.payloads), tmp_path / "unmounted"
        mounted.rename(unmounted)  # noqa: ASYNC240
        with pytest.raises(PayloadStoreError, match=f"{mounted}.*mount it"):
            lent_rollout.routed_experts.load()
        unmounted.rename(mounted)
        assert same(lent_rollout.routed_experts.load(), experts())


# After the lease


async def test_a_handle_after_its_lease_never_gives_wrong_data(
    kept_apart: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the file is there it gives what was put; once the row is swept it says that it is too late."""
    monkeypatch.setattr("replaybuf.storage.places.store.FILE_BYTES", 300_000)
    async with kept_apart.opened() as buffer:
        await buffer.put([rollout(3)], TASK)
        lease, [lent_rollout] = await lent(buffer)
        await lease.acknowledge()
        handle = lent_rollout.routed_experts
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
    """Let what has left be swept, and empty files be deleted, without the time of grace."""
    storage: Any = buffer.storage
    await storage.thread.run(lambda: _sweep(storage))


async def _sweep(storage: Any) -> None:
    await storage.sweeper.stop()  # which would be in the way
    await storage.engine.write(lambda tx: tx.change("UPDATE rb_past SET removed_at = 0.0"))
    await storage.engine.write(lambda tx: sweep(tx, time.time(), 100))
    while await storage.files.maintain(True):  # noqa: ASYNC110
        await asyncio.sleep(0.01)  # an earlier task of the store may be deleting


# Damage


async def test_damage_of_a_deferred_array_is_an_error_of_load_alone(kept_apart: Kept) -> None:
    async with kept_apart.opened() as buffer:
        await buffer.put([rollout(pixels=experts(10**6)), rollout(1)], TASK)
        await turn_bits(buffer, kept_apart, experts(10**6).tobytes()[5000:5016])
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
    """Damage the bytes that are like these, in a file or in the payload's row."""
    turned = bytes(byte ^ 1 for byte in around)
    for path in kept.files():
        content = path.read_bytes()
        if (at := content.find(around)) >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(turned)
            return

    def change(tx: Any) -> None:
        for uid, data in tx.tuples("SELECT uid, data FROM rb_payload"):
            if around in data:
                changed = data.replace(around, turned)
                tx.change("UPDATE rb_payload SET data = :data WHERE uid = :uid", data=changed, uid=uid)

    storage: Any = buffer.storage
    await storage.thread.run(lambda: storage.engine.write(change))


async def test_load_all_keeps_the_order_over_groups_places_and_databases(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    handles: list[ArrayHandle] = []
    async with AsyncExitStack() as stack:
        for place in PLACES[:-1]:
            (tmp_path / place).mkdir()
            buffer = await stack.enter_async_context(kept_at(place, request, tmp_path / place).opened())
            number = len(handles)
            await buffer.put([rollout(number), rollout(number + 1)], TASK)
            await buffer.put([rollout(number + 2)], TASK)
            lease, _ = await lent(buffer, 2)
            handles += [member.routed_experts for item in lease.items[TASK] for member in item.item]
        order = [*range(0, len(handles), 2), *range(1, len(handles), 2), 0]
        loaded = load_all(handles[place] for place in order)
    assert all(same(array, experts(place)) for place, array in zip(order, loaded, strict=True))
    assert loaded[0] is not loaded[-1]


async def test_what_is_no_handle(in_file: Kept) -> None:
    with pytest.raises(InputError, match="must be ArrayHandles, got ndarray"):
        load_all([experts()])  # type: ignore[list-item]
    with pytest.raises(InputError, match="timeout"):
        load_all([], timeout=-1)
    assert load_all([]) == []


async def test_load_into_loads_each_handle_once_and_in_one_request(in_folder: Kept, reads: list[list[Any]]) -> None:
    async with in_folder.opened() as buffer:
        for number in range(5):
            await buffer.put([rollout(number)], TASK)
        lease, members = await lent(buffer, 5)
        members[0].extra_fields["again"] = members[0].routed_experts
        load_into([*lease.items[TASK], members])
        assert [len(extents) for extents in reads] == [5]
        assert members[0].extra_fields["again"] is members[0].routed_experts
        assert all(same(member.routed_experts, experts(number)) for number, member in enumerate(members))


async def test_small_arrays_of_one_field_are_read_together_and_come_apart(
    in_folder: Kept, reads: list[list[Any]]
) -> None:
    group = [rollout(number) for number in range(3)]
    for number, member in enumerate(group):
        member.extra_fields = {"small": np.arange(200 + number)}
    async with in_folder.opened() as buffer:
        await buffer.put(group, TASK)
        lease, _ = await lent(buffer, 1, deferred=("extra_fields", "routed_experts"))
        [item] = lease.items[TASK]
        loaded = load_all([*(member.extra_fields["small"] for member in item.item)] * 2)
    assert [len(extents) for extents in reads] == [1]
    assert all(same(array, np.arange(200 + place % 3)) for place, array in enumerate(loaded))
    assert not any(np.shares_memory(array, other) for array, other in combinations(loaded, 2))


# The classes of rollouts


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


@dataclass
class Holding:
    pixels: Any
    status: Status = Status.COMPLETED
    others: dict[str, Any] = field(default_factory=dict)


DONE = Status.COMPLETED


HOLDERS: dict[str, tuple[type, Callable[[Any, Any], Any], Callable[[Any], list[Any]]]] = {
    "dict": (dict, lambda a, b: {"status": DONE, "pixels": [a, {"b": b}]},
             lambda r: [r["pixels"][0], r["pixels"][1]["b"]]),
    "frozen dataclass": (Data, lambda a, b: Data(DONE, a, (b, "x")), lambda r: [r.pixels, r.more[0]]),
    "named tuple": (Holding, lambda a, b: Holding(Pair(a, [b])), lambda r: [r.pixels.left, r.pixels.right[0]]),
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
async def test_load_into_finds_handles_in_rollouts_of_every_class(in_folder: Kept, name: str) -> None:
    kind, make, arrays = HOLDERS[name]
    fields = ["pixels", "more"] if kind in (dict, Data) else ["pixels"] + ["others"] * (kind is Holding)
    async with in_folder.opened(rollout_type=kind, types=[Data, Model, Pair]) as buffer:
        await buffer.put([make(experts(1), experts(2)), make(experts(3), np.arange(2))], TASK)
        async with buffer.lease_batch({TASK: 1}, deferred=fields, timeout=0) as lease:
            rollouts = lease.items[TASK][0].item
            assert all(type(handle) is ArrayHandle for rollout in rollouts for handle in arrays(rollout))
            assert load_into(lease.items) is lease.items
            handles = [handle for rollout in rollouts for handle in arrays(rollout)]
            expected = [experts(1), experts(2), experts(3), np.arange(2)]
            expected_handles = expected if len(handles) == 4 else expected[::2]
            assert all(map(same, handles, expected_handles))
