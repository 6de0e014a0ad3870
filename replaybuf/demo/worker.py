"""The engine of the demo, and a rollout worker: a process that generates groups with weights that lag behind.

Started by the trainer as `python -m replaybuf.demo.worker`, with its settings in the first line of stdin, so that no
password is in the list of processes. EOF on stdin means that the run is over or the trainer dead, also by kill -9: then
the worker gives back its groups in flight, and ends. When a worker is killed, its prompts are handed out again.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from replaybuf import FencedError, ReplayBufError
from replaybuf.demo.policy import END, MAX_RESPONSE_TOKENS, Policy, decode, is_over, prompt_of, rows_of, verify
from replaybuf.demo.run_folder import BATCH_GROUPS, LAGS, RunFolder, buffer_config, sampler_of, worker_strategy
from replaybuf.places.owners import IN_DATABASE
from replaybuf.produce import TrainState, produce_loop
from replaybuf.rollouts.rollout import RolloutState, Status

#: Seconds per token: the median over prompts, and the standard deviation of its logarithm.
TOKEN_SECONDS, TOKEN_SPREAD = 0.003, 1.0
#: A fictitious mixture of experts: with `--payloads`, each token has an array of its experts.
LAYERS, TOP_K, EXPERTS = 48, 8, 128

_SECONDS, _TOKENS = 1, 2  # the purposes of a prompt's random numbers
_GRACE_SECONDS = 1.0
_REJOIN_SECONDS = 0.2


class Engine:
    """An agent loop over a policy. `load` sets new weights. Rollouts have arrays `with_experts`."""

    def __init__(self, seed: int, *, token_seconds: float = TOKEN_SECONDS, with_experts: bool = False) -> None:
        self._seed, self._token_seconds, self._with_experts = seed, token_seconds, with_experts
        self._paused = asyncio.Event()

    def load(self, policy: Policy, step: int) -> None:
        """Generate with the weights of train step `step` from now on."""
        self._policy, self._step = policy, step

    async def pause(self) -> None:
        """Interrupt generation: pending tokens are dropped."""
        self._paused.set()

    async def resume(self) -> None:
        """Resume generation."""
        self._paused.clear()

    async def generate_group(self, group: list[RolloutState], *, partial: bool) -> list[RolloutState]:
        """Generate the rollouts of a group and write them in place at the end: COMPLETED, or ABORTED after a pause."""
        policy, step, prompt, number = self._policy, self._step, prompt_of(group), int(group[0].group_id or 0)
        seconds = token_seconds(self._seed, number, self._token_seconds)
        randoms = np.random.default_rng([self._seed, number, _TOKENS, step]).random((len(group), MAX_RESPONSE_TOKENS))
        ids: list[list[int]] = []
        logprobs: list[list[float]] = []
        for rollout in group:
            kept = rollout.response_ids is not None and (partial or rollout.status == Status.COMPLETED)
            ids.append(list(map(int, rollout.response_ids)) if kept else [])
            logprobs.append(list(map(float, rollout.logprobs)) if ids[-1] else [])
        while (going := [i for i, said in enumerate(ids) if not is_over(said)]) and await self._goes_on(seconds):
            rows = np.stack([rows_of(prompt, ids[i])[-1] for i in going])
            for i, log_probs in zip(going, policy.log_probs(rows), strict=True):
                cumulative = np.exp(log_probs).cumsum()
                token = int((cumulative <= randoms[i, len(ids[i])] * cumulative[-1]).sum())
                ids[i].append(token)
                logprobs[i].append(float(log_probs[token]))
        for i, rollout in enumerate(group):
            if rollout.status != Status.COMPLETED:
                self._write(rollout, ids[i], logprobs[i])
        return group

    async def _goes_on(self, seconds: float) -> bool:
        """Wait for the time of a token. Return False as soon as generation is paused."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._paused.wait()
        return not self._paused.is_set()

    def _write(self, rollout: RolloutState, ids: list[int], log_probs: list[float]) -> None:
        rollout.response, rollout.response_ids = decode(ids), np.array(ids, dtype=np.int32)
        rollout.logprobs, rollout.response_mask = np.array(log_probs, dtype=np.float32), np.ones(len(ids), np.int32)
        rollout.status = Status.COMPLETED if is_over(ids) else Status.ABORTED
        if rollout.status == Status.COMPLETED:
            rollout.finish_reason = "stop" if ids[-1] == END else "length"
            rollout.reward = {"score": verify(prompt_of([rollout]), ids)}
        if self._with_experts:
            rollout.routed_experts = experts_of([*rollout.prompt_ids, *ids])


def experts_of(tokens: list[int]) -> NDArray[np.int16]:
    """Return the experts that each token went through: int16 [tokens, LAYERS, TOP_K]. They are made up."""
    mixed = 31 * np.array(tokens)[:, None, None] + 7 * np.arange(LAYERS)[:, None] + 17 * np.arange(TOP_K)
    return (mixed % EXPERTS).astype(np.int16)


def token_seconds(seed: int, number: int, median: float = TOKEN_SECONDS) -> float:
    """Return the seconds for each token of prompt `number`: log-normal over the prompts."""
    return median * float(np.exp(TOKEN_SPREAD * np.random.default_rng([seed, number, _SECONDS]).normal()))


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

    async def load_weights(state: TrainState) -> int:
        run = await asyncio.to_thread(RunFolder(Path(settings.folder)).load)
        if run is None:
            raise ReplayBufError(f"there are no weights in {settings.folder}: was the folder removed?")
        engine.load(run.policy, run.step)
        return run.step

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

    def end_with_input() -> None:
        while os.read(0, 4096):
            pass
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(stop.set)
        time.sleep(_GRACE_SECONDS)
        os._exit(0)

    threading.Thread(target=end_with_input, daemon=True).start()
    await work(settings, stop)


def main() -> int:
    """Run a worker. Return its exit code."""
    line = open(0, "rb", buffering=0, closefd=False).readline()  # noqa: SIM115  (and no byte more than the line)
    try:
        if line.endswith(b"\n"):  # otherwise the trainer is dead
            asyncio.run(_work_until_the_end_of_input(WorkerSettings(**json.loads(line))))
    except ReplayBufError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
