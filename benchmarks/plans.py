"""The plans of the hot statements, exactly as the databases get them.

The statements are caught on their way to the database while the buffer is used, and explained afterwards with the same
parameters; on PostgreSQL also as generic plans, which it may use for a statement that is run often. A plan is bad if it
reads a whole table, or sorts.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from sqlalchemy import text

from benchmarks.databases import TASK, engine_of, new_database, open_buffer, put_all, stop_sweeping
from benchmarks.groups import TRAIN_STEP, small
from benchmarks.million import fill_many, refresh
from benchmarks.table import Settings
from replaybuf import ReplayBuffer
from replaybuf.storage.sql.engine.transaction import Hook, installed
from replaybuf.storage.sql.statements.past import sweep

#: Tables that grow; those of a few rows may be read whole.
LARGE = ("rb_group", "rb_payload", "rb_past", "rb_annotation")
_EXPLAINED = re.compile(r"\s*(SELECT|UPDATE|DELETE|WITH)\b", re.IGNORECASE)


@dataclass(slots=True)
class Explained:
    """A statement, its purpose, its plans as lines of text, and the problems in them."""

    purpose: str
    statement: str
    plan: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


async def explain_all(url: str) -> list[Explained]:
    """Explain each statement of all frequent uses of the buffer at `url`, which `fill_many` filled."""
    caught: list[tuple[str, str, Any]] = []
    async with _using(url, "staleness", caught) as (buffer, during):
        await during("refresh", lambda: refresh(buffer, TRAIN_STEP + 1))
        await during("take staleness", lambda: buffer.get(64, TASK))
        await during("take staleness, expired", lambda: buffer.get(64, TASK, "expired"))
        await during("is_ready", lambda: buffer.is_ready({TASK: 64}))
        await during("count", lambda: buffer.count(TASK, "completed"))
        await during("count_statuses", lambda: buffer.count_statuses([TASK], ["completed"]))
    for policy in ("lifo", "prioritized"):
        async with _using(url, policy, caught) as (buffer, during):
            await buffer.get(1, TASK)  # the races begin
            await during(f"take {policy}", partial(buffer.get, 64, TASK))
            async with _using(url, policy, caught, capacity=await _count(url), remover=policy) as (full, evicting):
                await put_all(full, [small()])  # so they do here
                await evicting(f"evict {policy}", partial(put_all, full, [small() for _ in range(8)]))
    async with _using(url, "fifo", caught, archive=64, max_times_sampled=2) as (buffer, during):
        await during("lease", lambda: _lease(buffer))
        await during("archive", lambda: _lease(buffer))
        await during("look after groups", lambda: _look_after(buffer))
    for policy in ("fifo", "lifo", "staleness", "prioritized"):
        async with _using(url, policy, caught, archive=64) as (buffer, during):
            await during(f"take mixed {policy}", partial(_take_mixed, buffer))
    async with _using(url, "fifo", caught) as (buffer, during):
        await during("take fifo", lambda: buffer.get(64, TASK))
        items = (await buffer.sample({TASK: 64}))[TASK]
        await during("annotate", lambda: buffer.annotate({item.uid: [{"token": np.ones(1)}] for item in items}))
        await _make_garbage(buffer)
        await during("sweep", lambda: _sweep(buffer))
        return await buffer.storage.thread.run(lambda: _explain(engine_of(buffer), caught))


async def _count(url: str) -> int:
    async with open_buffer(url) as buffer:
        return len(buffer)


@asynccontextmanager
async def _using(
    url: str, policy: str, caught: list[tuple[str, str, Any]], **options: Any
) -> AsyncIterator[tuple[ReplayBuffer, Callable[[str, Callable[[], Awaitable[Any]]], Awaitable[None]]]]:
    async with open_buffer(url, policy, **options) as buffer:
        await stop_sweeping(buffer)

        async def during(purpose: str, work: Callable[[], Awaitable[Any]]) -> None:
            with installed(_Catching(purpose, caught)):
                await work()

        yield buffer, during


class _Catching(Hook):
    """Catches the statements of a purpose, each once, with its first parameters."""

    def __init__(self, purpose: str, caught: list[tuple[str, str, Any]]) -> None:
        self._purpose, self._caught = purpose, caught
        self._known = {(about, statement) for about, statement, _ in caught}

    def statement(self, sql: str, values: Sequence[Any], many: bool) -> None:
        for part in filter(_EXPLAINED.match, sql.split(";")):  # PostgreSQL gets several in one message
            if any(table in part for table in LARGE) and (self._purpose, part) not in self._known:
                self._caught.append((self._purpose, part, values[0] if many else values))
                self._known.add((self._purpose, part))


async def _lease(buffer: ReplayBuffer) -> None:
    async with buffer.lease_batch({TASK: 64}) as lease:
        await lease.extend()
        await lease.give_back(list(lease.open)[:32])


async def _take_mixed(buffer: ReplayBuffer) -> None:
    for _ in range(2):  # the first one fills the archive
        await buffer.get(16, TASK, timeout=9, mix={"replay": 0.5})


async def _look_after(buffer: ReplayBuffer) -> None:
    state = buffer.storage
    await state.thread.run(state.sweeper.maintain_groups)


async def _make_garbage(buffer: ReplayBuffer) -> None:
    """Remove every fourth group; on PostgreSQL, let the planner know what is in the tables, as autovacuum does."""
    items = [uid async for uid in _every_fourth(buffer)]
    await buffer.delete({"uid": {"$in": items}})
    engine = engine_of(buffer)
    if engine.dialect.name == "postgresql":
        await buffer.storage.thread.run(lambda: _vacuum(engine))


async def _every_fourth(buffer: ReplayBuffer) -> AsyncIterator[int]:
    engine = engine_of(buffer)

    async def uids() -> list[int]:
        async with engine.connect() as connection:
            return list((await connection.execute(text("SELECT uid FROM rb_group WHERE uid % 4 = 0"))).scalars())

    for uid in await buffer.storage.thread.run(uids):
        yield uid


async def _vacuum(engine: Any) -> None:
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        for table in LARGE:
            await connection.execute(text(f"VACUUM ANALYZE {table}"))


async def _sweep(buffer: ReplayBuffer) -> None:
    state = buffer.storage
    await state.thread.run(lambda: state.engine.write(lambda tx: sweep(tx, 1e12, 64)))


async def _explain(engine: Any, caught: list[tuple[str, str, Any]]) -> list[Explained]:
    explain = _explain_postgres if engine.dialect.name == "postgresql" else _explain_sqlite
    async with engine.connect() as connection:
        return [await explain(connection, Explained(purpose, query), values) for purpose, query, values in caught]


async def _explain_sqlite(connection: Any, result: Explained, parameters: Any) -> Explained:
    rows = await connection.exec_driver_sql("EXPLAIN QUERY PLAN " + result.statement, tuple(parameters))
    result.plan = [row[3] for row in rows]
    aliases = re.findall(rf"\b(?:{'|'.join(LARGE)}) (\w)\b", result.statement)
    for line in result.plan:
        if any(f"{line} ".startswith(f"SCAN {name} ") for name in (*LARGE, *aliases)) or "TEMP B-TREE" in line:
            result.problems.append(line)
    return result


async def _explain_postgres(connection: Any, result: Explained, parameters: Any) -> Explained:
    cursor = await connection.exec_driver_sql("EXPLAIN (FORMAT JSON) " + result.statement, tuple(parameters))
    _judge(result, "with these parameters", cursor.scalar_one())
    # A statement that is run often may get one plan for all parameters, made without looking at them.
    driver = (await connection.get_raw_connection()).driver_connection
    await driver.execute(f"PREPARE explained AS {result.statement}")
    nulls = f"({', '.join(['NULL'] * len(parameters))})" if parameters else ""
    await driver.execute("SET plan_cache_mode = force_generic_plan")
    generic = await driver.fetchval(f"EXPLAIN (FORMAT JSON) EXECUTE explained{nulls}")
    await driver.execute("RESET plan_cache_mode; DEALLOCATE explained")
    _judge(result, "generic", generic)
    return result


def _judge(result: Explained, mode: str, answer: Any) -> None:
    plan = json.loads(answer) if isinstance(answer, str) else answer
    nodes = _nodes(plan[0]["Plan"], 0)
    result.plan += [f"{mode}:", *(f"{'  ' * depth}{_node(node)}" for depth, node in nodes)]
    result.problems += [f"{mode}: {_node(node)}" for _, node in nodes if _is_bad(node)]


def _nodes(plan: dict[str, Any], depth: int) -> list[tuple[int, dict[str, Any]]]:
    return [(depth, plan), *(node for child in plan.get("Plans", ()) for node in _nodes(child, depth + 1))]


def _is_bad(node: dict[str, Any]) -> bool:
    kind = node["Node Type"]
    # An index without a condition is read from one end, past all groups of other tasks.
    scans = kind == "Seq Scan" or (kind in ("Index Scan", "Index Only Scan") and "Index Cond" not in node)
    return (scans and node.get("Relation Name") in LARGE) or "Sort" in kind


def _node(node: dict[str, Any]) -> str:
    words = [node["Node Type"], node.get("Relation Name"), node.get("Index Name"), node.get("Index Cond")]
    return " ".join(str(word) for word in words if word)[:200]


async def main(settings: Settings) -> int:
    """Print the plans. Return 1 if one is bad."""
    bad_count = 0
    for kind in settings.databases:
        async with new_database(kind) as url:
            await fill_many(url, settings.size(200_000, 20_000))
            for explained in await explain_all(url):
                bad_count += bool(explained.problems)
                print(f"\n{kind}, {explained.purpose}{': BAD' if explained.problems else ''}")
                print("  " + " ".join(explained.statement.split())[:300])
                print("\n".join(f"    {line}" for line in explained.plan))
                print("\n".join(f"    BAD: {line}" for line in explained.problems), end="")
    print(f"\n{bad_count} bad plans")
    return 1 if bad_count else 0
