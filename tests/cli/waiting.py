"""Databases whose trainer waits: each reason in a buffer of its own, made by processes that live, or were killed.

`play(ROLE, URL, SEED)` is one of the processes: it does its part in every buffer, says "ready", and stays until its
standard input is closed.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from replaybuf import ReplayBufError, ReplayBuffer, ReplayBufferConfig, Status
from replaybuf.produce import AsyncProduceStrategy, Sampler, TrainState, produce_loop, publish
from replaybuf.rules.needs import Reason
from tests.produce.scripted import ScriptedLoop, forever
from tests.stores import group

_PATIENCE = 120

Part = Callable[[ReplayBuffer], Awaitable[Any]]


@dataclass(frozen=True)
class Scene:
    """A buffer whose trainer waits for this reason: what the others do in it, and what is then said.

    `killed` is done by a producer that is killed later, `alive` by one that lives (and may wait itself), `rival` by
    another trainer, `before` by the trainer itself before it waits for `wants`. The answer has the text `says` in its
    first line, and names the cause `also` below.
    """

    reason: Reason
    says: str
    killed: Part | None = None
    alive: Part | None = None
    rival: Part | None = None
    before: Part | None = None
    wants: dict[str, int] = field(default_factory=lambda: {"math": 4})
    where: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    also: str = ""


def put(count: int, task: str = "math", status: Status = Status.COMPLETED, **details: Any) -> Part:
    """Put so many groups of one task."""

    async def part(buffer: ReplayBuffer) -> None:
        for number in range(count):
            rollouts = group(number, status=status)
            for rollout in rollouts:
                for name, value in details.items():
                    setattr(rollout, name, value)
            await buffer.put(rollouts, task, model_step=1, current_train_step=2)

    return part


async def _lease(buffer: ReplayBuffer) -> Any:
    return await buffer.lease_batch({"math": 4}, seconds=600, timeout=10)


async def _refresh(buffer: ReplayBuffer) -> None:
    await buffer.refresh_staleness(task_stale_thresholds={"math": 3}, current_train_step=12)


async def _put_two_tasks(buffer: ReplayBuffer) -> None:
    await put(1, "code")(buffer)
    await put(3)(buffer)


async def _work(buffer: ReplayBuffer) -> None:
    sampler = Sampler(buffer, [{"prompt": "2 + 2"}], "math", prompt_repeat_k=1)
    await produce_loop(AsyncProduceStrategy(), ScriptedLoop(), sampler, 4, timeout=_PATIENCE)


async def _work_to_the_end(buffer: ReplayBuffer) -> None:
    sampler = Sampler(buffer, [{"prompt": f"2 + {number}"} for number in range(3)], "math", epochs=1)
    loop = ScriptedLoop(scripts={2: forever()})
    await produce_loop(AsyncProduceStrategy(), loop, sampler, 4, timeout=_PATIENCE)


async def _publish(buffer: ReplayBuffer) -> None:
    await publish(buffer, TrainState(1, 1))


async def _sample(buffer: ReplayBuffer) -> None:
    await buffer.sample({"math": 4}, timeout=10)


_GONE = "no producer is left: gen-2 was killed"

SCENES = [
    Scene(Reason.ABSENT, "nothing was ever put into this buffer"),
    Scene(Reason.NO_SUCH_TASK, "Did you mean maths?", killed=put(4, "maths")),
    Scene(
        Reason.LEASED, "all 4 completed groups are leased by trainer-2 until", killed=put(4), rival=_lease, also=_GONE
    ),
    Scene(
        Reason.EXPIRED,
        "4 groups expired; the last refresh was to train step 12",
        killed=put(4),
        before=_refresh,
        also=_GONE,
    ),
    Scene(Reason.UNFIT, "4 of the 4 groups put were filtered", killed=put(4, status=Status.FILTERED), also=_GONE),
    Scene(
        Reason.UNFIT,
        "4 of the 4 groups put failed, with gen-2 (4); the last error: no such tool: calculator",
        killed=put(4, status=Status.FAILED, error_msg="no such tool: calculator"),
        also=_GONE,
    ),
    Scene(
        Reason.OTHER_STATUS,
        "4 groups are there, but of another status: 4 aborted",
        killed=put(4, status=Status.ABORTED),
        also=_GONE,
    ),
    Scene(
        Reason.NO_MATCH,
        '6 completed groups are there, but none matches {"reward": {"$gte": 3}}',
        killed=put(6),
        where={"reward": {"$gte": 3}},
        also=_GONE,
    ),
    Scene(
        Reason.HELD_BACK,
        "5 completed groups are there, but min_size is 8. Start the producers again",
        killed=put(5),
        options={"min_size": 8},
        also=_GONE,
    ),
    Scene(
        Reason.HELD_BACK,
        "5 completed groups are there, but samples_per_insert 1 allows 1 now: 5 were put and 4 drawn. "
        "Start the producers again, or widen error_buffer",
        killed=put(5),
        before=_sample,
        options={"max_times_sampled": 0, "samples_per_insert": 1.0, "error_buffer": (0, 100)},
    ),
    Scene(Reason.OTHER_STATUS, "6 groups are there, but of another status: 6 init", alive=put(6, status=Status.INIT)),
    Scene(
        Reason.FINISHED,
        "(2 of 4): no prompt of math is left in the dataset: of the 3 drawn, 2 are finished, 1 in flight",
        alive=_work_to_the_end,
        before=_publish,
    ),
    Scene(Reason.ABSENT, _GONE, killed=put(1)),
    Scene(Reason.SLOW, "Too little is ready for math (1 of 4): ", alive=put(1)),
    Scene(
        Reason.DEADLOCK,
        "for code (1 of 2): gen-1 waits for room since",
        alive=_put_two_tasks,
        wants={"math": 2, "code": 2},
        options={"capacity": 2, "on_full": "block", "put_timeout": _PATIENCE},
    ),
    Scene(Reason.DEADLOCK, "deadlock: gen-1 waits for the trainer since", alive=_work),
    Scene(
        Reason.ABSENT,
        "the trainer has published nothing yet; nobody has drawn any yet. Is it running?",
        alive=_work,
        wants={},
    ),
]


def shuffled(seed: int) -> dict[str, Scene]:
    """Return the scenes by the names of their buffers, which tell nothing."""
    scenes = random.Random(seed).sample(SCENES, len(SCENES))
    return {f"run-{number}": scene for number, scene in enumerate(scenes)}


async def _wait(scene: Scene, buffer: ReplayBuffer) -> None:
    if scene.before is not None:
        await scene.before(buffer)
    if scene.wants:
        await buffer.take_batch(scene.wants, where=scene.where, timeout=_PATIENCE)


def _part(role: str, scene: Scene) -> Part | None:
    if role == "trainer-1":
        return lambda buffer: _wait(scene, buffer)
    return {"gen-1": scene.alive, "gen-2": scene.killed, "trainer-2": scene.rival}[role]


async def _play(role: str, url: str, seed: int) -> None:
    async with AsyncExitStack() as stack:
        playing = []
        for name, scene in shuffled(seed).items():
            if (part := _part(role, scene)) is not None:
                config = ReplayBufferConfig(url=url, name=name, worker=role, policy="fifo", **scene.options)
                playing.append(asyncio.ensure_future(part(await stack.enter_async_context(config.build()))))
        await asyncio.wait(playing, timeout=1)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for one in playing:
            one.cancel()
            with suppress(asyncio.CancelledError, ReplayBufError):
                await one


def play(role: str, url: str, seed: str) -> None:
    asyncio.run(_play(role, url, int(seed)))
