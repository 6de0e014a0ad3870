"""docs/your-loop.md with asyncio, next to its `loop.py`: workers generate ahead of the trainer."""

import asyncio
import json

from loop import GROUPS, SAVED, STEPS, config, generate, prompt, save, train

from replaybuf import ReplayBuffer, ReplayBufferConfig, Sampler, Status

DATA = [prompt(number)[0] for number in range(STEPS * GROUPS)]


async def work(buffer: ReplayBuffer, weights: dict) -> None:
    sampler = Sampler(buffer, DATA, "math", make_group=lambda rollout, number: prompt(number), epochs=1)
    while weights["step"] < STEPS:
        if await buffer.count("math", Status.COMPLETED) >= 2 * GROUPS or not (drawn := await sampler.draw(1)):
            await asyncio.sleep(0.01)
            continue
        step = weights["step"]
        await asyncio.to_thread(generate, drawn[0].group, weights)
        await drawn[0].finish(model_step=step, current_train_step=weights["step"] + 1, stale_threshold=4)


async def learn(buffer: ReplayBuffer, weights: dict) -> None:
    while weights["step"] < STEPS:
        step = weights["step"] + 1
        await buffer.refresh_staleness(task_stale_thresholds={"math": 4}, current_train_step=step)
        async with buffer.lease_batch({"math": GROUPS}, timeout=60) as lease:
            await asyncio.to_thread(train, lease.batch["math"], weights)
        await buffer.checkpoint(step)
        save(weights)


async def main(config: ReplayBufferConfig) -> None:
    async with config.build() as buffer:
        if not SAVED.exists():
            await buffer.checkpoint(0)
            save({"step": 0, "skill": 0.3})
        weights = json.loads(SAVED.read_text())
        await buffer.restore(weights["step"])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(learn(buffer, weights))
            for _ in range(2):
                tasks.create_task(work(buffer, weights))


asyncio.run(main(config.model_copy(update={"url": config.url.replace("loop.db", "loop_async.db")})))
