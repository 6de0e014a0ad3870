"""Segments in a folder, of a local disk or a network file system: files, and what may happen to them."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from replaybuf.errors import DecodeError, DiskFullError, PayloadStoreError
from replaybuf.segments import folder as folders
from replaybuf.segments.folder import FolderStore
from replaybuf.segments.places import claim, in_frames
from replaybuf.segments.store import ALIGNMENT, Frame, GoneError, SegmentLostError, TakenError
from tests.segments.conftest import HOME
from tests.segments.written import DATABASE, read, written


@pytest.fixture
def local(folder: Path) -> FolderStore:
    store = FolderStore(str(folder))
    store.check_writable()
    claim(store, DATABASE, 1, HOME)
    return store


def test_a_new_segment_writes_over_nothing(local: FolderStore) -> None:
    [extent] = written(local, 1, b"one")
    with pytest.raises(TakenError):
        local.writer("1.seg", anew=False)
    assert read(local, extent) == [b"one"]


def test_what_was_written_over_is_gone(local: FolderStore) -> None:
    """Its file is the same, its number isn't."""
    [old] = written(local, 1, b"old" * 100)
    [new] = written(local, 2, b"new" * 100, file=1)
    found = read(local, old, new)
    assert isinstance(found[0], GoneError)
    assert found[1] == b"new" * 100


def test_what_is_written_over_while_it_is_read_is_gone(local: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the header and the bytes."""
    [old] = written(local, 1, b"old" * 1000)
    real, calls = os.preadv, 0

    def preadv(number: int, views: Any, at: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            written(local, 2, b"new" * 1000, file=1)
        return real(number, views[:1], at)  # the header alone, then the rest

    monkeypatch.setattr(os, "preadv", preadv)
    [found] = read(local, old)
    assert isinstance(found, GoneError)


@pytest.mark.parametrize("damage", ["header", "number", "database", "empty"])
def test_a_frame_that_was_changed_is_damaged(local: FolderStore, damage: str) -> None:
    [extent] = written(local, 1, b"x" * 1000)
    path = local.path / "segments" / "1.seg"
    raw = bytearray(path.read_bytes())
    if damage == "header":
        raw[20] ^= 1
    elif damage == "number":
        raw[:ALIGNMENT] = Frame(9, 64, 1000, in_frames(DATABASE), 0.0).packed()
    elif damage == "database":
        raw[:ALIGNMENT] = Frame(1, 64, 1000, bytes(16), 0.0).packed()
    path.write_bytes(b"" if damage == "empty" else raw)
    [found] = read(local, extent)
    assert isinstance(found, DecodeError)


def test_a_folder_that_is_away_is_not_damage(local: FolderStore) -> None:
    [extent] = written(local, 1, b"one")
    local.forget()
    local.close()
    local.path.rename(local.path.with_name("away"))
    for call in (lambda: read(local, extent), lambda: local.delete("1.seg"), lambda: list(local.segments())):
        with pytest.raises(PayloadStoreError, match="mount it, or put it back; nothing is lost"):
            call()
    with pytest.raises(PayloadStoreError, match="isn't there"):
        local.writer("2.seg", anew=False)


@pytest.mark.parametrize("what", ["deleted", "moved", "unmounted"])
def test_nothing_is_written_to_a_file_that_nobody_finds(local: FolderStore, what: str) -> None:
    writer = local.writer("1.seg", anew=False)
    path = local.path / "segments" / "1.seg"
    match what:
        case "deleted":
            path.unlink()
        case "moved":
            path.rename(path.with_name("2.seg"))
            path.touch()
        case _:
            local.path.rename(local.path.with_name("away"))
    with pytest.raises(SegmentLostError):
        writer.write(0, [b"x"], sync=False)


def test_a_closed_writer_writes_to_no_other_file(local: FolderStore) -> None:
    """The system gives the number of a closed file to the next one."""
    writer = local.writer("1.seg", anew=False)
    writer.close()
    writer.close()
    with pytest.raises(SegmentLostError):
        writer.write(0, [b"x"], sync=False)


def test_closing_waits_for_a_write(local: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = local.writer("1.seg", anew=False)
    real, writing, go_on = os.pwritev, threading.Event(), threading.Event()

    def pwritev(number: int, *rest: Any) -> int:
        writing.set()
        assert go_on.wait(20)
        return real(number, *rest)

    monkeypatch.setattr(os, "pwritev", pwritev)
    with ThreadPoolExecutor(2) as pool:
        write = pool.submit(writer.write, 0, [b"whole"], sync=False)
        writing.wait(20)
        close = pool.submit(writer.close)
        assert not close.done()
        go_on.set()
        write.result(20)
        close.result(20)
    assert (local.path / "segments" / "1.seg").read_bytes() == b"whole"


def test_writes_that_are_cut_short_go_on(local: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda number, views, at: real(number, [bytes(views[0])[:7]], at))
    raws = [os.urandom(100), os.urandom(33)]
    extents = written(local, 1, *raws)
    assert read(local, *extents) == raws


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_to_be_full(local: FolderStore, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    writer = local.writer("1.seg", anew=False)

    def full(*_: Any) -> int:
        raise OSError(code, "full")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(DiskFullError, match="free some space"):
        writer.write(0, [b"x"], sync=False)


def test_what_is_synced_is_synced_with_its_folder_once(local: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("fsync", "fdatasync"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda number, name=name, real=real: (calls.append(name), real(number))[1])
    writer = local.writer("1.seg", anew=False)
    writer.write(0, [b"x"], sync=False)
    assert calls == []
    writer.write(64, [b"x"], sync=True)
    assert calls == ["fsync", "fsync"]
    writer.write(128, [b"x"], sync=True)
    assert calls[2:] == ["fdatasync"]


def test_segments_are_read_by_many_threads_while_others_are_opened(
    local: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file is closed while somebody reads it, and no number is left open."""
    monkeypatch.setattr(folders, "_MOST_OPEN", 2)
    extents = [written(local, number, bytes([number]) * 1000)[0] for number in range(1, 9)]
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda n: (n % 8, read(local, extents[n % 8])), range(2000)):
            assert found[1] == [bytes([found[0] + 1]) * 1000]
    local.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_deleted_segments_are_not_kept_open(local: FolderStore) -> None:
    """Otherwise their room would not come back."""
    [extent] = written(local, 1, b"one")
    read(local, extent)
    (local.path / "segments" / "1.seg").unlink()
    assert read(local, extent) == [b"one"]
    local.forget()
    assert isinstance(read(local, extent)[0], GoneError)


# Network file systems


def test_on_a_network_every_write_is_on_the_server(
    network_folder: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (calls.append(number), real(number))[1])
    writer = network_folder.writer("1.seg", anew=False)
    writer.write(0, [b"x"], sync=False)
    assert calls


def test_on_a_network_nothing_is_written_over(network_folder: FolderStore) -> None:
    assert not network_folder.reuses


def test_on_a_network_older_content_is_read_anew(network_folder: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may have the file as it was before the last writes."""
    [first, second] = written(network_folder, 1, b"a" * 100, b"b" * 100)
    read(network_folder, first)
    real, stale = os.preadv, True

    def preadv(number: int, views: Any, at: int) -> int:
        nonlocal stale
        if stale:
            stale = False
            return 0
        return real(number, views, at)

    monkeypatch.setattr(os, "preadv", preadv)
    assert read(network_folder, second) == [b"b" * 100]


def test_on_a_network_a_handle_that_the_server_forgot_is_opened_anew(
    network_folder: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    [extent] = written(network_folder, 1, b"a" * 100)
    real, stale = os.preadv, True

    def preadv(number: int, views: Any, at: int) -> int:
        nonlocal stale
        if stale:
            stale = False
            raise OSError(errno.ESTALE, "stale")
        return real(number, views, at)

    monkeypatch.setattr(os, "preadv", preadv)
    assert read(network_folder, extent) == [b"a" * 100]
