"""An old primary that is back, or still there, takes no write of a run that follows another."""

from __future__ import annotations

import asyncio

import pytest

from replaybuf import ReplayBuffer
from replaybuf.errors import AccessError, UnreachableError
from tests.cluster.servers import Cluster, Node
from tests.cluster.test_failover import fail_over
from tests.faults.figures import Figures
from tests.stores import TASK, build, fill, group, take_all, until


async def test_a_run_does_not_go_back_to_an_old_primary(synchronous: Cluster, figures: Figures) -> None:
    """Neither who has it open, also while the new primary is away, nor who opens it then."""
    url = synchronous.new_database()
    async with build(url, reconnect_timeout=1) as buffer:
        await fill(buffer, 3)
        await fail_over(synchronous)
        await fill(buffer, 1, first=3)
        old, new = synchronous.standby, synchronous.primary
        await asyncio.to_thread(old.start)
        async with build(url) as other:
            await fill(other, 1, first=4)
        before = await asyncio.to_thread(groups_at, old, url)
        await asyncio.to_thread(new.kill)
        with pytest.raises(UnreachableError, match=r"is an old primary \(timeline .*a standby of the new one"):
            await buffer.put(group(5), TASK)
        await asyncio.to_thread(new.start)
        await until(lambda: is_put(buffer, 6), 30)
        figures.add(faults=1, groups=6, doubled=int(await asyncio.to_thread(groups_at, old, url) != before))
        assert await asyncio.to_thread(groups_at, old, url) == before
        assert await take_all(buffer) == [0, 1, 2, 3, 4, 6]


async def is_put(buffer: ReplayBuffer, number: int) -> bool:
    try:
        await buffer.put(group(number), TASK)
    except UnreachableError:
        return False
    return True


def groups_at(node: Node, url: str) -> int:
    [count] = node.ask_in(url, "SELECT count(*) FROM rb_group")
    return int(count)


@pytest.mark.long
async def test_two_primaries_of_one_timeline_are_refused(asynchronous: Cluster) -> None:
    """Nobody can tell which of them a new process should follow."""
    url = asynchronous.new_database()
    async with build(url) as buffer:
        await fill(buffer, 1)
    primary = asynchronous.primary
    await asyncio.to_thread(primary.kill)
    await asyncio.to_thread(asynchronous.promote)
    primary.follow_nobody()
    await asyncio.to_thread(primary.start)
    await asyncio.to_thread(primary.promote)
    assert primary is asynchronous.standby
    with pytest.raises(UnreachableError, match=r"both say that they are the primary, and each has"):
        async with build(url):
            pass


@pytest.mark.long
async def test_a_standby_takes_no_writes(asynchronous: Cluster) -> None:
    """Alone, or one of two that can't be reached; it can be read."""
    url = asynchronous.new_database()
    async with build(url) as buffer:
        await fill(buffer, 1)
    standby = asynchronous.standby.url(url.rpartition("/")[2])
    nowhere = standby.replace("127.0.0.1", "127.0.0.1:1,127.0.0.1")
    for named, error, text in (
        (standby, AccessError, "is a standby, which takes no writes; name the primary"),
        (nowhere, UnreachableError, "127.0.0.1:1 can't be used .*is a standby; start it"),
        (url.replace(str(asynchronous.primary.port), "1"), UnreachableError, "no primary can be reached"),
    ):
        with pytest.raises(error, match=text):
            async with build(named):
                pass
