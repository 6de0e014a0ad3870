"""The interface between a produce strategy and the engine that generates."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from replaybuf.errors import InputError
from replaybuf.rollouts.rewards import SCORE, reward_value
from replaybuf.rollouts.rollout import Status


@runtime_checkable
class AgentLoop(Protocol):
    """Generates the rollouts of a group, in one turn or many, and their rewards.

    Names and meanings are those of xtuner's agent loops.
    """

    async def generate_group(self, group: list[Any], *, partial: bool) -> list[Any] | None:
        """Generate the rollouts of a group, in place or anew. Return the group, or None for the one given.

        The group that is returned may have another number of rollouts.

        Rollouts that are COMPLETED already stay as they are. The others become COMPLETED, with their response and
        reward; or FAILED, with `error_msg`; or FILTERED; or, if generation is paused during the call, ABORTED, with the
        text and tokens so far in `response` and `response_ids`. With `partial`, ABORTED rollouts are continued from
        there. `response_model_steps` may be left to the strategy, unless the weights change during the call.

        An exception fails this group only: it is tried again, up to the buffer's `max_deliveries`. If the call is
        cancelled, nothing of it is kept.
        """

    async def pause(self) -> None:
        """Interrupt generation: running calls of `generate_group` return soon, with ABORTED rollouts."""

    async def resume(self) -> None:
        """Generate again, after a pause or at the beginning."""


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


class NoCoroutineError(InputError):
    """A method of the agent loop must be a coroutine."""


def check_agent_loop(agent_loop: Any) -> AgentLoop:
    """Check an agent loop. Raises InputError for a missing or wrong method."""
    if isinstance(agent_loop, type):
        raise InputError(f"the agent loop is a class: give an instance, {agent_loop.__name__}(...)")
    for name, arguments in (("generate_group", ([],)), ("pause", ()), ("resume", ())):
        method = getattr(agent_loop, name, None)
        if not callable(method):
            raise InputError(f"an agent loop needs the coroutine {name}(); {type(agent_loop).__name__} has none")
        try:
            inspect.signature(method).bind(*arguments, **({"partial": False} if arguments else {}))
        except TypeError as error:
            call = f"{name}(group, *, partial)" if arguments else f"{name}()"
            raise InputError(f"{type(agent_loop).__name__}.{name} can't be called as {call}: {error}") from error
        except ValueError:  # some callables have no signature
            pass
    return agent_loop  # type: ignore[no-any-return]


def awaitable(agent_loop: Any, name: str, made: Any) -> Awaitable[Any]:
    """Return the awaitable that a method of an agent loop returned. Raises NoCoroutineError for anything else."""
    if not inspect.isawaitable(made):
        raise NoCoroutineError(
            f"{type(agent_loop).__name__}.{name} must be a coroutine (async def); it returned a {type(made).__name__}"
        )
    return made


def reward_varies(group: Sequence[Any], *, reward_key: str = SCORE) -> bool:
    """Return whether the rollouts of a group have different rewards; otherwise their advantages are all zero.

    For `is_valid`: the filter of DAPO's dynamic sampling (Yu et al. 2025, arXiv:2503.14476, section 3.2). Rewards are
    numbers, or dicts with the part `reward_key`, in a field of that name; a rollout without one counts as different.
    """
    rewards = [
        reward_value(
            rollout.get("reward") if isinstance(rollout, dict) else getattr(rollout, "reward", None), reward_key
        )
        for rollout in group
    ]
    return len(set(rewards)) > 1 or None in rewards
