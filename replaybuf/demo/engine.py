"""The inference engine of the demo, as an agent loop: the policy says token after token, at a made-up speed.

A real engine serves many requests at once, and some take much longer than others. So the time per token depends on the
prompt: some milliseconds, and for a few prompts ten times that. A synchronous trainer waits for these; an asynchronous
one interrupts and continues them.

The arithmetic is done in a thread, one group's tokens at a time. The tokens depend only on the weights, the seed, the
number of the prompt, the rollout, the place of the token and the step of the weights: with the same weights a group
comes out the same, no matter which process generates it and how often it is interrupted.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np

from replaybuf.demo.arithmetic import MAX_RESPONSE_TOKENS
from replaybuf.demo.generation import Answers
from replaybuf.demo.policy import FloatArray, Policy
from replaybuf.rollouts.rollout import RolloutState, Status

#: Seconds that a token takes: the median of all prompts, and the spread (sigma) of its logarithm.
TOKEN_SECONDS, TOKEN_SPREAD = 0.003, 1.0

_SECONDS, _TOKENS = 1, 2  # the purposes of a prompt's random numbers


class Engine:
    """An agent loop over a policy. `session` is written to the rollouts, to mark their origin.

    `load` sets new weights, while nothing is being generated.
    """

    def __init__(self, seed: int, session: str, *, token_seconds: float = TOKEN_SECONDS) -> None:
        self._seed, self._session, self._token_seconds = seed, session, token_seconds
        self._weights: tuple[Policy, int] | None = None
        self._paused = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "engine")

    def load(self, policy: Policy, step: int) -> None:
        """Generate with the weights of train step `step` from now on."""
        self._weights = policy, step

    async def pause(self) -> None:
        """Interrupt generation: pending tokens don't come any more."""
        self._paused.set()

    async def resume(self) -> None:
        """Generate again."""
        self._paused.clear()

    async def generate_group(self, group: list[RolloutState], *, partial: bool) -> list[RolloutState]:
        """Generate the rollouts of a group and write them in place at the end: COMPLETED, or ABORTED after a pause."""
        assert self._weights is not None, "load() comes first"
        policy, step = self._weights
        answers = Answers.of(group, partial=partial)
        number = int(group[0].group_id or 0)
        seconds, randoms = token_seconds(self._seed, number, self._token_seconds), None
        while len(answers.unfinished) and await self._goes_on(seconds):
            randoms = token_randoms(self._seed, number, step, len(group)) if randoms is None else randoms
            await self._in_thread(answers.extend, policy, randoms)
        for rollout in group:
            if rollout.status != Status.COMPLETED:
                rollout.session_id = self._session
        answers.write(group)
        return group

    async def _goes_on(self, seconds: float) -> bool:
        """Wait for the time of a token. Return False as soon as generation is paused."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._paused.wait()
        return not self._paused.is_set()

    async def _in_thread(self, work: Any, *arguments: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False)


def token_seconds(seed: int, number: int, median: float = TOKEN_SECONDS) -> float:
    """Return the seconds for each token of prompt `number`: log-normal over the prompts."""
    return median * float(np.exp(TOKEN_SPREAD * np.random.default_rng([seed, number, _SECONDS]).normal()))


def token_randoms(seed: int, number: int, step: int, rows: int) -> FloatArray:
    """Return random numbers for the tokens of a prompt at a weight step: float64 [rows, MAX_RESPONSE_TOKENS]."""
    return np.random.default_rng([seed, number, _TOKENS, step]).random((rows, MAX_RESPONSE_TOKENS))
