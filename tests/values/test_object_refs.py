"""Ray ObjectRefs on their way through a buffer, with a fake of Ray in this process."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict

from replaybuf import ReplayBuffer, ReplayBufferConfig, Status, load_into
from replaybuf.errors import DecodeError, RolloutError
from replaybuf.values.codec import value_types as ext
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.rollout_type import RolloutType
from tests.codec.values import DICTS, MARK, hostile_field
from tests.produce.conftest import ledger_of
from tests.reference.snapshots import load_snapshot, snapshot_of
from tests.stores import until
from tests.values.fake_ray import FakeRay, OwnerDiedError


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


class Sample(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    status: Status = Status.COMPLETED
    pixels: Any = None
    inner: Sample | None = None


def build(url: str, **options: Any) -> ReplayBuffer[Any]:
    return ReplayBufferConfig(url=url, policy="fifo", rollout_type=Sample, **options).build()


async def test_objects_are_stored_by_value_and_come_back_as_new_ones(ray: FakeRay, url: str) -> None:
    refs = [ray.put(bytes([number])) for number in range(3)]
    sample = Sample(pixels={"a": [refs[0], (refs[1], refs[0])]}, inner=Sample(pixels=refs[2]))
    async with build(url) as buffer:
        await buffer.put([sample], "math")
        assert ray.gets == [3]
        assert threading.get_ident() not in ray.threads
        [[restored]] = await buffer.get(1, "math")
    new_refs = [restored.pixels["a"][0], *restored.pixels["a"][1], restored.inner.pixels]
    assert [ray.get(ref) for ref in new_refs] == [b"\0", b"\1", b"\0", b"\2"]
    assert not {*new_refs} & {*refs}
    assert sample.pixels["a"][0] is refs[0]


async def test_an_export_has_the_values_of_objects(ray: FakeRay, url: str, tmp_path: Path) -> None:
    async with build(url) as buffer:
        await buffer.put([Sample(pixels=[ray.put({"deep": 3})])], "math")
        await buffer.export(tmp_path / "out.jsonl")
    assert '"deep":3' in (tmp_path / "out.jsonl").read_text().replace(" ", "")


async def test_objects_in_deferred_fields_come_back_as_handles(ray: FakeRay, url: str) -> None:
    """Which do what ObjectRefs do: nothing is read or put into Ray."""
    array = np.arange(30_000)
    sample = Sample(pixels=[ray.put(array), ray.put({"deep": array})], inner=Sample(pixels=ray.put(b"x")))
    async with build(url) as buffer:
        await buffer.put([sample], "math")
        monkeyed, ray.put = ray.put, None  # type: ignore[method-assign, assignment]
        async with buffer.lease_batch({"math": 1}, deferred=["pixels", "inner"], timeout=0) as lease:
            [loaded] = load_into(lease.items["math"])[0].item
        ray.put = monkeyed  # type: ignore[method-assign]
    assert loaded.inner.pixels == b"x"
    assert all(pixels.tobytes() == array.tobytes() for pixels in (loaded.pixels[0], loaded.pixels[1]["deep"]))


async def test_objects_may_come_back_as_values(ray: FakeRay, url: str) -> None:
    inside = ray.put({"b": b"x"})
    async with build(url, object_refs="value") as buffer:
        await buffer.put([Sample(pixels=[1, ray.put({"a": inside})])], "math")
        [[restored]] = await buffer.get(1, "math")
    assert restored.pixels == [1, {"a": {"b": b"x"}}]
    assert ray.gets == [1, 1]  # what an object holds is known when it is there


async def test_a_refresh_and_a_copy_touch_no_object(ray: FakeRay, url: str) -> None:
    async with build(url) as buffer, build("memory://") as other:
        await buffer.put([Sample(pixels=ray.put(b"x"))], "math")
        object_count = len(ray.objects)
        await buffer.refresh_staleness(task_stale_thresholds={"math": None}, current_train_step=8)
        load_snapshot(other, snapshot_of(buffer))
        assert (len(ray.objects), ray.gets) == (object_count, [1])
        [[restored]] = await other.get(1, "math")
        assert ray.get(restored.pixels) == b"x"


async def test_other_puts_go_on_while_one_waits_for_an_object(ray: FakeRay, url: str) -> None:
    ray.ready.clear()
    async with build(url) as buffer:
        waiting = asyncio.create_task(buffer.put([Sample(pixels=ray.put(b"x"))], "math"))
        await until(lambda: bool(ray.gets))
        await buffer.put([Sample()], "math")
        assert len(buffer) == 1
        ray.ready.set()
        await waiting
        assert len(buffer) == 2


async def test_a_put_that_is_cancelled_while_it_waits_stores_nothing(ray: FakeRay, url: str) -> None:
    ray.ready.clear()
    async with build(url) as buffer:
        waiting = asyncio.create_task(buffer.put([Sample(pixels=ray.put(b"x"))], "math"))
        await until(lambda: bool(ray.gets))
        waiting.cancel()
        ray.ready.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert len(buffer) == 0


async def test_an_object_that_can_not_be_had_fails_its_put_alone(ray: FakeRay, url: str) -> None:
    lost_ref = ray.put(OwnerDiedError())
    samples = [Sample(pixels=[ray.put(b"x")]), Sample(pixels={"a": [ray.put(b"y"), lost_ref]}), Sample()]
    async with build(url) as buffer:
        puts = [buffer.put([sample], "math") for sample in samples]
        outcomes = await asyncio.gather(*puts, return_exceptions=True)
        assert [isinstance(outcome, RolloutError) for outcome in outcomes] == [False, True, False]
        with pytest.raises(RolloutError, match=r"the objects of 2 ObjectRefs can't be fetched: OwnerDiedError"):
            raise outcomes[1]  # type: ignore[misc]
        assert len(buffer) == 2


async def test_the_wait_for_objects_is_bounded(ray: FakeRay) -> None:
    ray.ready.clear()
    async with build("memory://", object_ref_timeout=0.05) as buffer:
        with pytest.raises(RolloutError, match=r"can't be fetched: they were not all there after 0\.05 s"):
            await buffer.put([Sample(pixels=ray.put(b"x"))], "math")


async def test_nothing_holds_an_object_after_its_put(ray: FakeRay, url: str) -> None:
    refs = [ray.put(b"x"), ray.put(b"y")]
    rollouts, watched = [Sample(pixels=refs[0]), Sample(pixels=[refs[1]])], [weakref.ref(ref) for ref in refs]
    del refs
    async with build(url) as buffer:
        gc.disable()  # which may let them go at any time, or much later
        try:
            await buffer.put(rollouts, "math")
            rollouts.clear()
            await until(lambda: all(ref() is None for ref in watched), 2)
        finally:
            gc.enable()


async def test_prompts_of_a_ledger_may_hold_objects(ray: FakeRay) -> None:
    rows = [{"status": "init", "pixels": ray.put(bytes([number]))} for number in range(2)]
    async with ReplayBufferConfig(url="memory://", rollout_type=dict).build() as buffer:
        prompts = await ledger_of(buffer, rows, "math", make_group=lambda row, _: [row]).draw(2)
        assert [ray.get(prompt.group[0]["pixels"]) for prompt in prompts] == [b"\0", b"\1"]
        assert ray.gets == [1, 1]


async def test_without_ray_a_group_is_set_aside_until_it_is_there(ray: FakeRay, url: str) -> None:
    async with build(url) as buffer:
        for pixels in (1, ray.put(b"x"), 2):
            await buffer.put([Sample(pixels=pixels)], "math")
        ray.running = False
        assert [rollouts[0].pixels for rollouts in await buffer.get(9, "math")] == [1, 2]
        [failed] = [item async for item in buffer.find({})]
        assert failed.status == "failed"
        assert "Ray isn't running in this process: call ray.init() before, or" in str(failed.error)
        ray.running = True
        await buffer.update({"status": "failed"}, status="completed")
        [[restored]] = await buffer.get(9, "math")
        assert ray.get(restored.pixels) == b"x"


async def test_what_an_object_holds_is_refused_with_its_place(ray: FakeRay) -> None:
    async with build("memory://") as buffer:
        with pytest.raises(RolloutError, match=r"rollouts\[0\]\.pixels: a value of type object can't be"):
            await buffer.put([Sample(pixels=ray.put([1, object()]))], "math")
        ray.running = False
        with pytest.raises(RolloutError, match=r"can't be fetched: Ray isn't running in this process"):
            await buffer.put([Sample(pixels=ray.put(1))], "math")


def test_ray_is_not_imported_for_reading() -> None:
    with pytest.raises(DecodeError, match=r"it holds a Ray ObjectRef, and Ray isn't running in this process"):
        DICTS.decode(hostile_field({MARK[ext.OBJECT_REF]: 1}))
    values = Codec(RolloutType(dict), object_refs="value")
    assert values.decode(hostile_field({MARK[ext.OBJECT_REF]: 1})) == [{"field": 1}]
