"""Waits that take long say in the log what they are for."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from replaybuf import FullError, NotReadyError, ReplayBuffer, RolloutState, Status
from replaybuf.buffer import wait_reports, waits
from replaybuf.storage.sql.statements.put import put_groups
from replaybuf.storage.values import NewGroup
from tests.produce.conftest import ledger_of
from tests.stores import TASK, build, fill, group, until

WAITS: dict[str, Callable[[ReplayBuffer], Awaitable[object]]] = {
    "take": lambda buffer: buffer.take_batch({TASK: 3}, timeout=600),
    "lease": lambda buffer: buffer.lease_batch({TASK: 3}, timeout=600).__aenter__(),
}


def told(caplog: pytest.LogCaptureFixture, logger: str = "replaybuf.waits") -> list[str]:
    """Return the warnings of a logger: by default, the reports of waits."""
    records = [record for record in caplog.records if record.name == logger]
    assert {record.levelno for record in records} <= {logging.WARNING}
    return [record.getMessage() for record in records]


@pytest.mark.parametrize("wait", WAITS)
async def test_a_waiting_trainer_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wait: str
) -> None:
    """Every so often, with what there is at that moment."""
    monkeypatch.setattr(wait_reports, "REPORT_SECONDS", 0.1)
    async with build("memory://") as buffer:
        await buffer.put(group(1), TASK)
        waiting = asyncio.ensure_future(WAITS[wait](buffer))
        await until(lambda: bool(told(caplog)), 60)
        await buffer.put(group(2), TASK)
        await until(lambda: "2 completed groups there, 3 needed" in told(caplog)[-1], 60)
        waiting.cancel()
        await asyncio.wait([waiting])
    first, *_ = told(caplog)
    assert re.match(rf"waiting for groups for \d s: Too little is ready for {TASK} \(1 of 3\): ", first)
    assert f"; task {TASK}: 1 completed group there, 3 needed" in first


async def test_a_put_that_waits_for_room_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of many that wait in line, only the first does."""
    monkeypatch.setattr(wait_reports, "REPORT_SECONDS", 0.1)
    async with build("memory://", capacity=1, on_full="block") as buffer:
        await buffer.put(group(1), TASK)
        puts = [buffer.put(group(number), TASK, timeout=0.35) for number in range(5)]
        assert all(isinstance(end, FullError) for end in await asyncio.gather(*puts, return_exceptions=True))
    logs = told(caplog)
    assert 1 <= len(logs) <= 4
    assert all("1 completed group is buffered, and the capacity is 1; nobody has drawn any yet" in log for log in logs)


async def test_a_wait_that_a_dataset_ends_is_over(shared_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though another task goes on, but not while a group may still come. The error names the task, and why."""
    assert wait_reports.REASON_SECONDS == 10
    for name in ("SHOW_SECONDS", "REASON_SECONDS"):
        monkeypatch.setattr(wait_reports, name, 0.2)
    async with build(shared_url) as buffer, build(shared_url) as trainer:
        ledger = ledger_of(buffer, [group(number) for number in range(3)], TASK)
        first, second, third = await ledger.draw(9)
        await first.finish(group(1))
        assert await ledger.draw() == []
        waiting = asyncio.create_task(trainer.take_batch({TASK: 4, "code": 1}, timeout=600))
        enough = asyncio.create_task(trainer.take_batch({TASK: 1}, timeout=600))
        assert (await enough)[1] == {TASK: 1}
        await second.finish(group(2))
        await _put_until(buffer, [asyncio.create_task(asyncio.sleep(1))])
        assert not waiting.done()
        await third.finish(group(3))
        await _put_until(buffer, [waiting])
        with pytest.raises(NotReadyError, match=f"for {TASK} .*no prompt.* is left to draw") as raised:
            await waiting
        assert (raised.value.diagnosis.task_name, raised.value.diagnosis.final) == (TASK, True)
        assert await buffer.count(TASK, Status.COMPLETED) == 2


async def _put_until(buffer: ReplayBuffer, tasks: list[asyncio.Task[Any]]) -> None:
    """Put groups of another task until these have ended."""
    async with asyncio.timeout(60):
        while (await asyncio.wait(tasks, timeout=0.1))[1]:
            await buffer.put(group(9), "code")


async def test_finished_rollouts_whose_status_was_never_set_are_completed(shared_url: str) -> None:
    """Not those that lack a response or a reward."""
    async with build(shared_url) as buffer:
        for fields in ({"response": "4", "reward": 1.0}, {"response": "4"}, {"reward": 1.0}):
            await buffer.put([RolloutState(message=[], **fields)], TASK)
        assert await buffer.count(TASK, Status.INIT) == 2
        [[rollout]] = await buffer.get(3, TASK)
    assert (rollout.reward, rollout.status) == (1.0, Status.COMPLETED)


def completed(**fields: Any) -> RolloutState:
    return RolloutState(message=[], response="4", status=Status.COMPLETED, **fields)


def generated(**fields: Any) -> RolloutState:
    return RolloutState(message=[], response="4", **fields)


@pytest.mark.parametrize(
    ("rollout", "options", "said"),
    [
        (completed(response_ids=[1, 2, 3], logprobs=[-0.5]), {}, "3 response_ids, 1 logprobs in rollouts[0]"),
        (completed(response_ids=[1, 2], response_mask=[1] * 4), {}, "2 response_ids, 4 response_mask in"),
        (completed(response_ids=[1], response_model_steps=[2, 3]), {}, "1 response_ids, 2 response_model_steps"),
        (
            completed(),
            {"current_train_step": 9, "stale_threshold": 4},
            "no response_model_steps, so its staleness is",
        ),
        (
            generated(reward=1.0, status=Status.INIT),
            {},
            "has responses and rewards, but its status is init: draws take",
        ),
    ],
)
async def test_a_put_that_is_probably_a_mistake_warns_once(
    caplog: pytest.LogCaptureFixture, rollout: RolloutState, options: dict[str, Any], said: str
) -> None:
    """Not of prompts, nor where somebody has said the status, nor of a ledger that keeps what is unfinished."""
    async with build("memory://") as buffer:
        whole = {"response_ids": [1], "logprobs": [-0.5], "response_mask": [1], "response_model_steps": [5]}
        await buffer.put([completed(**whole)], TASK, current_train_step=9, stale_threshold=4)
        await buffer.put([completed(response_ids=[1])], TASK, current_train_step=9, model_step=9)
        for unfinished in (RolloutState(message=[]), generated(status=Status.INIT)):
            await buffer.put([unfinished], TASK)
        for given in (generated(), generated(reward=1.0)):
            await buffer.put([given], TASK, status=Status.INIT)
        [prompt, *_] = await ledger_of(buffer, [group(3)], TASK).draw(2)
        await prompt.save(group(1, status=Status.INIT))
        assert told(caplog, "replaybuf.puts") == []
        for _ in range(2):
            await buffer.put([rollout.model_copy()], TASK, **options)
        [line] = told(caplog, "replaybuf.puts")
    assert line.startswith(f"a group of task {TASK} has ")
    assert said in line


async def test_the_timeout_of_a_put_includes_its_first_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may itself wait, for a lock or a connection: there is one deadline."""
    ahead = [0.0]
    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0], time=time.time))
    async with build("memory://", capacity=1, on_full="block") as buffer:
        await buffer.put(group(0), TASK)
        original_put = buffer.storage.put

        async def slow(new: NewGroup) -> int:
            ahead[0] += 100  # seconds
            return await original_put(new)

        monkeypatch.setattr(buffer.storage, "put", slow)
        async with asyncio.timeout(30):
            with pytest.raises(FullError, match="after 99 s"):
                await buffer.put(group(1), TASK, timeout=99)


async def test_a_put_without_room_tries_again_only_after_a_change(
    shared_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that replaces groups, too, which is tried though there is no room."""
    async with build(shared_url, capacity=1, on_full="block") as buffer:
        [prompt] = await ledger_of(buffer, [group(1)], TASK).draw()
        await buffer.put(group(2), TASK)
        write = Mock(wraps=buffer.storage.engine.write)
        monkeypatch.setattr(buffer.storage.engine, "write", write)
        finishing = asyncio.create_task(prompt.finish(group(3)))
        await asyncio.sleep(0.5)
        attempts = [call for call in write.call_args_list if getattr(call.args[0], "func", None) is put_groups]
        assert len(attempts) <= 5
        assert len(await buffer.get(1, TASK)) == 1
        await asyncio.wait_for(finishing, 60)


async def test_refused_puts_and_renewed_leases_wake_nobody(shared_url: str) -> None:
    """Since nothing became available."""
    async with build(shared_url, capacity=2, on_full="reject") as buffer:
        await fill(buffer, 2)
        lease = await buffer.lease_batch({TASK: 1}, heartbeat=False)
        await buffer.put(group(3), TASK)
        version = buffer.storage.version()
        await lease.extend()
        with pytest.raises(FullError):
            await buffer.put(group(4), TASK)
        assert buffer.storage.version() == version
