"""Samplers: prompt ledgers that make a group of k rollouts of each item; and the division of a batch among tasks.

The order of prompts is that of `PromptLedger.draw`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.buffer.sync import SyncReplayBuffer
from replaybuf.common.checks import check_by_task, check_whole
from replaybuf.errors import InputError
from replaybuf.produce.difficulty import Order
from replaybuf.produce.prompt_ledger import PromptLedger
from replaybuf.produce.prompt_records import to_rollout
from replaybuf.storage.values import LEASE_SECONDS
from replaybuf.values.rollouts.rollout import Status
from replaybuf.values.rollouts.statuses import StatusLike


class Sampler(PromptLedger):
    """Draws prompts from a dataset, each as a group of `prompt_repeat_k` rollouts to be generated.

    The dataset is indexed (`len` and `[]`), or any iterable; its items are rollouts, or records that
    `make_rollout` converts into rollouts (`to_rollout` supports the chat formats of OpenAI, verl and xtuner). It is
    read `epochs` times (None: for ever), with `shuffle` (a seed) in another order each time, or in an `order` by
    difficulty; items are read when drawn.

    The rollouts of a group are independent copies; only arrays, tensors and images are the same objects in all, and are
    stored once. Prompt n, counted from 0 over all epochs, has the `group_id` n and
    the `rollout_id`s n k to n k + k - 1, as in xtuner; none is given twice, even after crashes.

    Groups of the buffer with one of the statuses `again` come before new prompts, in this order: by default interrupted
    ones (ABORTED), with their partial responses, then expired ones. All samplers of the prompt ledger `name` (default:
    the task's), in any processes, together hand out every prompt once. Prompts of a dead worker are handed out again,
    `seconds` after its last heartbeat.
    """

    def __init__(
        self,
        buffer: ReplayBuffer | SyncReplayBuffer,
        dataset: Any,
        task_name: str,
        *,
        prompt_repeat_k: int = 1,
        epochs: int | None = None,
        shuffle: int | None = None,
        order: str | Order | None = None,
        make_rollout: Callable[[Any], Any] = to_rollout,
        again: Iterable[StatusLike] = (Status.ABORTED, Status.EXPIRED),
        name: str | None = None,
        seconds: float = LEASE_SECONDS,
    ) -> None:
        self.prompt_repeat_k = check_whole(prompt_repeat_k, "prompt_repeat_k", 1)
        self._make_rollout = make_rollout
        super().__init__(
            buffer,
            dataset,
            task_name,
            name=name,
            make_group=self._repeated,
            epochs=epochs,
            shuffle=shuffle,
            order=order,
            partial_rollouts=True,
            again=again,
            seconds=seconds,
        )

    def _repeated(self, item: Any, number: int) -> list[Any]:
        rollout, size, kind = self._make_rollout(item), self.prompt_repeat_k, self.rollout_type
        kind.check_class(rollout)
        containers = {name: value for name, value in kind.to_fields(rollout).items() if isinstance(value, (list, dict))}
        group = [copy.copy(rollout) for _ in range(size)]
        for place, copied in enumerate(group):
            for name, value in containers.items():
                kind.set(copied, name, _copied(value))
            kind.set(copied, "group_id", number)
            kind.set(copied, "rollout_id", number * size + place)
            kind.set(copied, "task_name", self.task_name)
        return group


def _copied(value: Any) -> Any:
    """Return a copy of lists and dicts at any depth, with the same other values in them."""
    if type(value) is list:
        return [_copied(item) for item in value]
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return value


def batch_sizes(weights: Mapping[str, float], batch_size: int) -> dict[str, int]:
    """Return the number of groups of a batch by task: in proportion to its weight, `batch_size` in all.

    Rounded by largest remainder; ties go to earlier tasks. A task of weight 0 gets none. Raises InputError for weights
    that aren't finite and at least 0, or are all 0.
    """
    size, known = check_whole(batch_size, "batch_size"), check_by_task(weights, "weights")
    for task, weight in known.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise InputError(f"the weight of task {task!r:.100} must be a number of at least 0, got {weight!r:.100}")
    largest = max(known.values(), default=0)
    if not largest:
        raise InputError("the weight of at least one task must be above 0")
    shares = {task: weight / largest for task, weight in known.items()}  # their sum is finite
    exact = {task: size * share / math.fsum(shares.values()) for task, share in shares.items()}
    sizes = {task: math.floor(number) for task, number in exact.items()}
    by_loss = sorted(exact, key=lambda task: sizes[task] - exact[task])
    for task in by_loss[: size - sum(sizes.values())]:
        sizes[task] += 1
    return sizes
