"""Servers and systems that lack what the store can do without: it goes on."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from replaybuf.storage.sql.engine import sqlite
from tests.faults.proxy import proxied
from tests.stores import TASK, build, group

LACKING = {
    "LISTEN": {b'LISTEN "': b'LISTAN "'},
    "NOTIFY": {b"pg_notify": b"pg_natify"},
    "pg_current_snapshot": {b"pg_current_snapshot": b"pg_current_snapshat"},
}


@pytest.mark.parametrize("lacking", LACKING)
async def test_who_waits_notices_what_others_put(lent_database: str, lacking: str) -> None:
    """By polling, twice a second; on connections that are kept."""
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


@pytest.mark.parametrize("change", [("_writes_to", lambda path: None), ("_LONGEST_POLL", 60.0)])
async def test_who_waits_notices_what_others_put_into_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: tuple[str, Any]
) -> None:
    """By polling where the system doesn't tell of writes, and without where it does."""
    monkeypatch.setattr(sqlite, *change)
    url = f"sqlite:///{tmp_path}/buffer.db"
    async with build(url) as waiting, build(url) as other:
        for number in range(2):
            taking = asyncio.create_task(waiting.get(1, TASK, timeout=20))
            await asyncio.sleep(0.1)  # it waits, and has looked
            await other.put(group(number), TASK)
            assert len(await taking) == 1
