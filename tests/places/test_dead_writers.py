"""Writers that are taken for dead, and segments that are deleted under them: puts go on, and no segment is nobody's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements import segments as statements
from replaybuf.storage.sql.tasks import buffer_segments as tasks
from tests.segments.arrays import (
    apart,
    ask,
    in_its_thread,
    listed,
    place_of,
    put,
    segments,
    take_all,
    until_no_segments,
)
from tests.stores import build, until

pytestmark = pytest.mark.usefixtures("soon_swept")


async def _die(url: str) -> None:
    await ask(url, "DELETE FROM rb_segment_user")


@pytest.mark.parametrize("deleted", [True, False])
async def test_a_put_of_a_writer_that_was_taken_for_dead_is_written_anew(
    where: tuple[str, str], monkeypatch: pytest.MonkeyPatch, deleted: bool
) -> None:
    """Whether or not others have deleted its files."""
    url, place = where
    monkeypatch.setattr(tasks, "_RENEW_SECONDS", 1000.0)
    async with apart(url, place) as writer:
        await put(writer, 1)
        if deleted:
            await take_all(writer)
        monkeypatch.setattr(tasks, "_RENEW_SECONDS", 0.1)
        await _die(url)
        async with apart(url, place) as other:
            await put(other, 2)
            await until(lambda: _disowned_but_one(url))
            outcomes = await asyncio.gather(put(writer, 3, 4), put(other, 5))
        assert [len(one) for one in outcomes] == [2, 1]
        assert sorted(await take_all(writer)) == ([2, 3, 4, 5] if deleted else [1, 2, 3, 4, 5])


async def _disowned_but_one(url: str) -> bool:
    """Whether the segments of those who aren't users any more are sealed."""
    return not await ask(
        url,
        "SELECT 1 FROM rb_segment WHERE size IS NULL AND owner IS NOT NULL "
        "AND owner NOT IN (SELECT id FROM rb_segment_user)",
    )


async def test_a_segment_that_somebody_deleted_is_replaced(url: str, folder: Path) -> None:
    """What was in it is lost, and said to be; puts go on."""
    async with apart(url, folder) as buffer:
        await put(buffer, 1)
        for one in (folder / "segments").iterdir():
            one.unlink()
        place_of(buffer).forget()
        await put(buffer, 2, 3)
        assert sorted(await take_all(buffer)) == [2, 3]
        [failed] = [item async for item in buffer.find({"status": "failed"})]
        assert "isn't there any more: somebody deleted it" in str(failed.error)


async def test_segments_of_the_dead_are_deleted_without_listing(
    where: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whoever has the database open, also if it keeps its own payloads in the database and reads nothing."""
    url, place = where
    async with apart(url, place) as buffer:
        await put(buffer, 1, 2, 3)
        await buffer.delete({})
        buffer.storage.segments._user = None  # it ends without saying so
        buffer.storage.segments._renew_at = float("inf")
    await _die(url)
    async with build(url):
        await until_no_segments(url)
    assert await listed(place) == []


async def test_a_use_that_is_renewed_while_others_look_for_the_dead_stays(lent_database: str) -> None:
    """Whoever renews it either isn't late, or learns that it was taken for dead: no segment is nobody's for ever."""
    async with build(lent_database) as one, build(lent_database) as other:
        await one.storage.open()
        await other.storage.open()
        engine, scope = one.storage.engine, one.storage.transactions.scope
        user = await in_its_thread(
            one, lambda: engine.write(lambda tx: statements.begin_use(tx, keeps=False), scope, fenced=False)
        )
        await ask(lent_database, "UPDATE rb_segment_user SET renewed_at = 0")
        loop, renewed, go_on = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

        async def renew() -> list[int]:
            async with engine.transaction(scope, write=True) as steps:
                assert await steps.run(lambda tx: statements.renew_use(tx, user))
                found = await steps.run(lambda tx: statements.register(tx, 1, user, 2))
                loop.call_soon_threadsafe(renewed.set)
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(go_on.wait(), loop))
            return [segment.id for segment in found]

        def end(tx: Transaction) -> int:
            return statements.end_dead_users(tx)

        renewing = asyncio.create_task(in_its_thread(one, renew))
        await renewed.wait()
        ending = asyncio.create_task(in_its_thread(other, lambda: other.storage.engine.write(end, scope, fenced=False)))
        await asyncio.sleep(0.3)
        go_on.set()
        await renewing
        assert await ending == 0
        assert {owner for owner, _, _ in (await segments(lent_database)).values()} == {user}
