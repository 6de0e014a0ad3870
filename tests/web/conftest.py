"""Databases to look into."""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import numpy as np
import pytest
from sqlalchemy import Connection, delete, insert, make_url, text

from replaybuf import ReplayBufferConfig, RolloutState, Status
from replaybuf.common import units
from replaybuf.storage.sql.engine.database import Access
from replaybuf.storage.sql.engine.urls import parse_url
from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.storage.sql.inspection.writer import over_sqlalchemy
from replaybuf.storage.sql.schema import tables
from replaybuf.web.app import PAGES, create_app
from replaybuf.web.page_tables import Ask
from tests.postgres import execute, filled_by


@pytest.fixture
def url(shared_url: str) -> str:
    """The URL of a new database."""
    return shared_url


@pytest.fixture(scope="session")
def reader(filled: str) -> Iterator[str]:
    """The URL of the example for somebody who only reads."""
    if filled.startswith("sqlite"):
        yield filled
        return
    execute(filled, "CREATE ROLE viewer LOGIN; GRANT SELECT ON ALL TABLES IN SCHEMA public TO viewer")
    yield make_url(filled).set(username="viewer").render_as_string(hide_password=False)
    execute(filled, "DROP OWNED BY viewer; DROP ROLE viewer")


@pytest.fixture
def page(filled: str) -> Client:
    return client_of(filled)


class Client:
    """Asks the pages as a browser does, without a server."""

    def __init__(self, app: Any, url: str, host: str = "localhost") -> None:
        self._url = url
        self._transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._base_url = f"http://{host}:8321"
        self._cookies = httpx.Cookies()

    def get(self, path: str, **settings: Any) -> httpx.Response:
        return self.request("GET", path, **settings)

    def data(self, name: str, parameters: Mapping[str, object] | None = None, **path: object) -> dict[str, Any]:
        """Return what a page reads, as plain values; `path` has the numbers in the page's path."""
        ask = Ask({key: str(value) for key, value in (parameters or {}).items()}, {k: str(v) for k, v in path.items()})
        values = open_reader(self._url).read(lambda tx: PAGES[name].show(tx, ask))
        plain: dict[str, Any] = units.plain(values)
        return plain

    def request(self, method: str, path: str, **settings: Any) -> httpx.Response:
        return asyncio.run(self._request(method, path, settings))

    async def _request(self, method: str, path: str, settings: dict[str, Any]) -> httpx.Response:
        async with httpx.AsyncClient(
            transport=self._transport, base_url=self._base_url, cookies=self._cookies
        ) as client:
            answer = await client.request(method, path, **settings)
            self._cookies = client.cookies
            return answer


def client_of(url: str, host: str = "localhost", **settings: Any) -> Client:
    """Return a client of the pages of a database."""
    return Client(_app_of(url, **settings), url, host)


@functools.cache
def _app_of(url: str, **settings: Any) -> Any:
    """The pages, whose templates are compiled once."""
    return create_app(open_reader(url), **settings)


GROUPS, FAILED_EVERY = 130, 40
#: What a page must show, and never do.
SCRIPT = "<script>document.title='broken in'</script><img src=x onerror=\"document.title='broken in'\">"
BIDI, TERMINAL = "abc\u202edef", "\x1b[31mred\x1b[0m\x07"
HOSTILE = f"{SCRIPT}\n{BIDI} {TERMINAL} NUL:\x00 surrogate:\ud800 {{{{ 7*7 }}}} javascript:alert(1)"
LONG = "x" * 1_000_000
HOSTILE_UID, LONG_UID = GROUPS + 1, GROUPS + 2
WORKERS = ("node1:811", "node2:77", "<b>node3</b>")


async def fill(url: str) -> None:
    """Put the groups of two tasks, a hostile one and a long one, and insert records of what was done."""
    chance = random.Random(1)
    async with ReplayBufferConfig(url=url, policy="staleness").build() as buffer:
        puts = []
        for number in range(GROUPS):
            group = [_rollout(chance, f"What is {number} + 5?", failed=number % FAILED_EVERY == 1) for _ in range(4)]
            options = {"current_train_step": 42 + number // 40, "stale_threshold": 8, "tags": {"level": number % 5}}
            puts.append(buffer.put(group, ("math", "code")[number % 2], **options))  # type: ignore[arg-type]
        await asyncio.gather(*puts)
        hostile = _rollout(chance, HOSTILE, HOSTILE)
        hostile.extra_fields = {SCRIPT: SCRIPT, f"{SCRIPT} in arrays": np.zeros(1000)}
        hostile.reward = {"score": 1.0, SCRIPT: 0.5}
        await buffer.put([hostile], SCRIPT, tags={"note": SCRIPT})
        await buffer.put([_rollout(chance, "Go on.", LONG)], "long")
        await buffer.checkpoint(45)
    await _insert_records(url)


filled = filled_by(fill)


def _rollout(chance: random.Random, prompt: str, text: str | None = None, *, failed: bool = False) -> RolloutState:
    text = text or chance.choice(("The answer is 12.", "12", "I think it is 13."))
    ids = [100 + ord(character) for character in text[:5000]]
    return RolloutState(
        message=[{"role": "system", "content": "Think."}, {"role": "user", "content": prompt}],
        response=text,
        prompt_ids=[1, 2, 3],
        response_ids=ids,
        logprobs=[-chance.expovariate(1.0) for _ in ids],
        response_mask=[int(place > 2) for place in range(len(ids))],
        response_model_steps=[40 + (place > 3) for place in range(len(ids))],
        reward=None if failed else {"score": float("12" in text), "form": chance.random()},
        finish_reason="stop",
        status=Status.FAILED if failed else Status.COMPLETED,
        error_msg="the sandbox timed out" if failed else None,
    )


async def _insert_records(url: str) -> None:
    """Insert what processes write of what they do, as it is after two hours of a run."""
    now = time.time()

    def insert_all(connection: Connection) -> None:
        connection.execute(delete(tables.history))  # a minute may have ended meanwhile
        for table, rows in _records(now).items():
            connection.execute(insert(getattr(tables, table)), rows)
        connection.execute(text(_groups_drawn(now)))

    await over_sqlalchemy(Access(parse_url(url)), insert_all)


def _groups_drawn(now: float) -> str:
    """Return the statement that inserts the groups of all batches."""
    workers = " ".join(f"WHEN {number} THEN '{name}'" for number, name in enumerate(WORKERS))
    expressions = {"worker": f"CASE uid % 3 {workers} END", "reward": "0.25 * (uid % 3)"}
    expressions |= {"oldest_step": "40", "created_at": f"{now - 500}"}
    names = [column.name for column in tables.group.columns]
    columns = ", ".join(expressions.get(name, f"g.{name}") for name in names)
    return f"""INSERT INTO rb_past ({", ".join(names)}, draw, staleness)
    SELECT {columns}, b.id, uid % 4 FROM rb_group g, rb_batch b WHERE uid <= 8"""


def _records(now: float) -> dict[str, list[dict[str, Any]]]:
    facts = {"epoch": 0, "status": "completed", "groups": 8, "settled": 8, "first_uid": 1, "last_uid": 8}
    figures = {"reward": 0.25, "min_reward": 0.0, "max_reward": 0.5, "staleness": 1.5, "max_staleness": 3}
    batches = [
        {"buffer": "default", "taken_at": now - 60 * (80 - n), "step": 400 + n, "worker": "trainer:1", "lease": None,
         "oldest_step": 40, "newest_step": 41, **facts, **figures}
        for n in range(60)
    ]  # fmt: skip
    wait = {
        "kind": "groups", "wants": {"math": 640}, "status": "completed", "query": None, "since": now - 130,
        "deadline": now + 470, "limits": {"error_buffer": 256},
        "reason": f"65 of 640 completed groups of math are there {SCRIPT}",
    }  # fmt: skip
    counts = {"groups": 40, "rollouts": 160, "tokens": 52_000, "failures": 3, "taken": 0}
    activity = counts | {"marks": {str(int(now) // 300 * 300): [*counts.values()]}, "draws": False}
    activity |= {"limits": {}, "epoch": 0}
    workers = [
        {"id": 900 + n, "buffer": "default", "name": name, "host": "node", "pid": 811 + n, "started_at": now - 7200,
         "seen_at": now - 900 * n, "ended_at": None, "activity": activity, "waits": []}
        for n, name in enumerate(WORKERS)
    ]  # fmt: skip
    workers.append(workers[0] | {"id": 903, "name": "trainer:1", "pid": 814, "seen_at": now + 3600, "waits": [wait]})
    events = [
        {"buffer": "default", "happened_at": now - 60 * n, "kind": ("lease_lapsed", "set_aside")[n % 2],
         "task_name": "math", "worker": WORKERS[n % 3], "step": 400 + n, "groups": 3, "uids": [1, 2, 3],
         "detail": SCRIPT}
        for n in range(120)
    ]  # fmt: skip
    history = [
        {"buffer": "default", "since": int(now - 60 * (120 - n)),
         "data": {"tasks": {"math": {"buffered": {"completed": 60 + n % 7}, "put": 30 * n,
                            "put_of": {}, "sampled_new": 20 * n}}}}
        for n in range(120)
    ]  # fmt: skip
    return {"batch": batches, "worker": workers, "event": events, "history": history}
