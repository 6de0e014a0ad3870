"""The run of docs/sql.md, and its questions with their answers."""

from __future__ import annotations

import re
import time
from typing import Any, NamedTuple

from sqlalchemy import Connection, delete, insert

from replaybuf import ReplayBufferConfig, RolloutState, Status
from replaybuf.common.worker_name import working_as
from replaybuf.storage.reports import ACTIVITIES
from replaybuf.storage.sql.schema.tables import ACTIVITY_SECONDS, event, worker
from tests.pages import DOCS
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
        row["activity"] |= {"limits": {}, "epoch": 0, "draws": is_trainer}
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
    """A question of docs/sql.md in words, its statement on each database, and the answer, the same on both."""

    text: str
    sqlite: str
    postgresql: str
    answer: str

    def on(self, dialect: str) -> str:
        """Return the statement for a dialect."""
        return self.postgresql if dialect == "postgresql" else self.sqlite


PAGE = DOCS / "sql.md"
_QUESTION = re.compile(r"(?m)^(\S[^\n]*)\n\n((?:```sql\n[^`]*```\n\n)+)```\n([^`]*)```$")


def questions() -> list[Question]:
    """Return the questions of the page, of which each has one statement, or one for each database."""
    found = []
    for text, blocks, answer in _QUESTION.findall(PAGE.read_text("utf-8").partition("## Questions")[2]):
        first, *others = re.findall(r"```sql\n(?:-- SQLite\n|-- PostgreSQL\n)?([^`]*)```", blocks)
        found.append(Question(text, first, *(others or [first]), answer))
    return found
