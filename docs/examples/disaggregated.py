"""A trainer and workers in processes of their own, on any hosts, over one database.

`python docs/examples/disaggregated.py trainer` once, and `python docs/examples/disaggregated.py worker` as often as you
like. Kill any of them with `kill -9` and start it again: each prompt is trained once. REPLAYBUF_URL names the database.
"""

import asyncio
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from replaybuf import FencedError, ReplayBufferConfig, RolloutState, Status
from replaybuf.produce import AsyncProduceStrategy, Sampler, TrainState, produce_loop, publish

URL = os.environ.get("REPLAYBUF_URL", "sqlite:///disaggregated.db")
CONFIG = ReplayBufferConfig(url=URL, capacity=32, on_full="block")
WEIGHTS = Path("disaggregated-weights.json")  # of a model that knows what it was trained on, so that it can be checked
PROMPTS = [{"prompt": f"{number}+5="} for number in range(200)]
STRATEGY = AsyncProduceStrategy(over_sample=1.0, enable_partial_rollout=True, max_staleness=3)
BATCH_SIZE = 8


class Engine:
    """Stands in for an inference engine: digits up to a full stop."""

    def __init__(self) -> None:
        self.paused = True

    async def generate_group(self, group: list[RolloutState], *, partial: bool) -> None:
        await asyncio.gather(*(self._generate(rollout) for rollout in group if rollout.status != Status.COMPLETED))

    async def _generate(self, rollout: RolloutState) -> None:
        ids = rollout.response_ids = list(rollout.response_ids or [])  # of an interrupted one: what it has
        while ids[-1:] != [ord(".")] and not self.paused:
            await asyncio.sleep(random.uniform(0, 0.005))
            ids.append(random.choice(b"0123456789...."))
        done = ids[-1:] == [ord(".")]
        rollout.response, rollout.reward = bytes(ids).decode(), 1 / len(ids) if done else None
        rollout.status = Status.COMPLETED if done else Status.ABORTED

    async def pause(self) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False


def load_weights() -> dict[str, Any]:
    return json.loads(WEIGHTS.read_text()) if WEIGHTS.exists() else {}


def save_weights(weights: dict[str, Any]) -> None:
    new = WEIGHTS.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(weights))
    new.replace(WEIGHTS)  # at any moment they are the old ones or the new ones


async def update_engine(state: TrainState) -> int:
    """Load the weights that the trainer has published, or newer ones that are there already; their step."""
    text = await asyncio.to_thread(Path(str(state.weights)).read_text)
    return int(json.loads(text)["step"])


async def worker() -> None:
    while True:
        async with CONFIG.build() as buffer:
            sampler = Sampler(buffer, PROMPTS, "math", prompt_repeat_k=4, epochs=1, seconds=5)
            try:
                summary = await produce_loop(STRATEGY, Engine(), sampler, BATCH_SIZE, load_weights=update_engine)
                return print(f"worker: {summary}")
            except FencedError as error:  # the trainer was restored: join its run
                print(f"worker: {error}", flush=True)


async def trainer() -> None:
    async with CONFIG.build() as buffer:
        if weights := load_weights():
            print(f"trainer: goes on from step {weights['step']}", flush=True)
        else:
            weights = {"step": 0, "trained": []}
            await buffer.checkpoint(0)
            save_weights(weights)
        await buffer.restore(weights["step"])  # always: it fences off a trainer that has the buffer open already
        while len(weights["trained"]) < len(PROMPTS):
            step = weights["step"] + 1
            await publish(buffer, TrainState(train_step=step, model_step=step - 1, weights=str(WEIGHTS)))
            await STRATEGY.refresh(buffer, "math", step)
            batch, _ = await buffer.take_batch({"math": BATCH_SIZE}, timeout=600, current_train_step=step)
            weights["trained"] += [group[0].group_id for group in batch["math"]]  # the train step
            weights["step"] = step
            await buffer.checkpoint(step)  # first the buffer, then the weights:
            save_weights(weights)  # killed in between, it goes on from the step before
            print(f"trainer: step {step}: {len(weights['trained'])} prompts trained so far", flush=True)
        await publish(buffer, TrainState(weights["step"], weights["step"], str(WEIGHTS), finished=True))
        print(f"trainer: {weights['step']} steps, {len(set(weights['trained']))} of {len(PROMPTS)} prompts trained")


if sys.argv[1:] not in (["trainer"], ["worker"]):
    sys.exit(__doc__)
asyncio.run({"trainer": trainer, "worker": worker}[sys.argv[1]]())
