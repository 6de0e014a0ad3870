"""Groups that are generated concurrently, each by its own asyncio task."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from replaybuf.buffer.waits import check_possible
from replaybuf.common.cancellation import first_of, shielded
from replaybuf.common.checks import check_step, check_tags, check_timeout, check_whole
from replaybuf.errors import (
    FullError,
    InputError,
    LeaseLostError,
    NotReadyError,
    ProduceError,
    ReplayBufError,
    RolloutError,
)
from replaybuf.produce.agent_loop import (
    AgentLoop,
    FailureTracker,
    Generated,
    ProduceSummary,
    check_agent_loop,
    checked_status,
    count_tokens,
    error_of,
    text_of,
)
from replaybuf.produce.prompt import Prompt, discard_partial_responses
from replaybuf.produce.sampler import Again, Sampler
from replaybuf.rules.limits import Level
from replaybuf.storage.values import Draw
from replaybuf.values.rollouts.rewards import reward_value
from replaybuf.values.rollouts.rollout import Status, group_status
from replaybuf.values.rollouts.segments import as_group, flat, rewards_of

if TYPE_CHECKING:
    from replaybuf.produce.strategies import ProduceStrategy

#: The tag that counts how often a group was interrupted.
INTERRUPTED = "interrupted"

_logger = logging.getLogger("replaybuf.produce")

#: A group without room is tried again after a change, at the earliest and at the latest after so many seconds.
_SHORTEST_SECONDS, _ROOM_SECONDS = 0.25, 1.0
#: A cancelled call of the agent loop has so long to end.
_ENDING_SECONDS = 1.0


def check_size(batch_size: Any, sampler: Any, min_size: int | None) -> int:
    """Check that the sampler's buffer can deliver a batch of groups of at least so many rollouts. Raises InputError."""
    if not isinstance(sampler, Sampler):
        raise InputError(f"expected a Sampler, got {type(sampler).__name__}")
    size = check_whole(batch_size, "batch_size", 1)
    if min_size is not None and min_size > sampler.prompt_repeat_k:
        raise InputError(f"min_size {min_size} is more than the {sampler.prompt_repeat_k} rollouts of a group")
    sizes = {sampler.task_name: size}
    check_possible(Draw(sizes, at_least=sizes), sampler.buffer.limits)
    return size


class Generations:
    """The groups in flight of one strategy, for batches of `size` groups. `summary` counts their outcomes.

    `train_step` is the step that the groups are for, `model_step` that of the generating weights. Both may be changed,
    for groups that are started afterwards. `patience` is the timeout in seconds. Raises InputError for wrong arguments.
    """

    def __init__(
        self,
        strategy: ProduceStrategy,
        agent_loop: AgentLoop,
        sampler: Sampler,
        batch_size: int,
        timeout: float | None,
        train_step: int = 0,
        model_step: int = 0,
    ) -> None:
        self.size = check_size(batch_size, sampler, strategy.min_size)
        self.train_step = check_whole(train_step, "train_step")
        self.model_step = check_step(model_step, "model_step")
        self.patience = check_timeout(timeout)
        self.sampler, self.buffer, self.task_name = sampler, sampler.buffer, sampler.task_name
        self.summary, self.failures = ProduceSummary(), FailureTracker()
        self._agent_loop, self.strategy, self._is_pausing = check_agent_loop(agent_loop), strategy, False
        self._kind, self._timeout = self.buffer.rollout_type, strategy.pause_timeout
        self._tasks: list[asyncio.Task[None]] = []  # in the order in which they were started
        self._calling_tasks: set[asyncio.Task[None] | None] = set()  # tasks in a call of the agent loop

    def __len__(self) -> int:
        return len(self._tasks)

    async def start(self, count: int, *choices: Iterable[Again] | None) -> int:
        """Draw up to `count` prompts and start to generate them. Return their number.

        `choices` are the groups of the buffer that come before new prompts, and others for when there are no more.
        """
        prompts: list[Prompt] = []
        for choice in choices if count > 0 else ():
            prompts = prompts or await self.sampler.draw(count, again=choice, partial_rollouts=self.strategy.partial)
        self._tasks += [asyncio.create_task(self._run(prompt)) for prompt in prompts]
        self.summary.continued += sum(prompt.status != Status.INIT or prompt.attempt > 1 for prompt in prompts)
        await asyncio.sleep(0)  # a task that is cancelled before its first step would not give its prompt back
        return len(prompts)

    def bounded(self, count: int, level: Level, in_flight: int) -> int:
        """Bound a number of groups by the room that those in flight leave, and by the concurrency in this process."""
        room, concurrency = self.buffer.limits.insertable(level, Status.COMPLETED), self.strategy.max_concurrency
        if room is not None:
            count = min(count, room - in_flight)
        return count if concurrency is None else min(count, concurrency - len(self))

    def check_waste(self, progress: str, since: int = 0) -> None:
        """Raise ProduceError, which says the `progress`, if too many groups were wasted, but for the first `since`."""
        if self.failures.wasted - since >= self.strategy.give_up_after * self.size:
            text = f"task {self.task_name}: {progress}, {self.failures.describe()}"
            raise ProduceError(text) from self.failures.last_raised

    async def wait(self, timeout: float, *others: Coroutine[Any, Any, Any]) -> None:
        """Wait until at least one group or one of `others` is done, for up to `timeout` seconds.

        Raises the errors of `check`, and those of the others, which are cancelled at the end.
        """
        await first_of(*others, tasks=self._tasks, timeout=timeout)
        self.check()

    def check(self) -> None:
        """Remove the tasks that are done.

        Raises the first error of storing a group, and ProduceError if too many groups have failed in a row.
        """
        for _ in filter(asyncio.Task.cancelled, self._tasks):
            self.failures.add_failure("it cancelled its own task")
        self._collect()
        if self.failures.consecutive >= self.strategy.max_failures:
            raise ProduceError(
                f"task {self.task_name}: {self.failures.consecutive} groups in a row failed to be generated, "
                f"the last one by {self.failures.last_error}; their prompts are kept"
            ) from self.failures.last_raised

    async def resume(self) -> None:
        """Resume the agent loop. Raises NotReadyError if that takes longer than `pause_timeout` seconds."""
        if not await self._returns("resume"):
            kind = type(self._agent_loop).__name__
            text = f"after {self._timeout:g} s: resume() of the agent loop ({kind}) has not returned"
            raise NotReadyError(text)

    async def _returns(self, name: str) -> bool:
        """Return whether this method of the agent loop returns within `pause_timeout` seconds; raise its error.

        Otherwise it is cancelled; one that suppresses that is left behind.
        """
        calling = asyncio.ensure_future(getattr(self._agent_loop, name)())
        try:
            done, _ = await asyncio.wait([calling], timeout=self._timeout)
        finally:
            calling.cancel()
            await asyncio.wait([calling], timeout=min(_ENDING_SECONDS, self._timeout))
        if not done and (not calling.done() or calling.cancelled()):
            return False
        if calling.cancelled():
            raise ProduceError(f"task {self.task_name}: {name}() of the agent loop has cancelled itself")
        calling.result()
        return True

    async def pause(self) -> None:
        """Interrupt all groups, and store their partial responses.

        Calls that haven't returned after `pause_timeout` seconds are cancelled; nothing of them is kept.
        """
        if not self._tasks:
            return
        began, self._is_pausing = time.monotonic(), True
        try:
            if await self._returns("pause"):
                await asyncio.wait(self._tasks, timeout=max(0.0, began + self._timeout - time.monotonic()))
        finally:
            self._is_pausing = False
        if late_count := sum(not task.done() for task in self._tasks):
            text = "task %s: %d groups were not done %g s after pause(); they begin anew later"
            _logger.warning(text, self.task_name, late_count, self._timeout)
            await self.cancel()
        self._collect()

    async def cancel(self) -> None:
        """Cancel all groups; their prompts are given back unchanged.

        The agent loop has `pause_timeout` seconds to end its calls. Cancelling the caller doesn't shorten this wait.
        """
        await shielded(self._cancel())

    async def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        deadline = time.monotonic() + self._timeout
        # Only calls of the agent loop are left behind: those of the store have timeouts of their own.
        while late_tasks := [task for task in self._tasks if not task.done()]:
            remaining = max(0.0, deadline - time.monotonic()) or None
            waited_for = late_tasks if remaining else [task for task in late_tasks if task not in self._calling_tasks]
            if not waited_for:
                text = "task %s: %d groups are still being generated %g s after they were cancelled"
                _logger.warning(text, self.task_name, len(late_tasks), self._timeout)
                break
            for task in () if remaining else waited_for:
                task.cancel()  # its agent loop suppressed the first one; without room, its group may be stored never
            await asyncio.wait(waited_for, timeout=remaining)
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.exception()  # marks it as retrieved

    @contextlib.asynccontextmanager
    async def ending(self) -> AsyncIterator[None]:
        """Cancel all groups at the end of the block, also after an error, as `cancel` does.

        If failures in a row led to a ProduceError, the prompts aren't at fault: their failures since the last success
        are undone.
        """
        try:
            yield
        except ProduceError:
            await shielded(self._undo_failures())
            raise
        finally:
            await self.cancel()

    async def _undo_failures(self) -> None:
        await self._cancel()
        for status, uids in self.failures.failed.items():  # also prompts that were set aside
            query = {"uid": {"$in": sorted(uids)}, "status": {"$in": [status, Status.FAILED]}}
            await self.buffer.update(query, status=status)

    def _collect(self) -> None:
        """Remove the tasks that are done. Raises the first error that ended one."""
        ended = [task for task in self._tasks if task.done()]
        self._tasks = [task for task in self._tasks if not task.done()]
        errors = [error for task in ended if not task.cancelled() and (error := task.exception())]
        if errors:
            raise errors[0]

    # One group

    async def _run(self, prompt: Prompt) -> None:
        try:
            await self._generate(prompt)
        except LeaseLostError:
            self.summary.lost += 1
        except BaseException:
            with contextlib.suppress(ReplayBufError, RuntimeError):  # if this fails, its lease ends
                await shielded(prompt.give_back())
            raise

    async def _generate(self, prompt: Prompt) -> None:
        began, model_step, tokens_before = time.monotonic(), self.model_step, count_tokens(prompt.group, self._kind)
        group = prompt.group
        error: str | BaseException | None = await self._call_each(prompt) if self.strategy.by_rollout else None
        try:
            if not self.strategy.by_rollout:
                group = await self._call(group)
            status = checked_status(group, self._kind)
            if status == Status.FAILED:
                status, error = (
                    (Status.COMPLETED, None)
                    if self._is_enough(prompt, group)
                    else (status, error or error_of(group, self._kind))
                )
            if status == Status.COMPLETED:
                get, key = self._kind.get, self._kind.reward_key
                completed = self._completed_rollouts(group)
                self.summary.add_rewards(rewards_of(completed, lambda item: reward_value(get(item, "reward"), key)))
        except (Exception, asyncio.CancelledError) as raised:
            task = asyncio.current_task()
            if isinstance(raised, asyncio.CancelledError) and task and task.cancelling():
                raise  # otherwise the agent loop has raised its own, as a failure
            error = raised
        seconds, tokens = time.monotonic() - began, max(0, count_tokens(group, self._kind) - tokens_before)
        if error is None:
            try:
                status = await self._store(prompt, group, status, model_step)
                self.failures.reset()
            except RolloutError as raised:  # its result can't be stored
                error = raised
        text = None
        if error is not None:
            text = text_of(error)
            status = await self._fail(prompt, error, text)
        self.summary.add(status, tokens)
        outcome = Generated(self.task_name, group, status, tokens, seconds, prompt.attempt, model_step, text)
        self.failures.add_wasted(outcome, pausing=self._is_pausing)
        if self.strategy.on_group is not None:
            self.strategy.on_group(outcome)

    async def _call(self, group: list[Any]) -> list[Any]:
        task = asyncio.current_task()
        self._calling_tasks.add(task)
        try:
            generated = await self._agent_loop.generate_group(group, partial=self.strategy.partial)
            return group if generated is None else as_group(generated)
        finally:
            self._calling_tasks.discard(task)

    async def _call_each(self, prompt: Prompt) -> BaseException | None:
        """Generate the rollouts of a group by a call each, and add each to its prompt when it is completed.

        A call that fails leaves its rollout FAILED. Return the first error. Raises those of storing a rollout.
        """
        task = asyncio.current_task()
        places = [place for place, rollout in enumerate(prompt.group) if not self._completed_rollouts([rollout])]
        calls = [asyncio.create_task(self._call_one(prompt, place)) for place in places]
        self._calling_tasks.add(task)
        try:
            errors = await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
            if calls:  # those that suppress it are left behind
                await asyncio.wait(calls, timeout=self._timeout)
            self._calling_tasks.discard(task)
        return next(filter(None, errors), None)

    async def _call_one(self, prompt: Prompt, place: int) -> BaseException | None:
        group, model_step = prompt.group, self.model_step
        try:
            generated = await self._call([group[place]])
            if len(generated) != 1:
                raise RolloutError(f"generate_group was given one rollout, and returned {len(generated)}")
            is_completed = checked_status(generated, self._kind) == Status.COMPLETED
            [group[place]] = generated
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task and task.cancelling():
                raise
            return self._failed(group[place], error)
        if is_completed:
            try:
                await prompt.add(place, model_step=model_step if self._is_dated else None)
            except RolloutError as error:  # it can't be stored
                return self._failed(group[place], error)
        return None

    def _failed(self, rollout: Any, error: BaseException) -> BaseException:
        for segment in flat([rollout]):
            self._kind.set_status(segment, Status.FAILED)
            self._kind.set(segment, "error_msg", text_of(error))
        return error

    def _completed_rollouts(self, group: Sequence[Any]) -> list[Any]:
        return [rollout for rollout in group if {*map(self._kind.status, flat([rollout]))} == {Status.COMPLETED}]

    def _is_enough(self, prompt: Prompt, group: Sequence[Any]) -> bool:
        """Return whether a group goes without its failed rollouts, since this was the last attempt at it."""
        min_size = self.strategy.min_size
        return min_size is not None and self._is_last(prompt) and len(self._completed_rollouts(group)) >= min_size

    def _is_last(self, prompt: Prompt) -> bool:
        return 0 < self.buffer.limits.max_deliveries <= prompt.attempt

    @property
    def _is_dated(self) -> bool:
        """Whether puts name model and train step: the rollouts have the fields of staleness, or a rule demands them."""
        may_have = self._kind.may_have
        is_known = may_have("response_model_steps") and (may_have("response_ids") or may_have("response"))
        return self.strategy.expiry.active or is_known

    async def _fail(self, prompt: Prompt, error: str | BaseException, text: str) -> Status:
        """Give a group back for a retry, or set it aside as FAILED after the last one. Return its status."""
        is_last = self._is_last(prompt)
        self.failures.add_failed_prompt(prompt, error, last=is_last)
        await prompt.give_back(failed=text)
        return Status.FAILED if is_last else Status.INIT

    async def _store(self, prompt: Prompt, group: list[Any], status: Status, model_step: int) -> Status:
        """Store a generated group. Return its stored status."""
        tags = {} if self.strategy.tags is None else check_tags(self.strategy.tags(group)) or {}
        if (times := prompt.tags.get(INTERRUPTED)) is not None:
            tags[INTERRUPTED] = times
        override = None  # None: the status of the rollouts
        if status == Status.COMPLETED and not self.strategy.is_valid(self._completed_rollouts(group)):
            status = override = Status.FILTERED
            for rollout in flat(group):
                self._kind.set_status(rollout, Status.FILTERED)
        elif status == Status.ABORTED:
            tags[INTERRUPTED] = 1 + (times if isinstance(times, int) else 0)
            if not self.strategy.partial:
                discard_partial_responses(group, self._kind, Status.ABORTED)
        rule, min_size = self.strategy.expiry, self.strategy.min_size
        status_before = group_status(map(self._kind.status, flat(group)))
        is_dated = self._is_dated
        while True:
            version = self.buffer.waits.version()
            try:
                await prompt.finish(
                    group,
                    model_step=model_step if is_dated else None,
                    current_train_step=self.train_step if is_dated else None,
                    stale_threshold=rule.stale_threshold,
                    token_stale_threshold=rule.token_stale_threshold,
                    expired_groups_retryable=rule.retryable,
                    tags=tags,
                    status=override,
                    min_size=None if override or min_size is None else min(min_size, len(group)),
                    keep_unfit=self.buffer.limits.keeps_unfit,
                )
            except FullError as error:  # keep the group, and renew its lease, until there is room
                self.buffer.waits.warn(f"room for {self.task_name}", f"task {self.task_name}: {error}", _logger)
                await asyncio.sleep(_SHORTEST_SECONDS)  # refusals of several groups may seem changes to each other
                await self.buffer.waits.changed(_ROOM_SECONDS - _SHORTEST_SECONDS, version)
            else:
                status_now = group_status(map(self._kind.status, flat(group)))
                # The rollouts change only if they expire; their class may have other names for EXPIRED and FILTERED.
                return status if status_now == status_before else Status.EXPIRED
