"""Pages of groups: each group once, in the order that is asked for, whatever it is that groups are ordered by."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import Connection, insert, text

from replaybuf.rules.policies import parse_order
from replaybuf.rules.query import parse
from replaybuf.storage.sql.inspection.group_queries import Chosen, Key, page_of_groups
from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.storage.sql.schema.tables import group, lane
from tests.storage.test_schema import create, run

GROUPS, SIZE = 60, 11
LANES = [
    {"id": 1, "task_name": "math", "status": "completed", "step": 9},
    {"id": 2, "task_name": "code", "status": "completed", "step": None},
    {"id": 3, "task_name": "code", "status": "failed", "step": 3},
    {"id": 4, "task_name": "none", "status": "init", "step": 3},
]
ORDERS = ("staleness", "-staleness", "reward", "-reward", "uid", "-uid")
CHOSEN: tuple[Mapping[str, Any], ...] = (
    {},
    {"task": "code"},
    {"status": "completed"},
    {"task": "none"},
    {"query": parse({"priority": {"$gte": 1}})},
    {"query": parse({"staleness": {"$lt": 4}, "status": "completed"})},
    {"buffer": "default", "task": "math"},
)


def fill(connection: Connection) -> None:
    """Groups whose staleness is counted, pinned or unknown, many of them equal; one lane has none, one no step."""
    chance = random.Random(3)
    connection.execute(insert(lane), [{**one, "buffer": "default", "leased": False} for one in LANES])
    empty = {"oldest": [0], "newest": [0], "reward": [0.0]}
    common = {"mixed": False, "times_sampled": 0, "created_at": 1.0, "bytes": 1, "marks": empty}
    connection.execute(
        insert(group),
        [
            common
            | {
                "uid": uid,
                "lane": chance.choice((1, 2, 2, 3)),
                "oldest_step": chance.choice((None, 1, 1, 2, 5)),
                "pinned_staleness": chance.choice((None, None, 0, 4, 4)),
                "reward": chance.choice((None, 0.0, 0.5, 1.0)),
                "priority": float(chance.randrange(3)),
                "worker": chance.choice((None, "a", "b")),
            }
            for uid in range(1, GROUPS + 1)
        ],
    )
    connection.execute(text("INSERT INTO rb_tally (lane, name, shard, amount) VALUES (1, 'size', 0, 1)"))


def pages(tx: Any, chosen: Chosen) -> list[int]:
    """The uids of all pages, one after the other."""
    seen: list[int] = []
    after: Key | None = None
    while True:
        rows, after = page_of_groups(tx, chosen, after, SIZE)
        assert len(rows) == SIZE or after is None
        seen += [row["uid"] for row in rows]
        if after is None:
            return seen


def in_order(values: Sequence[Any], down: bool) -> bool:
    """Whether values are in order, those that are unknown last."""
    known = [value for value in values if value is not None]
    return [*known, *[None] * (len(values) - len(known))] == list(values) and all(
        one >= other if down else one <= other for one, other in pairwise(known)
    )


async def test_pages_have_each_group_that_matches_once_and_in_order(shared_url: str) -> None:
    await run(shared_url, create)
    await run(shared_url, fill)
    values = "SELECT uid, task_name, status, staleness, reward, priority, worker FROM groups"

    def check(tx: Any) -> None:
        all_groups = {row["uid"]: row for row in tx.rows(values)}
        assert len(all_groups) == GROUPS
        for order in ORDERS:
            term = parse_order([order])[0]
            for one in CHOSEN:
                chosen = Chosen(**{"query": parse({}), "order": term, **one})
                found = pages(tx, chosen)
                assert sorted(found) == sorted(uid for uid, row in all_groups.items() if matches(row, one)), (
                    order,
                    one,
                )
                assert in_order([all_groups[uid][term.field] for uid in found], term.descending), (order, one)

    reader = open_reader(shared_url)
    await asyncio.to_thread(reader.read, check)


def matches(row: Mapping[str, Any], chosen: Mapping[str, Any]) -> bool:
    if chosen is CHOSEN[4]:
        return bool(row["priority"] >= 1)
    if chosen is CHOSEN[5]:
        return row["staleness"] is not None and row["staleness"] < 4 and row["status"] == "completed"
    return all(
        row["task_name" if name == "task" else name] == value for name, value in chosen.items() if name != "buffer"
    )


@pytest.mark.parametrize("value", [-(2**63), 2**63 - 1, 4])
async def test_a_page_behind_any_number_is_answered(shared_url: str, value: int) -> None:
    await run(shared_url, create)
    await run(shared_url, fill)
    for order in ("staleness", "-staleness"):
        chosen = Chosen(parse({}), parse_order([order])[0])
        read = open_reader(shared_url).read
        await asyncio.to_thread(read, lambda tx, one=chosen: page_of_groups(tx, one, Key(value, 1), SIZE))
