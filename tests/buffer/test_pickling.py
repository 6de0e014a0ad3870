"""Configs go to other processes; buffers say that they do not."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from replaybuf import AsyncReplayBufferConfig, FIFOPolicy, ReplayBufError, ReplayBufferConfig, SyncReplayBufferConfig
from tests.scripts import run
from tests.stores import TASK, group, opened


def test_spawned_processes_get_the_config(shared_url: str) -> None:
    run(
        """
        from multiprocessing import get_context
        from tests.buffer.test_pickling import put_from_config
        if __name__ == "__main__":
            config = ReplayBufferConfig(url=url, policy=FIFOPolicy)
            children = [get_context("spawn").Process(target=put_from_config, args=(config, n)) for n in range(2)]
            for child in children: child.start()
            for child in children: child.join()
            assert [child.exitcode for child in children] == [0, 0]
            buffer = config.build()
            assert sorted(asyncio.run(take_all(buffer))) == [0, 1]
            asyncio.run(buffer.close())
        """,
        shared_url,
    )


def put_from_config(config: ReplayBufferConfig, number: int) -> None:
    async def main() -> None:
        async with config.build() as buffer:
            await buffer.put(group(number), TASK)

    asyncio.run(main())


@pytest.mark.parametrize("kind", [ReplayBufferConfig, SyncReplayBufferConfig, AsyncReplayBufferConfig])
@pytest.mark.parametrize("policy", ["fifo", FIFOPolicy])
def test_configs_can_be_pickled(kind: type[ReplayBufferConfig], policy: object) -> None:
    config = kind(url="sqlite:///run.db", policy=policy, rollout_type=dict)  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("used", [False, True])
def test_a_buffer_can_not_be_pickled_and_says_what_can(url: str, used: bool) -> None:
    with opened(url) as buffer:
        if used:
            asyncio.run(buffer.count_where({}))
        with pytest.raises(TypeError, match="pickle its config") as caught:
            pickle.dumps(buffer)
        assert isinstance(caught.value, ReplayBufError)
