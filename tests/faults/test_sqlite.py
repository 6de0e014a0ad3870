"""SQLite's files: no room, damage, a network, and the log."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from replaybuf import ReplayBufferConfig
from replaybuf.common.file_systems import filesystem_type, is_network
from replaybuf.errors import StorageError
from replaybuf.storage.sql.engine import sqlite_files
from replaybuf.storage.sql.engine.sqlite_files import refuse_network_filesystem
from tests.cli.conftest import run
from tests.faults import damage, disks
from tests.faults.conftest import Figures
from tests.faults.processes import Ledger, end, entries, kill, numbers, start, wait_for_lines
from tests.postgres import execute
from tests.stores import TASK, because, build, fill, group, take_all


@pytest.mark.parametrize("kind", [disks.under_a_limit, disks.on_a_small_disk])
def test_a_full_disk_loses_nothing(tmp_path: Path, kind: object, figures: Figures) -> None:
    """Every call that fails says why; all groups whose put returned are there, and with more room it goes on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    ledger = tmp_path / "ledger"
    assert end(start(kind, ledger, str(disk)), ledger) == 0  # type: ignore[arg-type]
    disks.check(ledger, figures, "run.db")
    put_numbers = numbers(ledger, "put")
    assert set(entries(ledger, "seen")[0].split()) == set(map(str, put_numbers[:-10]))


# PostgreSQL on a disk that gets full: an error that says so, nothing is lost, and it goes on afterwards


@pytest.mark.long
def test_a_full_disk_of_the_server_loses_nothing(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, figures: Figures
) -> None:
    disk, ledger = tmp_path_factory.mktemp("disk"), tmp_path / "ledger"  # a short path: sockets need one
    for folder in (disk, *disk.parents):
        folder.chmod(0o755)  # the server isn't root
        if folder.name.startswith("pytest-of-"):
            break
    assert end(start(disks.postgres_on_a_small_disk, ledger, str(disk)), ledger, 300) == 0
    disks.check(ledger, figures, "postgresql://")


PAGE = 16 * 1024


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A database with damage.COUNT groups."""
    path = tmp_path_factory.mktemp("sound") / "run.db"
    asyncio.run(damage.fill(f"sqlite:///{path}"))
    return path.read_bytes()


def use(folder: Path, content: bytes, figures: Figures) -> Path:
    """Use a file of this content in a process of its own, which has to end by itself; its ledger."""
    folder.mkdir()
    (folder / "run.db").write_bytes(content)
    ledger = folder / "ledger"
    process = start(damage.use, ledger, f"sqlite:///{folder}/run.db")
    assert end(process, ledger, 60) == 0
    handed_out = numbers(ledger, "given")
    figures.add(faults=1, groups=damage.COUNT, doubled=len(handed_out) - len(set(handed_out)))
    assert entries(ledger, "wrong") == []
    assert sorted(handed_out) == sorted(set(handed_out))
    return ledger


def refused_database(words: str | None = None) -> Any:
    """The error of a file that isn't, or is no more, what it was."""
    return pytest.raises(StorageError, match=words, check=because("not a database"))


def refused(ledger: Path) -> set[str]:
    """The classes of the errors."""
    return {entry.split()[1] for entry in entries(ledger, "refused")}


@pytest.mark.parametrize("size", [None, 0, 1, 50, PAGE, 7 * PAGE + 100, -1])
def test_a_truncated_file(tmp_path: Path, sound: bytes, size: int | None, figures: Figures) -> None:
    """One that is empty, or a byte, is a new database; others are damaged, or what is read of them is right."""
    ledger = use(tmp_path / "it", sound[:size], figures)
    if size is None:
        assert refused(ledger) == set()
        assert sorted(numbers(ledger, "given")) == sorted(numbers(ledger, "seen")) == list(range(damage.COUNT))
    assert refused(ledger) <= {"StorageError"}
    assert refused(ledger) or size in (0, 1) or numbers(ledger, "given")


def flipped(content: bytes, chance: random.Random, first: int, last: int, count: int) -> bytes:
    """With so many bits of a range turned round."""
    changed = bytearray(content)
    for _ in range(count):
        changed[chance.randrange(first, last)] ^= 1 << chance.randrange(8)
    return bytes(changed)


# (3 and 27 hit texts and numbers among the metadata.)
SEEDS = [(3, 27), pytest.param(range(100, 300), marks=pytest.mark.long)]


@pytest.mark.parametrize("seeds", SEEDS, ids=len)
@pytest.mark.parametrize("where", ["header", "schema", "anywhere", "one page", "zeros"])
def test_a_damaged_file(tmp_path: Path, sound: bytes, where: str, seeds: Sequence[int], figures: Figures) -> None:
    for seed in seeds:
        content = damaged(sound, where, random.Random(f"{where} {seed}"))
        ledger = use(tmp_path / f"it-{seed}", content, figures)
        assert refused(ledger) <= {"StorageError", "DecodeError", "AccessError"}, seed


INDEXES = {"fifo": "rb_group_in_order", "staleness": "rb_group_by_step", "prioritized": "rb_group_by_random_key"}


@pytest.mark.parametrize("policy", INDEXES)
async def test_an_index_that_has_a_group_twice_gives_it_to_nobody(tmp_path: Path, policy: str) -> None:
    """One of its cells is in the place of another one: SQLite itself takes the group twice then."""
    path = tmp_path / "run.db"
    async with build(f"sqlite:///{path}", policy=policy, seed=1) as buffer:
        for number in range(5):
            await buffer.put(group(number), TASK, model_step=number, current_train_step=8)
        assert await buffer.get(1, TASK)
    with closing(sqlite3.connect(path)) as connection:
        [[page]] = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", [INDEXES[policy]])
    content = bytearray(path.read_bytes())
    pointers = (page - 1) * PAGE + 8  # behind the header of a leaf
    content[pointers + 2 : pointers + 4] = content[pointers : pointers + 2]
    path.write_bytes(content)
    async with build(f"sqlite:///{path}", policy=policy, seed=1) as buffer:
        for call in (buffer.get(4, TASK), buffer.lease_batch({TASK: 4})):
            with refused_database(r"some of them twice.*nothing was"):
                await call
        assert await buffer.count(TASK, "completed") == 4


@pytest.mark.parametrize("change", ["rb_group SET times_sampled = x'41da'", "rb_group SET pinned_staleness = 9e999"])
async def test_a_count_that_is_no_number_is_told_as_damage(tmp_path: Path, change: str) -> None:
    path = tmp_path / "run.db"
    async with build(f"sqlite:///{path}") as buffer:
        await fill(buffer, 2)
        execute(path, f"UPDATE {change}")
        with pytest.raises(StorageError, match="replaybuf doctor tells"):
            await buffer.metrics()


def damaged(sound: bytes, kind: str, chance: random.Random) -> bytes:
    """The content of a database with damage in this part."""
    size = len(sound)
    page = chance.randrange(1, size // PAGE) * PAGE
    match kind:
        case "header":
            return flipped(sound, chance, 0, 100, 3)
        case "schema":
            return flipped(sound, chance, 100, PAGE, 20)
        case "anywhere":
            return flipped(sound, chance, 0, size, 100)
        case "one page":
            return flipped(sound, chance, page, page + PAGE, 50)
    return sound[:page] + bytes(PAGE) + sound[page + PAGE :]


# As proc(5) describes it, with optional fields, a blank in a name, and two that are mounted over each other.
MOUNTS = r"""
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/root rw
24 22 0:22 / /proc rw,nosuid - proc proc rw
30 22 0:40 / /home rw shared:7 master:2 - nfs4 server:/home rw,vers=4.2
31 30 0:41 / /home/me/local rw - xfs /dev/sdb1 rw
32 22 0:42 / /mnt/my\040share rw - cifs //host/share rw
33 22 0:43 / /mnt/keys rw - fuse.sshfs me@host:/ rw
34 22 0:44 / /over rw - lustre mgs:/fs rw
35 34 0:45 / /over rw - tmpfs none rw
"""


@pytest.fixture
def mounts(tmp_path: Path) -> str:
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS)
    return str(table)


def test_the_file_system_is_that_of_the_nearest_mount_point(mounts: str) -> None:
    kinds = {
        "/run.db": "ext4",
        "/homely/run.db": "ext4",
        "/home/me/run.db": "nfs4",
        "/home/me/local/run.db": "xfs",
        "/mnt/my share/deep/run.db": "cifs",
        "/mnt/keys/run.db": "fuse.sshfs",
        "/over/run.db": "tmpfs",
    }
    assert {path: filesystem_type(path, mounts) for path in kinds} == kinds


def test_nothing_is_known_of_a_system_without_a_table_of_mounts(tmp_path: Path) -> None:
    assert filesystem_type("/run.db", str(tmp_path / "none")) is None
    refuse_network_filesystem("/run.db", str(tmp_path / "none"))


def test_a_link_to_a_network_file_system_is_followed(mounts: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/home/me")
    assert filesystem_type(tmp_path / "link" / "run.db", mounts) == "nfs4"


def test_network_file_systems_are_known_and_others_are_not_refused() -> None:
    remote = ["nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "fuse.s3fs", "fuse"]
    local = ["ext4", "xfs", "btrfs", "overlay", "tmpfs", "9p", "virtiofs", "fuseblk", "zfs", None]
    assert [kind for kind in (*remote, *local) if is_network(kind)] == remote


async def test_a_file_there_is_refused_before_anything_is_made(tmp_path: Path, on_network: None) -> None:
    """The message has the path, the type and what to do; every call says so, also a second one."""
    path = tmp_path / "run.db"
    buffer = build(f"sqlite:///{path}")
    for _ in range(2):
        with pytest.raises(
            StorageError, match=r"run\.db .*nfs4.*local disk, or PostgreSQL", check=because("network filesystem")
        ):
            await buffer.put(group(1), TASK)
    await buffer.close()
    assert not path.exists()


async def test_whoever_knows_better_may_allow_it(tmp_path: Path, on_network: None) -> None:
    config = ReplayBufferConfig(url=f"sqlite:///{tmp_path}/run.db", allow_network_filesystem=True)
    async with config.build() as buffer:
        assert await buffer.put(group(1), TASK) == 1


async def test_the_command_line_reads_there_and_upgrades_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.db"
    async with build(f"sqlite:///{path}") as buffer:
        await buffer.put(group(1), TASK)
    monkeypatch.setattr(sqlite_files, "filesystem_type", lambda *_: "nfs4")
    assert TASK in run("ls", str(path)).stdout
    assert sqlite_files.read_only_uri(str(path)).endswith("mode=ro")  # it copies no WAL that another host writes
    assert "nfs4" in run("doctor", str(path), "--upgrade", code=1).stderr


@pytest.fixture
def on_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """All paths are on NFS."""
    monkeypatch.setattr(sqlite_files, "filesystem_type", lambda *_: "nfs4")


COUNT = 30


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_log_that_is_deleted_while_it_is_open(tmp_path: Path, replaced: bool, figures: Figures) -> None:
    """Nothing more is stored, nobody else comes in, and closing the buffer saves all that was committed."""
    path = tmp_path / "run.db"
    url = f"sqlite:///{path}"
    buffer = build(url)
    await fill(buffer, COUNT)
    beside(path, "-wal").unlink()
    if replaced:
        beside(path, "-wal").touch()
    for call in (buffer.put(group(100), TASK), buffer.get(1, TASK), buffer.count_where({})):
        with refused_database(r"run\.db-wal\) was deleted or replaced.*Close the buffer"):
            await call
    await buffer.close()
    async with build(url) as buffer:
        await buffer.put(group(COUNT), TASK)
        remaining = await take_all(buffer)
    figures.compare(1, range(COUNT + 1), remaining)
    assert remaining == list(range(COUNT + 1))


async def test_a_second_user_of_a_database_whose_log_is_gone_is_refused(tmp_path: Path) -> None:
    """It would make another log, and the database would be damaged."""
    path = tmp_path / "run.db"
    first, second = build(f"sqlite:///{path}"), build(f"sqlite:///{path}")
    await fill(first, COUNT)
    beside(path, "-wal").unlink()
    # Either is right: we look before SQLite does, and SQLite may be told by the first user's index of the log.
    words = r"run\.db-wal\) was deleted while the database was in use|its log \(-wal\) can't be read; it was truncated"
    with refused_database(words):
        await second.put(group(100), TASK)
    await second.close()
    assert not beside(path, "-wal").exists()
    await first.close()
    async with build(f"sqlite:///{path}") as buffer:
        assert await take_all(buffer) == list(range(COUNT))


async def test_a_database_that_is_deleted_or_replaced_while_it_is_open(tmp_path: Path, figures: Figures) -> None:
    """Nothing is stored where nobody would find it."""
    path, other = tmp_path / "run.db", tmp_path / "other.db"
    async with build(f"sqlite:///{other}") as buffer:
        await fill(buffer, 3)
    buffer = build(f"sqlite:///{path}")
    await fill(buffer, COUNT)
    empty = build(f"sqlite:///{path}", name="empty")
    await buffer.save(tmp_path / "saved")
    assert not await empty.delete({})
    for step in (path.unlink, lambda: other.rename(path)):
        step()
        for call in (lambda: buffer.put(group(100), TASK), lambda: empty.resume(tmp_path / "saved")):
            with refused_database(r"run\.db was deleted or replaced while this process had it open"):
                await call()
    await buffer.close()
    await empty.close()
    figures.add(faults=4)


async def put_and_stay(ledger: Ledger, url: str) -> None:
    async with build(url) as buffer:
        for number in range(COUNT):
            await buffer.put(group(number, text="x" * 50_000), TASK)
            ledger.write("put", number)
            if number == COUNT // 2:
                execute(url, "PRAGMA wal_checkpoint(TRUNCATE)")
        ledger.write("ready")
        await asyncio.sleep(60)


def after_a_kill(folder: Path) -> Path:
    """A database whose only user was killed: half of its groups are in the log."""
    path, ledger = folder / "run.db", folder / "ledger"
    process = start(put_and_stay, ledger, f"sqlite:///{path}")
    wait_for_lines(ledger, COUNT + 1)
    kill(process)
    assert numbers(ledger, "put") == list(range(COUNT))
    assert beside(path, "-wal").stat().st_size > 500_000
    return path


@pytest.mark.parametrize("put_back", [True, False])
async def test_a_log_that_is_missed_after_a_crash(tmp_path: Path, put_back: bool, figures: Figures) -> None:
    """Opening says so. Put back it brings everything; deleting its index, too, goes on with what is in the file."""
    path = after_a_kill(tmp_path)
    log = beside(path, "-wal").rename(tmp_path / "elsewhere")
    buffer = build(f"sqlite:///{path}")
    with refused_database(r"Put it back; or .*delete run\.db-shm"):
        await buffer.put(group(100), TASK)
    await buffer.close()
    if put_back:
        log.rename(beside(path, "-wal"))
    else:
        beside(path, "-shm").unlink()
    async with build(f"sqlite:///{path}") as buffer:
        remaining = await take_all(buffer)
    expected = range(COUNT if put_back else COUNT // 2 + 1)
    figures.compare(2, expected, remaining)
    assert remaining == list(expected)


async def test_a_torn_end_of_the_log_is_what_was_not_yet_committed(tmp_path: Path, figures: Figures) -> None:
    """Of a log that was cut off by a power cut, whole transactions are there up to the cut."""
    path = after_a_kill(tmp_path)
    log = beside(path, "-wal")
    log.write_bytes(log.read_bytes()[: log.stat().st_size - 100_000])
    async with build(f"sqlite:///{path}") as buffer:
        remaining = await take_all(buffer)
    figures.add(faults=1)
    assert COUNT // 2 < len(remaining) < COUNT
    assert remaining == list(range(len(remaining)))


async def open_and_close(ledger: Ledger, url: str, seconds: float) -> None:
    """Open the database, use it and close it, again and again: with its last user the log goes."""
    ends, count = time.monotonic() + seconds, 0
    while time.monotonic() < ends:
        async with build(url) as buffer:
            await buffer.put(group(count), TASK)
            assert await buffer.get(1, TASK)
        count += 1
    ledger.write("opened", count)


@pytest.mark.parametrize("seconds", [0.7, pytest.param(60, marks=pytest.mark.long)])
def test_a_log_that_goes_with_its_last_user_is_not_missed(tmp_path: Path, seconds: float) -> None:
    """Whoever opens the database at the moment when another one closes it."""
    ledgers = [tmp_path / str(number) for number in range(3)]
    processes = [start(open_and_close, ledger, f"sqlite:///{tmp_path}/run.db", seconds) for ledger in ledgers]
    for process, ledger in zip(processes, ledgers, strict=True):
        assert end(process, ledger, seconds + 60) == 0
        assert numbers(ledger, "opened")[0] > 0
