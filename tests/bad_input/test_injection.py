"""Texts and numbers reach the database as they are."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest

from replaybuf import ReplayBufError, ReplayBuffer
from tests.bad_input.conftest import find
from tests.stores import build, fill, group, numbers_of, take_all

ATTACKS = [
    "'; DROP TABLE rb_group; --",
    '"; DROP TABLE rb_group; --',
    "%s %(x)s :x ? $1 %",
    "$_$); DROP TABLE rb_group; --$_",
    "\\'; SELECT 1",
    "a.b[0].$c",
    "{}\n",
    "\u2028',)",
]


@pytest.mark.parametrize("kept_url", ["sqlite", "postgresql"], indirect=True)
async def test_every_text_is_taken_as_it_is(kept: ReplayBuffer) -> None:
    """As the name of a task, a key, the name and the value of a tag, and in a query."""
    for attack in ATTACKS:
        await attacked(kept, attack)


async def test_every_number_of_a_tag_comes_back_as_it_was(shared_url: str) -> None:
    """PostgreSQL's JSON has large floats as whole numbers, by their shortest decimal representation."""
    numbers = [0.1, -2.0, 1e16, 123456789012345678.0, -9e18, 1e22, -1.2345678901234567e19, 1e23]
    numbers += [1.7976931348623157e308, 5e-324, 2**63 - 1, -(2**63), 2.0**63, -(2.0**63), 2.0**64]
    async with build(shared_url) as buffer:
        await buffer.put(group(1), "numbers", tags={f"n{place}": number for place, number in enumerate(numbers)})
        [item] = [item async for item in buffer.find({"task_name": "numbers"})]
        assert item.tags is not None
        assert [*item.tags.values()] == numbers


async def attacked(buffer: ReplayBuffer, attack: str) -> None:
    before = await buffer.count_where({"task_name": {"$ne": attack}})
    for number, tags in enumerate(({attack: attack}, {attack: 1, "x": attack}, {"x": 1}, None)):
        await buffer.put(group(number), attack, key=f"{attack}{number}", tags=tags)
    await buffer.put(group(4), attack, key=f"{attack}3", tags={"x": True})
    counts = {
        "task": await buffer.count_where({"task_name": attack}),
        "tag": await buffer.count_where({f"tags.{attack}": attack}),
        "tag ne": await buffer.count_where({f"tags.{attack}": {"$ne": attack}, "task_name": attack}),
        "tag in": await buffer.count_where({f"tags.{attack}": {"$in": [attack, 1]}}),
        "tag below": await buffer.count_where({f"tags.{attack}": {"$lte": attack}}),
        "value": await buffer.count_where({"tags.x": attack}),
        "ready": int(await buffer.is_ready({attack: 4})),
        "update": await buffer.update({f"tags.{attack}": attack}, tags={attack: attack}),
        "status": (await buffer.count_statuses([attack], ["completed"]))[attack]["completed"],  # type: ignore[index]
    }
    assert counts == {
        "task": 4,
        "tag": 1,
        "tag ne": 3,
        "tag in": 2,
        "tag below": 1,
        "value": 1,
        "ready": 1,
        "update": 1,
        "status": 4,
    }
    for call in (
        find(order_by=attack),
        find({attack: 1}),
        find({"status": attack}),
        find({"uid": {attack: 1}}),
        lambda b: b.update({}, status=attack),
        lambda b: b.get(1, attack, attack),
    ):
        with pytest.raises(ReplayBufError):
            await call(buffer)
    await buffer.refresh_staleness(task_stale_thresholds={attack: 4}, current_train_step=9)
    assert sorted(numbers_of(await buffer.get(10, attack, where={"task_name": attack}))) == [0, 1, 2, 4]
    assert await buffer.count_where({"task_name": {"$ne": attack}}) == before


@pytest.mark.parametrize("name", ["a%41.db", "a b#.db", "a?b.db", "a'b\".db", "ä&b=c;.db"])
async def test_every_name_of_a_file_can_be_written(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name.removesuffix(".db")
    folder.mkdir()
    url = f"sqlite:///{quote(str(folder / name))}"
    async with build(url) as buffer:
        await fill(buffer, 2)
        await buffer.save(folder / "snapshot")
    assert sorted(path.name for path in folder.iterdir()) == sorted([name, "snapshot"])
    async with build("sqlite://") as copy:
        await copy.resume(folder / "snapshot")
        assert await take_all(copy) == [0, 1]
