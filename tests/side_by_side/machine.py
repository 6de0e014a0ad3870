"""The state machine."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from replaybuf import ReplayBuffer, Status
from tests.side_by_side.drawn import (
    TASKS,
    by_task,
    changes,
    orders,
    puts,
    queries,
    sizes,
    some_uids,
    sometimes,
    statuses,
    tasks,
)
from tests.side_by_side.keeping import Keeping
from tests.side_by_side.leasing import Leasing
from tests.side_by_side.seen import seen


class SideBySide(Leasing, Keeping):
    """All operations: of few rules, because hypothesis draws these alike, and whole examples without some of them."""

    @precondition(lambda self: len(self.reference) < 30)
    @rule(many=st.lists(puts, min_size=1, max_size=6))
    def put(self, many: list[dict[str, Any]]) -> None:
        self.put_at_once(many)
        self.put_one(many[0])

    @precondition(lambda self: len(self.reference) > 1)
    @rule(size=sizes, task=tasks, status=statuses, where=sometimes)
    def get(self, size: int, task: str, status: Status, where: Any) -> None:
        self.both(lambda buffer: buffer.get(size, task, status, where=where))

    @precondition(lambda self: len(self.reference) > 1)
    @rule(wanted=st.dictionaries(tasks, sizes), status=statuses, timeout=st.sampled_from([0, 0.001]))
    def take_batch(self, wanted: dict[str, int], status: Status, timeout: float) -> None:
        self.both(lambda buffer: buffer.take_batch(wanted, group_status=status, timeout=timeout))

    @rule(
        many=st.lists(puts, min_size=2, max_size=6),
        wanted=st.dictionaries(tasks, st.integers(1, 3), min_size=1),
        wheres=st.lists(st.none() | sometimes, min_size=1, max_size=4),
        beta=st.sampled_from([None, 0, 0.5, 1]),
        priorities=st.lists(st.sampled_from([0, 0.25, 1, 1e3]), min_size=1, max_size=4),
    )
    def replay(
        self,
        many: list[dict[str, Any]],
        wanted: dict[str, int],
        wheres: list[Any],
        beta: float | None,
        priorities: list[float],
    ) -> None:
        """What a prioritized trainer does: groups are drawn with weights, several times, and get new priorities."""
        for put in many if len(self.reference) < 10 else []:
            self.put_one({name: value for name, value in put.items() if name in ("items", "task_name", "priority")})

        async def operation(buffer: ReplayBuffer) -> Any:
            draws = [await buffer.sample(wanted, where=where, beta=beta) for where in wheres]
            uids = [item.uid for items in draws[-1].values() for item in items]
            updated = await buffer.update_priorities(dict(zip([*uids, 1, 2, 3], priorities, strict=False)))
            return [seen(drawn) for drawn in draws], updated

        self.both(operation)

    @rule(
        many=st.lists(puts, min_size=1, max_size=6),
        steps=st.lists(st.integers(0, 9), min_size=1, max_size=2),
        sequence=by_task,
        token=by_task,
        retryable=st.dictionaries(tasks, st.booleans()),
        chosen=st.none() | st.none() | st.lists(st.sampled_from(Status), max_size=4),
        then_get=sizes,
    )
    def train(
        self,
        many: list[dict[str, Any]],
        steps: list[int],
        sequence: dict[str, int | None],
        token: dict[str, int | None],
        retryable: dict[str, bool],
        chosen: list[Status] | None,
        then_get: int,
    ) -> None:
        """What a trainer does: groups of the last step's model come in, a refresh (or two), and a batch is taken."""
        for put in many if len(self.reference) < 30 else []:
            fresh = {name: value for name, value in put.items() if "threshold" not in name}
            self.put_one(fresh | {"model_step": steps[0] - 1, "current_train_step": steps[0]})
        rules = dict.fromkeys(token) | sequence
        for step in steps:
            self.both(
                lambda buffer, step=step: buffer.refresh_staleness(
                    task_stale_thresholds=rules,
                    task_token_stale_thresholds=token,
                    expired_groups_retryable_by_task={
                        task: value for task, value in retryable.items() if task in rules
                    },
                    current_train_step=step,
                    statuses=chosen,
                )
            )
            self.same()
        self.both(lambda buffer: buffer.get(then_get, TASKS[0]))

    @precondition(lambda self: len(self.reference) > 1)
    @rule(query=queries, changes=changes)
    def update(self, query: Any, changes: dict[str, Any]) -> None:
        self.both(lambda buffer: buffer.update(query, **changes))

    @precondition(lambda self: len(self.reference) > 1)
    @rule(query=queries, uids=some_uids)
    def delete(self, query: Any, uids: Any) -> None:
        self.both(lambda buffer: buffer.delete({"$and": [query, uids]}))

    @rule(query=queries, order_by=orders, limit=st.none() | st.integers(0, 3))
    def read(self, query: Any, order_by: list[str], limit: int | None) -> None:
        async def operation(buffer: ReplayBuffer) -> Any:
            found = [item.uid async for item in buffer.find(query, order_by=order_by, limit=limit)]
            return found, await buffer.count_where(query)

        self.both(operation)
