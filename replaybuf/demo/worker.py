"""A rollout worker: a process that generates groups with weights that lag behind, and puts them into the buffer.

Started by the trainer as `python -m replaybuf.demo.worker`, with its settings in the first line of its standard input
(so that no password is in the list of processes). The end of that input means that the run is over or the trainer gone,
by kill -9 too: then the worker ends.

Nothing is lost when a worker is killed. It puts a group before it moves its position on, and a prompt that it generates
a second time has the same key, so that it replaces the first. Expired groups are read, generated again and put under
their key: until that put they stay in the buffer.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np

from replaybuf import ReplayBufError, ReplayBuffer, ReplayBufferConfig, RolloutState, Status
from replaybuf.demo.arithmetic import Prompt, prompt_at
from replaybuf.demo.blas import use_one_thread
from replaybuf.demo.folder import RunFolder
from replaybuf.demo.generation import generate_group, prompt_of
from replaybuf.demo.policy import Policy
from replaybuf.demo.settings import CHUNK_GROUPS, ENOUGH_GROUPS, STALE_THRESHOLD, TASK, WorkerSettings, group_key
from replaybuf.demo.weights import WeightsWatcher

_PAUSE_SECONDS = 0.03
_GRACE_SECONDS = 1.0


class Worker:
    """Generates its share of the prompts: those whose number leaves `worker` when divided by `workers`."""

    def __init__(self, settings: WorkerSettings, buffer: ReplayBuffer) -> None:
        self.settings, self.buffer = settings, buffer
        self.folder = RunFolder(Path(settings.folder))
        self._watcher = WeightsWatcher(self.folder.path)
        self._weights: tuple[Policy, int] | None = None
        self._newest_step = 0
        self._position = self.folder.position(settings.worker)

    async def run(self, stopping: threading.Event) -> None:
        """Work until `stopping` is set."""
        while not stopping.is_set():
            if not self._look_at_weights() or not await self._work():
                await asyncio.sleep(_PAUSE_SECONDS)

    def _look_at_weights(self) -> bool:
        """Load new weights when these are too far behind; whether there are any."""
        step = self._watcher.newest_step()
        if step is not None:
            self._newest_step = step
        if self._weights is None or self._newest_step - self._weights[1] >= self.settings.lag:
            self._weights = self._watcher.poll() or self._weights
        return self._weights is not None

    async def _work(self) -> bool:
        """Generate a few groups; False when enough of them wait in the buffer."""
        expired = [prompt async for prompt in self._expired()]
        if expired:
            await self._generate(expired)
            return True
        if await self.buffer.count(TASK, Status.COMPLETED) >= ENOUGH_GROUPS:
            return False
        await self._generate([(index, prompt_at(self.settings.seed, index)) for index in self._next_indices()])
        self.folder.save_position(self.settings.worker, self._position)
        return True

    async def _expired(self) -> AsyncIterator[tuple[int, Prompt]]:
        """Some expired groups of this worker; the first worker also has those of workers that are no more."""
        mine: dict[str, object] = {"tags.worker": self.settings.worker}
        if self.settings.worker == 0:
            mine = {"$or": [mine, {"tags.worker": {"$gte": self.settings.workers}}]}
        query = {"task_name": TASK, "status": Status.EXPIRED, **mine}
        async for item in self.buffer.find(query, limit=CHUNK_GROUPS):
            if item.item:
                yield int(item.item[0].group_id), prompt_of(item.item)

    def _next_indices(self) -> list[int]:
        first = self._position + (self.settings.worker - self._position) % self.settings.workers
        indices = [first + place * self.settings.workers for place in range(CHUNK_GROUPS)]
        self._position = indices[-1] + 1
        return indices

    async def _generate(self, prompts: list[tuple[int, Prompt]]) -> None:
        """Generate a group for each prompt and put them; the puts share a transaction."""
        assert self._weights is not None
        policy, step = self._weights
        groups = [(index, prompt, self._group(policy, step, index, prompt)) for index, prompt in prompts]
        await asyncio.gather(*(self._put(step, index, prompt, group) for index, prompt, group in groups))

    def _group(self, policy: Policy, step: int, index: int, prompt: Prompt) -> list[RolloutState]:
        rng = np.random.default_rng([self.settings.seed, index, step])
        group = generate_group(policy, rng, prompt)
        for place, rollout in enumerate(group):
            rollout.group_id, rollout.rollout_id = index, f"{index}/{place}"
            rollout.session_id = self.settings.session
        return group

    async def _put(self, step: int, index: int, prompt: Prompt, group: list[RolloutState]) -> None:
        await self.buffer.put(
            group,
            TASK,
            model_step=step,
            current_train_step=self._newest_step + 1,
            stale_threshold=STALE_THRESHOLD,
            tags={"worker": self.settings.worker, "level": len(str(prompt.answer))},
            key=group_key(self.settings.seed, index),
        )


async def work(settings: WorkerSettings, stopping: threading.Event) -> None:
    """Open the buffer and work."""
    async with ReplayBufferConfig(url=settings.url).build() as buffer:
        await Worker(settings, buffer).run(stopping)


def _end_with_input(stopping: threading.Event) -> None:
    """Wait for the end of the input; then give the work in hand a moment, and end the process whatever it does."""
    while os.read(0, 4096):
        pass
    stopping.set()
    threading.Event().wait(_GRACE_SECONDS)
    os._exit(0)


def _read_line() -> str:
    """The first line of the input, and no byte more."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit(0)  # the trainer has gone
        line += byte
    return line.decode()


def main() -> int:
    """The process of a worker; its exit code."""
    use_one_thread()
    settings, stopping = WorkerSettings.from_json(_read_line()), threading.Event()
    threading.Thread(target=_end_with_input, args=(stopping,), daemon=True).start()
    try:
        asyncio.run(work(settings, stopping))
    except ReplayBufError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
