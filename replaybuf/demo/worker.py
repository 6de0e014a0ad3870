"""A rollout worker: a process that generates groups with weights that lag behind, and puts them into the buffer.

Started by the trainer as `python -m replaybuf.demo.worker`, with its settings in the first line of stdin, so that no
password is in the list of processes. EOF on stdin means that the run is over or the trainer dead, also by kill -9: then
the worker gives back its groups in flight, and ends.

Nothing is lost when a worker is killed: its prompts are handed out again some seconds later."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from replaybuf import FencedError, ReplayBufError
from replaybuf.demo.policy import (
    END,
    MAX_RESPONSE_TOKENS,
    FloatArray,
    Policy,
    decode,
    is_over,
    prompt_of,
    rows_of,
    verify,
)
from replaybuf.demo.run_folder import (
    BATCH_GROUPS,
    EXPERTS,
    LAGS,
    LAYERS,
    TOP_K,
    RunFolder,
    buffer_config,
    sampler_of,
    worker_strategy,
)
from replaybuf.places.owners import IN_DATABASE
from replaybuf.produce import TrainState, produce_loop
from replaybuf.rollouts.rollout import RolloutState, Status

#: Seconds per token: the median over prompts, and the standard deviation of its logarithm.
TOKEN_SECONDS, TOKEN_SPREAD = 0.003, 1.0

_SECONDS, _TOKENS = 1, 2  # the purposes of a prompt's random numbers


class Engine:
    """An agent loop over a policy. `load` sets new weights, while nothing is being generated.

    Rollouts have arrays `with_experts`, as those of a mixture of experts do.
    """

    def __init__(self, seed: int, *, token_seconds: float = TOKEN_SECONDS, with_experts: bool = False) -> None:
        self._seed, self._token_seconds, self._with_experts = seed, token_seconds, with_experts
        self._weights: tuple[Policy, int] | None = None
        self._paused = asyncio.Event()

    def load(self, policy: Policy, step: int) -> None:
        """Generate with the weights of train step `step` from now on."""
        self._weights = policy, step

    async def pause(self) -> None:
        """Interrupt generation: pending tokens are dropped."""
        self._paused.set()

    async def resume(self) -> None:
        """Resume generation."""
        self._paused.clear()

    async def generate_group(self, group: list[RolloutState], *, partial: bool) -> list[RolloutState]:
        """Generate the rollouts of a group and write them in place at the end: COMPLETED, or ABORTED after a pause."""
        assert self._weights is not None, "load() comes first"
        policy, step = self._weights
        answers = [_Answer(rollout, partial) for rollout in group]
        number = int(group[0].group_id or 0)
        seconds = token_seconds(self._seed, number, self._token_seconds)
        randoms = np.random.default_rng([self._seed, number, _TOKENS, step]).random((len(group), MAX_RESPONSE_TOKENS))
        while not all(is_over(answer.ids) for answer in answers) and await self._goes_on(seconds):
            for answer, numbers in zip(answers, randoms, strict=True):
                if not is_over(answer.ids):
                    answer.extend(policy, prompt_of(group), numbers)
        for rollout, answer in zip(group, answers, strict=True):
            if rollout.status != Status.COMPLETED:
                answer.write(rollout)
                if self._with_experts:
                    rollout.routed_experts = experts_of([*rollout.prompt_ids, *answer.ids])
        return group

    async def _goes_on(self, seconds: float) -> bool:
        """Wait for the time of a token. Return False as soon as generation is paused."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._paused.wait()
        return not self._paused.is_set()


class _Answer:
    """The tokens of a rollout so far and their log-probabilities; those of an interrupted one only if `partial`."""

    def __init__(self, rollout: RolloutState, partial: bool) -> None:
        kept = rollout.response_ids is not None and (partial or rollout.status == Status.COMPLETED)
        self.ids: list[int] = list(map(int, rollout.response_ids)) if kept else []
        self.log_probs: list[float] = list(map(float, rollout.logprobs)) if kept and self.ids else []

    def extend(self, policy: Policy, prompt: str, randoms: FloatArray) -> None:
        """Sample the next token, with the random number of its position."""
        log_probs = policy.log_probs(rows_of(prompt, self.ids)[-1:])[0]
        cumulative = np.exp(log_probs).cumsum()
        token = int((cumulative <= randoms[len(self.ids)] * cumulative[-1]).sum())
        self.ids.append(token)
        self.log_probs.append(float(log_probs[token]))

    def write(self, rollout: RolloutState) -> None:
        """Write the answer into its rollout: COMPLETED with its reward, or ABORTED with the tokens so far."""
        rollout.response, rollout.response_ids = decode(self.ids), np.array(self.ids, dtype=np.int32)
        rollout.logprobs = np.array(self.log_probs, dtype=np.float32)
        rollout.response_mask = np.ones(len(self.ids), dtype=np.int32)
        rollout.status = Status.COMPLETED if is_over(self.ids) else Status.ABORTED
        if rollout.status == Status.COMPLETED:
            rollout.finish_reason = "stop" if self.ids[-1] == END else "length"
            rollout.reward = {"score": verify(prompt_of([rollout]), self.ids)}


def experts_of(tokens: list[int]) -> NDArray[np.int16]:
    """Return the experts that each token went through: int16 [tokens, LAYERS, TOP_K]. They are made up."""
    layers, ranks = np.arange(LAYERS), np.arange(TOP_K)
    mixed = 31 * np.array(tokens)[:, None, None] + 7 * layers[:, None] + 17 * ranks
    return (mixed % EXPERTS).astype(np.int16)


def token_seconds(seed: int, number: int, median: float = TOKEN_SECONDS) -> float:
    """Return the seconds for each token of prompt `number`: log-normal over the prompts."""
    return median * float(np.exp(TOKEN_SPREAD * np.random.default_rng([seed, number, _SECONDS]).normal()))


_GRACE_SECONDS = 1.0
_REJOIN_SECONDS = 0.2


@dataclass(frozen=True)
class WorkerSettings:
    """The settings of one rollout worker."""

    url: str
    folder: str
    worker: int
    seed: int
    prompts: int
    payloads: str = IN_DATABASE


async def work(settings: WorkerSettings, stop: asyncio.Event, engine: Engine | None = None) -> None:
    """Generate until the trainer has finished, or `stop` is set; after a restore, join the buffer anew."""
    engine = engine or Engine(settings.seed, with_experts=settings.payloads != IN_DATABASE)

    async def load_weights(state: TrainState) -> int | None:
        loaded = await asyncio.to_thread(RunFolder(Path(settings.folder)).load_policy)
        if loaded is None:
            raise ReplayBufError(f"there are no weights in {settings.folder}: was the folder removed?")
        engine.load(*loaded)
        return loaded[1]

    while not stop.is_set():
        try:
            async with buffer_config(settings.url, payloads=settings.payloads).build() as buffer:
                await produce_loop(
                    worker_strategy(settings.worker),
                    engine,
                    sampler_of(buffer, settings.seed, settings.prompts),
                    BATCH_GROUPS,
                    load_weights=load_weights,
                    max_lag=LAGS[settings.worker % len(LAGS)],
                    stop=stop,
                    worker=f"worker-{settings.worker}",
                )
                return
        except FencedError as error:
            print(f"joining anew: {error}", file=sys.stderr, flush=True)
            await asyncio.sleep(_REJOIN_SECONDS)  # if this worker's own trainer is dead, `stop` is set by then


async def _work_until_the_end_of_input(settings: WorkerSettings) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    threading.Thread(target=_end_with_input, args=(stop, loop), daemon=True).start()
    await work(settings, stop)


def _end_with_input(stop: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
    """Wait for EOF on stdin; then set `stop`, and end the process after a grace period in any case."""
    while os.read(0, 4096):
        pass
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(stop.set)
    threading.Event().wait(_GRACE_SECONDS)
    os._exit(0)


def main() -> int:
    """Run a worker. Return its exit code."""
    line = open(0, "rb", buffering=0, closefd=False).readline()  # noqa: SIM115  (and no byte more than the line)
    if not line.endswith(b"\n"):
        return 0  # the trainer is dead
    try:
        asyncio.run(_work_until_the_end_of_input(WorkerSettings(**json.loads(line))))
    except ReplayBufError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
