"""Produce strategies: how the groups of a train step are generated, synchronously or ahead of the trainer."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field, field_validator

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.common.cancellation import first_of
from replaybuf.common.checks import shown
from replaybuf.common.readable_config import Function, ReadableConfig
from replaybuf.errors import NotReadyError, ProduceError
from replaybuf.produce.agent_loop import AgentLoop, ProduceSummary
from replaybuf.produce.generations import INTERRUPTED, Generations
from replaybuf.produce.sampler import Again, Sampler
from replaybuf.rules.limits import Level
from replaybuf.rules.transitions import level_of
from replaybuf.values.rollouts.rollout import Status
from replaybuf.values.rollouts.staleness import EXPIRING_STATUSES, ExpiryRule, staleness_of

#: Default timeout of the production of a batch, in seconds.
PRODUCE_TIMEOUT = 3600.0

_POLL_SECONDS = 1.0


def always(group: list[Any]) -> bool:
    """Return True: every completed group is valid."""
    return True


def until_complete(completed: int, batch_size: int) -> bool:
    """Return whether the buffer has fewer completed groups than the batch needs."""
    return completed < batch_size


class ProduceStrategy(ReadableConfig):
    """Produces the groups of a batch. A strategy only has settings: the same one serves any number of batches.

    At most `max_concurrency` groups are generated at the same time (None: no limit).

    Hooks (functions, or "module:function"): `is_valid(group)` returns whether a completed group may be trained on;
    others become FILTERED. `should_continue(completed, batch_size)` returns whether to generate more.
    `on_group(generated)` is called for every group, for logging. `tags(group)` returns the tags to store with a group.
    An exception from a hook ends the batch.

    `min_size`: after its last attempt a group with so many completed rollouts goes without the failed ones.

    A failed group is retried, up to the buffer's `max_deliveries`. The batch ends with ProduceError after
    `max_failures` in a row, or when `give_up_after` times its size was wasted (failed, filtered, too old when done, or
    interrupted without a pause, and without a token). Then failures of prompts since the last success are undone, since
    the agent loop is at fault. `pause_timeout` limits the seconds for interrupting generation, and for resuming it.
    """

    env_prefix: ClassVar[str] = "REPLAYBUF_PRODUCE_"

    max_concurrency: int | None = Field(default=None, ge=1)
    min_size: int | None = Field(default=None, ge=1)
    max_failures: int = Field(default=32, ge=1)
    give_up_after: float = Field(default=10.0, gt=0)
    pause_timeout: float = Field(default=30.0, gt=0, le=86_400)
    is_valid: Function = always
    should_continue: Function = until_complete
    on_group: Function | None = None
    tags: Function | None = None

    @field_validator("is_valid", "should_continue", "on_group", "tags")
    @classmethod
    def _check_function(cls, hook: Any) -> Any:
        if hook is not None and not callable(hook):
            raise ValueError(f"expected a function, or 'module:function', got {shown(hook)}")
        if inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(getattr(type(hook), "__call__", None)):  # noqa: B004
            raise ValueError("it must be a plain function, not a coroutine (async def): nobody would wait for it")
        return hook

    async def produce_batch(
        self,
        agent_loop: AgentLoop,
        sampler: Sampler,
        batch_size: int,
        *,
        train_step: int,
        model_step: int,
        timeout: float | None = PRODUCE_TIMEOUT,
    ) -> ProduceSummary:
        """Generate until `batch_size` completed groups of the sampler's task are in the buffer. Return a summary.

        `train_step` is the step that the batch is for, `model_step` that of the generating weights. Groups already in
        the buffer count. Afterwards no generation is running; take the batch with `buffer.take_batch`.

        Raises ProduceError if the dataset has no more prompts (reason "exhausted"), or if the groups can't be made
        for other reasons (its cause is the last error of the agent loop), both with the `summary` so far;
        NotReadyError, a TimeoutError, after `timeout` seconds (None: never); FencedError if the buffer was restored.
        After any error, and after cancellation, every prompt is either finished or handed out again.
        """
        batch = _Batch(self, agent_loop, sampler, batch_size, timeout, train_step, model_step)
        with batch.summary.producing():
            await self._plan(batch)
            await batch.produce()
        return batch.summary

    # Differences between strategies

    @property
    def partial(self) -> bool:
        """Whether interrupted rollouts are continued."""
        return False

    @property
    def expiry(self) -> ExpiryRule:
        """The rule by which groups expire."""
        return ExpiryRule()

    async def _plan(self, batch: _Batch) -> None:
        """Set how far to run ahead, and which groups are handed out again."""


class SyncProduceStrategy(ProduceStrategy):
    """For synchronous training: exactly `batch_size` completed groups for this step.

    Groups that fail or are filtered are replaced. The sampler decides which prompts come first.
    """


#: Statuses of groups in the buffer that are generated again.
WAITING = (Status.ABORTED, Status.EXPIRED)


class AsyncProduceStrategy(ProduceStrategy):
    """For asynchronous training: runs ahead, and interrupts the remaining groups when the batch is complete.

    `over_sample`: the number of groups generated at the same time beyond the batch, as a ratio of its size, rounded up.
    The batch is complete when enough of them are, so the slowest don't delay it. The others are interrupted and put
    back as ABORTED: with their partial response, to be continued, if `enable_partial_rollout` is set; otherwise without
    it. They come before new prompts. The tag "interrupted" counts the interruptions.

    `max_staleness`: a rollout expires when it is older, in train steps. `max_token_staleness`: older tokens are masked
    out, and a rollout expires when no trainable token is left (None: never). Both count updates of the generating
    weights, one every `sync_weights_interval` train steps: n allows (n + 1) * sync_weights_interval - 1 steps.

    Tail batches: once there are `tail_batch_trigger_size` groups that have expired, or were interrupted at least
    `tail_batch_max_tries` times (None: only expired ones), the next batch is produced from these, without running
    ahead, so that the slowest prompts are generated to their end. Until then they wait, unless no other prompt is left.
    0: no tail batches; such groups come before new prompts like others. -1: expired groups are dropped, and new prompts
    take their place.

    The names are xtuner's, except `over_sample` (there `over_sample_threshold`).
    """

    over_sample: float = Field(default=0.0, ge=0, le=1000)
    enable_partial_rollout: bool = False
    max_staleness: int | None = Field(default=None, ge=0)
    max_token_staleness: int | None = Field(default=None, ge=0)
    sync_weights_interval: int = Field(default=1, ge=1)
    tail_batch_trigger_size: int = Field(default=0, ge=-1)
    tail_batch_max_tries: int | None = Field(default=None, ge=1)

    @property
    def partial(self) -> bool:
        return self.enable_partial_rollout

    @property
    def expiry(self) -> ExpiryRule:
        thresholds = self._threshold(self.max_staleness), self._threshold(self.max_token_staleness)
        return ExpiryRule(*thresholds, retryable=self._retries_expired)

    @property
    def waiting(self) -> tuple[Status, ...]:
        """The statuses of groups in the buffer that are generated again."""
        return WAITING if self._retries_expired else (Status.ABORTED,)

    @property
    def _retries_expired(self) -> bool:
        return self.tail_batch_trigger_size >= 0

    def _threshold(self, updates: int | None) -> int | None:
        return None if updates is None else (updates + 1) * self.sync_weights_interval

    def ahead(self, batch_size: int) -> int:
        """Return the number of groups generated beyond the batch."""
        return math.ceil(round(self.over_sample * batch_size, 9))

    async def refresh(self, buffer: ReplayBuffer, task_name: str, train_step: int) -> int:
        """Move the task to a train step, and expire groups that are too old for it. Return the number of these."""
        rule = self.expiry
        if not rule.active:
            return 0
        expired = await buffer.refresh_staleness(
            task_stale_thresholds={task_name: rule.stale_threshold},
            task_token_stale_thresholds={task_name: rule.token_stale_threshold},
            expired_groups_retryable_by_task={task_name: rule.retryable},
            current_train_step=train_step,
            statuses=EXPIRING_STATUSES,
        )
        return expired[task_name]

    def too_old(self, model_step: int, train_step: int) -> bool:
        """Return whether every group generated by these weights would expire at once."""
        rule = self.expiry
        return rule.expires(staleness_of(model_step, train_step), model_step, train_step)

    async def again(self, sampler: Sampler) -> tuple[bool, list[Again]]:
        """Return whether a tail batch is due, and which groups of the buffer come before new prompts."""
        if self.tail_batch_trigger_size <= 0:
            return False, [*self.waiting]
        task = {"task_name": sampler.task_name, "status": Status.ABORTED}
        tries = self.tail_batch_max_tries
        often_interrupted = None if tries is None else {f"tags.{INTERRUPTED}": {"$gte": tries}}
        tail_size = await sampler.buffer.count(sampler.task_name, Status.EXPIRED)
        if often_interrupted is not None:
            tail_size += await sampler.buffer.count_where(task | often_interrupted)
        if tail_size >= self.tail_batch_trigger_size:
            return True, [Status.EXPIRED, (Status.ABORTED, often_interrupted), Status.ABORTED]
        return False, [(Status.ABORTED, None if often_interrupted is None else {"$not": often_interrupted})]

    async def _plan(self, batch: _Batch) -> None:
        if self.too_old(batch.model_step, batch.train_step):
            raise ProduceError(
                f"weights of step {batch.model_step} are too old for train step {batch.train_step}: all groups would "
                f"expire at once (max_staleness {self.max_staleness}, max_token_staleness {self.max_token_staleness}); "
                "load newer weights"
            )
        batch.summary.expired += await self.refresh(batch.buffer, batch.task_name, batch.train_step)
        tail, batch.again = await self.again(batch.sampler)
        batch.rest = self.waiting
        batch.ahead = 0 if tail else self.ahead(batch.size)


class _Batch(Generations):
    """A batch that is being produced: `ahead` groups beyond it, too.

    The groups `again` of the buffer come before new prompts (None: the sampler's), and `rest` after them.
    """

    ahead = 0
    again: Sequence[Again] | None = None
    rest: Sequence[Again] = ()

    async def produce(self) -> None:
        """Generate until the batch is complete."""
        self.summary.reused = await self._count_completed()
        await self.resume()
        async with self.ending():
            await self._fill()
            await self.pause()

    async def _fill(self) -> None:
        """Keep groups in flight until the batch is complete."""
        deadline, waits = time.monotonic() + self.patience, self.buffer.waits
        should_continue = self.strategy.should_continue
        while True:
            version = waits.version()
            self.check()  # before the count, which includes the groups that are done
            completed = await self._count_completed()
            if not should_continue(completed, self.size):
                return
            self.check_waste(self._progress(completed))
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                await self.pause()  # which may complete the missing groups
                completed = await self._count_completed()
                if not should_continue(completed, self.size):
                    return
                raise NotReadyError(f"after {self.patience:g} s: task {self.task_name}: {self._progress(completed)}")
            count = await self._count_to_start(completed)
            if count > 0:
                [started] = await first_of(self.start(count, self.again, self.rest), timeout=remaining)
                if started != 0:
                    continue  # until enough groups are in flight, no prompt is left, or the time is over
            if self:
                await self.wait(min(remaining, _POLL_SECONDS))
            elif count > 0:
                await self._check_exhausted(completed)
                await waits.changed(min(remaining, _POLL_SECONDS), version)

    async def _count_completed(self) -> int:
        return await self.buffer.count(self.task_name, Status.COMPLETED)

    def _progress(self, completed: int) -> str:
        return f"{completed} of {self.size} completed groups"

    async def _count_to_start(self, completed: int) -> int:
        """Return the number of groups to start now."""
        count = self.size + self.ahead - completed - len(self)
        is_slowed = self.buffer.limits.slows_puts
        level = level_of(await self.buffer.tallies(), self.task_name) if is_slowed else Level()
        count = self.bounded(count, level, len(self))
        return count if self else max(1, count)  # should_continue asked for more

    async def _check_exhausted(self, completed: int) -> None:
        """Raise ProduceError if no prompt is left to draw, and none is in flight elsewhere."""
        again = None if self.again is None else [*self.again, *self.rest]
        counts = await self.sampler.counts(again)
        if not counts.in_flight and not counts.waiting and await self._count_completed() <= completed:
            text = f"task {self.task_name}: {self._progress(completed)}, and {self.sampler.why_none}"
            raise ProduceError(text, reason="exhausted")
