"""xtuner's own managers, samplers, agent loops and producers over a database, with prompts of word problems.

    python -m tests.xtuner.production sync|async|disaggregated URL MODEL_FOLDER

prints the prompts of each step's batch as JSON. The engine is a stand-in, in place of a Ray actor on GPUs.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

import ray
from xtuner.v1.data_proto.rl_data import RolloutState, SampleParams, Status
from xtuner.v1.datasets.config import DataloaderConfig, DatasetConfig
from xtuner.v1.datasets.rl_tokenize_fn import RLTextTokenizeFnConfig
from xtuner.v1.rl.agent_loop import SingleTurnAgentLoopConfig
from xtuner.v1.rl.agent_loop_manager import (
    AgentLoopManagerConfig,
    AsyncProduceStrategyConfig,
    DisaggAgentLoopManagerConfig,
    DisaggAsyncProduceStrategyConfig,
    SamplerConfig,
    SyncProduceStrategyConfig,
)

from replaybuf.integrations.xtuner import AsyncReplayBufferConfig, SyncReplayBufferConfig

PROMPTS = Path(__file__).resolve().parents[1] / "data" / "math.xtuner.jsonl"
STEPS, SIZE = 3, 6


class Remote:
    """A method of an actor."""

    def __init__(self, method: Any) -> None:
        self.remote = method


class Controller:
    """Answers half of the problems, after a while of its own for each."""

    def __init__(self) -> None:
        self.generate = Remote(self._generate)
        self.pause_generation = self.continue_generation = Remote(self._nothing)
        self.set_enable_partial_rollout = Remote(lambda enabled: None)

    async def _generate(self, rollout: RolloutState) -> RolloutState:
        await asyncio.sleep(random.Random(rollout.rollout_id).random() / 20)
        right = int(rollout.rollout_id or 0) % 2 == 0
        rollout.response = f"#### {rollout.reward_model['ground_truth'] if right else 0}"
        rollout.response_ids = list(rollout.response.encode())
        rollout.reward = {"score": float(right)}
        rollout.status = Status.COMPLETED
        return rollout

    async def _nothing(self) -> None: ...


def sampler() -> SamplerConfig:
    dataset = DatasetConfig(name="math", anno_path=PROMPTS, enable_sequential_sampler=True, disable_filter=True)
    return SamplerConfig(
        prompt_repeat_k=2,
        dataloader_cfg=DataloaderConfig(
            dataset_config_list=[{"dataset": dataset, "tokenize_fn": RLTextTokenizeFnConfig(max_length=1024)}],
            collator="fake_collator",
            pack_level="none",
            pack_to_max_length=False,
            pack_max_length=1024,
            num_workers=0,
            round_up=False,
        ),
    )


KINDS: dict[str, tuple[Any, Any, Any]] = {
    "sync": (AgentLoopManagerConfig, SyncProduceStrategyConfig(), SyncReplayBufferConfig),
    "async": (AgentLoopManagerConfig, AsyncProduceStrategyConfig(over_sample_threshold=0.5), AsyncReplayBufferConfig),
    "disaggregated": (
        DisaggAgentLoopManagerConfig,
        DisaggAsyncProduceStrategyConfig(over_sample_threshold=0.5, max_staleness=1),
        AsyncReplayBufferConfig,
    ),
}


def manager_of(kind: str, url: str, model: str) -> Any:
    manager, strategy, replay_buffer_config = KINDS[kind]
    loop = SingleTurnAgentLoopConfig(hf_checkpoint=model, sample_params=SampleParams(max_tokens=64))
    task = {"task_name": "math", "agent_loop_config": loop, "produce_strategy_config": strategy}
    return manager(tasks=[task | {"sampler_config": sampler()}]).build(
        rollout_controller=Controller(), tokenizer=model, replay_buffer=replay_buffer_config(url=url).build()
    )


async def batches(kind: str, manager: Any) -> list[Any]:
    if kind != "disaggregated":
        return [await manager.produce_batch(SIZE, step, model_step=step - 1) for step in range(1, STEPS + 1)]
    producer, made = asyncio.create_task(manager.produce_loop(SIZE)), []
    try:
        for step in range(1, STEPS + 1):
            made.append(await asyncio.wait_for(manager.get_batch(SIZE, step), 60))
            await manager.pause_produce()
            await manager.continue_produce(model_step=step)
    finally:
        manager.shutdown()
        await asyncio.wait_for(producer, 60)
    return made


async def main(kind: str, url: str, model: str) -> None:
    manager = manager_of(kind, url, model)
    made = await batches(kind, manager)
    print(json.dumps([[group[0].extra_fields["index"] for group in batch.rollout_states] for batch in made]))
    await manager.replay_buffer.close()


if __name__ == "__main__":
    ray.get = lambda value, **_: value  # what a call of the stand-in returned
    asyncio.run(main(*sys.argv[1:]))
