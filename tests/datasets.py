"""Datasets of prompts, as the tests of the prompt ledger read them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from replaybuf import RolloutState, Status


def prompt(number: int) -> RolloutState:
    return RolloutState(rollout_id=number, message=[{"role": "user", "content": str(number)}], prompt_ids=[number])


def complete(group: list[RolloutState], text: str = "done") -> list[RolloutState]:
    for rollout in group:
        rollout.response, rollout.status = (rollout.response or "") + text, Status.COMPLETED
    return group


def numbers(prompts: list[Any]) -> list[int]:
    return [int(one.group[0].rollout_id) for one in prompts]


class Shuffled:
    """A stateful data loader: every epoch in another order, drawn as it goes."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._size = size
        self._left: list[int] = []

    def __iter__(self) -> Iterator[RolloutState]:
        if not self._left:
            self._left = list(range(self._size))
        while self._left:
            yield prompt(self._left.pop(self._random.randrange(len(self._left))))

    def state_dict(self) -> dict[str, Any]:
        return {"left": list(self._left), "random": self._random.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._left = list(state["left"])
        self._random.setstate(state["random"])


class Resuming:
    """A stateful dataset as some are: told the epoch, always going on from the state that was loaded last."""

    def __init__(self, size: int) -> None:
        self._size, self._first, self._at, self._epoch = size, 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[RolloutState]:
        for self._at in range(self._first + 1, self._size + 1):  # noqa: B020
            yield prompt(100 * self._epoch + self._at - 1)

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._first = self._at = state["at"]


def indexed(size: int) -> list[RolloutState]:
    return [prompt(number) for number in range(size)]
