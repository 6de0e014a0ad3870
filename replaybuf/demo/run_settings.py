"""The settings of the demo's run: sizes and times, the buffer, and the strategy of each mode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.checks import Tags
from replaybuf.config import ReplayBufferConfig
from replaybuf.demo import Mode
from replaybuf.demo.policy import Prompts, answer_of, prompt_of
from replaybuf.errors import ReplayBufError
from replaybuf.produce import (
    AsyncProduceStrategy,
    ProduceStrategy,
    Sampler,
    SamplerWithReplayBuffer,
    SyncProduceStrategy,
)
from replaybuf.segments.places import IN_DATABASE, parse_place

TASK = "arithmetic"

GROUP_SIZE = 8  # rollouts of a prompt
BATCH_GROUPS = 32  # groups per training step
STALE_THRESHOLD = 4  # train steps at which a group expires
ARCHIVED_GROUPS = 20 * BATCH_GROUPS  # trained groups that stay for SQL

DEFAULT_STEPS = 200
DEFAULT_SECONDS = 60.0  # unless --steps is given

#: Seconds after which the prompts of a killed worker are handed out again.
PROMPT_SECONDS = 5.0

#: A worker loads new weights when it is more than this many steps behind: odd workers are slower.
LAGS = (1, 2)

#: Groups that a worker generates at the same time.
CONCURRENCY = 24


#: Of a made-up mixture of experts, of which each token has an array where payloads are kept apart (`--payloads`).
LAYERS, TOP_K, EXPERTS = 48, 8, 128
#: The demo's groups are small: all with such arrays are kept apart.
PAYLOAD_THRESHOLD = 1024


def buffer_config(url: str, worker: str | None = None, payloads: str = IN_DATABASE) -> ReplayBufferConfig:
    """Return the config of who uses the buffer. Deliveries aren't limited: in this run, people kill the workers."""
    return ReplayBufferConfig(
        url=url,
        policy="staleness",
        max_deliveries=0,
        archive=ARCHIVED_GROUPS,
        worker=worker,
        payloads=payloads,
        payload_threshold=PAYLOAD_THRESHOLD,
    )


def made_place(payloads: str) -> str:
    """Return the setting `payloads` with an absolute path, whose folder is there. Raises ReplayBufError."""
    place = parse_place(payloads)
    if place is None:
        return IN_DATABASE
    if "://" not in place:
        try:
            Path(place).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ReplayBufError(f"can't make the folder for payloads {place}: {error.strerror}") from error
    return place


def sampler_of(buffer: ReplayBuffer, seed: int, prompts: int) -> Sampler:
    """Return a sampler of the first `prompts` prompts of a run; interrupted and expired ones come first."""
    return SamplerWithReplayBuffer(
        buffer, Prompts(seed, prompts), TASK, prompt_repeat_k=GROUP_SIZE, epochs=1, seconds=PROMPT_SECONDS
    )


def colocated_strategy(mode: Mode) -> ProduceStrategy:
    """Return the strategy that generates exactly the groups of the next step (sync), or runs more than needed (async).

    Of those, the slowest are interrupted, and continued later.
    """
    if mode == Mode.SYNC:
        return SyncProduceStrategy(tags=_tags_of(0))
    return AsyncProduceStrategy(
        over_sample=0.5,
        enable_partial_rollout=True,
        max_staleness=STALE_THRESHOLD - 1,
        tail_batch_trigger_size=BATCH_GROUPS // 4,
        tail_batch_max_tries=3,
        tags=_tags_of(0),
    )


def worker_strategy(worker: int) -> AsyncProduceStrategy:
    """Return the strategy of workers: together they run ahead until further groups would expire."""
    return AsyncProduceStrategy(
        over_sample=0.75,
        enable_partial_rollout=True,
        max_staleness=STALE_THRESHOLD - 1,
        max_concurrency=CONCURRENCY,
        tags=_tags_of(worker),
    )


def _tags_of(worker: int) -> Callable[[list[Any]], Tags]:
    return lambda group: {"worker": worker, "level": len(str(answer_of(prompt_of(group))))}
