"""The run of docs/sql.md, and its questions with their answers."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from sqlalchemy import Connection, delete, insert

from replaybuf import ReplayBufferConfig, RolloutState, Status
from replaybuf.common.worker_name import working_as
from replaybuf.storage.reports import ACTIVITIES
from replaybuf.storage.sql.schema.tables import ACTIVITY_SECONDS, event, worker
from tests.storage.test_schema import run

STEPS = (411, 412, 413)
WORKERS = ("gpu-1", "gpu-2", "gpu-3")
_PUT_IN_A_STEP = 12


async def fill(url: str) -> None:
    """Three steps of a run: each puts twelve groups and trains on five; then a lease, a failure and a checkpoint."""
    async with ReplayBufferConfig(url=url, policy="fifo", archive=100).build() as buffer:
        for step in STEPS:
            for n in range(_PUT_IN_A_STEP):
                await _put(buffer, step, n)
            await buffer.refresh_staleness(task_stale_thresholds={"math": 5, "code": 5}, current_train_step=step)
            with working_as("trainer"):
                batch = await buffer.sample({"math": 4, "code": 1}, current_train_step=step)
                await buffer.annotate({item.uid: _annotations(item) for items in batch.values() for item in items})
        await buffer.checkpoint(STEPS[-1])
        with working_as("trainer"):
            await buffer.lease_batch({"math": 2}, seconds=3600, heartbeat=False, current_train_step=STEPS[-1] + 1)
        with working_as("gpu-2"):
            failed = _rollout("math", 0, 0, right=False) | {"status": Status.FAILED, "error_msg": "CUDA out of memory"}
            await buffer.put([RolloutState(**failed)], "math", tags={"level": 0})
    await run(url, _say_who)


async def _put(buffer: Any, step: int, n: int) -> None:
    name = WORKERS[n % 3]
    task_name = "code" if n % 4 == 3 else "math"
    is_wrong = name == "gpu-3" and (step, n) >= (STEPS[0], 9)
    group = [RolloutState(**_rollout(task_name, n, i, right=not is_wrong and (n + i) % 4 > 0)) for i in range(2)]
    model_step = step - 2 if n % 3 else step - 4
    with working_as(name):
        await buffer.put(
            group, task_name, model_step=model_step, current_train_step=step, stale_threshold=5, tags={"level": n % 2}
        )


def _annotations(item: Any) -> list[dict[str, float]]:
    """Return the advantage and the KL of each rollout of a group."""
    scores = [rollout.reward["score"] for rollout in item.item]
    return [{"advantage": score - item.reward, "kl": 0.04 if any(scores) else 0.3} for score in scores]


def _rollout(task_name: str, n: int, i: int, *, right: bool) -> dict[str, Any]:
    answer = "So the answer is 12. " if right else "I can't say. "
    return {
        "rollout_id": 2 * n + i,
        "message": [
            {"role": "system", "content": "Think step by step. " * 20},
            {"role": "user", "content": f"What is {n} + {12 - n}?" if task_name == "math" else f"Sort {n} numbers."},
        ],
        "prompt_ids": [1] * 20,
        "response": answer * (30 if right else 40),
        "response_ids": [2] * (300 if right else 500),
        "finish_reason": "stop" if right else "length",
        "reward": {"score": float(right), "format": 1.0 if right else 0.5},
        "status": Status.COMPLETED,
    }


def _say_who(connection: Connection) -> None:
    """Write what the processes of such a run would have written of themselves, instead of what this one did."""
    now = time.time()
    for table in (worker, event):
        connection.execute(delete(table))
    alive = {"buffer": "default", "host": "node-1", "started_at": now - 7200, "seen_at": now - 2, "ended_at": None}
    names = dict(enumerate((*WORKERS, "trainer"), 1))
    workers = [alive | {"id": number, "name": name, "pid": 100 + number} for number, name in names.items()]
    workers[1]["seen_at"] = now - 2400  # gpu-2 was killed forty minutes ago
    since = int(now) // ACTIVITY_SECONDS * ACTIVITY_SECONDS - ACTIVITY_SECONDS
    for row in workers:
        is_trainer = row["name"] == "trainer"
        counts = (0, 0, 0, 0, 17) if is_trainer else (12, 24, 9600, int(row["name"] == "gpu-2"), 0)
        row["activity"] = dict(zip(ACTIVITIES, counts, strict=True)) | {"marks": {str(since): counts}}
        row["activity"] |= {"limits": {}, "policies": {}, "epoch": 0, "draws": is_trainer}
        row["waits"] = [_waiting(now)] if is_trainer else []
    connection.execute(insert(worker), workers)
    connection.execute(insert(event), _event(now))


def _waiting(now: float) -> dict[str, Any]:
    return {
        "kind": "groups",
        "wants": {"code": 8},
        "status": "completed",
        "query": None,
        "since": now - 300,
        "deadline": now + 300,
        "limits": {},
        "reason": "task code: 6 of 8 completed groups",
    }


def _event(now: float) -> dict[str, Any]:
    return {
        "buffer": "default",
        "happened_at": now - 60,
        "kind": "given_back",
        "task_name": "math",
        "worker": "trainer",
        "step": None,
        "groups": 4,
        "uids": [1, 2, 3, 4],
        "detail": "NCCL timeout",
    }


class Question(NamedTuple):
    """A question in words (Markdown) under a topic, and its statement on each database."""

    topic: str
    text: str
    sqlite: str
    postgresql: str

    def on(self, dialect: str) -> str:
        """Return the statement for a dialect."""
        return self.postgresql if dialect == "postgresql" else self.sqlite


def _questions(text: str) -> tuple[Question, ...]:
    """Parse the questions of a text: below a topic, each is a line above its one or two statements."""
    questions, topic = [], ""
    for block in text.strip().split("\n\n"):
        if block.startswith("# "):
            topic = block.removeprefix("# ")
            continue
        words, _, statements = block.partition("\n")
        sqlite, _, postgresql = statements.partition("\n-- on PostgreSQL\n")
        questions.append(Question(topic, words, sqlite, postgresql or sqlite))
    return tuple(questions)


QUESTIONS = _questions("""
# What goes on

What is there, how stale is it, and how good?
SELECT task_name, status, count(*) AS groups, avg(staleness) AS staleness, avg(reward) AS reward
  FROM groups GROUP BY task_name, status ORDER BY task_name, status

# Steps

The last steps (the worst: `ORDER BY reward`), and what they were trained on:
SELECT step, worker, tasks, groups, reward, min_reward, max_staleness, oldest_model_step
  FROM batches ORDER BY id DESC LIMIT 10

Since step 413 the reward falls: who made what that step was trained on?
SELECT worker, count(*) AS groups, avg(reward) AS reward, max(staleness) AS stalest
  FROM batch_groups WHERE step = 413 GROUP BY worker ORDER BY reward

The three worst answers, whole, that it was trained on:
SELECT r.uid, r.worker, length(r.full_response) AS characters, substr(r.full_response, 1, 40) AS begins
  FROM batch_groups b JOIN rollouts r ON r.uid = b.uid
 WHERE b.step = 413 ORDER BY r.reward, r.uid, r.position LIMIT 3

Whose groups were far from the reference model, as the trainer [found out](looking.md#annotations)?
SELECT worker, avg(value) AS kl FROM annotations WHERE step = 413 AND name = 'kl' GROUP BY worker ORDER BY worker

Was anything trained on twice? (A draw counts if all of it was consumed, and no restore undid it.)
WITH runs AS (
    SELECT buffer, restores, min(step) AS first_step
      FROM batches WHERE status = 'completed' AND settled > 0 GROUP BY buffer, restores)
SELECT m.uid, count(*) AS times FROM batches b JOIN batch_groups m ON m.batch = b.id
 WHERE b.status = 'completed' AND b.settled = b.groups AND NOT EXISTS (
    SELECT 1 FROM runs r WHERE r.buffer = b.buffer AND r.restores > b.restores
       AND coalesce(r.first_step <= b.step, TRUE))
 GROUP BY m.uid HAVING count(*) > 1 ORDER BY times DESC, m.uid

# Rewards

By part, of rewards that are dicts:
SELECT task_name, avg(rewards ->> '$.score') AS score, avg(rewards ->> '$.format') AS format
  FROM rollouts WHERE status = 'completed' GROUP BY task_name ORDER BY task_name
-- on PostgreSQL
SELECT task_name, avg((rewards ->> 'score')::float) AS score, avg((rewards ->> 'format')::float) AS format
  FROM rollouts WHERE status = 'completed' GROUP BY task_name ORDER BY task_name

Groups in which all answers are worth the same, so that nothing is learned from them:
SELECT task_name, count(*) AS groups, sum(CASE WHEN lowest = highest THEN 1 ELSE 0 END) AS flat
  FROM (SELECT uid, task_name, min(reward) AS lowest, max(reward) AS highest
          FROM rollouts WHERE status = 'completed' GROUP BY uid, task_name) AS spread
 GROUP BY task_name ORDER BY task_name
""")
