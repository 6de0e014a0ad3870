"""ObjectRefs with a real local Ray, and actors that put and take."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from replaybuf import ReplayBuffer, ReplayBufferConfig
from replaybuf.errors import RolloutError
from tests.reference.snapshots import load_snapshot, snapshot_of
from tests.stores import until

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

PIXELS = np.arange(300_000, dtype="f4")  # large enough for Ray's shared memory


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray
    ray.shutdown()


def build(url: str, **options: Any) -> ReplayBuffer[Any]:
    return ReplayBufferConfig(url=url, policy="fifo", rollout_type=dict, **options).build()


def group(value: Any) -> list[dict[str, Any]]:
    return [{"status": "completed", "value": value}]


async def test_objects_come_back_as_new_ones_or_as_values(ray: Any, url: str) -> None:
    ref = ray.put(PIXELS)
    nested = ray.put({"inner": ref})
    async with build(url) as buffer, build("memory://", object_refs="value") as other:
        await buffer.put(group([ref, {"a": (nested,)}]), "math")
        load_snapshot(other, snapshot_of(buffer))
        [[[with_refs]], [[values]]] = [await store.get(1, "math") for store in (buffer, other)]
    first, second = with_refs["value"][0], with_refs["value"][1]["a"][0]
    assert isinstance(first, ray.ObjectRef)
    assert first != ref
    assert np.array_equal(ray.get(first), PIXELS)
    assert np.array_equal(ray.get(ray.get(second)["inner"]), PIXELS)
    assert np.array_equal(values["value"][1]["a"][0]["inner"], PIXELS)


@pytest.mark.parametrize("url", ["memory://"], indirect=True)
async def test_an_object_that_can_not_be_had_says_why(ray: Any, url: str) -> None:
    @ray.remote
    def fail() -> Any:
        raise KeyError("no pixels")

    @ray.remote
    def sleep() -> Any:
        time.sleep(60)

    @ray.remote(num_cpus=0)
    class Owner:
        def make(self) -> Any:
            self.ref = ray.put(PIXELS)
            return [self.ref]

    owner = Owner.remote()
    [orphan] = await asyncio.to_thread(ray.get, owner.make.remote())
    ray.kill(owner)

    async def noticed() -> bool:
        try:
            await asyncio.to_thread(ray.get, orphan, timeout=1)
        except ray.exceptions.OwnerDiedError:
            return True
        except ray.exceptions.GetTimeoutError:
            return False
        return False

    await until(noticed, seconds=60)
    failed = fail.remote()
    await asyncio.to_thread(ray.wait, [failed], timeout=60)
    slow = sleep.remote()
    cases = [
        (failed, "KeyError: 'no pixels'"),
        (orphan, r"OwnerDiedError: "),
        (slow, r"they were not all there after 2 s \(object_ref_timeout\)"),
    ]
    async with build(url, object_ref_timeout=2) as buffer:
        await buffer.put(group(ray.put(1)), "math")
        for ref, cause in cases:
            with pytest.raises(RolloutError, match="the objects of 2 ObjectRefs can't be fetched: " + cause):
                await buffer.put(group([ray.put(2), {"a": ref}]), "math")
        assert len(buffer) == 1
    ray.cancel(slow, force=True)


async def test_objects_are_deleted_when_nobody_needs_them_any_more(ray: Any, url: str) -> None:
    rollouts, kept_ref = group({"a": [ray.put(PIXELS)]}), ray.put(PIXELS)
    key, kept_key = rollouts[0]["value"]["a"][0].hex(), kept_ref.hex()
    counts = ray._private.worker.global_worker.core_worker.get_all_reference_counts
    gc.disable()  # what is left to the garbage collector would hold the object for any time
    try:
        async with build(url) as buffer:
            rollouts.append({"status": "completed", "value": kept_ref})
            await buffer.put(rollouts, "math")
            rollouts.clear()

            async def is_deleted() -> bool:
                return key.encode() not in counts() and bytes.fromhex(key) not in counts()

            await until(is_deleted)
            assert kept_key.encode() in counts() or bytes.fromhex(kept_key) in counts()
            assert np.array_equal(ray.get(kept_ref), PIXELS)
    finally:
        gc.enable()


@pytest.mark.parametrize("url", ["sqlite", "postgresql"], indirect=True)
async def test_actors_put_and_take(ray: Any, url: str) -> None:
    config = ReplayBufferConfig(url=url, policy="fifo", rollout_type=dict)

    @ray.remote(num_cpus=0)
    class Worker:
        def __init__(self, config: Any) -> None:
            self.buffer = config.build()

        async def put(self, number: int) -> None:
            fields = {"status": "completed", "value": ray.put(np.full(300_000, number, "f4"))}
            await self.buffer.put([fields], "math")

        async def take(self) -> list[Any]:
            groups = await self.buffer.get(3, "math", timeout=60)
            return [rollouts[0]["value"] for rollouts in groups]

    workers = [Worker.remote(config) for _ in range(2)]
    taker = Worker.remote(config)
    taking = taker.take.remote()
    await asyncio.to_thread(ray.get, [workers[number % 2].put.remote(number) for number in range(3)])
    refs = await asyncio.to_thread(ray.get, taking)
    for worker in workers:  # the objects that they made are gone with them; those of the taker aren't
        ray.kill(worker)
    numbers = sorted(int(array[0]) for array in await asyncio.to_thread(ray.get, refs))
    assert numbers == [0, 1, 2]
    ray.kill(taker)
