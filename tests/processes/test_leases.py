"""Leases, eviction and expiry in several processes, some of which are killed: every group is accounted for."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from replaybuf.rules.transitions import Tally
from tests.faults.ledger import wait_for_lines
from tests.faults.processes import kill
from tests.processes import worker
from tests.processes.test_processes import Crew, crew, done, twice
from tests.stores import build

__all__ = ["crew"]  # the fixture


async def tallies(url: str) -> Counter[Tally]:
    totals: Counter[Tally] = Counter()
    async with build(url) as buffer:
        for (_, _, name), count in (await buffer.storage.tallies()).items():
            totals[name] += count
    return totals


@pytest.mark.parametrize("each", [60, pytest.param(3000, marks=pytest.mark.long)])
def test_what_was_put_is_what_became_of_it(crew: Crew, shared_url: str, tmp_path: Path, each: int) -> None:
    """Delivered + evicted + dropped = put, whoever was killed; and nothing is acknowledged twice."""
    over = tmp_path / "over"
    producers = [crew.start(worker.produce_beyond_capacity, first, each) for first in (0, 10_000)]
    doomed, doomed_log = crew.start(worker.produce_beyond_capacity, 20_000, 100_000)
    wait_for_lines(doomed_log, 20)
    kill(doomed)
    dropping = crew.start(worker.drop_old_groups, over)
    victim, victim_log = crew.start(worker.lease, over, 1)
    wait_for_lines(victim_log, 3)
    consumers = [crew.start(worker.lease, over, size) for size in (3, 4)]
    kill(victim)
    crew.end(*producers)
    over.touch()
    crew.end(*consumers, dropping)

    acknowledged = done(victim_log, *(log for _, log in consumers))
    assert twice(acknowledged) == []
    totals = asyncio.run(tallies(shared_url))
    put = done(doomed_log, *(log for _, log in producers))
    assert len(put) <= totals[Tally.PUT] <= len(put) + 1  # a put may be committed by whom was killed before it said so
    left = (Tally.TAKEN, Tally.EVICTED, Tally.DROPPED, Tally.DELETED, Tally.REPLACED, Tally.SIZE, Tally.LEASED)
    assert totals[Tally.PUT] == sum(totals[name] for name in left)
    assert totals[Tally.SIZE] == totals[Tally.LEASED] == totals[Tally.DELETED] == totals[Tally.REPLACED] == 0
    assert len(acknowledged) <= totals[Tally.TAKEN] <= len(acknowledged) + 1
    assert totals[Tally.RETURNED] > 0
    assert set(acknowledged) <= set(put) | {put[0] + 1, *(number + 1 for number in put)}
