"""A run whose processes may be killed at any moment: `python docs/loop.py trainer`, `python docs/loop.py worker`.

The guide says more. REPLAYBUF_URL names the database.
"""

import asyncio
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from replaybuf import FencedError, PromptLedger, ReplayBuffer, ReplayBufferConfig, RolloutState, Status

CONFIG = ReplayBufferConfig(url=os.environ.get("REPLAYBUF_URL", "sqlite:///loop.db"), capacity=32, on_full="block")
WEIGHTS = Path("loop-weights.json")  # of a model that knows what it was trained on, so that it can be checked
PROMPTS = [RolloutState(rollout_id=n, message=[{"role": "user", "content": f"{n}+5="}]) for n in range(200)]


def load_weights() -> dict[str, Any]:
    return json.loads(WEIGHTS.read_text()) if WEIGHTS.exists() else {}


def save_weights(weights: dict[str, Any]) -> None:
    new = WEIGHTS.with_suffix(".new")
    new.write_text(json.dumps(weights))
    new.replace(WEIGHTS)  # at any moment they are the old ones or the new ones


async def generate(group: list[RolloutState]) -> None:
    await asyncio.sleep(random.uniform(0, 0.02))  # the inference engine
    for rollout in group:
        rollout.response = random.choice(["12", "13"])
        rollout.response_ids, rollout.reward = list(rollout.response.encode()), random.random()
        rollout.status = Status.COMPLETED


async def work(buffer: ReplayBuffer) -> None:
    ledger = PromptLedger(buffer, PROMPTS, "math", make_group=lambda prompt, number: [prompt] * 4, seconds=5)
    while len(load_weights().get("trained", [])) < len(PROMPTS):
        prompts = await ledger.draw(4)
        if not prompts:  # but prompts come back: when their worker dies, and when the trainer is restored
            await asyncio.sleep(0.1)
        for prompt in prompts:
            step = load_weights().get("step", 0)
            await generate(prompt.group)
            await prompt.finish(model_step=step, current_train_step=step + 1)


async def worker() -> None:
    while True:
        async with CONFIG.build() as buffer:
            try:
                return await work(buffer)
            except FencedError as error:  # the trainer was restored: join its run
                print(f"worker: {error}", flush=True)


async def trainer() -> None:
    async with CONFIG.build() as buffer:
        if weights := load_weights():
            await buffer.restore(weights["step"])
            print(f"trainer: goes on from step {weights['step']}", flush=True)
        else:
            weights = {"step": 0, "trained": []}
            await buffer.checkpoint(0)
            save_weights(weights)
        while len(weights["trained"]) < len(PROMPTS):
            batch, _ = await buffer.take_batch({"math": 8}, timeout=600)
            weights["trained"] += [group[0].rollout_id for group in batch["math"]]  # the train step
            weights["step"] += 1
            await buffer.checkpoint(weights["step"])  # first the buffer, then the weights:
            save_weights(weights)  # killed in between, it goes on from the step before
        print(f"trainer: {weights['step']} steps, {len(set(weights['trained']))} of {len(PROMPTS)} prompts trained")


asyncio.run({"worker": worker, "trainer": trainer}[sys.argv[1]]())
