"""Buffers in processes that fork."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from replaybuf import AsyncReplayBufferConfig, ReplayBufferConfig, SyncReplayBufferConfig
from replaybuf.errors import InputError
from replaybuf.rules.policies import FIFOPolicy
from tests.scripts import run
from tests.stores import opened

FORK = """
    async def child():
        await fill(buffer, 5, 100)
        assert len(buffer) >= 5
        await buffer.wait_ready({TASK: 5}, timeout=10)
        gc.collect()
        {close}

    buffer = build(url)
    asyncio.run(fill(buffer, 5))
    pid = forked(lambda: asyncio.run(child()), lambda: {exit})
    asyncio.run(fill(buffer, 5, 5))
    assert os.waitpid(pid, 0)[1] == 0
    started = time.monotonic()
    asyncio.run(fill(buffer, 5, 10))
    assert sorted(asyncio.run(take_all(buffer))) == [*range(15), *range(100, 105)]
    assert time.monotonic() - started < 5
    asyncio.run(buffer.close())
"""


@pytest.mark.parametrize(("close", "leave"), [("await buffer.close()", "os._exit(0)"), ("pass", "sys.exit(0)")])
def test_a_fork_uses_the_buffer_while_its_parent_goes_on(shared_url: str, close: str, leave: str) -> None:
    run(FORK.replace("{close}", close).replace("{exit}", leave), shared_url)


IN_MEMORY = """
    async def refused():
        for call in (
            lambda: buffer.put(group(1), TASK),
            lambda: buffer.get(1, TASK),
            lambda: buffer.take_batch({TASK: 1}, timeout=5),
            lambda: buffer.wait_ready({TASK: 1}, timeout=5),
            lambda: buffer.count_where({}),
            lambda: buffer.refresh_staleness(task_stale_thresholds={TASK: 4}, current_train_step=9),
            lambda: buffer.metrics(),
            lambda: buffer.lease_batch({TASK: 1}, timeout=5),
            buffer.__aenter__,
        ):
            try:
                await call()
            except StorageError as error:
                assert "memory of the process that was forked" in str(error), error
            else:
                raise AssertionError(call)
        try:
            len(buffer)
        except StorageError:
            await buffer.close()
            return
        raise AssertionError

    {use}
    assert os.waitpid(forked(lambda: asyncio.run(refused())), 0)[1] == 0
    asyncio.run(fill(buffer, 5, 5))
    assert len(buffer) == {left}
    asyncio.run(buffer.close())
"""


@pytest.mark.parametrize(
    ("url", "use", "left"),
    [("memory://", "asyncio.run(fill(buffer, 5))", 10), ("memory://", "pass", 5), ("", "pass", 5)],
    ids=["used", "unused", "without a url"],
)
def test_a_buffer_in_memory_can_not_follow_a_fork(url: str, use: str, left: int) -> None:
    """Instead of an empty one appearing in its place, or a copy from which nothing comes back."""
    build = "build(url)" if url else "SyncReplayBufferConfig().build()"
    run(IN_MEMORY.replace("{use}", f"buffer = {build}; {use}").replace("{left}", str(left)), url)


def test_a_fork_does_not_keep_the_leases_of_its_parent_alive(shared_url: str) -> None:
    """Its heartbeat is for its own."""
    run(
        """
        async def child():
            async with buffer.lease_batch({TASK: 1}, seconds=0.2) as lease:
                extended = []
                extend = buffer.storage.extend
                async def note(leased, *args):
                    extended.append(leased.token)
                    return await extend(leased, *args)
                buffer.storage.extend = note
                while len(extended) < 3:
                    await asyncio.sleep(0.01)
                assert set(extended) == {lease.token}, (extended, lease)

        async def parent():
            await fill(buffer, 5)
            return await buffer.lease_batch({TASK: 1}, seconds=0.2)

        buffer = build(url)
        lease = asyncio.run(parent())
        assert os.waitpid(forked(lambda: asyncio.run(child())), 0)[1] == 0
        asyncio.run(lease.acknowledge())
        asyncio.run(buffer.close())
        """,
        shared_url,
    )


@pytest.mark.parametrize("whose", ["buffer", "build(url)"])
def test_a_fork_in_the_middle_of_another_threads_transactions_finds_no_locks(shared_url: str, whose: str) -> None:
    """It would seem to SQLite that the child holds those that the parent held."""
    run(
        f"""
        async def go_on():
            while not over.is_set():
                await buffer.put(group(1), TASK)
                await buffer.get(1, TASK)

        over = threading.Event()
        buffer = build(url)
        asyncio.run(fill(buffer, 1))
        thread = threading.Thread(target=lambda: asyncio.run(go_on()))
        thread.start()
        for _ in range(12):
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)
                asyncio.run({whose}.put(group(2), "other"))
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
        over.set()
        thread.join()
        assert asyncio.run(buffer.count("other", "completed")) == 12
        asyncio.run(buffer.close())
        """.replace("signal.alarm", "__import__('signal').alarm"),
        shared_url,
    )


# Configs go to other processes; buffers say that they do not


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
        with pytest.raises(InputError, match="pickle its config"):
            pickle.dumps(buffer)
