"""The name of who puts and draws: of a block, of the config, or of the process."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from replaybuf import ConfigError, ReplayBufferConfig
from replaybuf.common.worker_name import worker_name, working_as
from replaybuf.errors import InputError


def test_without_any_it_is_that_of_the_process() -> None:
    assert worker_name() == f"{socket.gethostname()}:{os.getpid()}"


def test_that_of_the_block_comes_before_that_of_the_config() -> None:
    buffer = ReplayBufferConfig(url="memory://", worker="trainer").build()
    assert buffer.worker == "trainer"
    with working_as("rollout-7"):
        assert buffer.worker == "rollout-7"
        with working_as(None):
            assert buffer.worker == "rollout-7"
    assert buffer.worker == "trainer"


def test_each_task_has_its_own() -> None:
    async def work(name: str) -> str:
        with working_as(name):
            await asyncio.sleep(0)
            return worker_name()

    async def both() -> list[str]:
        return await asyncio.gather(work("a"), work("b"))

    assert asyncio.run(both()) == ["a", "b"]


def test_a_forked_process_has_its_own() -> None:
    ours, (reading, writing) = worker_name(), os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, worker_name().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 1000).decode() == ours.replace(str(os.getpid()), str(child))
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("name", ["", "a\0b", "\ud800", "x" * 201])
def test_it_is_one_that_databases_can_hold(name: str) -> None:
    with pytest.raises(InputError, match="worker"), working_as(name):
        pass
    with pytest.raises(ConfigError, match="worker"):
        ReplayBufferConfig(url="memory://", worker=name).build()
