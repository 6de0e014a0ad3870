"""Payloads in a folder, of a local disk or a network file system: files, and what may happen to them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from replaybuf.errors import PayloadStoreError, StorageError
from replaybuf.storage.places.folder import FolderStore
from replaybuf.storage.places.owners import claim
from replaybuf.storage.places.store import FILES, MARKER, file_name
from tests.places.arrays import files
from tests.places.conftest import HOME
from tests.places.written import DATABASE, read, written
from tests.reasons import because


@pytest.fixture
def local(folder: Path) -> FolderStore:
    store = FolderStore(str(folder))
    store.check_writable()
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


@pytest.mark.parametrize("what", ["moved", "unmounted", "another"])
def test_nothing_is_written_to_a_folder_that_nobody_finds(
    local: FolderStore, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """It was there when the file was opened."""
    written(local, 1, b"one")
    real, away = os.writev, local.path.with_name("away")

    def writev(number: int, views: Any) -> int:
        local.path.rename(away)
        if what != "unmounted":
            (local.path / FILES).mkdir(parents=True)
            (local.path / MARKER).write_bytes((away / MARKER).read_bytes() if what == "moved" else b"{}")
        return real(number, views)

    monkeypatch.setattr(os, "writev", writev)
    with pytest.raises(
        PayloadStoreError, match="was moved during a write" if what == "moved" else "isn't there|another place"
    ):
        written(local, 2, b"two")


def test_writes_that_are_cut_short_go_on(local: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda number, views: real(number, [bytes(views[0])[:7]]))
    raws = [os.urandom(100), os.urandom(33)]
    assert read(local, *written(local, 1, *raws)) == raws


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

    monkeypatch.setattr(os, "writev", full)
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
    store.check_writable()
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
