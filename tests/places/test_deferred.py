"""Deferred fields: handles take the place of their arrays, and load what was put, wherever the payload is."""

from __future__ import annotations

import asyncio
import pickle
import threading
from typing import Any

import numpy as np
import pytest

from replaybuf import Status, load_into
from replaybuf.errors import InputError, RolloutError
from replaybuf.storage.places.folder import FolderStore
from replaybuf.storage.sql.tasks.handles import ArrayHandle, load_all
from tests.places.arrays import LARGE, Kept, experts, lent, rollout, same
from tests.stores import TASK

ARRAYS = {
    "one byte": np.array([7], np.uint8),
    "half": np.linspace(0, 1, 30_000, dtype=np.float16),
    "nan": np.full(9_000, np.nan, np.float64),
    "big-endian": np.arange(9_000, dtype=">i4"),
    "complex": np.arange(4_000, dtype=np.complex64).reshape(2, 2, -1),
    "bool": np.arange(50_000) % 3 == 0,
    "matrix": np.arange(30_000, dtype=np.int16).reshape(100, 300),
    "part": np.arange(60_000, dtype=np.int32)[::2],
    "no items": np.zeros((0, 7), np.float32),
    "no axes": np.array(1.5, np.float32),
    "text": np.array(["a", "bcd"] * 500),
}


async def test_load_returns_the_array_that_was_put(in_folder: Kept) -> None:
    async with in_folder.opened() as buffer:
        await buffer.put([rollout(**ARRAYS)], TASK)
        _, [lent_rollout] = await lent(buffer, deferred=["extra_fields"])
        for name, array in ARRAYS.items():
            handle = lent_rollout.extra_fields[name]
            assert type(handle) is ArrayHandle
            assert (handle.dtype, handle.shape, handle.nbytes) == (str(array.dtype), array.shape, array.nbytes)
            loaded = handle.load()
            assert same(loaded, np.ascontiguousarray(array).reshape(array.shape) if name == "part" else array), name
            assert loaded.flags.writeable
            assert same(await handle.load_async(), loaded)


async def test_large_and_small_arrays_wherever_the_payloads_are(kept: Kept) -> None:
    nested = {"deep": [{"pixels": experts(5)}, experts(6)], "small": np.arange(3), "lists": [1, [2.5, "three"]]}
    async with kept.opened() as buffer:
        await buffer.put([rollout(**nested), rollout(1)], TASK)
        lease, [lent_rollout] = await lent(buffer, deferred=["routed_experts", "extra_fields"])
        extra_fields = lent_rollout.extra_fields
        assert same(lent_rollout.routed_experts.load(), experts())
        assert same(extra_fields["deep"][0]["pixels"].load(), experts(5))
        assert same(extra_fields["deep"][1].load(), experts(6))
        assert same(extra_fields["small"].load(), np.arange(3))
        assert extra_fields["lists"] == [1, [2.5, "three"]]
        assert lent_rollout.logprobs == [-0.5, -0.25]
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


class Image:
    """A class with a converter, which does something with its array."""

    def __init__(self, pixels: np.ndarray[Any, Any]) -> None:
        self.mean = float(pixels.mean())
        self.pixels = pixels


CONVERTED: dict[Any, Any] = {Image: ("image", lambda image: {"p": image.pixels}, lambda stored: Image(stored["p"]))}


async def test_converters_get_arrays(in_folder: Kept) -> None:
    """They are users' functions, which know no handles: their values are read at once."""
    async with in_folder.opened(converters=CONVERTED) as buffer:
        await buffer.put([rollout(images=[Image(experts(2)), Image(experts(3))], after=experts(4))], TASK)
        async with buffer.lease_batch({TASK: 1}, deferred=["extra_fields"], timeout=0) as lease:
            extra_fields = lease.items[TASK][0].item[0].extra_fields
            assert [image.mean for image in extra_fields["images"]] == [experts(2).mean(), experts(3).mean()]
            assert same(extra_fields["after"].load(), experts(4))


@pytest.mark.torch
async def test_tensors(in_folder: Kept) -> None:
    torch = pytest.importorskip("torch")
    tensors = {
        "bfloat16": torch.arange(30_000).to(torch.bfloat16).reshape(3, -1),
        "int16": torch.arange(30_000, dtype=torch.int16),
        "small": torch.ones(2, 2),
        "conj": torch.arange(9_000).to(torch.complex64).conj(),
    }
    async with in_folder.opened() as buffer:
        await buffer.put([rollout(**tensors)], TASK)
        _, [lent_rollout] = await lent(buffer, deferred=["extra_fields"])
        for name, expected in tensors.items():
            handle = pickle.loads(pickle.dumps(lent_rollout.extra_fields[name]))
            assert (handle.dtype, handle.shape) == (str(expected.dtype).removeprefix("torch."), (*expected.shape,))
            loaded = handle.load()
            assert loaded.dtype == expected.dtype
            assert torch.equal(loaded, expected)
            loaded.resolve_conj().add_(1)


# Which groups and fields


async def test_names_that_are_no_fields(in_file: Kept) -> None:
    async with in_file.opened() as buffer:
        with pytest.raises(InputError, match=r"no field 'x'; it has .*routed_experts"):
            buffer.find({}, deferred=["x"])
        with pytest.raises(InputError, match="deferred must be a list"):
            buffer.lease_batch({TASK: 1}, deferred="routed_experts")
        for name in ("response_ids", "response_mask", "response_model_steps"):
            with pytest.raises(InputError, match=f"{name} is needed to mask.*defer the fields with large tensors"):
                buffer.lease_batch({TASK: 1}, deferred=[name])


async def test_fields_of_dicts(in_folder: Kept) -> None:
    """Any name will do: a rollout that lacks the field has nothing to be deferred."""
    async with in_folder.opened(rollout_type=dict) as buffer:
        await buffer.put([{"status": Status.COMPLETED, "pixels": experts()}, {"status": Status.COMPLETED}], TASK)
        async with buffer.lease_batch({TASK: 1}, deferred=["pixels", "other"], timeout=0) as lease:
            first, second = lease.items[TASK][0].item
            assert same(first["pixels"].load(), experts())
            assert "pixels" not in second


async def test_expired_and_masked_groups(in_folder: Kept) -> None:
    """A refresh masks tokens and expires groups as if nothing were deferred."""
    async with in_folder.opened() as buffer:
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
        assert [(member.status, member.routed_experts) for member in item.item] == [(Status.EXPIRED, None)] * 2


async def test_rollouts_with_handles_are_refused_by_a_put(in_folder: Kept) -> None:
    async with in_folder.opened() as buffer:
        await buffer.put([rollout()], TASK)
        _, [lent_rollout] = await lent(buffer)
        with pytest.raises(RolloutError, match=r"rollouts\[0\]\.routed_experts.*handle.*load_into"):
            await buffer.put([lent_rollout], TASK)
        load_into(lent_rollout)
        await buffer.put([lent_rollout], TASK)


async def test_only_the_wanted_bytes_are_read(in_folder: Kept, reads: list[list[Any]]) -> None:
    def sizes() -> list[int]:
        return [sum(extent.size for extent in extents) for extents in reads]

    async with in_folder.opened() as buffer:
        for number in range(4):
            await buffer.put([rollout(number, pixels=experts(7, 8 * LARGE))], TASK)
        lease, lent_rollouts = await lent(buffer, 4, ["routed_experts", "extra_fields"])
        assert sizes() == []
        await lease.give_back()
        _, lent_rollouts = await lent(buffer, 4, ["extra_fields"])
        assert sum(sizes()) == 4 * experts().nbytes
        reads.clear()
        load_all(lent_rollout.extra_fields["pixels"] for lent_rollout in lent_rollouts[1:3])
        assert sizes() == [2 * experts(0, 8 * LARGE).nbytes]  # in one call


# The synchronous face, and cancellation


async def test_a_cancelled_lease_gives_its_groups_back(kept_apart: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled while the arrays of other fields are being read."""
    started, go_on = threading.Event(), threading.Event()
    original = FolderStore.read

    def slow(store: FolderStore, ranges: Any) -> list[Any]:
        started.set()
        go_on.wait(30)
        return original(store, ranges)

    async with kept_apart.opened() as buffer:
        await buffer.put([rollout(pixels=experts(1))], TASK)
        monkeypatch.setattr(FolderStore, "read", slow)
        leasing = asyncio.ensure_future(lent(buffer, deferred=["extra_fields"]))
        await asyncio.to_thread(started.wait, 30)
        leasing.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await leasing
        monkeypatch.undo()
        _, [lent_rollout] = await lent(buffer)
        assert same(lent_rollout.routed_experts.load(), experts())
