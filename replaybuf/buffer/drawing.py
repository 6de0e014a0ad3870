"""Draws: the options that they share, and the common code of `get`, `take_batch`, `sample` and `lease_batch`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from replaybuf.buffer.tracing import of_drawn, traced
from replaybuf.buffer.waits import Waits
from replaybuf.common.checks import check_at_least, check_exponent, check_mix, check_sizes, check_timeout, check_whole
from replaybuf.errors import InputError
from replaybuf.rules.query import LogicNode, Node, Query, ScalarNode, parse
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.values import Draw, Leased, StorageItem
from replaybuf.values.rollouts.rollout import Status
from replaybuf.values.rollouts.statuses import Statuses, StatusLike

#: The minimum number of groups of a draw: one for every task, or by task.
AtLeast = int | Mapping[str, int]


class DrawOptions(TypedDict, total=False):
    """The options of all draws. `ReplayBuffer.take_batch` has their meaning, `DrawRequest.checked` their defaults."""

    where: Query | None
    current_train_step: int | None
    timeout: float | None
    at_least: AtLeast | None
    mix: Mapping[str, float | Mapping[str, float]] | None


@dataclass(frozen=True, slots=True)
class DrawRequest:
    """A request for a batch: the draw, the seconds to wait for it, and the exponent of its importance weights."""

    draw: Draw
    patience: float
    beta: float | None

    @classmethod
    def checked(
        cls,
        sizes: Mapping[str, int],
        group_status: StatusLike,
        *,
        statuses: Statuses,
        worker: str | None = None,
        beta: float | None = None,
        deferred: frozenset[str] = frozenset(),
        where: Query | None = None,
        current_train_step: int | None = None,
        timeout: float | None = 0,
        at_least: AtLeast | None = None,
        mix: Mapping[str, float | Mapping[str, float]] | None = None,
    ) -> DrawRequest:
        """Return the checked request of a draw. Raises InputError and QueryError.

        By default a draw with a timeout needs all groups of its sizes, and one without needs none.
        """
        status, exponent = statuses.check(group_status), check_exponent(beta)
        if status == Status.ARCHIVED:
            raise InputError("archived groups are drawn by mix= alone; read them with find({'status': 'archived'})")
        if status == Status.FILLING:
            raise InputError("filling groups are drawn when they are whole; `filling(task)` has what is missing")
        node = None if where is None else parse(where, statuses)
        numbers, patience = check_sizes(sizes), check_timeout(timeout)
        replay, replayed, fresh = None, None, numbers
        if mix is not None:
            if status != Status.COMPLETED:
                raise InputError(f"mix is for draws of completed groups, not of {status} ones")
            replay = check_mix(mix, numbers)
            fresh = {task: size - replay.get(task, 0) for task, size in numbers.items()}
            node, replayed = _with_earlier_draws(node, "$eq"), _with_earlier_draws(node, "$gt")
        if at_least is not None:
            needed = check_at_least(at_least, fresh)
        else:
            needed = fresh if patience > 0 else {}
        step = None if current_train_step is None else check_whole(current_train_step, "current_train_step")
        draw = Draw(numbers, status, node, needed, exponent is not None, worker, step, deferred, replay, replayed)
        return cls(draw, patience, exponent)

    @traced("replaybuf.take", of_drawn)
    async def take(self, storage: SQLStorage, waits: Waits) -> dict[str, list[StorageItem]]:
        """Take the groups and return them by task. Raises NotReadyError."""
        drawn = await waits.draw(self.draw, self.patience, storage.take)
        self._weigh(drawn)
        return drawn

    @traced("replaybuf.lease", lambda leased: {**of_drawn(leased.items), "lease": leased.token})
    async def lease(self, storage: SQLStorage, waits: Waits, seconds: float) -> Leased:
        """Lease the groups. Raises NotReadyError."""
        leased = await waits.draw(self.draw, self.patience, lambda draw: storage.lease(draw, seconds))
        self._weigh(leased.items)
        return leased

    def _weigh(self, drawn: Mapping[str, Sequence[StorageItem]]) -> None:
        """Convert the store's `weight`, N p, to the importance weight (N p)^-beta."""
        if self.beta is None:
            return
        for items in drawn.values():
            for item in items:
                item.weight = None if item.weight is None else _power(item.weight, -self.beta)


def _with_earlier_draws(where: Node | None, operator: str) -> Node:
    """Return a condition on the earlier draws of a group, `times_sampled` against 0, and this one."""
    drawn = ScalarNode("times_sampled", operator, 0)
    return drawn if where is None else LogicNode("$and", (where, drawn))


def _power(base: float, exponent: float) -> float:
    try:
        return float(base**exponent)
    except (OverflowError, ZeroDivisionError):  # priorities of extreme ranges: the batch is drawn already
        return math.inf
