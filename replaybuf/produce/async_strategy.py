"""Asynchronous production: ahead of the trainer, with interrupted and expired groups generated again."""

from __future__ import annotations

import math

from pydantic import Field

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import ProduceError
from replaybuf.produce.outcome import INTERRUPTED
from replaybuf.produce.sampler import Sampler
from replaybuf.produce.strategy import Batch, ProduceStrategy
from replaybuf.prompts.ledger import Again
from replaybuf.rollouts.rollout import Status
from replaybuf.rollouts.staleness import EXPIRING_STATUSES, ExpiryRule, staleness_of

#: The groups of the buffer that are generated again.
WAITING = (Status.ABORTED, Status.EXPIRED)


class AsyncProduceStrategy(ProduceStrategy):
    """For asynchronous training: runs ahead, and interrupts the remaining groups when the batch is complete.

    `over_sample`: the number of groups generated at the same time beyond the batch, as a ratio of its size, rounded up.
    The batch is complete when enough of them are, so the slowest don't hold it up. The others are interrupted and put
    back as ABORTED: with their partial response, to be continued, if `enable_partial_rollout` is set; otherwise for a
    fresh start. They come before new prompts. The tag "interrupted" counts the interruptions.

    `max_staleness`: a rollout expires when it is more train steps old than that. `max_token_staleness`: tokens that are
    more steps old than that are masked out, and a rollout expires when no trainable one is left (None: never). Both
    count in steps between updates of the generating weights, `sync_weights_interval` train steps each: n allows
    (n + 1) * sync_weights_interval - 1 steps.

    Tail batches: once there are `tail_batch_trigger_size` groups that have expired, or were interrupted at least
    `tail_batch_max_tries` times (None: only expired ones), the next batch is produced from them, without running ahead,
    so that the slowest prompts are generated to their end. Until then they wait, unless no other prompt is left. 0: no
    tail batches; such groups come before new prompts like others. -1: groups that expire are dropped, and new prompts
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

    def _threshold(self, most: int | None) -> int | None:
        return None if most is None else (most + 1) * self.sync_weights_interval

    def ahead(self, batch_size: int) -> int:
        """Return how many groups are generated beyond the batch."""
        return math.ceil(round(self.over_sample * batch_size, 9))

    async def refresh(self, buffer: ReplayBuffer, task_name: str, train_step: int) -> int:
        """Move the task to a train step, and expire the groups that are too old for it. Return their number."""
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
        """Return whether all groups that these weights generate would expire at once."""
        rule = self.expiry
        return rule.expires(staleness_of(model_step, train_step), model_step, train_step)

    async def again(self, sampler: Sampler) -> tuple[bool, list[Again]]:
        """Return whether it is time for a tail batch, and which groups of the buffer come before new prompts."""
        if self.tail_batch_trigger_size <= 0:
            return False, [*self.waiting]
        task = {"task_name": sampler.task_name, "status": Status.ABORTED}
        tries = self.tail_batch_max_tries
        often = None if tries is None else {f"tags.{INTERRUPTED}": {"$gte": tries}}
        gathered = await sampler.buffer.count(sampler.task_name, Status.EXPIRED)
        if often is not None:
            gathered += await sampler.buffer.count_where(task | often)
        if gathered >= self.tail_batch_trigger_size:
            return True, [Status.EXPIRED, (Status.ABORTED, often), Status.ABORTED]
        return False, [(Status.ABORTED, None if often is None else {"$not": often})]

    async def _plan(self, batch: Batch) -> None:
        if self.too_old(batch.model_step, batch.train_step):
            raise ProduceError(
                f"weights of step {batch.model_step} are too old for train step {batch.train_step}: all groups would "
                f"expire at once (max_staleness {self.max_staleness}, max_token_staleness {self.max_token_staleness}); "
                "load newer weights"
            )
        batch.summary.expired += await self.refresh(batch.sampler.buffer, batch.task_name, batch.train_step)
        tail, batch.again = await self.again(batch.sampler)
        batch.rest = self.waiting
        batch.ahead = 0 if tail else self.ahead(batch.size)
