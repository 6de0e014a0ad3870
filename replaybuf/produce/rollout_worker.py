"""Disaggregated generation: a worker that produces for a trainer in another process, through their shared store.

The trainer publishes its state, its step and its newest weights, as a cursor: a small versioned value that is part of
step checkpoints and snapshots. A restore brings the old state back, until the trainer publishes anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import closing

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.buffer.sync import SyncReplayBuffer, asynchronous_of
from replaybuf.buffer.wait_reports import WaitReport
from replaybuf.common.cancellation import first_of
from replaybuf.common.checks import check_step, check_timeout, check_whole, shown
from replaybuf.errors import InputError, NotReadyError
from replaybuf.produce.agent_loop import AgentLoop, ProduceSummary
from replaybuf.produce.generations import Generations
from replaybuf.produce.sampler import Sampler, overwrite
from replaybuf.produce.strategies import PRODUCE_TIMEOUT, AsyncProduceStrategy
from replaybuf.rules.circumstances import IN_FLIGHT, TRAINER, TrainState
from replaybuf.rules.limits import Level
from replaybuf.rules.transitions import Tally, level_of, total

#: Who waits looks at the store when it has changed, and after so many seconds at the latest; at the earliest after so
#: many, however often it changes.
_LONGEST_SECONDS, _SHORTEST_SECONDS = 5.0, 0.25


async def publish(buffer: ReplayBuffer | SyncReplayBuffer, state: TrainState) -> None:
    """Publish the trainer's state to all workers. Raises FencedError, StorageError."""
    if not isinstance(state, TrainState):
        raise InputError(f"expected TrainState(train_step=..., model_step=...), got {shown(state)}")
    await overwrite(asynchronous_of(buffer).cursors, TRAINER, state.train_step, state.encode())


async def published(buffer: ReplayBuffer | SyncReplayBuffer) -> TrainState | None:
    """Return the state published last; None before the first. Raises InputError if it can't be read."""
    cursor = await asynchronous_of(buffer).cursors.read(TRAINER)
    return TrainState.decode(cursor.value) if cursor.version else None


async def wait_published(
    buffer: ReplayBuffer | SyncReplayBuffer, *, after: TrainState | None = None, timeout: float | None
) -> TrainState:
    """Wait until the published state differs from `after`, and return it.

    Raises NotReadyError after `timeout` seconds (None: never), FencedError if the buffer was restored.
    """
    buffer, patience = asynchronous_of(buffer), check_timeout(timeout)
    deadline = time.monotonic() + patience
    news = "nothing" if after is None else f"nothing since step {after.train_step}"
    with closing(buffer.waits.for_trainer(patience)) as report:
        while True:
            version = buffer.waits.version()
            await buffer.check_fence()
            state = await published(buffer)
            if state is not None and state != after:
                return state
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                if report.is_long:
                    reason = await buffer.waits.why(report.wait, await buffer.tallies(), over=True)
                    await report.timed_out(reason.sentence)
                raise NotReadyError(f"after {patience:g} s: the trainer has published {news}; is it running?")
            if report.due:
                reason = await buffer.waits.why(report.wait, await buffer.tallies())
                report.update(reason.sentence, str(reason))
            await _wait_for_change(buffer, version, min(remaining, report.pause))


async def _wait_for_change(buffer: ReplayBuffer, version: int, timeout: float) -> None:
    """Wait for a change of the store since `version`, for up to `timeout` seconds."""
    await asyncio.sleep(min(_SHORTEST_SECONDS, timeout))
    await buffer.waits.changed(max(0.0, min(timeout, _LONGEST_SECONDS) - _SHORTEST_SECONDS), version)


#: Loads the weights of a published state. Returns the loaded model step if it differs from the state's.
LoadWeights = Callable[[TrainState], Awaitable[int | None]]


async def produce_loop(
    strategy: AsyncProduceStrategy,
    agent_loop: AgentLoop,
    sampler: Sampler,
    batch_size: int,
    *,
    load_weights: LoadWeights | None = None,
    max_lag: int = 0,
    stop: asyncio.Event | None = None,
    timeout: float | None = PRODUCE_TIMEOUT,
) -> ProduceSummary:
    """Produce groups until the trainer has finished, or `stop` is set. Return a summary of this worker's production.

    Any number of workers may run this over one database, on any hosts, each with its own engine. Together they keep as
    many groups completed or in flight as the strategy needs for a batch of `batch_size`, and no more than the buffer's
    capacity and rate limits leave room for; that holds them back when the trainer is slower.

    The trainer publishes its state with `publish`. When its weights are more than `max_lag` steps newer, `load_weights`
    is called while nothing is being generated. With `enable_partial_rollout` generation is interrupted, and unfinished
    groups are put back to be continued with the new weights; otherwise the groups in flight are finished first.

    `generate_group` and `load_weights` may take as long as they need, and are to bound their own calls of the engine.

    Raises NotReadyError if nothing could be done for `timeout` seconds (None: never), FencedError if the buffer was
    restored (build it anew, and join the restored run), ProduceError if generation fails again and again, or if
    `give_up_after` times the batch was wasted since a group was completed last.
    After any error, every prompt is either finished or handed out again.
    """
    if not isinstance(strategy, AsyncProduceStrategy):
        raise InputError(f"a worker needs an AsyncProduceStrategy, got {type(strategy).__name__}")
    work = _Work(strategy, agent_loop, sampler, batch_size, timeout)
    work.max_lag, work.load_weights = check_whole(max_lag, "max_lag"), load_weights
    await work.run(stop or asyncio.Event())
    return work.summary


class _Work(Generations):
    """The groups in flight of a worker."""

    strategy: AsyncProduceStrategy
    max_lag = 0
    load_weights: LoadWeights | None = None
    loaded_step: int | None = None  # the published model step at the last load
    busy_at: float  # the last time with work to do
    idle_report: WaitReport | None = None  # the current idle period
    produced = 0  # groups
    wasted = 0  # groups, until the last one was produced

    async def run(self, stop: asyncio.Event) -> None:
        """Generate from the trainer's first published state on, until it has finished or `stop` is set."""
        state: TrainState | None
        state, _ = await first_of(wait_published(self.buffer, timeout=self.patience), stop.wait())
        if state is None:  # `stop` was set first
            return
        self.model_step, self.busy_at = state.model_step, time.monotonic()
        with self.summary.producing():
            async with self.ending():
                try:
                    await self._work_until_finished(state, stop)
                finally:
                    self._end_idle()
                await self.pause()

    async def _work_until_finished(self, state: TrainState, stop: asyncio.Event) -> None:
        version = -1
        while not state.finished and not stop.is_set():
            self.train_step = state.train_step
            self.check()
            started = 0
            if await self._weights_are_new(state):
                tail, returning = await self.strategy.again(self.sampler)
                room = self._room(*await self._level(), tail=tail)
                drawing = self.start(room, returning, self.strategy.waiting)
                started, _ = await first_of(drawing, stop.wait(), timeout=max(self.patience, _LONGEST_SECONDS))
                if started is None and not stop.is_set():
                    text = f"task {self.task_name}: its dataset has given no prompt, and may hang"
                    raise NotReadyError(f"after {self.patience:g} s: {text}")
            else:
                await self.buffer.check_fence()
            if started:
                self._end_idle()
            else:
                await self._wait_for_work(state, stop, version)
            if self.summary.produced > self.produced:
                self.produced, self.wasted = self.summary.produced, self.failures.wasted
            self.check_waste("none was completed lately", since=self.wasted)
            version = self.buffer.waits.version()  # before all that is read until the next wait
            state = await published(self.buffer) or state

    async def _weights_are_new(self, state: TrainState) -> bool:
        """Return whether generation may go on. Loads newer weights if there are any and nothing is being generated."""
        step_before = self.model_step
        is_fresh = not self.strategy.too_old(step_before, state.train_step)
        is_behind = self.loaded_step is None or state.model_step - self.loaded_step > self.max_lag
        if not is_behind and (is_fresh or state.model_step <= step_before):
            return is_fresh
        if self.strategy.partial:
            await self.pause()
        if self:
            return False
        loaded = None if self.load_weights is None else await self.load_weights(state)
        self.model_step = state.model_step if loaded is None else check_step(loaded, "load_weights()")
        if self.model_step != step_before or self.loaded_step is None:
            self.busy_at = time.monotonic()
        self.loaded_step = max(self.model_step, state.model_step)
        await self.resume()
        return not self.strategy.too_old(self.model_step, state.train_step)

    def _room(self, level: Level, in_flight: int, *, tail: bool) -> int:
        """Return the number of groups that may start, given all workers' groups, the limits and our concurrency."""
        room = self.size + (0 if tail else self.strategy.ahead(self.size)) - level.completed - in_flight
        return self.bounded(room, level, in_flight)

    async def _level(self) -> tuple[Level, int]:
        """Return the level of the task, and the number of groups in flight, over all workers. Raises FencedError."""
        tallies = await self.buffer.waits.tallies()
        return level_of(tallies, self.task_name), total(tallies, self.task_name, Tally.LEASED, IN_FLIGHT)

    async def _wait_for_work(self, state: TrainState, stop: asyncio.Event, version: int) -> None:
        """Wait until a group is done, `stop` is set, or the store has changed since `version`.

        Raises NotReadyError after too long without work.
        """
        timeout = _LONGEST_SECONDS
        is_idle = not self
        if is_idle:
            self.idle_report = self.idle_report or self.buffer.waits.for_trainer(self.patience)
            timeout = self.busy_at + self.patience - time.monotonic()
            if timeout <= 0:
                reason = await self._why_idle(state)
                await self.idle_report.timed_out(reason, self.task_name)
                raise NotReadyError(f"after {self.patience:g} s: {reason}")
            if self.idle_report.due:
                self.idle_report.update(await self._why_idle(state))
            timeout = min(timeout, self.idle_report.pause)
        await self.wait(timeout, _wait_for_change(self.buffer, version, timeout), stop.wait())
        if not is_idle:
            self._end_idle()

    def _end_idle(self) -> None:
        """End the idle period."""
        self.busy_at = time.monotonic()
        if self.idle_report is not None:
            self.idle_report.close()
            self.idle_report = None

    async def _why_idle(self, state: TrainState) -> str:
        task = f"task {self.task_name}"
        if self.strategy.too_old(self.model_step, state.train_step):
            return (
                f"{task}: weights of step {self.model_step} are too old for train step {state.train_step}, and "
                "the trainer has published no newer ones"
            )
        level, in_flight = await self._level()
        if self._room(level, in_flight, tail=False) > 0:
            cause = f"{self.sampler.why_none} ({in_flight} in flight)"
            return f"{task}: {cause}, and the trainer has not finished; is it running?"
        return f"{task}: {level.completed} completed groups wait, and nobody takes them; is the trainer running?"
