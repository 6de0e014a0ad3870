"""Views, and the plans of their queries."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Connection, insert, text

from replaybuf import ReplayBufferConfig, RolloutState, Status
from replaybuf.storage.sql.schema.tables import batch, group, lane, payload
from replaybuf.values.codec.payload import Codec
from replaybuf.values.codec.payload_format import Texts
from replaybuf.values.rollouts.outline import preview, reward_parts
from replaybuf.values.rollouts.rollout_type import RolloutType
from tests.storage.test_schema import create, run
from tests.stores import TASK, build, rows


def rollout(**values: Any) -> RolloutState:
    return RolloutState(
        **({"message": [], "response": "a", "response_ids": [1, 2], "status": Status.COMPLETED} | values)
    )


async def test_a_wholly_expired_group_has_nothing_of_its_response_in_either_view(shared_url: str) -> None:
    async with build(shared_url) as buffer:
        group = [rollout(reward={"score": 1.0}, error_msg="slow")]
        await buffer.put(group, TASK, model_step=1, current_train_step=2)
        await buffer.refresh_staleness(task_stale_thresholds={TASK: 1}, current_train_step=3)
        assert await rows(buffer, "SELECT response_tokens, error FROM groups") == [(0, None)]
        result = await rows(buffer, "SELECT response_tokens, response, rewards, error_msg FROM rollouts")
        assert result == [(0, "", None, None)]


async def test_tools_that_compare_with_texts_find_numbers(tmp_path: Path) -> None:
    """Datasette's `rollouts?reward=0` is `WHERE reward = '0'`: on SQLite true only of a column with a type."""
    async with ReplayBufferConfig(url=f"sqlite:///{tmp_path}/run.db", policy="fifo").build() as buffer:
        group = [rollout(rollout_id=7, reward=reward, finish_reason="stop", prompt_ids=[1]) for reward in (0.0, 1.0)]
        await buffer.put(group, TASK, model_step=1, current_train_step=4, key="3")
        await buffer.lease_batch({TASK: 1}, heartbeat=False)
    connection = sqlite3.connect(tmp_path / "run.db")
    connection.row_factory = sqlite3.Row
    views = {"groups": 1, "rollouts": 2}
    for view, count in views.items():
        result = connection.execute(f"SELECT * FROM {view}").fetchall()
        assert len(result) == count
        for row in result:
            for name, value in dict(row).items():
                if value is not None:
                    query = f"SELECT count(*) FROM {view} WHERE {name} = ? AND {name} = {str(value)!r}"
                    assert connection.execute(query, [str(value)]).fetchone()[0] >= 1, (view, name, value)
    # SQLite writes a real number as 0.0, and people as 0.
    assert connection.execute("SELECT position FROM rollouts WHERE reward = '0'").fetchall()[0]["position"] == 0
    connection.close()


async def test_failed_rollouts_say_why(shared_url: str) -> None:
    """Each its own error; the group its first, unless it was set aside for another reason."""
    async with build(shared_url, max_deliveries=1) as buffer:
        failed = {"status": Status.FAILED, "response": "", "response_ids": []}
        await buffer.put(
            [rollout(), rollout(**failed, error_msg="out of memory"), rollout(**failed, error_msg="b")], TASK
        )
        await buffer.put([rollout(error_msg="only a warning")], TASK)
        await buffer.put([rollout()], TASK)
        assert await rows(buffer, "SELECT status, error FROM groups ORDER BY uid") == [
            ("failed", "out of memory"),
            ("completed", None),
            ("completed", None),
        ]
        errors = await rows(buffer, "SELECT error_msg FROM rollouts ORDER BY uid, position")
        assert errors == [(None,), ("out of memory",), ("b",), ("only a warning",), (None,)]
        lease = await buffer.lease_batch({TASK: 1}, heartbeat=False)
        await lease.give_back(failed="the trainer's reason")
        [[error]] = await rows(buffer, "SELECT error FROM groups WHERE uid = 2")
        assert "the trainer's reason" in error


async def test_parts_of_rewards_are_there_for_sql(shared_url: str) -> None:
    async with build(shared_url) as buffer:
        for score in (0.0, 1.0):
            parts = {"score": score, "format": np.float32(0.5), "length": 3, "ok": True, "why": "so", "deep": {"a": 1}}
            await buffer.put([rollout(reward=parts), rollout(reward=2.0), rollout()], TASK)
        part = "rewards ->> '$.format'" if shared_url.startswith("sqlite") else "rewards ->> 'format'"
        assert await rows(buffer, f"SELECT sum(CAST({part} AS REAL)), sum(reward), count(*) FROM rollouts") == [
            (1, 5, 6)
        ]
        [(parts_,), *other_rows] = await rows(buffer, "SELECT rewards FROM rollouts WHERE uid = 1 ORDER BY position")
        parts_ = json.loads(parts_) if isinstance(parts_, str) else parts_
        assert parts_ == {"score": 0.0, "format": 0.5, "length": 3.0, "ok": 1.0, "why": "so"}
        assert other_rows == [(None,), (None,)]


async def test_what_is_cut_shows_it(shared_url: str) -> None:
    async with build(shared_url) as buffer:
        for length in (200, 201):
            text = "é" * length
            await buffer.put([rollout(response=text, error_msg=text, message=[{"role": "u", "content": text}])], TASK)
        uncut, cut = "é" * 200, "é" * 200 + "…"
        query = "SELECT prompt, response, error_msg FROM rollouts ORDER BY uid"
        assert await rows(buffer, query) == [(uncut,) * 3, (cut,) * 3]
        assert await rows(buffer, "SELECT prompt, response FROM groups ORDER BY uid") == [(uncut,) * 2, (cut,) * 2]


def test_a_preview_is_a_text_that_databases_can_hold() -> None:
    assert preview("a\x00b\ud800") == "a\ufffdb?"
    assert preview(17) is None


def test_parts_that_are_no_numbers_or_texts_are_left_out() -> None:
    reward = {"a": 1, 2: 3.0, "nan": float("nan"), "list": [1], "nested": {"score": 1}, "none": None, "t": "x" * 300}
    assert reward_parts(reward) == {"a": 1.0, "t": "x" * 200 + "…"}
    assert reward_parts(1.0) == reward_parts(None) == {}


LONG = "Let us see: é = 💡. " * 5_000
# Texts that no database takes as they are.
ODD = ("a\x00" * 150, "\ud800" * 250)


async def test_texts_longer_than_their_previews_are_whole_in_plain_sql(shared_url: str) -> None:
    """Responses, the prompt, and the conversation; each of its own rollout, though all begin alike."""
    message = [{"role": "system", "content": LONG}, {"role": "user", "content": LONG + "1"}]
    async with build(shared_url) as buffer:
        await buffer.put([rollout(message=message, response=f"{LONG}{n}", response_ids=[1]) for n in range(3)], TASK)
        assert await rows(buffer, "SELECT full_response FROM rollouts ORDER BY position") == [
            (f"{LONG}{n}",) for n in range(3)
        ]
        [(prompt, messages)] = await rows(buffer, "SELECT full_prompt, messages FROM groups")
        assert prompt == LONG + "1"
        assert (json.loads(messages) if isinstance(messages, str) else messages) == message


async def test_a_whole_text_is_null_where_sql_cannot_have_it(shared_url: str) -> None:
    """Texts with NUL or lone surrogates, and rollouts that expired; their neighbours have theirs."""
    async with build(shared_url) as buffer:
        message = [{"role": "user", "content": ODD[0]}, {"role": "user", "content": [{"type": "text"}]}]
        await buffer.put([rollout(message=message, response=text) for text in (*ODD, LONG, None)], TASK)
        await buffer.put([rollout(response=LONG)], TASK, model_step=1, current_train_step=2)
        await buffer.refresh_staleness(task_stale_thresholds={TASK: 1}, current_train_step=3)
        result = await rows(buffer, "SELECT full_response FROM rollouts ORDER BY uid, position")
        assert result == [(None,), (None,), (LONG,), (None,), (None,)]
        [(prompt, messages), _] = await rows(buffer, "SELECT full_prompt, messages FROM groups ORDER BY uid")
        assert prompt == ""
        assert [turn["content"] for turn in (json.loads(messages) if isinstance(messages, str) else messages)] == [
            None,
            None,
        ]


@pytest.mark.parametrize("spoil", ["UPDATE rb_payload SET data = 'x'", "UPDATE rb_payload SET outline = '[{}]'"])
async def test_no_view_fails_for_a_payload_that_is_not_what_it_was(shared_url: str, spoil: str) -> None:
    """One that is cut short, and the outlines of older versions."""
    async with build(shared_url) as buffer:
        await buffer.put([rollout(message=[{"role": "user", "content": LONG}], response=LONG)], TASK)
        await buffer.storage._write(lambda tx: tx.run(spoil))
        assert await rows(buffer, "SELECT full_prompt, messages FROM groups") == [(None, None)]
        assert await rows(buffer, "SELECT full_response FROM rollouts") == [(None,)]


def test_a_text_is_looked_for_from_an_offset_on_or_behind_the_last_one() -> None:
    codec = Codec(RolloutType(dict))
    payload = codec.encode([{"a": "xx", "b": "xx"}, {"a": "zz", "b": "x"}])
    texts = Texts(payload)
    first, second = texts.find("xx"), texts.find("xx")
    assert first is not None
    assert second is not None
    at, length = first
    assert payload[at : at + length] == b"xx"
    assert first < second
    assert texts.find("xx") == first
    assert texts.find("xx", at + length) == second
    assert texts.find("xx", second[0] + 1) is None
    assert texts.find("yy") is None


GROUPS, BATCHES, TAKEN = 1_000, 250, 4

#: Queries of some rows. None may read a table whole that grows with the run.
QUERIES = (
    "SELECT * FROM groups WHERE uid = 17",
    "SELECT * FROM groups ORDER BY uid DESC LIMIT 20",
    "SELECT * FROM rollouts WHERE uid = 17",
    "SELECT uid, position, full_response FROM rollouts ORDER BY uid DESC LIMIT 20",
    "SELECT * FROM batches WHERE step = 413",
    "SELECT * FROM batches WHERE id = 17",
    "SELECT * FROM batches ORDER BY id DESC LIMIT 20",
    "SELECT * FROM batches ORDER BY step DESC LIMIT 20",
    "SELECT * FROM batch_groups WHERE step = 413",
    "SELECT * FROM batch_groups WHERE batch = 17",
    "SELECT * FROM batch_groups WHERE uid = 17",
    "SELECT g.worker, g.reward FROM batch_groups b JOIN groups g ON g.uid = b.uid WHERE b.step = 413",
    "SELECT r.response FROM batch_groups b JOIN rollouts r ON r.uid = b.uid WHERE b.step = 413 AND r.reward = 0",
    "SELECT * FROM leases",
    "SELECT * FROM leases WHERE worker = 'gpu-1'",
)
_WHOLE = re.compile(r"Seq Scan on (rb_group|rb_payload|rb_batch|rb_past)\b|^SCAN [gpb]$")
_SORTED = "USE TEMP B-TREE FOR ORDER BY"


def fill(connection: Connection) -> None:
    lanes = [{"id": n, "buffer": "default", "task_name": "math", "leased": n == 1} for n in (1, 2)]
    connection.execute(insert(lane), [row | {"status": "completed"} for row in lanes])
    marks = json.dumps({"oldest": [1], "newest": [1], "reward": [0.0]})
    numbers = f"WITH RECURSIVE n(uid) AS (SELECT 1 UNION ALL SELECT uid + 1 FROM n WHERE uid < {GROUPS})"
    cast = "CAST(:json AS jsonb)" if connection.dialect.name == "postgresql" else ":json"
    for table, columns, values in (
        (group, "lane, mixed, priority, times_sampled, created_at, bytes, marks", f"2, false, 1, 0, 1, 1, {cast}"),
        (payload, "outline, data", f"{cast}, :data"),
    ):
        parameters = {"json": marks} if table is group else {"json": '[{"response": "4"}]', "data": b"."}
        connection.execute(
            text(f"INSERT INTO {table.name} (uid, {columns}) {numbers} SELECT uid, {values} FROM n"), parameters
        )
    leased = "lane = 1, lease = 7, leased_until = 2e9, holder = 'gpu-1'"
    connection.execute(text(f"UPDATE rb_group SET {leased} WHERE uid BETWEEN 100 AND 110"))
    nothing = {"buffer": "default", "taken_at": 1.0, "epoch": 0, "status": "completed", "groups": TAKEN, "settled": 0}
    connection.execute(insert(batch), [nothing | _batch(n) for n in range(BATCHES)])
    names = ", ".join(column.name for column in group.columns)
    query = f"SELECT {names}, (uid - 1) / {TAKEN} + 1, 1 FROM rb_group"
    connection.execute(text(f"INSERT INTO rb_past ({names}, draw, staleness) {query}"))


def _batch(step: int) -> dict[str, object]:
    first = step * TAKEN + 1
    return {"id": step + 1, "step": step, "first_uid": first, "last_uid": first + TAKEN - 1}


def whole_tables(connection: Connection) -> dict[str, Sequence[str]]:
    """The parts of plans that read a whole table, by query."""
    explain = _postgres_problems if connection.dialect.name == "postgresql" else _sqlite_problems
    problems_of = {query: explain(connection, query) for query in QUERIES}
    return {query: problems for query, problems in problems_of.items() if problems}


def _postgres_problems(connection: Connection, query: str) -> list[str]:
    """PostgreSQL reads small tables whole: here it does where no index can serve."""
    for method in ("seqscan", "hashjoin", "mergejoin"):
        connection.execute(text(f"SET LOCAL enable_{method} = off"))
    return [line for (line,) in connection.execute(text(f"EXPLAIN {query}")) if _WHOLE.search(line)]


def _sqlite_problems(connection: Connection, query: str) -> list[str]:
    """SQLite says SCAN of a table that it reads in its order, too: in a query with a limit, if it needn't sort."""
    plan = [(parent, line) for _, parent, _, line in connection.execute(text(f"EXPLAIN QUERY PLAN {query}"))]
    if "LIMIT" in query:
        return [line for parent, line in plan if parent == 0 and line == _SORTED]
    return [line for _, line in plan if _WHOLE.search(line)]


async def test_nothing_that_grows_is_read_whole(empty_url: str) -> None:
    await run(empty_url, create)
    await run(empty_url, fill)
    assert await run(empty_url, whole_tables) == {}
