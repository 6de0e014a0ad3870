"""Groups that are generated concurrently, each by its own asyncio task, their outcomes, and their failures."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from replaybuf.buffer.cancellation import to_its_end
from replaybuf.checks import check_tags
from replaybuf.errors import FullError, LeaseLostError, NotReadyError, ProduceError, ReplayBufError, RolloutError
from replaybuf.produce.agent_loop import AgentLoop, Generated, NoCoroutineError, awaitable
from replaybuf.produce.produce_summary import ProduceSummary
from replaybuf.produce.sampler import Sampler
from replaybuf.prompts import Prompt
from replaybuf.prompts.prompt_ledger import Again, begin_anew
from replaybuf.rollouts.normalise import as_group
from replaybuf.rollouts.rewards import reward_value
from replaybuf.rollouts.rollout import Status, group_status
from replaybuf.rollouts.rollout_type import RolloutType

if TYPE_CHECKING:
    from replaybuf.produce.strategies import ProduceStrategy


#: The tag that counts how often a group was interrupted.
INTERRUPTED = "interrupted"


def judge(group: Sequence[Any], kind: RolloutType) -> Status:
    """Return the status of a group, by its rollouts. Raises RolloutError for results that no agent loop may return."""
    if not group:
        raise RolloutError("generate_group returned an empty group")
    statuses = []
    for place, rollout in enumerate(group):
        try:
            kind.check_class(rollout)
            statuses.append(kind.status(rollout))
        except RolloutError as error:
            raise RolloutError(f"generate_group returned a rollout ([{place}]) that can't be stored: {error}") from None
    status = group_status(statuses)
    if status in (Status.INIT, Status.EXPIRED, Status.ARCHIVED):
        raise RolloutError(
            f"generate_group returned a group that is {status}: its rollouts must be completed, failed, filtered or "
            "aborted"
        )
    return status


def count_tokens(group: Sequence[Any], kind: RolloutType) -> int:
    """Return the number of response tokens of a group, as far as it is known."""
    count = 0
    for rollout in group:
        with contextlib.suppress(AttributeError, TypeError):
            count += len(kind.get(rollout, "response_ids"))
    return count


def begin_anew_later(group: Sequence[Any], kind: RolloutType) -> None:
    """Remove what interrupted rollouts have generated; they stay ABORTED."""
    aborted = [rollout for rollout in group if kind.status(rollout) == Status.ABORTED]
    begin_anew(aborted, kind)
    for rollout in aborted:
        kind.set_status(rollout, Status.ABORTED)


def error_of(group: Sequence[Any], kind: RolloutType) -> str:
    """Return the errors that the rollouts report."""
    texts = [str(text) for rollout in group if (text := kind.get(rollout, "error_msg"))]
    return texts[0] if texts else "its rollouts have the status failed, and no error_msg"


def text_of(error: BaseException) -> str:
    """Return an error and its class on one line, for people."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_logger = logging.getLogger("replaybuf.produce")

_KINDS = {Status.FILTERED: "filtered", Status.EXPIRED: "too old when done"}
_UNASKED = "interrupted, though generation was not paused (does resume() end the pause?)"


class FailureTracker:
    """Counts failures since the last success, and wasted groups; keeps the last error."""

    def __init__(self) -> None:
        self.consecutive = 0
        self.last_error = ""
        self.last_raised: BaseException | None = None
        self.failed: dict[Status, set[int]] = {}  # prompts that failed in this row, by their status before
        self._wasted: Counter[str] = Counter()
        self._shown: set[str] = set()  # places of errors whose traceback was logged

    @property
    def wasted(self) -> int:
        """How many generated groups were wasted."""
        return self._wasted.total()

    def add_failure(self, error: str | BaseException) -> None:
        """Count a failed call of the agent loop."""
        self.consecutive += 1
        if isinstance(error, BaseException):
            self.last_raised = error
        self.last_error = text_of(error) if isinstance(error, BaseException) else error

    def add_failed_prompt(self, prompt: Prompt, error: str | BaseException, *, last: bool) -> None:
        """Count and log a failed group, the first time with the place where the error was raised."""
        self.add_failure(error)
        self.failed.setdefault(prompt.status, set()).add(prompt.uid)
        raised = error if isinstance(error, BaseException) else None
        known = raised is None or (place := _place(raised)) in self._shown
        if not known:
            self._shown.add(place)
        outcome = "is set aside" if last else "will be tried again"
        _logger.warning("%r failed, and %s: %s", prompt, outcome, self.last_error, exc_info=None if known else raised)

    def reset(self) -> None:
        """Note that a group was generated and stored."""
        self.consecutive = 0
        self.failed.clear()

    def add_wasted(self, made: Generated, *, pausing: bool) -> None:
        """Count a group if it was wasted."""
        if made.status == Status.ABORTED:
            if not made.tokens and not pausing:  # no progress was made
                self._wasted[_UNASKED] += 1
        elif made.status != Status.COMPLETED:
            self._wasted[_KINDS.get(made.status, "failed")] += 1

    def describe(self) -> str:
        """Return a sentence about the wasted groups."""
        text = f"after {self.wasted} in vain: " + ", ".join(f"{n} {kind}" for kind, n in self._wasted.most_common())
        return text + (f"; the last error was {self.last_error}" if self._wasted["failed"] else "")


def _place(error: BaseException) -> str:
    """Return the class of an error, and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} {frames[-1].filename}:{frames[-1].lineno}" if frames else type(error).__name__


_ROOM_SECONDS = 1.0


class Generations:
    """The groups in flight of one strategy. `summary` counts their outcomes.

    `train_step` is the step that they are for, `model_step` that of the weights which generate. Both may be changed,
    for groups that are started from then on.
    """

    def __init__(
        self,
        agent_loop: AgentLoop,
        sampler: Sampler,
        strategy: ProduceStrategy,
        summary: ProduceSummary,
        train_step: int,
        model_step: int,
    ) -> None:
        self.train_step, self.model_step = train_step, model_step
        self.failures = FailureTracker()
        self._pausing = False
        self._agent_loop, self._sampler, self._strategy, self._summary = agent_loop, sampler, strategy, summary
        self._kind, self._timeout = sampler.buffer.rollout_type, strategy.pause_timeout
        self._tasks: list[asyncio.Task[None]] = []  # in the order in which they were started
        self._calling: set[asyncio.Task[None] | None] = set()  # those that are in a call of the agent loop

    def __len__(self) -> int:
        return len(self._tasks)

    async def start(self, count: int, again: Iterable[Again]) -> int:
        """Draw up to `count` prompts and start to generate them. Return their number."""
        if count < 1:
            return 0
        prompts = await self._sampler.sample(count, again=again, partial=self._strategy.partial)
        self._tasks += [asyncio.create_task(self._run(prompt)) for prompt in prompts]
        self._summary.continued += sum(prompt.status != Status.INIT or prompt.attempt > 1 for prompt in prompts)
        await asyncio.sleep(0)  # a task that is cancelled before its first step would not give its prompt back
        return len(prompts)

    async def wait(self, timeout: float) -> None:
        """Wait until at least one group is done, for up to `timeout` seconds. Raises what `check` raises."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        self.check()

    def check(self) -> None:
        """Remove the tasks that are done.

        Raises what storing one raised, and ProduceError if too many have failed in a row.
        """
        for _ in filter(asyncio.Task.cancelled, self._tasks):
            self.failures.add_failure("it cancelled its own task")
        self._collect()
        if self.failures.consecutive >= self._strategy.max_failures:
            raise ProduceError(
                f"task {self._sampler.task_name}: {self.failures.consecutive} groups in a row failed to be generated, "
                f"the last one by {self.failures.last_error}; their prompts are kept"
            ) from self.failures.last_raised

    async def resume(self) -> None:
        """Resume the agent loop. Raises NotReadyError if that takes longer than `pause_timeout` seconds."""
        loop = self._agent_loop
        try:
            async with asyncio.timeout(self._timeout) as limit:
                await awaitable(loop, "resume", loop.resume())
        except TimeoutError as error:
            if not limit.expired():
                raise  # the agent loop's own
            text = f"after {self._timeout:g} s: resume() of the agent loop ({type(loop).__name__}) has not returned"
            raise NotReadyError(text) from error

    async def pause(self) -> None:
        """Interrupt all groups, and store their partial responses.

        Calls that haven't returned after `pause_timeout` seconds are cancelled; nothing of them is kept.
        """
        if not self._tasks:
            return
        began, self._pausing = time.monotonic(), True
        try:
            async with asyncio.timeout(self._timeout) as limit:
                await awaitable(self._agent_loop, "pause", self._agent_loop.pause())
                await asyncio.wait(self._tasks)
        except TimeoutError:
            if not limit.expired():
                raise  # the agent loop's own
        finally:
            self._pausing = False
        if late := [task for task in self._tasks if not task.done()]:
            _logger.warning(
                "task %s: %d groups were not done %g s after pause(); they begin anew later",
                self._sampler.task_name,
                len(late),
                self._timeout,
            )
            await self.cancel()
        self._summary.pause_seconds += time.monotonic() - began
        self._collect()

    async def cancel(self) -> None:
        """End all groups at once; their prompts are given back as they were.

        The agent loop has `pause_timeout` seconds to end its calls. A caller that is cancelled meanwhile waits as well.
        """
        for task in self._tasks:
            task.cancel()
        try:
            await self._ended()
        finally:
            if late := sum(not task.done() for task in self._tasks):
                _logger.warning(
                    "task %s: %d groups are still being generated %g s after they were cancelled",
                    self._sampler.task_name,
                    late,
                    self._timeout,
                )
            for task in self._tasks:
                if task.done() and not task.cancelled():
                    task.exception()  # so that it counts as seen

    async def _ended(self) -> None:
        """Wait for the end of all tasks; for those in a call of the agent loop at most `pause_timeout` seconds.

        The others are busy with the store, which has its own timeouts.
        """
        deadline, cancelled = time.monotonic() + self._timeout, None
        while late := [task for task in self._tasks if not task.done()]:
            remaining = max(0.0, deadline - time.monotonic()) or None
            late = late if remaining else [task for task in late if task not in self._calling]
            if not late:
                break
            try:
                await asyncio.wait(late, timeout=remaining)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    @contextlib.asynccontextmanager
    async def ending(self) -> AsyncIterator[None]:
        """End all groups at the end of the block, also after an error, as `cancel` does.

        If nothing but failures led to a ProduceError, the prompts aren't at fault: these failures don't count.
        """
        try:
            yield
        except ProduceError:
            await self.cancel()
            await self._forgive()
            raise
        finally:
            await self.cancel()

    async def _forgive(self) -> None:
        """Undo the failures of prompts since the last success, also of those that were set aside."""
        for status, uids in self.failures.failed.items():
            failed = {"uid": {"$in": sorted(uids)}, "status": {"$in": [status, Status.FAILED]}}
            await self._sampler.buffer.update(failed, status=status)

    def _collect(self) -> None:
        """Remove the tasks that are done. Raises the first error that ended one."""
        done = [task for task in self._tasks if task.done()]
        self._tasks = [task for task in self._tasks if not task.done()]
        errors = [error for task in done if not task.cancelled() and (error := task.exception())]
        if errors:
            raise errors[0]

    # One group

    async def _run(self, prompt: Prompt) -> None:
        try:
            await self._generate(prompt)
        except LeaseLostError:
            self._summary.lost += 1
        except BaseException:
            with contextlib.suppress(ReplayBufError, RuntimeError):  # otherwise it comes back when its lease ends
                await to_its_end(prompt.give_back())
            raise

    async def _generate(self, prompt: Prompt) -> None:
        began, model_step, before = time.monotonic(), self.model_step, count_tokens(prompt.group, self._kind)
        group = prompt.group
        error: str | BaseException | None = None
        try:
            made = await self._call(group)
            group = group if made is None else as_group(made)
            status = judge(group, self._kind)
            error = error_of(group, self._kind) if status == Status.FAILED else None
            if status == Status.COMPLETED:
                get, key = self._kind.get, self._kind.reward_key
                self._summary.add_rewards(reward_value(get(one, "reward"), key) for one in group)
        except NoCoroutineError:
            raise
        except (Exception, asyncio.CancelledError) as raised:
            task = asyncio.current_task()
            if isinstance(raised, asyncio.CancelledError) and task and task.cancelling():
                raise  # otherwise the agent loop has raised its own, as a failure
            error = raised
        seconds, tokens = time.monotonic() - began, max(0, count_tokens(group, self._kind) - before)
        if error is None:
            try:
                status = await self._store(prompt, group, status, model_step)
                self.failures.reset()
            except RolloutError as raised:  # its result can't be stored
                error = raised
        text = None
        if error is not None:
            status, text = await self._fail(prompt, error), self.failures.last_error
        self._count(
            Generated(self._sampler.task_name, group, status, tokens, seconds, prompt.attempt, model_step, text)
        )

    async def _call(self, group: list[Any]) -> list[Any] | None:
        task = asyncio.current_task()
        self._calling.add(task)
        try:
            made = self._agent_loop.generate_group(group, partial=self._strategy.partial)
            result: list[Any] | None = await awaitable(self._agent_loop, "generate_group", made)
            return result
        finally:
            self._calling.discard(task)

    async def _fail(self, prompt: Prompt, error: str | BaseException) -> Status:
        """Let a group be tried again, or set it aside as FAILED after the last try. Return its status."""
        most = self._sampler.buffer.limits.max_deliveries
        last = bool(most) and prompt.attempt >= most
        self.failures.add_failed_prompt(prompt, error, last=last)
        await prompt.give_back(failed=error if isinstance(error, str) else text_of(error))
        return Status.FAILED if last else Status.INIT

    async def _store(self, prompt: Prompt, group: list[Any], status: Status, model_step: int) -> Status:
        """Store a generated group. Return the status with which it is stored."""
        tags = {} if self._strategy.tags is None else check_tags(self._strategy.tags(group)) or {}
        if (times := prompt.tags.get(INTERRUPTED)) is not None:
            tags[INTERRUPTED] = times
        stored = None  # None: the status of the rollouts
        if status == Status.COMPLETED and not self._strategy.is_valid(group):
            status = stored = Status.FILTERED
            for rollout in group:
                self._kind.set_status(rollout, Status.FILTERED)
        elif status == Status.ABORTED:
            tags[INTERRUPTED] = 1 + (times if isinstance(times, int) else 0)
            if not self._strategy.partial:
                begin_anew_later(group, self._kind)
        rule, before = self._strategy.expiry, group_status(map(self._kind.status, group))
        # Without these fields, rollouts have no staleness; a rule that needs it raises an error.
        may_have = self._kind.may_have
        is_known = may_have("response_model_steps") and (may_have("response_ids") or may_have("response"))
        dated = rule.active or is_known
        while True:
            seen = self._sampler.buffer.waits.version()
            try:
                await prompt.finish(
                    group,
                    model_step=model_step if dated else None,
                    current_train_step=self.train_step if dated else None,
                    stale_threshold=rule.stale_threshold,
                    token_stale_threshold=rule.token_stale_threshold,
                    expired_groups_retryable=rule.retryable,
                    tags=tags,
                    status=stored,
                    keep_unfit=self._sampler.buffer.limits.keeps_unfit,
                )
            except FullError as error:  # the group is kept, and its lease extended, until there is room
                _logger.warning("task %s: %s", self._sampler.task_name, error)
                await self._sampler.buffer.waits.changed(seen, _ROOM_SECONDS)
            else:
                now = group_status(map(self._kind.status, group))
                # The rollouts change only if they expire; their class may have another word for that, or for filtered.
                return status if now == before else Status.EXPIRED

    def _count(self, made: Generated) -> None:
        self._summary.add(made.status, made.tokens, made.seconds)
        self.failures.add_wasted(made, pausing=self._pausing)
        if self._strategy.on_group is not None:
            self._strategy.on_group(made)
