"""The interface of an inference engine to produce strategies, and what a batch came to (`ProduceSummary`)."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from replaybuf.common.checks import error_text, shown
from replaybuf.common.units import number, short
from replaybuf.errors import InputError, ProduceError, RolloutError
from replaybuf.produce.prompt import Prompt
from replaybuf.values.rollouts.rewards import SCORE, reward_value
from replaybuf.values.rollouts.rollout import Status, group_status
from replaybuf.values.rollouts.rollout_type import RolloutType
from replaybuf.values.rollouts.segments import flat, rewards_of


@runtime_checkable
class AgentLoop(Protocol):
    """Generates the rollouts of a group, in one turn or many, and their rewards.

    Names and meanings are those of xtuner's agent loops.
    """

    async def generate_group(self, group: list[Any], *, partial: bool) -> list[Any] | None:
        """Generate the rollouts of a group, in place or in a new list. Return the group, or None for the one given.

        The returned group may have another number of rollouts.

        Rollouts that are COMPLETED already stay unchanged. The others become COMPLETED, with their response and
        reward; or FAILED, with `error_msg`; or FILTERED; or, if generation is paused during the call, ABORTED, with the
        text and tokens so far in `response` and `response_ids`. With `partial`, ABORTED rollouts are continued from
        these. `response_model_steps` may be left to the strategy, unless the weights change during the call.

        An exception fails this group only, which is retried, up to the buffer's `max_deliveries`. The results of a
        cancelled call are discarded.
        """

    async def pause(self) -> None:
        """Interrupt generation: running calls of `generate_group` return soon, with ABORTED rollouts."""

    async def resume(self) -> None:
        """Start generation, or resume it after a pause."""


def check_agent_loop(agent_loop: Any) -> AgentLoop:
    """Check that an agent loop has its methods. Raises InputError."""
    if not isinstance(agent_loop, AgentLoop):
        raise InputError(f"an agent loop needs generate_group, pause and resume; got {shown(agent_loop)}")
    return agent_loop


def reward_varies(group: Sequence[Any], *, reward_key: str = SCORE) -> bool:
    """Return whether the rollouts of a group have different rewards; otherwise their advantages are all zero.

    For `is_valid`: the filter of DAPO's dynamic sampling (Yu et al. 2025, arXiv:2503.14476, section 3.2). Rewards are
    numbers, or dicts with the part `reward_key`, in a field of that name; a rollout without one counts as different.
    """

    def reward(item: Any) -> float | None:
        return reward_value(item.get("reward") if isinstance(item, dict) else getattr(item, "reward", None), reward_key)

    rewards = rewards_of(group, reward)
    return len(set(rewards)) > 1 or None in rewards


@dataclass(frozen=True, slots=True)
class Generated:
    """A group that was generated and stored, for logging: its outcome and its cost.

    `status` is that of the stored group, or INIT for one that failed and will be tried again. `tokens` were generated
    in this call by the weights of `model_step`, in `seconds`. `attempt` counts the deliveries of the prompt.
    """

    task_name: str
    group: list[Any]
    status: Status
    tokens: int
    seconds: float
    attempt: int
    model_step: int
    error: str | None = None


def checked_status(group: Sequence[Any], kind: RolloutType) -> Status:
    """Return the status of a group, by its rollouts. Raises RolloutError for results that no agent loop may return."""
    if not group:
        raise RolloutError("generate_group returned an empty group")
    statuses = []
    for place, rollout in enumerate(flat(group)):
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
    with contextlib.suppress(RolloutError):  # of what can't be stored
        for rollout in flat(group):
            with contextlib.suppress(AttributeError, TypeError):
                count += len(kind.get(rollout, "response_ids"))
    return count


def error_of(group: Sequence[Any], kind: RolloutType) -> str:
    """Return the rollouts' error messages, joined."""
    texts = dict.fromkeys(str(text) for rollout in flat(group) if (text := kind.get(rollout, "error_msg")))
    return "; ".join(texts) or "its rollouts have the status failed, and no error_msg"


def text_of(error: str | BaseException) -> str:
    """Return an error with its class, for logs; a text as it is."""
    return error if isinstance(error, str) else error_text(error)


_logger = logging.getLogger("replaybuf.produce")

_KINDS = {Status.FILTERED: "filtered", Status.EXPIRED: "too old when done"}
_UNASKED_PAUSE = "interrupted, though generation was not paused (does resume() end the pause?)"


class FailureTracker:
    """Counts failures since the last success, and wasted groups; keeps the last error."""

    def __init__(self) -> None:
        self.consecutive = 0
        self.last_error = ""
        self.last_raised: BaseException | None = None
        self.failed: dict[Status, set[int]] = {}  # prompts that failed since the last success, by their earlier status
        self._wasted: Counter[str] = Counter()

    @property
    def wasted(self) -> int:
        """The number of generated groups that were wasted."""
        return self._wasted.total()

    def add_failure(self, error: str | BaseException) -> None:
        """Count a failed call of the agent loop."""
        self.consecutive += 1
        if isinstance(error, BaseException):
            self.last_raised = error
        self.last_error = text_of(error)

    def add_failed_prompt(self, prompt: Prompt, error: str | BaseException, *, last: bool) -> None:
        """Count and log a failed group, the first one since the last success with its traceback."""
        self.add_failure(error)
        self.failed.setdefault(prompt.status, set()).add(prompt.uid)
        raised = error if isinstance(error, BaseException) and self.consecutive == 1 else None
        outcome = "is set aside" if last else "will be tried again"
        _logger.warning("%r failed, and %s: %s", prompt, outcome, self.last_error, exc_info=raised)

    def reset(self) -> None:
        """Start counting again: a group was generated and stored."""
        self.consecutive = 0
        self.failed.clear()

    def add_wasted(self, generated: Generated, *, pausing: bool) -> None:
        """Count a group if it was wasted."""
        if generated.status == Status.ABORTED:
            if not generated.tokens and not pausing:  # no progress was made
                self._wasted[_UNASKED_PAUSE] += 1
        elif generated.status != Status.COMPLETED:
            self._wasted[_KINDS.get(generated.status, "failed")] += 1

    def describe(self) -> str:
        """Return a sentence about the wasted groups."""
        text = f"after {self.wasted} in vain: " + ", ".join(f"{n} {kind}" for kind, n in self._wasted.most_common())
        return text + (f"; the last error was {self.last_error}" if self._wasted["failed"] else "")


_NAMES = {Status.COMPLETED: "produced", Status.ABORTED: "interrupted", Status.INIT: "retried"}
_GROUPS = ("failed", "retried", "filtered", "expired", "interrupted", "lost")


@dataclass(slots=True)
class ProduceSummary:
    """The production of one batch. Counts are of groups; new groups and earlier ones are counted separately.

    - `produced`: generated now, and completed; `reused`: completed groups in the buffer at the beginning.
    - `continued`: prompts handed out again: interrupted, expired or failed ones, or prompts of dead workers.
    - `failed`: set aside as FAILED; `retried`: failed, and will be retried; `filtered`: not valid; `expired`: too old,
      at the beginning or when put; `interrupted`: put back as ABORTED; `lost`: handed to another worker before they
      were done, and not stored.
    - `tokens`: response tokens generated now, including those of interrupted and failed groups.
    - `seconds`: the time of the production.
    - `raw_rewards_sum`, `raw_rewards_count`: over the rollouts of all completed groups, including filtered and expired
      ones, without which the mean would be biased. Rollouts without a reward don't count.
    """

    produced: int = 0
    reused: int = 0
    continued: int = 0
    failed: int = 0
    retried: int = 0
    filtered: int = 0
    expired: int = 0
    interrupted: int = 0
    lost: int = 0
    tokens: int = 0
    seconds: float = 0.0
    raw_rewards_sum: float = 0.0
    raw_rewards_count: int = 0

    def add_rewards(self, rewards: Iterable[float | None]) -> None:
        """Count the rewards of a completed group's rollouts; None where one has none."""
        scores = [reward for reward in rewards if reward is not None]
        self.raw_rewards_sum += sum(scores)
        self.raw_rewards_count += len(scores)

    def add(self, status: Status, tokens: int) -> None:
        """Count a group of this status; INIT is one that failed and will be tried again."""
        name = _NAMES.get(status, status.value)
        setattr(self, name, getattr(self, name) + 1)
        self.tokens += tokens

    @contextmanager
    def producing(self) -> Iterator[None]:
        """Add the time of the block to `seconds`. A ProduceError that ends it takes this summary along."""
        began = time.monotonic()
        try:
            yield
        except ProduceError as error:
            error.summary = self
            raise
        finally:
            self.seconds += time.monotonic() - began

    def __str__(self) -> str:
        """Return `32 groups (5 reused; 2 interrupted), 13.4k tokens in 2.1 s`."""
        other_counts = [f"{number(count)} {name}" for name in _GROUPS if (count := getattr(self, name))]
        notes = "; ".join(filter(None, [f"{self.reused} reused" if self.reused else "", ", ".join(other_counts)]))
        text = f"{number(self.produced)} groups{f' ({notes})' if notes else ''}"
        return f"{text}, {short(self.tokens)} tokens in {self.seconds:.1f} s"
