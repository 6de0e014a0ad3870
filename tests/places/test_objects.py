"""Places: settings, and figures."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from replaybuf.errors import PayloadStoreError, StorageError
from replaybuf.storage.places import folder as folders
from replaybuf.storage.places.folder import FolderStore
from replaybuf.storage.places.objects import ObjectStore
from replaybuf.storage.places.owners import claim
from replaybuf.storage.places.store import FILES, MARKER, file_name
from replaybuf.view.metrics import prometheus, read_figures
from tests.cli.conftest import run, run_json
from tests.observe.test_spans import numbers
from tests.places.arrays import NBYTES, apart, files, heavy
from tests.places.conftest import DATABASE, HOME, PATIENCE, read, written
from tests.places.relay import Relay
from tests.scripts import forked
from tests.stores import TASK, because, build, group, opened, sweep_now
from tests.web.conftest import client_of


@pytest.fixture
def local(folder: Path) -> FolderStore:
    store = FolderStore(str(folder))
    store.prepare()
    claim(store, DATABASE, 1, HOME)
    return store


def test_a_new_file_writes_over_nothing(local: FolderStore) -> None:
    [extent] = written(local, 1, b"one")
    with pytest.raises(PayloadStoreError):
        written(local, 1, b"two")
    assert read(local, extent) == [b"one"]


def test_a_folder_that_is_away_is_not_damage(local: FolderStore) -> None:
    [extent] = written(local, 1, b"one")
    local.path.rename(local.path.with_name("away"))
    calls = (
        lambda: read(local, extent),
        lambda: local.delete([file_name(1)]),
        lambda: written(local, 2, b"two"),
        local.check_there,
    )
    for call in calls:
        with pytest.raises(PayloadStoreError, match=r"mount it, or put it back .*nothing is lost"):
            call()


def test_files_that_came_into_another_folder_are_deleted_and_it_is_said_once(local: FolderStore) -> None:
    (local.path / MARKER).write_bytes(b"{}")
    with pytest.raises(PayloadStoreError, match=r"^\S+ is another place than before") as caught:
        written(local, 1, b"one")
    assert type(caught.value.__cause__) is not PayloadStoreError
    assert files(local.path) == {}


def test_a_mount_whose_server_has_ended_is_not_damage(local: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    [extent] = written(local, 1, b"one")

    def not_connected(*_: Any) -> int:
        raise OSError(errno.ENOTCONN, "ended")

    monkeypatch.setattr(os, "preadv", not_connected)
    with pytest.raises(PayloadStoreError, match=r"can't be read .*see that it is mounted"):
        read(local, extent)


@pytest.mark.parametrize("what", ["moved", "unmounted", "another"])
def test_nothing_is_written_to_a_folder_that_nobody_finds(
    local: FolderStore, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """It was there when the file was opened."""
    written(local, 1, b"one")
    real, away = folders._write_all, local.path.with_name("away")

    def write_all(file: Any, buffers: Any) -> None:
        local.path.rename(away)
        if what != "unmounted":
            (local.path / FILES).mkdir(parents=True)
            (local.path / MARKER).write_bytes((away / MARKER).read_bytes() if what == "moved" else b"{}")
        real(file, buffers)

    monkeypatch.setattr(folders, "_write_all", write_all)
    with pytest.raises(
        PayloadStoreError, match="was moved during a write" if what == "moved" else "isn't there|another place"
    ):
        written(local, 2, b"two")


def test_reads_that_are_cut_short_go_on(local: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    [extent] = written(local, 1, raw := os.urandom(1000))
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda number, views, at: real(number, [views[0][:7]], at))
    assert read(local, extent) == [raw]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_to_be_full(local: FolderStore, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """And nothing stays of what was begun."""

    def full(*_: Any) -> int:
        raise OSError(code, "full")

    monkeypatch.setattr(folders, "_write_all", full)
    with pytest.raises(StorageError, match="free some space", check=because("disk full")):
        written(local, 1, b"x")
    assert files(local.path) == {}


@pytest.mark.parametrize(("on_network", "sync", "calls"), [(False, False, 0), (False, True, 2), (True, False, 1)])
def test_what_is_synced_is_synced_with_its_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, on_network: bool, sync: bool, calls: int
) -> None:
    """On a network every write is on the server."""
    monkeypatch.setattr(
        "replaybuf.storage.places.folder.filesystem_type", lambda path: "nfs4" if on_network else "ext4"
    )
    store = FolderStore(str(folder))
    store.prepare()
    claim(store, DATABASE, 1, HOME)
    synced: list[str] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda n: (synced.append(os.readlink(f"/proc/self/fd/{n}")), real(n))[1])
    written(store, 1, b"x", sync=sync)
    assert synced == [str(folder / FILES / file_name(1)), str(folder / FILES)][:calls]


def test_no_file_is_left_open(local: FolderStore) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(8):
        read(local, *written(local, number, b"x"))
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def objects(bucket: str) -> ObjectStore:
    store = ObjectStore(bucket, PATIENCE)
    claim(store, DATABASE, 1, HOME)
    return store


def test_an_answer_that_it_cannot_is_asked_again(objects: ObjectStore, relay: Relay) -> None:
    [extent] = written(objects, 1, b"x" * 1000)
    for status, call in ((500, lambda: read(objects, extent)), (503, lambda: written(objects, 2, b"y"))):
        relay.status = status
        threading.Timer(0.2, relay.well).start()
        call()
    assert read(objects, extent) == [b"x" * 1000]


@pytest.mark.parametrize("way", ["away", "503"])
def test_a_store_that_is_down_is_not_damage(objects: ObjectStore, relay: Relay, way: str) -> None:
    """Whatever its name has in it; and the sentence says how long it was asked."""
    [extent] = written(objects, 1, b"x" * 1000)
    impatient = ObjectStore(objects.url, 1.0)
    relay.fail(way)
    with pytest.raises(PayloadStoreError, match=r"asked again for 0.8 s|didn't answer within"):
        read(impatient, extent)
    with pytest.raises(PayloadStoreError, match=r"asked again for 0.8 s"):
        written(impatient, 2, b"y")
    relay.well()
    assert read(objects, extent) == [b"x" * 1000]


def test_refused_credentials_are_said_at_once_and_not_shown(objects: ObjectStore, relay: Relay) -> None:
    [extent] = written(objects, 1, b"x" * 1000)
    relay.status = 403
    before = len(relay.requests)
    with pytest.raises(PayloadStoreError, match="refuses these credentials") as refused:
        read(objects, extent)
    assert len(relay.requests) - before == 1
    assert "SECRET" not in str(refused.value)
    with pytest.raises(PayloadStoreError, match="refuses these credentials"):
        written(objects, 2, b"y")


def test_one_object_that_is_gone_keeps_no_other_from_being_deleted(tmp_path: Path) -> None:
    """In stores that answer 404 for it, as a folder does, Google's and Azure's."""
    store, numbers = ObjectStore(f"file://{tmp_path}", PATIENCE), range(1, 41)
    store.write([(file_name(number), [b"x"]) for number in numbers if number != 3], sync=False)
    store.delete(map(file_name, numbers))
    assert [*store.files()] == []


def test_a_body_that_is_cut_is_asked_for_again(objects: ObjectStore, relay: Relay) -> None:
    raw = os.urandom(1_000_000)
    [extent] = written(objects, 1, raw)
    relay.cut_after, relay.cuts = 300_000, 2
    assert read(objects, extent) == [raw]
    assert relay.cuts == 0


def test_a_bucket_that_is_not_there_is_said_so(relay: Relay) -> None:
    store = ObjectStore("s3://nobody-made-it/run", PATIENCE)
    with pytest.raises(PayloadStoreError, match="no such bucket; make it, or correct the name"):
        claim(store, DATABASE, 1, HOME)
    with pytest.raises(PayloadStoreError, match="no such bucket"):
        written(store, 1, b"x")


def test_a_forked_process_is_told_how_to_start(objects: ObjectStore, bucket: str) -> None:
    """`obstore` has its threads in the parent only."""

    def open_there() -> None:
        with pytest.raises(PayloadStoreError):
            ObjectStore(bucket, PATIENCE)

    assert os.waitpid(forked(open_there), 0)[1] == 0


def place(url: str) -> dict[str, Any]:
    """The one row of the view."""
    [row] = run_json("sql", url, "SELECT * FROM places")
    return dict(row)


async def fill(url: str, folder: Path, groups: int) -> None:
    async with apart(url, folder) as buffer:
        for number in range(groups):
            await buffer.put(heavy(number), TASK)


async def take(url: str) -> None:
    """Take a group, and let it be swept at once."""
    async with build(url) as buffer:
        await buffer.get(1, TASK)
        await buffer.storage._write(sweep_now)


def test_the_view_adds_up(shared_url: str, folder: Path) -> None:
    asyncio.run(fill(shared_url, folder, 4))
    size = sum(file.stat().st_size for file in (folder / FILES).iterdir())
    # The last tail of a file is padded, which isn't counted.
    assert place(shared_url) == {"url": str(folder), "files": 4, "groups": 4, "bytes": 4 * NBYTES}
    assert 4 * NBYTES <= size < 4 * NBYTES + 256
    asyncio.run(take(shared_url))
    assert place(shared_url)["groups"] == 3


def test_stats_metrics_and_the_page_say_the_same(shared_url: str, folder: Path) -> None:
    asyncio.run(fill(shared_url, folder, 2))
    row = place(shared_url)
    assert run_json("stats", shared_url)["database"]["places"] == {row.pop("url"): row}
    [line] = [line for line in run("stats", shared_url).stdout.splitlines() if line.startswith("payloads in")]
    assert line == f"payloads in {folder}: 200 kB of 2 groups, 2 files"
    values = numbers(parse(prometheus(read_figures(shared_url))))
    labels = (("place", str(folder)),)
    assert values["replaybuf_payload_files", labels] == row["files"]
    assert values["replaybuf_payload_file_bytes", labels] == row["bytes"]
    assert values["replaybuf_payload_file_groups", labels] == row["groups"]
    client = client_of(shared_url)
    page = client.get("/").text
    assert f'<dt title="{folder}">payloads apart</dt><dd>200 kB' in page


def test_a_database_that_keeps_all_has_no_places(shared_url: str) -> None:
    with opened(shared_url) as buffer:
        asyncio.run(buffer.put(group(1), TASK))
    assert run_json("sql", shared_url, "SELECT * FROM places") == []
    assert "payloads in" not in run("stats", shared_url).stdout
    assert "payloads apart" not in client_of(shared_url).get("/").text
    assert "replaybuf_payload_file" not in prometheus(read_figures(shared_url))
