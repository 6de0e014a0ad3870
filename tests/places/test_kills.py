"""`kill -9`, stops, full disks and lost folders: nothing is lost, nothing doubled, and no byte is left over."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from replaybuf.storage.sql.tasks import payload_files
from tests.faults.conftest import Figures
from tests.faults.processes import Crowd, Ledger, end, entries, numbers, start
from tests.histories.history import Recorder, calls_in, numbers_of_calls
from tests.histories.workers import LEASED, TAKEN
from tests.places import roles
from tests.places.arrays import apart, ask, listed, take_all
from tests.postgres import Databases
from tests.stores import TASK, until

pytestmark = pytest.mark.usefixtures("soon_swept")


class Places:
    """Another empty database and an empty place at each call: a folder, or a prefix of a bucket.

    `variables` are what processes need to know of the environment.
    """

    def __init__(self, folder: Path, databases: Databases | None = None, bucket: str | None = None) -> None:
        self._folder, self._databases, self._bucket, self._count = folder, databases, bucket, 0
        self._lent = ExitStack()
        self.variables = {name: value for name, value in os.environ.items() if bucket and name.startswith("AWS_")}

    def __call__(self) -> tuple[str, str, Path]:
        self._count += 1
        folder = self._folder / str(self._count)
        place = folder / "payloads"
        place.mkdir(parents=True)
        return self._url(folder), f"{self._bucket}/{self._count}" if self._bucket else str(place), folder

    def _url(self, folder: Path) -> str:
        if self._databases is None:
            return f"sqlite:///{folder}/b.db"
        self._lent.close()  # nobody uses the last one any more
        return self._lent.enter_context(self._databases.lent())()

    def close(self) -> None:
        self._lent.close()


@pytest.fixture(params=["sqlite", "postgresql", "sqlite-objects"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Places]:
    databases = request.getfixturevalue("postgres_databases") if request.param == "postgresql" else None
    bucket = request.getfixturevalue("bucket") if request.param == "sqlite-objects" else None
    with closing(Places(tmp_path, databases, bucket)) as places:
        yield places


async def _left_over(url: str, place: str, rest: Path) -> tuple[int, list[str]]:
    """How many groups are set aside, and the files that are there after the next process has taken all that is left.

    `rest` becomes the ledger of that one.
    """
    await ask(url, "UPDATE rb_past SET removed_at = 0")
    await ask(url, "UPDATE rb_group SET leased_until = 1 WHERE leased_until IS NOT NULL")
    async with apart(url, place, **roles.PATIENT) as buffer:
        recorder, failed = Recorder(Ledger(rest)), 0
        for task in (TASK, TAKEN, LEASED):
            kind = "acknowledge" if task == LEASED else "take"
            await recorder.call(kind, take_all(buffer, task), lambda groups: groups)
            failed += await buffer.count(task, "failed")
        await _until_nothing_is_named(url)
        if buffer.storage.files.writes:
            await buffer.storage.thread.run(buffer.storage.files._delete_orphans)
    return failed, await listed(place)


async def _nothing_is_named(url: str) -> bool:
    return not await ask(url, _NAMED)


async def _until_nothing_is_named(url: str) -> None:
    """Wait as long as there are fewer groups of files, or files, each minute; then say what keeps the rest."""

    async def weight() -> int:
        return sum(1 + groups for _, groups in await ask(url, _NAMED))

    while before := await weight():
        try:
            await until(lambda: _is_less(weight(), before), 60)
        except TimeoutError:
            tables = {table: await ask(url, f"SELECT {columns} FROM {table}") for table, columns in _KEEPING.items()}
            raise AssertionError(f"files are still named: {tables}") from None


async def _is_less(number: Awaitable[int], limit: int) -> bool:
    return await number < limit


_NAMED = "SELECT id, groups FROM rb_file WHERE groups >= 0"
#: Rows that keep a file.
_KEEPING = {
    "rb_file": "id, place, groups",
    "rb_place": "id, kept_until",
    "rb_payload": "uid, file",
    "rb_group": "uid, lane, since, leased_until",
    "rb_past": "uid, since, until, removed_at, draw",
    "rb_lane": "id, task_name, status",
}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the dead have left is deleted without waiting for a day."""
    monkeypatch.setattr(payload_files, "YOUNG_SECONDS", -86_400.0)


@pytest.mark.parametrize("count", [2, pytest.param(None, marks=pytest.mark.long)])
def test_a_process_that_is_killed_at_any_point_loses_nothing(
    places: Places, count: int | None, figures: Figures
) -> None:
    """Around every statement, commit, write, sync, deletion: the next process has all that was put and not taken."""
    url, place, folder = places()
    process = start(roles.live, folder / "ledger", url, place, None, places.variables)
    assert end(process, folder / "ledger") == 0
    points = entries(folder / "ledger", "point")
    kinds = ("write", "delete", "commit") if places.variables else ("write", "sync", "delete", "commit")
    wanted_points = [f"{side} {call}" for side in ("before", "after") for call in kinds]
    assert set(wanted_points) <= set(points)
    if count is not None and places.variables:
        count = 1  # a server of S3's that is written in Python takes its time
    judged = 0
    for point in random.Random().sample(range(len(points)), len(points)):
        judged += kill_at(point, places, figures)
        if judged == count:
            break
    assert judged


def kill_at(point: int, places: Places, figures: Figures) -> bool:
    """Kill a process at a point, and look at what is left; return False if it had ended, or not begun."""
    url, place, folder = places()
    ledger = folder / "ledger"
    if end(start(roles.live, ledger, url, place, point, places.variables), ledger) == 0:
        return False  # one run has a few more than another
    call, rest = entries(ledger, "killed")[0], folder / "rest"
    if not entries(ledger, "call") or not asyncio.run(_is_there(url)):
        return False
    left_over = asyncio.run(_left_over(url, place, rest))
    figures.judge(1, calls_in([ledger, rest]))
    assert left_over == (0, []), (point, call)
    assert asyncio.run(_nothing_is_named(url)), (point, call)
    return True


async def _is_there(url: str) -> bool:
    """Whether the tables were made before the kill."""
    try:
        await ask(url, "SELECT 1 FROM rb_file")
    except Exception:
        return False
    return True


@pytest.mark.parametrize("kills", [3, pytest.param(60, marks=pytest.mark.long)])
def test_processes_that_are_killed_or_stopped_at_any_moment_lose_nothing(
    places: Places, kills: int, figures: Figures
) -> None:
    """Those that are stopped go on."""
    url, place, folder = places()
    stop, rest = folder / "stop", folder / "rest"
    work = (roles.work, url, place, str(stop))
    crowd = Crowd(folder, random.getrandbits(32), lambda _, number: (*work, number * 100_000, places.variables))
    crowd.start(*"abcd")
    for turn in range(kills):
        role = crowd.chance.choice("abcd")
        if turn % 3 != 2:
            crowd.shoot(role, 3, 0.3)
            continue
        assert crowd.wait_for_lines(role, 3, 0.3)
        pid = crowd.running[role][0].pid or 0
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(pid, signal.SIGCONT)
    stop.touch()
    crowd.end()
    left_over = asyncio.run(_left_over(url, place, rest))
    figures.judge(kills, calls_in([*crowd.ledgers, rest]))
    assert left_over == (0, [])


@pytest.mark.parametrize("places", ["sqlite", "postgresql"], indirect=True)
@pytest.mark.parametrize("kills", [1, pytest.param(30, marks=pytest.mark.long)])
def test_a_run_that_is_killed_in_its_checkpoints_and_restores_is_the_run_that_was_not(
    places: Places, kills: int, figures: Figures
) -> None:
    """Batch by batch, byte for byte; and no byte is left over."""
    url, place, folder = places()
    whole_ledger = folder / "whole"
    assert end(start(roles.train, whole_ledger, url, place, None), whole_ledger) == 0
    points, expected = len(entries(whole_ledger, "point")), entries(whole_ledger, "batch")
    assert len(expected) == roles.STEPS
    url, place, folder = places()
    chance = random.Random()
    for number in range(kills + 1):
        ledger = folder / f"{number}.ledger"
        kill_at = None if number == kills else chance.randrange(points // 3)
        died = end(start(roles.train, ledger, url, place, kill_at), ledger)
        lines = entries(ledger, "batch")
        differing = [batch for batch in lines if batch not in expected]
        figures.add(faults=int(died != 0), groups=3 * len(lines), lost=len(differing))
        assert differing == [], (entries(ledger, "killed"), expected)
        if died == 0:
            break
    assert sorted(numbers(ledger, "left")) == sorted(numbers(whole_ledger, "left"))
    assert asyncio.run(_left_over(url, place, folder / "rest")) == (0, [])
    assert numbers_of_calls(calls_in([folder / "rest"]), "take") == []


@pytest.mark.parametrize("places", ["sqlite", "postgresql"], indirect=True)
@pytest.mark.parametrize("what", ["full", "read-only"])
def test_a_disk_that_takes_no_more_loses_nothing(places: Places, what: str, figures: Figures) -> None:
    """The put fails with the reason; what was put is read and taken; with room it goes on; and all room comes back."""
    url, place, folder = places()
    ledger = folder / "ledger"
    assert end(start(roles.fill_up, ledger, url, place, what), ledger) == 0
    if entries(ledger, "not-permitted"):
        pytest.skip("this user may not mount")
    calls = calls_in([ledger])
    figures.judge(1, calls)
    put_numbers, received = numbers_of_calls(calls, "put"), numbers(ledger, "seen")
    [refusal] = entries(ledger, "refused")
    assert refusal.startswith("StorageError" if what == "full" else "PayloadStoreError"), refusal
    assert sorted(received) == [number for number in sorted(put_numbers) if number < 1000]
    assert entries(ledger, "failed") == ["0"]
    assert len(put_numbers) > 15
