"""From prompts to batches: samplers, produce strategies, and workers on other hosts."""

from replaybuf.produce.agent_loop import AgentLoop, Generated, ProduceSummary, reward_varies
from replaybuf.produce.difficulty import Unsolved
from replaybuf.produce.prompt import Prompt
from replaybuf.produce.prompt_records import JSONLines, to_rollout
from replaybuf.produce.rollout_worker import produce_loop, publish, published, wait_published
from replaybuf.produce.sampler import LedgerCounts, Sampler
from replaybuf.produce.strategies import AsyncProduceStrategy, ProduceStrategy, SyncProduceStrategy
from replaybuf.rules.circumstances import TrainState

__all__ = [
    "AgentLoop",
    "AsyncProduceStrategy",
    "Generated",
    "JSONLines",
    "LedgerCounts",
    "ProduceStrategy",
    "ProduceSummary",
    "Prompt",
    "Sampler",
    "SyncProduceStrategy",
    "TrainState",
    "Unsolved",
    "produce_loop",
    "publish",
    "published",
    "reward_varies",
    "to_rollout",
    "wait_published",
]
