"""From prompts to batches: samplers, strategies that decide what is generated when, and workers on other hosts."""

from replaybuf.produce.agent_loop import AgentLoop, Generated, reward_varies
from replaybuf.produce.async_strategy import AsyncProduceStrategy
from replaybuf.produce.jsonl import JSONLines
from replaybuf.produce.records import to_rollout
from replaybuf.produce.sampler import Sampler, SamplerWithReplayBuffer
from replaybuf.produce.strategy import ProduceStrategy, SyncProduceStrategy
from replaybuf.produce.summary import ProduceSummary
from replaybuf.produce.train_state import publish, published, wait_published
from replaybuf.produce.weights import batch_sizes
from replaybuf.produce.worker import produce_loop
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
