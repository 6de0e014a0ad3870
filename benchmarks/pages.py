"""The pages of `replaybuf serve` over 1,000,000 groups: the first request of a new server, and those after it.

The pages are asked for without a network and without a browser: the time is that of reading and rendering. Beside it is
the processor time of this process, which is all of it on SQLite, and tells more on a machine that does other things.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator

import httpx

from benchmarks import groups
from benchmarks.databases import TASK, execute, new_database, open_buffer, put_all
from benchmarks.million import fill_many
from benchmarks.table import Cost, Row, Settings, milliseconds, spread
from replaybuf.common.worker_name import working_as
from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.web.app import create_app

STEPS, BATCH, WORKERS = 100, 64, 8
LAST_STEP = groups.TRAIN_STEP + STEPS
AIM = 0.2

#: What is asked for: the first page of everything, groups in each order and by some queries, and a page further on.
PAGES = (
    "/",
    "/groups",
    *(f"/groups?order={order}" for order in ("reward", "-reward", "staleness", "-staleness", "created_at", "priority")),
    "/groups?status=completed&order=uid",
    '/groups?where={"reward": {"$gte": 0.9}}',
    '/groups?where={"reward": {"$gte": 0.9}}&order=-staleness',
    '/groups?where={"worker": "worker-3"}',
    "/groups/{uid}",
    "/steps",
    "/steps/{step}",
    "/workers",
    "/worker?worker=worker-3",
    "/checkpoints",
    "/events",
    "/sql",
    "/metrics",
)


async def run(settings: Settings) -> AsyncIterator[Row]:
    """Yield a row for each page of each database."""
    many = settings.size(1_000_000, 20_000)
    for kind in settings.databases:
        async with new_database(kind) as url:
            await fill_many(url, many)
            last = str(await _train(url))
            if kind == "postgresql":
                await execute(url, "VACUUM (ANALYZE)")  # as autovacuum has done in the minutes of so many puts
            for page in PAGES:
                yield await _page(settings, kind, url, page.replace("{uid}", last).replace("{step}", str(LAST_STEP)))


async def _train(url: str) -> int:
    """Put and take what a run of some steps does. Return the uid of a group that is there."""
    async with open_buffer(url, "lifo", archive=BATCH * STEPS) as buffer:
        for step in range(groups.TRAIN_STEP + 1, LAST_STEP + 1):
            for worker in range(WORKERS):
                with working_as(f"worker-{worker}"):
                    await put_all(buffer, [groups.small() for _ in range(BATCH // WORKERS)])
            await buffer.take_batch({TASK: BATCH}, current_train_step=step, timeout=60)
        return max([item.uid async for item in buffer.find({}, order_by="-uid", limit=1)])


async def _page(settings: Settings, kind: str, url: str, page: str) -> Row:
    took: list[Cost] = []
    transport = httpx.ASGITransport(create_app(open_reader(url)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
        for _ in range(settings.rounds + 1):
            start, cpu = time.perf_counter(), time.process_time()
            answer = await client.get(page)
            took.append(Cost(time.perf_counter() - start, time.process_time() - cpu))
            if answer.status_code != httpx.codes.OK:
                raise RuntimeError(f"{page} answered {answer.status_code}: {answer.text[:2000]}")
            await asyncio.sleep(0)
    first, later = took[0], took[1:]
    middle = statistics.median(one.seconds for one in later)
    return Row(
        "pages",
        f"{kind}: {page}",
        spread([one.seconds for one in later]),
        f"the first: {milliseconds(first.seconds)}",
        f"processor {milliseconds(statistics.median(one.cpu for one in later))}",
        f"<= {AIM * 1000:g} ms",
        max(first.seconds, middle) <= AIM,
    )
