"""`replaybuf doctor --rescue`: whatever is damaged, the groups whose pages are whole are saved."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from replaybuf import ReplayBufferConfig, RolloutState, Status
from replaybuf.storage.sql.engine.sqlite_connection import PAGE_SIZE
from tests.cli.conftest import run, run_json
from tests.cli.doctored import examine, wrong

COUNT = 150
_TABLE_INTERIOR = 5


def group(number: int) -> list[RolloutState]:
    """A group with its number on every page that it is on."""
    mark = f"g{number:04d}-"
    return [
        RolloutState(
            rollout_id=number,
            message=[{"role": "user", "content": mark * 3}],
            response=mark * random.Random(number).choice([3, 30, 300, 3000, 12000]),
            extra_fields={"end": mark * 20},
            status=Status.COMPLETED,
        )
    ]


async def fill(path: Path, *, close: bool = True) -> Any:
    buffer = ReplayBufferConfig(url=f"sqlite:///{path}", policy="fifo", archive=20).build()
    for number in range(COUNT):
        await buffer.put(
            group(number), "math" if number % 3 else "code", tags={"mark": f"g{number:04d}-"}, key=str(number)
        )
    await buffer.get(10, "math")
    await buffer.update({"uid": {"$in": [20, 21]}}, status="failed")
    await buffer.lease_batch({"code": 5}, seconds=3600, heartbeat=False)
    await buffer.delete({"uid": {"$in": [50, 51, 52]}})
    if close:
        await buffer.close()
    return buffer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with groups in all states; nobody has it open."""
    path = tmp_path_factory.mktemp("whole") / "run.db"
    asyncio.run(fill(path))
    return path


def numbers(rows: list[Any]) -> dict[int, Any]:
    return {int(row["tags"]["mark"][1:5]) if row["tags"] else -1: row for row in rows}


@pytest.fixture(scope="module")
def there(whole: Path) -> dict[int, Any]:
    """The groups in it, by number."""
    return numbers(run_json("ls", whole, "--limit", 0))


def pages_of(data: bytes) -> dict[int, set[int]]:
    """The pages that each group is on, and maybe some that it was on before."""
    pages: dict[int, set[int]] = {}
    for start in range(0, len(data), PAGE_SIZE):
        for mark in set(re.findall(rb"g(\d{4})-", data[start : start + PAGE_SIZE])):
            pages.setdefault(int(mark), set()).add(start // PAGE_SIZE)
    return pages


def interior(data: bytes) -> set[int]:
    """The pages behind which others of a table are."""
    return {n for n in range(1, len(data) // PAGE_SIZE) if data[n * PAGE_SIZE] == _TABLE_INTERIOR}


async def rescued(folder: Path) -> dict[int, Any]:
    """The groups in a snapshot, by number: their rollouts and metadata."""
    async with ReplayBufferConfig(url="sqlite:///:memory:", policy="lifo").build() as buffer:
        await buffer.resume(folder)
        items = [item async for item in buffer.find({})]
        assert len(buffer) == len([item for item in items if item.status != Status.ARCHIVED])
    for item in items:
        assert item.item[0].response == group(item.item[0].rollout_id)[0].response  # what is saved is right
    return {item.item[0].rollout_id: item for item in items}


def save_what_is_left(damaged: Path, folder: Path) -> dict[int, Any]:
    """Rescue from a file, which stays as it is; an error on one line stands for nothing."""
    before = {file.name: file.read_bytes() for file in damaged.parent.iterdir() if file.is_file()}
    result = run("doctor", damaged, "--rescue", folder, "--json", code=None)
    assert {file.name: file.read_bytes() for file in damaged.parent.iterdir() if file.is_file()} == before
    if result.stderr:
        assert re.fullmatch(r"Error: [^\n]*\n", result.stderr)
        return {}
    saved: dict[int, Any] = {}
    for file in folder.glob("**/*.sqlite"):
        saved |= asyncio.run(rescued(file.parent))
    return saved


def test_a_sound_file_is_saved_whole(whole: Path, there: dict[int, Any], tmp_path: Path) -> None:
    """As it was, with leased groups given back, and a database that is resumed from it is sound."""
    [row] = run_json("doctor", whole, "--rescue", tmp_path / "rescued")
    assert (row["groups"], row["lost"]) == (len(there), 0)
    saved = asyncio.run(rescued(tmp_path / "rescued"))
    assert saved.keys() == there.keys()
    for number, item in saved.items():
        row = there[number]
        assert (item.uid, item.task_name, item.status, item.tags, item.key, item.created_at) == (
            row["uid"],
            row["task_name"],
            row["status"],
            row["tags"],
            row["key"],
            pytest.approx(item.created_at),
        )
    run("resume", tmp_path / "new.db", tmp_path / "rescued")
    assert wrong(examine(tmp_path / "new.db")) == {}
    counts, before = (run_json("stats", path)["buffers"]["default"]["tasks"] for path in (tmp_path / "new.db", whole))
    assert counts["math"] == before["math"]


def test_a_file_that_was_cut_short_anywhere(whole: Path, there: dict[int, Any], tmp_path: Path) -> None:
    data = whole.read_bytes()
    chance = random.Random(1)
    sizes = sorted({0, 1, 99, 512, PAGE_SIZE, *(chance.randrange(len(data)) for _ in range(14)), len(data) - 1})
    pages, saved_at_all = pages_of(data), 0
    for size in sizes:
        damaged = tmp_path / f"{size}" / "run.db"
        damaged.parent.mkdir()
        damaged.write_bytes(data[:size])
        saved = save_what_is_left(damaged, tmp_path / f"rescued-{size}")
        left = {number for number in there if all((page + 1) * PAGE_SIZE <= size for page in pages[number])}
        if all((page + 1) * PAGE_SIZE <= size for page in interior(data)):
            assert left <= saved.keys(), size
            saved_at_all += len(saved)
    assert saved_at_all > COUNT


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 4))])
def test_flipped_bits_anywhere(whole: Path, there: dict[int, Any], tmp_path: Path, seed: int) -> None:
    """All groups are saved that are on other pages, as they were."""
    data = whole.read_bytes()
    chance, pages, inner = random.Random(seed), pages_of(data), interior(data)
    for n in range(12):
        place = chance.randrange(len(data)) if n > 4 else chance.randrange(PAGE_SIZE * 12)
        flipped = bytearray(data)
        flipped[place] ^= 1 << chance.randrange(8)
        damaged = tmp_path / f"{n}" / "run.db"
        damaged.parent.mkdir()
        damaged.write_bytes(flipped)
        saved = save_what_is_left(damaged, tmp_path / f"rescued-{n}")
        page = place // PAGE_SIZE
        if page not in inner:
            left = {number for number in there if page not in pages[number]}
            assert left <= saved.keys(), place
            for number in left:
                assert saved[number].tags == there[number]["tags"]
        run("doctor", damaged, code=None)


def test_what_is_behind_a_damaged_line_of_the_schema(whole: Path, there: dict[int, Any], tmp_path: Path) -> None:
    """SQLite doesn't know tables any more that are listed behind an index whose line is damaged."""
    data = bytearray(whole.read_bytes())
    place = data.index(b"indexrb_group_by_steprb_group") - 5  # in the header of its row
    data[place] ^= 4
    damaged = tmp_path / "damaged" / "run.db"
    damaged.parent.mkdir()
    damaged.write_bytes(data)
    assert save_what_is_left(damaged, tmp_path / "rescued").keys() == there.keys()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 3))])
def test_whole_pages_of_rubbish(whole: Path, there: dict[int, Any], tmp_path: Path, seed: int) -> None:
    """Several pages at once, the first one too: where tables are is known of every database of this version."""
    data = whole.read_bytes()
    chance, pages, inner = random.Random(seed), pages_of(data), interior(data)
    for n in range(8):
        bad = (
            {0}
            if n == 0
            else {page for page in chance.sample(range(1, len(data) // PAGE_SIZE), n) if page not in inner}
        )
        damaged = tmp_path / f"{n}" / "run.db"
        damaged.parent.mkdir()
        rubbish = bytearray(data)
        for page in bad:
            rubbish[page * PAGE_SIZE : (page + 1) * PAGE_SIZE] = chance.randbytes(PAGE_SIZE)
        damaged.write_bytes(rubbish)
        saved = save_what_is_left(damaged, tmp_path / f"rescued-{n}")
        assert {number for number in there if not bad & pages[number]} <= saved.keys(), bad
        run("doctor", damaged, code=1)


def test_the_log_is_read_too(there: dict[int, Any], tmp_path: Path) -> None:
    """What was committed after the last copying of the log into the file is saved; of a damaged log, its beginning."""
    origin = tmp_path / "origin" / "run.db"
    origin.parent.mkdir()

    async def copy() -> None:
        buffer = await fill(origin, close=False)
        for name in ("run.db", "run.db-wal"):
            shutil.copy(origin.parent / name, tmp_path / name)
        await buffer.close()

    asyncio.run(copy())
    log = (tmp_path / "run.db-wal").read_bytes()
    assert len(log) > PAGE_SIZE
    main = (tmp_path / "run.db").read_bytes()
    for n, (first, second) in enumerate(
        itertools.product([main, main[: len(main) // 2]], [log, log[: len(log) // 2], b"x" * 999, b""])
    ):
        folder = tmp_path / f"{n}"
        folder.mkdir()
        (folder / "run.db").write_bytes(first)
        (folder / "run.db-wal").write_bytes(second)
        run("doctor", folder / "run.db", "--rescue", tmp_path / f"rescued-{n}", code=None)
        assert (folder / "run.db").read_bytes() == first
        assert (folder / "run.db-wal").read_bytes() == second
        if n == 0:
            assert asyncio.run(rescued(tmp_path / "rescued-0")).keys() == there.keys()


NO_DATABASES = {
    "empty": b"",
    "a text": b"no database",
    "rubbish": random.Random(1).randbytes(100_000),
    "only a beginning": b"SQLite format 3\0" + b"\0" * 5000,
}


@pytest.mark.parametrize("content", NO_DATABASES.values(), ids=NO_DATABASES)
def test_what_is_no_database_is_an_error_on_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.db").write_bytes(content)
    result = run("doctor", tmp_path / "run.db", "--rescue", tmp_path / "rescued", code=1)
    assert re.fullmatch(r"Error: [^\n]*nothing of it can be read\n", result.stderr)
    assert run("doctor", tmp_path / "run.db", code=1).stdout.startswith("problem")


def test_groups_whose_lane_is_lost_are_kept_apart(whole: Path, there: dict[int, Any], tmp_path: Path) -> None:
    copy = Path(shutil.copy(whole, tmp_path / "run.db"))
    with closing(sqlite3.connect(copy)) as connection, connection:
        connection.execute("DELETE FROM rb_lane")
    saved = save_what_is_left(copy, tmp_path / "rescued")
    assert saved.keys() == there.keys()
    assert {(item.task_name, item.status) for item in saved.values()} == {("lost+found", Status.FAILED)}


def test_groups_of_which_only_payload_and_index_are_left(whole: Path, there: dict[int, Any], tmp_path: Path) -> None:
    """They come back with their task and status, and with what the payload says of them."""
    with closing(sqlite3.connect(whole)) as connection:
        [root] = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'rb_group'").fetchone()
    damaged = tmp_path / "damaged" / "run.db"
    damaged.parent.mkdir()
    data = bytearray(whole.read_bytes())
    data[(root - 1) * PAGE_SIZE : root * PAGE_SIZE] = b"x" * PAGE_SIZE
    damaged.write_bytes(data)
    saved = save_what_is_left(damaged, tmp_path / "rescued")
    assert {number: (item.uid, item.task_name, item.status) for number, item in saved.items()} == {
        number: (row["uid"], row["task_name"], row["status"]) for number, row in there.items()
    }
    run("resume", tmp_path / "new.db", tmp_path / "rescued")
    assert wrong(examine(tmp_path / "new.db")) == {}


def test_cursors_of_prompt_ledgers_are_saved(whole: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(whole, tmp_path / "run.db"))
    with closing(sqlite3.connect(copy)) as connection, connection:
        connection.execute("INSERT INTO rb_cursor VALUES ('default', 'prompts', 0, 3, 17, x'07')")
        connection.execute("INSERT INTO rb_cursor VALUES ('default', 'prompts', 5, 2, 9, x'05')")  # of a checkpoint
    run("doctor", copy, "--rescue", tmp_path / "rescued")
    run("resume", tmp_path / "new.db", tmp_path / "rescued")
    with closing(sqlite3.connect(tmp_path / "new.db")) as connection:
        rows = connection.execute("SELECT * FROM rb_cursor").fetchall()
    assert rows == [("default", "prompts", 0, 3, 17, b"\x07")]


def test_several_buffers_have_a_folder_each(tmp_path: Path) -> None:
    async def put(name: str, number: int) -> None:
        async with ReplayBufferConfig(url=f"sqlite:///{tmp_path}/run.db", name=name).build() as buffer:
            await buffer.put(group(number), "math")

    asyncio.run(put("a/b", 1))
    asyncio.run(put("eval", 2))
    rows = run_json("doctor", tmp_path / "run.db", "--rescue", tmp_path / "rescued")
    assert [(row["buffer"], row["groups"]) for row in rows] == [("a/b", 1), ("eval", 1)]
    assert list(asyncio.run(rescued(tmp_path / "rescued" / "a%2Fb"))) == [1]
    assert list(asyncio.run(rescued(tmp_path / "rescued" / "eval"))) == [2]


def test_a_snapshot_is_not_written_over(whole: Path, tmp_path: Path) -> None:
    run("save", whole, tmp_path / "backup")
    assert "already" in run("doctor", whole, "--rescue", tmp_path / "backup", code=1).stderr


def test_it_is_for_files(postgres_database: str, tmp_path: Path) -> None:
    assert "backups" in run("doctor", postgres_database, "--rescue", tmp_path / "rescued", code=1).stderr


def test_it_only_reads_and_says_so(whole: Path, tmp_path: Path) -> None:
    for other in ("--repair", "--quick"):
        assert "--rescue only reads" in run("doctor", whole, other, "--rescue", tmp_path / "rescued", code=2).stderr
    assert not (tmp_path / "rescued").exists()


def test_what_is_lost_is_counted(whole: Path, there: dict[int, Any], tmp_path: Path) -> None:
    copy = Path(shutil.copy(whole, tmp_path / "run.db"))
    with closing(sqlite3.connect(copy)) as connection, connection:
        connection.execute("DELETE FROM rb_payload WHERE uid IN (60, 61)")
    result = run("doctor", copy, "--rescue", tmp_path / "rescued", "--nl", code=1)
    assert f'"groups": {len(there) - 2}' in result.stdout
    assert '"lost": 2' in result.stdout
    run("resume", tmp_path / "new.db", tmp_path / "rescued")
    assert wrong(examine(tmp_path / "new.db")) == {}
