"""Datasets of prompts, as the tests of the prompt ledger read them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from replaybuf import ReplayBuffer, RolloutState, Sampler, Status


def prompt(number: int) -> RolloutState:
    return RolloutState(rollout_id=number, message=[{"role": "user", "content": str(number)}], prompt_ids=[number])


def complete(group: list[RolloutState], text: str = "done") -> list[RolloutState]:
    for rollout in group:
        rollout.response, rollout.status = (rollout.response or "") + text, Status.COMPLETED
    return group


def numbers(prompts: list[Any]) -> list[int]:
    return [int(one.group[0].rollout_id) for one in prompts]


class Shuffled:
    """A dataset that is iterated: every epoch in another order, of which it is told."""

    def __init__(self, size: int) -> None:
        self._size, self._epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[RolloutState]:
        order = list(range(self._size))
        random.Random(self._epoch).shuffle(order)
        return map(prompt, order)


def indexed(size: int) -> list[RolloutState]:
    return [prompt(number) for number in range(size)]


def ledger_of(buffer: ReplayBuffer, dataset: Any, task_name: str, **options: Any) -> Sampler:
    """A sampler of rollouts, or groups of them, as they are, read once; what was interrupted begins anew."""
    return Sampler(
        buffer, dataset, task_name, **({"make_group": _as_it_is, "epochs": 1, "partial_rollouts": False} | options)
    )


def _as_it_is(item: Any, number: int) -> list[Any]:
    return list(item) if isinstance(item, list) else [item]
