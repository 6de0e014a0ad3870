"""Operations that are killed at each of their fail points: how a database is prepared, and what is done to it."""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Container, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from replaybuf import Lease, Prompt, ReplayBuffer, Sampler, Status
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.leases import end_leases
from tests.faults.copies import transact
from tests.faults.failpoints import SCHEMAS, FailPoints
from tests.faults.processes import Ledger
from tests.produce.conftest import ledger_of
from tests.stores import TASK, build, group, sweep_now

COUNT = 10
STEP = 9


Run = Callable[[ReplayBuffer, Any], Awaitable[object]]


@dataclass(frozen=True)
class Operation:
    """What is done while armed, in a buffer with these options; `ready` comes before that, in the same process."""

    run: Run
    ready: Callable[[ReplayBuffer], Awaitable[Any]] | None = None
    options: dict[str, Any] = field(default_factory=dict)


def rarely(names: Iterable[str], often: Container[str]) -> list[Any]:
    """Parameters, those that aren't tested often as long forms."""
    return [name if name in often else pytest.param(name, marks=pytest.mark.long) for name in names]


async def fill(url: str) -> None:
    """COUNT completed groups of several ages, and some that are aborted or failed."""
    if url.startswith("sqlite:///"):
        shutil.copy(await _filled_file(), url.removeprefix("sqlite:///"))
    else:
        await _put_all(url)


_files: list[Path] = []


async def _filled_file() -> Path:
    """A SQLite file that was filled once, to be copied."""
    if not _files:
        folder = Path(tempfile.mkdtemp(prefix="rb-filled-"))
        atexit.register(shutil.rmtree, folder)
        await _put_all(f"sqlite:///{folder}/filled.db")
        _files.append(folder / "filled.db")
    return _files[0]


async def _put_all(url: str) -> None:
    async with build(url) as buffer:
        for number in range(COUNT):
            await buffer.put(
                group(number, 2), TASK, model_step=number % 5, current_train_step=STEP, key=str(number), tags={"a": 1}
            )
        for number, status in enumerate([Status.ABORTED, Status.FAILED, Status.ABORTED], COUNT):
            await buffer.put(group(number, status=status), TASK, model_step=1, current_train_step=STEP)


async def run_operation(url: str, name: str, ledger: Ledger, kill_at: int | None) -> None:
    """Do one of them to the end, or to a fail point."""
    points = FailPoints(ledger, kill_at)
    operation = OPERATIONS[name]
    async with build(url, **operation.options) as buffer:
        ready = await operation.ready(buffer) if operation.ready else None
        with points.armed():
            await operation.run(buffer, ready)


def victim(ledger: Ledger, url: str, name: str, folder: Path, kill_at: int | None) -> None:
    """A process that does an operation of `OPERATIONS` or of `SCHEMAS` and may be killed in it.

    What it saves goes into the folder.
    """
    os.chdir(folder)
    if name in SCHEMAS:
        points = FailPoints(ledger, kill_at)
        with points.armed():
            asyncio.run(transact(url, SCHEMAS[name]))
    else:
        asyncio.run(run_operation(url, name, ledger, kill_at))


# Operations of a buffer


def put_part(buffer: ReplayBuffer, index: int) -> Awaitable[Any]:
    """Put a rollout of a group of two."""
    return buffer.put(group(100 + index), TASK, group="filling", size=2, index=index)


async def put_several(buffer: ReplayBuffer, _: Any) -> None:
    """In one transaction: they wait together while the database's thread is busy."""
    buffer.storage.thread.post(time.sleep, 0.1)
    await asyncio.gather(*(buffer.put(group(number), TASK) for number in range(100, 104)))


async def take(buffer: ReplayBuffer, _: Any) -> None:
    assert len(await buffer.get(4, TASK)) == 4


async def lease(buffer: ReplayBuffer, _: Any) -> None:
    open_lease = await buffer.lease_batch({TASK: 4}, heartbeat=False)
    assert open_lease.counts == {TASK: 4}


async def leased(buffer: ReplayBuffer) -> Lease:
    return await buffer.lease_batch({TASK: 4}, heartbeat=False)


async def leased_for_a_moment(buffer: ReplayBuffer) -> None:
    open_lease = await buffer.lease_batch({TASK: 4}, heartbeat=False, seconds=0.01)
    await asyncio.sleep(0.05)
    assert open_lease.open


async def refresh(buffer: ReplayBuffer, _: Any) -> None:
    expired = await buffer.refresh_staleness(task_stale_thresholds={TASK: 9}, current_train_step=STEP + 2)
    assert 0 < expired[TASK] < COUNT


async def refresh_dropping(buffer: ReplayBuffer, _: Any) -> None:
    dropped_counts = await buffer.refresh_staleness(
        task_stale_thresholds={TASK: 9},
        current_train_step=STEP + 2,
        expired_groups_retryable_by_task={TASK: False},
    )
    assert 0 < dropped_counts[TASK] < COUNT


async def update(buffer: ReplayBuffer, _: Any) -> None:
    assert await buffer.update({"uid": {"$lte": 4}}, status="failed", priority=3.0, tags={"c": 3}) == 4


async def update_priorities(buffer: ReplayBuffer, _: Any) -> None:
    assert await buffer.update_priorities({1: 2.0, 2: 5.0}) == 2


async def delete(buffer: ReplayBuffer, _: Any) -> None:
    assert await buffer.delete({"uid": {"$gt": 7}}) == COUNT - 4


async def sweep_all(buffer: ReplayBuffer, _: Any) -> None:
    """Sweep without a grace time: also what a draw has taken that is cancelled then, and gives it back."""
    await in_thread(buffer, lambda tx: sweep_now(tx, time.time() + 60))


async def end_all_leases(buffer: ReplayBuffer, _: Any) -> None:
    assert await in_thread(buffer, end_leases) == 4


async def in_thread(buffer: ReplayBuffer, function: Callable[[Transaction], Any]) -> Any:
    state = buffer.storage
    return await state.thread.run(lambda: state.transactions.write(function))


async def save_and_delete(buffer: ReplayBuffer) -> None:
    await buffer.save(SNAPSHOT)
    await buffer.delete({})


async def kept_and_changed(buffer: ReplayBuffer) -> None:
    """A checkpoint, and after it a bit of everything."""
    await buffer.checkpoint(1)
    await buffer.get(3, TASK)
    await buffer.lease_batch({TASK: 1}, heartbeat=False)
    await buffer.put(group(200), TASK, key="9")
    await buffer.update({"uid": 6}, priority=7.0, tags={"changed": True})
    await buffer.refresh_staleness(task_stale_thresholds={TASK: 9}, current_train_step=STEP + 2)


async def finish(buffer: ReplayBuffer, open_lease: Lease) -> None:
    """Store a result in the place of what it was made from."""
    [first, *_] = sorted(open_lease.open)
    await open_lease.finish(group(100), TASK, replaces=[first])


def prompts_of(buffer: ReplayBuffer) -> Sampler:
    return ledger_of(
        buffer, range(100, 110), TASK, make_group=lambda item, number: group(item, status=Status.INIT), seconds=100
    )


async def given_up(buffer: ReplayBuffer) -> None:
    """Nothing is there of what `fill` has put that a ledger would hand out again."""
    await buffer.delete({"status": "aborted"})


async def draw_prompts(buffer: ReplayBuffer, _: Any) -> None:
    assert len(await prompts_of(buffer).draw(3)) == 3


async def a_prompt(buffer: ReplayBuffer) -> Prompt:
    await given_up(buffer)
    [prompt, _] = await prompts_of(buffer).draw(2)
    return prompt


# What a draw comes to that is cancelled after its commit: others may have missed the groups for a moment.


async def lease_and_give_back(buffer: ReplayBuffer, _: Any) -> None:
    await (await leased(buffer)).give_back()


async def draw_and_give_back(buffer: ReplayBuffer, _: Any) -> None:
    for prompt in await prompts_of(buffer).draw(3):
        await prompt.give_back()


async def put_in_pieces(buffer: ReplayBuffer, _: Any) -> None:
    """Put groups that are numbered by what was there before, in several transactions: what no call may do."""
    count = await buffer.count_where({})
    for number in range(count, count + 2):
        await buffer.put(group(100 + number), TASK)


SNAPSHOT = "snapshot"
CHECKPOINT: Run = lambda buffer, _: buffer.checkpoint(2)  # noqa: E731

OPERATIONS = {
    "put": Operation(
        lambda buffer, _: buffer.put(group(100, 3), TASK, model_step=7, current_train_step=STEP, tags={"b": 2})
    ),
    "put several": Operation(put_several),
    "put replacing": Operation(lambda buffer, _: buffer.put(group(100), TASK, key="3", replaces=[5, 6])),
    "put evicting": Operation(put_several, options={"capacity": COUNT + 3}),
    "fill a group": Operation(lambda buffer, _: put_part(buffer, 1), lambda buffer: put_part(buffer, 0)),
    "take": Operation(take),
    "take at random": Operation(take, options={"policy": "prioritized", "seed": 1}),
    "take again": Operation(take, options={"policy": "uniform", "seed": 1, "max_times_sampled": 2, "archive": 100}),
    "lease": Operation(lease),
    "acknowledge": Operation(lambda _, lease: lease.acknowledge(), leased),
    "give back": Operation(lambda _, lease: lease.give_back(failed="the consumer fails"), leased),
    "extend": Operation(lambda _, lease: lease.extend(100), leased),
    "leases end": Operation(end_all_leases, leased_for_a_moment),
    "refresh": Operation(refresh),
    "refresh dropping": Operation(refresh_dropping),
    "update": Operation(update),
    "update priorities": Operation(update_priorities),
    "delete": Operation(delete),
    "sweep": Operation(sweep_all, lambda buffer: buffer.get(4, TASK)),
    "save": Operation(lambda buffer, _: buffer.save(SNAPSHOT)),
    "resume": Operation(lambda buffer, _: buffer.resume(SNAPSHOT), save_and_delete),
    "checkpoint": Operation(CHECKPOINT, kept_and_changed),
    "checkpoint over another": Operation(CHECKPOINT, kept_and_changed, options={"keep_checkpoints": 1}),
    "drop a checkpoint": Operation(lambda buffer, _: buffer.drop_checkpoint(1), kept_and_changed),
    "restore": Operation(lambda buffer, _: buffer.restore(1), kept_and_changed),
    "finish": Operation(finish, leased),
    "draw prompts": Operation(draw_prompts, given_up),
    "finish a prompt": Operation(lambda _, prompt: prompt.finish([*group(prompt.group[0].rollout_id)]), a_prompt),
    "save a prompt": Operation(lambda _, prompt: prompt.save(), a_prompt),
}
#: One of each kind, which are tested by default: the others are in one transaction as one of these.
OFTEN = {"put evicting", "fill a group", "take", "acknowledge", "refresh", "save", "checkpoint", "restore"}
OFTEN |= {"finish a prompt", "sweep"}
#: A fault that is planted, for tests of the tests.
PLANTED = {"put in pieces": Operation(put_in_pieces)}
#: Of draws, by their names in OPERATIONS.
UNDONE = {
    "take": Operation(lease_and_give_back),
    "lease": Operation(lease_and_give_back),
    "draw prompts": Operation(draw_and_give_back, given_up),
}
