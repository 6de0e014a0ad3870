"""Servers that lack what the store can do without: it says so once, and goes on."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.storage.sql.inspection.writer import upgrade_database
from replaybuf.storage.sql.schema.revisions import HEAD
from tests.faults.proxy import proxied
from tests.stores import TASK, build, fill, group, take_all

LACKING = {
    "LISTEN": {b'LISTEN "': b'LISTAN "'},
    "NOTIFY": {b"pg_notify": b"pg_natify"},
    "pg_current_snapshot": {b"pg_current_snapshot": b"pg_current_snapshat"},
}


@pytest.mark.parametrize("lacking", LACKING)
async def test_who_waits_notices_what_others_put(
    lent_database: str, caplog: pytest.LogCaptureFixture, lacking: str
) -> None:
    """By polling, twice a second; on connections that are kept."""
    caplog.set_level(logging.WARNING, "replaybuf.watch")
    async with proxied(lent_database) as proxy:
        proxy.instead = LACKING[lacking]
        async with build(proxy.url) as waiting, build(proxy.url) as other:
            for number in range(2):
                taking = asyncio.create_task(waiting.get(1, TASK, timeout=20))
                await asyncio.sleep(0.6)  # it waits, and has looked
                put = time.monotonic()
                await other.put(group(number), TASK)
                assert len(await taking) == 1
                assert time.monotonic() - put < 10
        assert len(proxy.links) <= 12
    told = [record.getMessage() for record in caplog.records]
    assert 1 <= len(told) <= 2  # once for each store
    assert all(f" has no {lacking} (" in one for one in told)


@pytest.mark.parametrize("lacking", [b"to_regproc", b"pg_language", b"has_function_privilege", b"pg_advisory_lock("])
async def test_puts_and_upgrades_do_without_functions_where_they_can_not_be_asked_for(
    lent_database: str, lacking: bytes
) -> None:
    async with proxied(lent_database) as proxy:
        proxy.instead = {lacking: lacking[:3] + b"x" + lacking[4:]}
        async with build(proxy.url) as buffer:
            await fill(buffer, 2)
            await buffer.put(group(2), TASK)
            assert await take_all(buffer) == [0, 1, 2]
        assert (await asyncio.to_thread(upgrade_database, open_reader(proxy.url)))[1] == HEAD
