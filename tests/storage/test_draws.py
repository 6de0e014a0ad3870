"""What the one SELECT of a draw has to get right on each database: any order, and groups that aren't as they were."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from replaybuf.query import FIELDS
from replaybuf.rules.policies import OrderTerm, ReplayPolicy
from tests.stores import TASK, build, group, numbers_of

ORDERS = [(field, place % 2 == 0) for place, field in enumerate(FIELDS)]
#: More than SQLite reads within the query.
LONG = "4 " * 20_000


def by(field: str, *, descending: bool) -> ReplayPolicy:
    """A policy that orders by a field."""
    order = (OrderTerm(field, descending), OrderTerm("timestamp_id"))
    policy: type[ReplayPolicy] = type("ByField", (ReplayPolicy,), {"name": "by_field", "order": order})
    return policy()


async def draws(url: str, field: str, *, descending: bool) -> list[list[int]]:
    """The numbers of some draws in this order, from six groups, one of them large."""
    policy, name = by(field, descending=descending), f"{field} {descending}"
    async with build(url, name=name, policy=policy, max_times_sampled=0) as buffer:
        for number in range(6):
            rollouts = group(number, text=LONG if number == 2 else "4")
            rollouts[0].reward = None if number % 2 else float(number % 3)
            steps = {"model_step": number % 4, "current_train_step": 5} if number % 3 else {}
            await buffer.put(rollouts, TASK, priority=number % 2, tags={"low": number < 3}, **steps)
        found = [await buffer.get(size, TASK) for size in (1, 4, 6)]
        found.append(await buffer.get(2, TASK, where={"tags.low": True, "task_name": TASK, "status": "completed"}))
    return [numbers_of(groups) for groups in found]


async def test_draws_in_any_order_are_those_of_the_memory(shared_url: str) -> None:
    for field, descending in ORDERS:
        expected = await draws("memory://", field, descending=descending)
        assert await draws(shared_url, field, descending=descending) == expected, (field, descending)


@pytest.mark.parametrize("pinned", ["none", "all", "some"])
async def test_the_most_stale_are_drawn_whichever_are_pinned(shared_url: str, pinned: str) -> None:
    """By one SELECT or by merging two."""
    async with build(shared_url, policy="staleness") as buffer:
        for number, step in enumerate((3, 1, 2, 4)):
            is_pinned = pinned == "all" or (pinned == "some" and number % 2)
            rollouts = group(number)
            if is_pinned:
                rollouts[0].seq_staleness = 4 - step
                await buffer.put(rollouts, TASK)
            else:
                await buffer.put(rollouts, TASK, model_step=step, current_train_step=5)
        assert numbers_of(await buffer.get(3, TASK)) == [1, 2, 0]


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM rb_payload WHERE uid = ?",
        "UPDATE rb_payload SET data = zeroblob(length(data)) WHERE uid = ?",
        "UPDATE rb_payload SET data = substr(data, 1, length(data) - 1) WHERE uid = ?",
        "UPDATE rb_payload SET data = 'a text' WHERE uid = ?",
        "UPDATE rb_payload SET data = 1.5 WHERE uid = ?",
        "UPDATE rb_group SET bytes = 'many' WHERE uid = ?",
        "UPDATE rb_group SET marks = '{\"oldest' WHERE uid = ?",
        "UPDATE rb_group SET tags = 'no JSON' WHERE uid = ?",
    ],
)
@pytest.mark.parametrize("text", ["4", LONG], ids=["small", "large"])
async def test_a_group_that_is_damaged_is_set_aside_and_the_next_drawn(tmp_path: Path, text: str, damage: str) -> None:
    """Whatever a SQLite file holds in its place; a group that can be read all the same is drawn."""
    async with build(f"sqlite:///{tmp_path}/run.db") as buffer:
        uids = [await buffer.put(group(number, text=text), TASK) for number in range(3)]
        with closing(sqlite3.connect(tmp_path / "run.db", isolation_level=None)) as other:
            assert other.execute(damage, (uids[1],)).rowcount == 1
        readable = "bytes" in damage
        assert numbers_of(await buffer.get(2, TASK)) == ([0, 1] if readable else [0, 2])
        assert await buffer.count(TASK, "failed") == (0 if readable else 1)
