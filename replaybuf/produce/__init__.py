"""From prompts to batches: samplers, produce strategies, and workers on other hosts."""

from replaybuf.produce.agent_loop import AgentLoop, Generated, ProduceSummary, reward_varies
from replaybuf.produce.prompt_records import JSONLines, to_rollout
from replaybuf.produce.rollout_worker import produce_loop, publish, published, wait_published
from replaybuf.produce.sampler import Sampler, SamplerWithReplayBuffer, batch_sizes
from replaybuf.produce.strategies import AsyncProduceStrategy, ProduceStrategy, SyncProduceStrategy
from replaybuf.rules.train_state import TrainState

__all__ = [
    "AgentLoop",
    "AsyncProduceStrategy",
    "Generated",
    "JSONLines",
    "ProduceStrategy",
    "ProduceSummary",
    "Sampler",
    "SamplerWithReplayBuffer",
    "SyncProduceStrategy",
    "TrainState",
    "batch_sizes",
    "produce_loop",
    "publish",
    "published",
    "reward_varies",
    "to_rollout",
    "wait_published",
]
