"""What notebooks show of buffers, leases and groups."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from replaybuf import ReplayBuffer, ReplayBufferConfig
from replaybuf.common.units import html_table
from tests.stores import TASK, build, fill

HOSTILE = "<script>alert(1)</script>\x1b[31m"


@pytest.fixture
async def buffer() -> AsyncIterator[ReplayBuffer]:
    async with build("memory://") as buffer:
        await fill(buffer, 3)
        yield buffer


async def test_a_buffer_is_a_table_of_its_groups(buffer: ReplayBuffer) -> None:
    async with buffer.lease_batch({TASK: 1}):
        shown = buffer._repr_html_()
    assert f'<td style="text-align: left">{TASK}</td>' in shown
    numbers = [part.partition("<")[0] for part in shown.split('text-align: right">')[1:]]
    assert numbers == ["2", "1"]
    await buffer.close()
    assert "closed" in buffer._repr_html_()


async def test_a_lease_and_its_groups_are_tables(buffer: ReplayBuffer) -> None:
    async with buffer.lease_batch({TASK: 2}) as lease:
        assert "Lease" in lease._repr_html_()
        assert lease._repr_html_().count("<tr>") == 3
        [item, *_] = lease.items[TASK]
        assert f"group {item.uid} of {TASK}" in item._repr_html_()


def test_a_synchronous_buffer_is_shown_like_the_other() -> None:
    with ReplayBufferConfig(url="memory://").build_sync() as buffer:
        assert "status" in (buffer._repr_html_() or "")


def test_nothing_that_is_shown_is_html_and_all_of_it_is_short() -> None:
    shown = html_table(HOSTILE, (HOSTILE,), [(HOSTILE,), ("x" * 1000,), (None,), (0.5,), *[(1,)] * 60])
    assert "<script>" not in shown
    assert "\x1b" not in shown
    assert "x" * 201 not in shown
    assert "14 more" in shown
