"""The settings of a load, checked before a process starts, and the groups that it puts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from replaybuf import ReplayBufferConfig, RolloutState, Status
from replaybuf.errors import InputError
from replaybuf.segments.places import IN_DATABASE

#: Buffers of loads have names that begin so: groups of others are somebody's.
PREFIX = "replaybuf-bench-"
TASK = "bench"
_GROUP = re.compile(r"(\d{1,4})x(\d{1,7})")
_POOL = 1 << 20  # tokens that responses are cut out of
_PROMPT_TOKENS = 64


@dataclass(frozen=True)
class BenchSettings:
    """A load: `workers` processes put, `trainers` processes take `take` groups at a time, for `seconds`.

    A group has `rollouts` responses of `tokens` tokens each, as arrays or `lists`, and `extra` bytes in one array. A
    worker puts `rate` groups a second (0: as fast as it can), up to `concurrency` of them at once, and `groups` at the
    most (0: any number); when all have, the load ends. While there are more than `most` groups, which is looked at once
    a second, workers pause (0: never). With a `capacity` the buffer itself holds puts back, exactly. Trainers train for
    `step_seconds` after each batch. `joined`: others put into this buffer and take from it, too, and what is left there
    stays.
    """

    url: str
    buffer: str
    workers: int = 8
    trainers: int = 1
    rollouts: int = 8
    tokens: int = 4000
    lists: bool = False
    extra: int = 0
    seconds: float = 60.0
    groups: int = 0
    rate: float = 0.0
    concurrency: int = 1
    take: int = 64
    leases: bool = False
    step_seconds: float = 0.0
    most: int = 4096
    capacity: int = 0
    payloads: str = IN_DATABASE
    joined: bool = False
    keep: bool = False

    def check(self) -> None:
        """Raise InputError for settings with which nothing could be measured."""
        if not self.workers and not self.trainers:
            raise InputError("neither workers nor trainers: nothing would be done; give --workers or --trainers")
        if not self.seconds > 0:
            raise InputError(f"--minutes must be more than 0, got {self.seconds / 60:g}")
        if 0 < self.capacity < self.take:
            raise InputError(f"a take of {self.take} groups never finds them in a buffer of --capacity {self.capacity}")
        if 0 < self.most < self.take:
            raise InputError(f"a take of {self.take} groups never finds them if workers pause at --most {self.most}")
        if not self.workers and not self.joined:
            raise InputError("without --workers there is nothing to take, unless this load is to --join another one")

    def config(self, worker: str | None = None) -> ReplayBufferConfig:
        """Return the config of the buffer, in the name of a worker."""
        return ReplayBufferConfig(
            url=self.url,
            name=self.buffer,
            policy="fifo",
            capacity=self.capacity or None,
            on_full="block" if self.capacity else "evict",
            payloads=self.payloads,
            worker=worker,
        )


def parse_group(text: str) -> tuple[int, int]:
    """Return the rollouts of a group and the tokens of each: `8x4000`. Raises InputError."""
    found = _GROUP.fullmatch(text.strip().lower().replace(",", "").replace("_", ""))
    if found is None or not int(found[1]):
        raise InputError(f"{text!r:.50} is no group: write ROLLOUTSxTOKENS, as in 8x4000")
    if int(found[2]) > _POOL // 2:
        raise InputError(f"{int(found[2]):,} tokens in a response: at most {_POOL // 2:,} can be made; see --extra")
    return int(found[1]), int(found[2])


class GroupMaker:
    """Makes groups of new rollouts around arrays that are there already, so that making takes little of the time."""

    def __init__(self, settings: BenchSettings, number: int) -> None:
        random = np.random.default_rng(number)
        self._settings = settings
        self._ids = random.integers(0, 150_000, _POOL).astype(np.int32)
        self._logprobs = random.normal(-1, 0.5, _POOL).astype(np.float32)
        self._extra = random.integers(0, 256, settings.extra).astype(np.uint8)
        self._number = number << 40
        self._made = 0

    def make(self) -> list[RolloutState]:
        """Return a new group; no two of a load have the same tokens from the first on, or the same rollout ids."""
        self._made += 1
        group = [self._rollout(place) for place in range(self._settings.rollouts)]
        if self._settings.extra:
            group[0].extra_fields["extra"] = self._extra
        return group

    def _rollout(self, place: int) -> RolloutState:
        tokens, number = self._settings.tokens, self._number + self._made * self._settings.rollouts + place
        start = number * 7919 % (_POOL - tokens - _PROMPT_TOKENS)
        fields: dict[str, Any] = {
            "prompt_ids": self._ids[start : start + _PROMPT_TOKENS],
            "response_ids": self._ids[start + _PROMPT_TOKENS : start + _PROMPT_TOKENS + tokens],
            "logprobs": self._logprobs[start : start + tokens],
        }
        if self._settings.lists:
            fields = {name: array.tolist() for name, array in fields.items()}
        return RolloutState(
            rollout_id=number,
            message=[{"role": "user", "content": "A train leaves at 9:40 and arrives at 12:05. How long does it go?"}],
            response="It goes for two hours and 25 minutes.",
            finish_reason="stop",
            reward=float(number % 2),
            status=Status.COMPLETED,
            **fields,
        )
