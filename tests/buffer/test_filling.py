"""Groups whose rollouts come one by one: when they are drawable, what is refused, and what restores leave."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from functools import partial
from typing import Any

import pytest

from replaybuf import ReplayBuffer, RolloutState, Status, StorageItem
from replaybuf.errors import ConflictError, FileError, FullError, InputError, RolloutError, StorageError
from replaybuf.rules.query import parse
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.counts import set_aside
from replaybuf.storage.sql.statements.lanes import need_lanes
from replaybuf.storage.sql.tasks import filling
from replaybuf.storage.sql.tasks.transactions import Encoding
from tests.postgres import execute
from tests.stores import TASK, build, group, until, until_equal

OPTIONS: dict[str, Any] = {"group": "p1", "size": 3}


def one(number: int, status: Status = Status.COMPLETED) -> list[RolloutState]:
    return group(number, status=status)


async def put(buffer: ReplayBuffer, *numbers: int, **options: Any) -> None:
    """Put rollouts one by one, of one group of three."""
    for number in numbers:
        await buffer.put(one(number), TASK, **OPTIONS, **options)


@pytest.fixture
async def buffer(shared_url: str) -> Any:
    async with build(shared_url) as new_buffer:
        yield new_buffer


async def contents(buffer: ReplayBuffer) -> dict[str, list[list[int]]]:
    """The numbers of the rollouts of each group, by status."""
    groups: dict[str, list[list[int]]] = {}
    async for item in buffer.find({}):
        groups.setdefault(item.status.value, []).append([rollout.rollout_id for rollout in item.item])
    return groups


async def test_a_group_is_drawable_when_its_last_rollout_came(buffer: ReplayBuffer) -> None:
    for index in (2, 0):
        await buffer.put(one(index), TASK, index=index, model_step=4, **OPTIONS)
        assert await buffer.get(1, TASK) == []
    progress = (await buffer.filling(TASK))["p1"]
    assert (progress.size, progress.min_size, sorted(progress.uids), progress.missing) == (3, 3, [0, 2], [1])
    assert len(buffer) == 0  # groups
    uid = await buffer.put(one(1), TASK, index=1, model_step=5, current_train_step=9, **OPTIONS)
    assert await buffer.filling(TASK) == {}
    [item] = (await buffer.sample({TASK: 1}))[TASK]
    assert ([rollout.rollout_id for rollout in item.item], item.uid, item.key, item.staleness) == (
        [0, 1, 2],
        uid,
        "p1",
        4,
    )
    assert (await buffer.metrics(distributions=False))["tasks"][TASK]["put"] == 1


async def test_rollouts_that_come_at_once_from_several_processes_fill_each_group_once(shared_url: str) -> None:
    places = [(name, index) for name in range(5) for index in range(4)]
    random.Random(1).shuffle(places)
    async with build(shared_url) as first, build(shared_url) as second:
        await asyncio.gather(
            *(
                (first if number % 2 else second).put(
                    one(10 * name + index), TASK, group=f"p{name}", size=4, index=index
                )
                for number, (name, index) in enumerate(places)
            )
        )
        by_status = await contents(first)
    assert {status: sorted(groups) for status, groups in by_status.items()} == {
        "completed": [[10 * name + index for index in range(4)] for name in range(5)]
    }


async def test_a_rollout_that_contradicts_its_group_is_refused(buffer: ReplayBuffer) -> None:
    await buffer.put(one(0), TASK, index=0, **OPTIONS)
    before = await contents(buffer)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"index": 0}, "has its rollout 0 already"),
        ({"size": 4}, "was begun with .* size=3 .* 4 and"),
        ({"min_size": 2}, "min_size=3, and this rollout comes with 'math', 3 and 2"),
        ({"task_name": "code"}, "was begun with task_name='math'"),
    ]
    for options, message in cases:
        with pytest.raises(ConflictError, match=message):
            await buffer.put(one(1), **{"task_name": TASK, **OPTIONS, **options})
    assert await contents(buffer) == before


async def test_options_that_make_no_sense_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"size": None}, "needs size="),
        ({"size": 0}, "size must be a whole number"),
        ({"size": True}, "size must be a whole number"),
        ({"index": 3}, "index 3 is beyond"),
        ({"index": -1}, "index must be a whole number"),
        ({"min_size": 4}, "min_size 4 is more than the 3"),
        ({"min_size": 0}, "min_size must be"),
        ({"group": ""}, "group is empty"),
        ({"group": None}, "give its name"),
        ({"key": "k"}, "key, status and keep_unfit can't be given"),
        ({"status": "completed"}, "key, status and keep_unfit can't be given"),
        ({"size": 70_000}, "can't fill up to 70000 rollouts"),
    ]
    async with build("memory://") as buffer:
        for options, message in cases:
            with pytest.raises(InputError, match=message):
                await buffer.put(one(0), TASK, **{**OPTIONS, **options})
        assert await contents(buffer) == {}


async def test_only_finished_rollouts_come_and_one_at_a_time(buffer: ReplayBuffer) -> None:
    with pytest.raises(InputError, match="must be completed, failed or filtered, and this one is aborted"):
        await buffer.put(one(0, Status.ABORTED), TASK, **OPTIONS)
    with pytest.raises(InputError, match="one by one, and this put has 2"):
        await buffer.put(group(0, 2), TASK, **OPTIONS)
    for call in (buffer.put(one(0), TASK, status="filling"), buffer.update({}, status="filling")):
        with pytest.raises(InputError, match="filling"):
            await call
    with pytest.raises(InputError, match="filling"):
        await buffer.get(1, TASK, "filling")


async def test_a_group_takes_no_rollout_once_it_is_whole_or_has_left(buffer: ReplayBuffer) -> None:
    await put(buffer, 0, 1, 2)
    for _ in range(2):
        with pytest.raises(ConflictError, match="has all its rollouts already"):
            await put(buffer, 9)
        await buffer.get(1, TASK)
    assert await contents(buffer) == {}


#: Statuses of three rollouts, the fewest completed ones that are enough, and what becomes of them.
WHOLE = {"failed": [[0, 1, 2]]}
SHORT: list[tuple[list[Status], int | None, dict[str, list[list[int]]]]] = [
    ([Status.COMPLETED, Status.FAILED, Status.COMPLETED], 2, {"completed": [[0, 2]], "failed": [[1]]}),
    ([Status.COMPLETED, Status.FAILED, Status.COMPLETED], 3, WHOLE),
    ([Status.COMPLETED, Status.FAILED, Status.COMPLETED], None, WHOLE),
    ([Status.FAILED, Status.COMPLETED, Status.FILTERED], 2, WHOLE),
    ([Status.COMPLETED, Status.ABORTED, Status.FAILED], 1, WHOLE),
]


async def test_what_is_no_rollout_is_refused_with_a_min_size_too() -> None:
    async with build("memory://", rollout_type=dict) as buffer:
        with pytest.raises(RolloutError, match="rollouts of exactly dict, not NoneType"):
            await buffer.put([None], TASK, min_size=1)


async def test_a_group_goes_without_unfit_rollouts_if_enough_are_completed(buffer: ReplayBuffer) -> None:
    """Whether they come one by one or at once; with interrupted ones it fails as a whole."""
    for statuses, least, expected in SHORT:
        rollouts = [one(number, status) for number, status in enumerate(statuses)]
        await buffer.put([*itertools.chain(*rollouts)], TASK, min_size=least, tags={"a": 1})
        assert await contents(buffer) == expected
        assert {item.tags["a"] async for item in buffer.find({}) if item.tags} == {1}
        await buffer.delete({})
        if Status.ABORTED not in statuses:
            for rollout in rollouts:
                await buffer.put(rollout, TASK, min_size=least, **OPTIONS)
            assert await contents(buffer) == expected
            await buffer.delete({})


@pytest.mark.parametrize(("least", "status"), [(2, "completed"), (3, "failed")])
async def test_a_group_whose_time_is_over_goes_without_the_missing_rollouts(
    shared_url: str, least: int, status: str
) -> None:
    async with build(shared_url, fill_seconds=0.2) as buffer:
        await put(buffer, 0, 1, min_size=least)
        await until_equal({}, lambda: buffer.filling(TASK), 60)
        assert await contents(buffer) == {status: [[0, 1]]}
        if status == "failed":
            [item] = [item async for item in buffer.find({})]
            assert item.error == "2 of 3 rollouts came in 0.2 s"


async def test_a_group_whose_time_is_over_has_the_highest_priority_and_the_newest_step_of_its_rollouts(
    shared_url: str,
) -> None:
    async with build(shared_url, fill_seconds=3600) as buffer:
        for number, (priority, step) in enumerate([(1.0, None), (3.0, 7), (2.0, 9), (1.0, 8)]):
            steps = {"current_train_step": step, "model_step": 4}
            await buffer.put(one(number), TASK, group="p1", size=5, min_size=1, priority=priority, **steps)
        await buffer.storage.thread.run(partial(buffer.storage.filling.give_up, time.time(), 3600))
        assert (await buffer.filling(TASK))["p1"].missing == [4]  # its time isn't over yet
        await buffer.storage.thread.run(partial(buffer.storage.filling.give_up, time.time() + 7200, 3600))
        [item] = [item async for item in buffer.find({})]
        assert (item.status, item.priority, item.staleness) == (Status.COMPLETED, 3.0, 9 - 4 - 1)


async def test_a_rollout_that_is_deleted_meanwhile_is_missing(
    buffer: ReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await buffer.put(one(0), TASK, **OPTIONS)
    await put(buffer, 1)
    read = Encoding.read

    async def deleting(self: Encoding, *arguments: Any) -> Any:
        payloads = await read(self, *arguments)
        monkeypatch.setattr(Encoding, "read", read)
        await buffer.storage.delete(parse({"uid": first}))
        return payloads

    monkeypatch.setattr(Encoding, "read", deleting)
    await put(buffer, 2)
    assert await contents(buffer) == {"filling": [[1], [2]]}
    await put(buffer, 3)
    assert await contents(buffer) == {"completed": [[2, 1, 3]]}


async def test_the_staleness_rule_of_the_last_put_is_that_of_the_group(buffer: ReplayBuffer) -> None:
    rule = {"current_train_step": 9, "stale_threshold": 3, "expired_groups_retryable": False}
    left: list[StorageItem] = []
    for number in range(3):
        await buffer.put(one(number), TASK, model_step=1 if number else 8, dropped=left, **rule, **OPTIONS)
    assert await contents(buffer) == {}
    assert await buffer.dropped(TASK) == 1
    assert [[rollout.rollout_id for rollout in item.item] for item in left] == [[0], [1], [0, 1, 2]]
    [activity] = buffer.storage.presence._workers.values()
    assert (activity.groups, activity.rollouts) == (1, 3)


async def test_the_group_needs_room_and_its_rollouts_dont(shared_url: str) -> None:
    async with build(shared_url, capacity=1, on_full="reject") as buffer:
        await buffer.put(one(9), TASK)
        await put(buffer, 0, 1)
        with pytest.raises(FullError):
            await put(buffer, 2)
        assert await contents(buffer) == {"completed": [[9]], "filling": [[0], [1]]}
        await buffer.get(1, TASK)
        await put(buffer, 2)
        assert await contents(buffer) == {"completed": [[0, 1, 2]]}


async def test_a_restore_takes_a_group_back_to_the_rollouts_that_it_had(buffer: ReplayBuffer) -> None:
    await put(buffer, 0)
    await buffer.checkpoint(1)
    for _ in range(2):
        await put(buffer, 1, 2)
        assert await contents(buffer) == {"completed": [[0, 1, 2]]}
        assert len(await buffer.get(1, TASK)) == 1
        await buffer.put(one(3), TASK, group="later", size=1)
        await buffer.get(1, TASK)
        await buffer.restore(1)
        assert await contents(buffer) == {"filling": [[0]]}
        assert (await buffer.filling(TASK))["p1"].missing == [1, 2]


async def test_many_rollouts_in_one_call_fill_their_groups(buffer: ReplayBuffer) -> None:
    options: list[Any] = [{"group": f"p{number % 2}", "size": 2} for number in range(4)]
    await buffer.put_many([one(number) for number in range(4)], TASK, each=options)
    assert sorted((await contents(buffer))["completed"]) == [[0, 2], [1, 3]]


async def test_a_snapshot_has_groups_that_fill(buffer: ReplayBuffer, shared_url: str, tmp_path: Any) -> None:
    await buffer.put(one(0), TASK, index=1, **OPTIONS)
    await buffer.save(tmp_path / "snapshot")
    async with build(shared_url, name="other") as other:
        await other.resume(tmp_path / "snapshot")
        await put(other, 1, 2)
        assert await contents(other) == {"completed": [[1, 0, 2]]}


async def test_an_export_has_full_groups_only(buffer: ReplayBuffer, shared_url: str, tmp_path: Any) -> None:
    """And an import refuses rollouts that look like those of others."""
    for index in (1, 2):
        await buffer.put(one(index), TASK, index=index, **OPTIONS)
    await buffer.put(one(8), TASK)
    file = tmp_path / "x.jsonl"
    assert (await buffer.export(file, limit=1)).groups == 1
    async with build(shared_url, name="other") as other:
        await other.import_from(file)
        assert await contents(other) == {"completed": [[8]]}
        file.write_text(file.read_text().replace('"group.status":"completed"', '"group.status":"filling"'))
        with pytest.raises(FileError, match="line 1: a rollout of a group that fills"):
            await other.import_from(file)


async def test_groups_that_cant_be_completed_dont_keep_others_from_it(
    shared_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For lack of room in their task, of which one is read and logged, once."""
    monkeypatch.setattr(filling, "_ROLLOUTS_AT_ONCE", 1)
    async with build(shared_url, capacity=1, on_full="reject", fill_seconds=0.01) as buffer:
        await buffer.put(one(9), "full")
        for name in ("p1", "p2"):
            await buffer.put(one(0), "full", group=name, size=2, min_size=1)
        await buffer.put(one(1), TASK, group="p3", size=2, min_size=1)

        async def is_there() -> bool:
            await buffer.storage.thread.run(buffer.storage.sweeper.maintain_groups)
            return await buffer.count(TASK, "completed") == 1

        await until(is_there, 60)
        await is_there()
        assert sorted(await buffer.filling("full")) == ["p1", "p2"]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert ["can't be completed yet" in text for text in warnings] == [True]


async def give_up(buffer: ReplayBuffer) -> bool:
    """Give up all groups that fill, as after two hours."""
    return bool(await buffer.storage.thread.run(partial(buffer.storage.filling.give_up, time.time() + 7200, 3600)))


async def test_a_group_that_cant_be_completed_is_read_again_only_after_a_while(
    shared_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_uids: list[int] = []
    read = filling.Filling._read
    monkeypatch.setattr(filling.Filling, "_read", lambda self, uids: read_uids.extend(uids) or read(self, uids))
    async with build(shared_url, capacity=1, on_full="block", fill_seconds=3600) as buffer:
        await buffer.put(one(9), TASK)
        uid = await buffer.put(one(0), TASK, min_size=1, **OPTIONS)
        for _ in range(3):
            assert not await give_up(buffer)
        assert read_uids == [uid]
        assert await buffer.get(1, TASK)
        await give_up(buffer)
        assert await contents(buffer) == {"completed": [[0]]}
        await give_up(buffer)
        assert buffer.storage.filling._retry_at == {}


async def test_groups_are_given_up_for_a_short_time_at_once(shared_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "_LONGEST_SECONDS", -1.0)
    async with build(shared_url, fill_seconds=3600) as buffer:
        for number in range(2):
            await buffer.put(one(number), TASK, group=f"p{number}", size=2, min_size=1)
        for given_up in (1, 2):
            assert await give_up(buffer)
            assert await buffer.count(TASK, "completed") == given_up
        assert not await give_up(buffer)


async def test_a_group_that_this_process_cant_read_stays_as_it_is(shared_url: str) -> None:
    """It may be one of other rollouts, or of a newer version; and so does one that is damaged, until it is mended."""
    async with (
        build(shared_url, rollout_type=dict, fill_seconds=3600) as buffer,
        build(shared_url, fill_seconds=3600) as other,
    ):
        await buffer.put([{"own": 1, "reward": 1.0, "status": "completed"}], TASK, min_size=1, **OPTIONS)
        assert not await give_up(other)
        assert [*await buffer.filling(TASK)] == ["p1"]
        await give_up(buffer)
        assert len(await buffer.get(1, TASK)) == 1


async def test_a_group_that_another_process_completes_is_no_warning(
    shared_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read = filling.Filling._read
    async with build(shared_url, fill_seconds=3600) as buffer, build(shared_url, fill_seconds=3600) as other:
        await buffer.put(one(0), TASK, min_size=1, **OPTIONS)
        await other.count(TASK, "filling")

        async def read_late(self: filling.Filling, uids: Any) -> Any:
            items = await read(self, uids)
            if self is buffer.storage.filling:
                await give_up(other)
            return items

        monkeypatch.setattr(filling.Filling, "_read", read_late)
        assert not await give_up(buffer)
        assert await contents(buffer) == {"completed": [[0]]}
        assert buffer.storage.filling._retry_at == {}
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


async def test_rollouts_dont_wait_behind_a_group_that_has_no_room(shared_url: str) -> None:
    async with build(shared_url, capacity=1, on_full="block", put_timeout=30) as buffer:
        await buffer.put(one(9), TASK)
        await put(buffer, 0, 1)
        last = asyncio.create_task(buffer.put(one(2), TASK, **OPTIONS))
        await until(lambda: _has_timed(buffer))
        await buffer.put(one(5), TASK, group="p2", size=2, timeout=0)
        assert await buffer.get(1, TASK)
        await last
        assert await contents(buffer) == {"completed": [[0, 1, 2]], "filling": [[5]]}


async def _has_timed(buffer: ReplayBuffer) -> bool:
    return buffer.waits.for_room.count == 1 or await buffer.count_where({"status": "filling"}) == 2


async def test_a_damaged_rollout_is_set_aside_and_another_takes_its_place(buffer: ReplayBuffer) -> None:
    uid = await buffer.put(one(0), TASK, **OPTIONS)

    def damage(tx: Transaction) -> None:
        [home] = need_lanes(tx, [(TASK, Status.FILLING)]).values()
        set_aside(tx, home, {uid or 0: "damaged"})

    await buffer.storage._write(damage)
    assert await buffer.filling(TASK) == {}
    await put(buffer, 0, 1, 2)
    assert await contents(buffer) == {"completed": [[0, 1, 2]], "failed": [[0]]}
    assert (await buffer.metrics(distributions=False))["tasks"][TASK]["put"] == 2


async def test_unfit_rollouts_of_a_short_group_are_kept_only_if_unfit_groups_are(buffer: ReplayBuffer) -> None:
    await buffer.put([*one(0), *one(1, Status.FAILED)], TASK, min_size=1, keep_unfit=False)
    assert await contents(buffer) == {"completed": [[0]]}


async def test_a_put_ends_though_stored_rollouts_of_its_group_have_lost_their_lane(shared_url: str) -> None:
    async with build(shared_url) as buffer:
        for number in range(2):
            await buffer.put(one(number), TASK, group="p1", size=3)
        execute(shared_url, "UPDATE rb_group SET lane = 999 WHERE uid = (SELECT min(uid) FROM rb_group)")
        with pytest.raises(StorageError, match="2 rollouts of group 'p1' are stored, and 1 of them can be read"):
            await buffer.put(one(2), TASK, group="p1", size=3)
