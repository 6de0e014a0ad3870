"""Asynchronous training: production runs ahead, and what is interrupted goes on with newer weights.

Start it with `python docs/examples/async.py`, kill it with `kill -9` at any moment and start it again: each prompt is
trained once. REPLAYBUF_URL names the database.
"""

import asyncio
import json
import os
import random
from pathlib import Path
from typing import Any

from replaybuf import ReplayBufferConfig, RolloutState, Status
from replaybuf.produce import AsyncProduceStrategy, Sampler

CONFIG = ReplayBufferConfig(url=os.environ.get("REPLAYBUF_URL", "sqlite:///async.db"), policy="staleness")
WEIGHTS = Path("async-weights.json")  # of a model that knows what it was trained on, so that it can be checked
PROMPTS = [{"prompt": f"{number}+5="} for number in range(200)]
STRATEGY = AsyncProduceStrategy(
    over_sample=0.5,  # of 12 groups the first 8 are trained, and the others interrupted
    enable_partial_rollout=True,  # to go on from there in the next step
    max_staleness=3,
    tail_batch_trigger_size=8,  # when 8 have expired, or were interrupted
    tail_batch_max_tries=2,  # so often, they are a batch, which is generated to its end
)
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
            await asyncio.sleep(random.uniform(0, 0.002))
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


async def main() -> None:
    engine = Engine()
    async with CONFIG.build() as buffer:
        if weights := load_weights():
            print(f"goes on from step {weights['step']}", flush=True)
        else:
            weights = {"step": 0, "trained": []}
            await buffer.checkpoint(0)
            save_weights(weights)
        await buffer.restore(weights["step"])  # always: it fences off a trainer that has the buffer open already
        sampler = Sampler(buffer, PROMPTS, "math", prompt_repeat_k=4, epochs=1, shuffle=1)
        while len(weights["trained"]) < len(PROMPTS):
            step = weights["step"] + 1
            summary = await STRATEGY.produce_batch(engine, sampler, BATCH_SIZE, train_step=step, model_step=step - 1)
            batch, _ = await buffer.take_batch({"math": BATCH_SIZE}, current_train_step=step)
            weights["trained"] += [group[0].group_id for group in batch["math"]]  # the train step
            weights["step"] = step
            await buffer.checkpoint(step)  # first the buffer, then the weights:
            save_weights(weights)  # killed in between, it goes on from the step before
            print(f"step {step}: {summary}", flush=True)
        print(f"{weights['step']} steps, {len(set(weights['trained']))} of {len(PROMPTS)} prompts trained")


asyncio.run(main())
