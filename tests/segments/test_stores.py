"""The contract of places for segments: what is written is read, once and whole, and what isn't there is said so."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from replaybuf.errors import ConfigError, DecodeError, DiskFullError, PayloadStoreError
from replaybuf.segments import folder as folders
from replaybuf.segments.extents import Extent
from replaybuf.segments.folder import FolderStore
from replaybuf.segments.frames import ALIGNMENT, Frame, GoneError
from replaybuf.segments.markers import CopyError, Marker, claim, in_frames, recognise, take_over
from replaybuf.segments.objects import ObjectStore
from replaybuf.segments.store import (
    MARKER,
    Range,
    SegmentLostError,
    SegmentStore,
    TakenError,
)
from tests.segments.conftest import HOME, PATIENCE
from tests.segments.relay import Relay

DATABASE = "d" * 32


def framed(extent: Extent, raw: bytes) -> list[Any]:
    """The buffers of a frame."""
    header = Frame(extent.segment, extent.at, extent.size, in_frames(DATABASE), 0.0).packed()
    return [header, raw, bytes(-len(raw) % ALIGNMENT)]


def written(store: SegmentStore, segment: int, *payloads: bytes, file: int | None = None) -> list[Extent]:
    """Write a segment with these payloads, at once; return where they are."""
    writer = store.writer(f"{file or segment}.seg", anew=file is not None)
    at, extents, buffers = ALIGNMENT, [], []
    for raw in payloads:
        extents.append(Extent(1, segment, file or segment, at, len(raw)))
        buffers += framed(extents[-1], raw)
        at += len(raw) + -len(raw) % ALIGNMENT + ALIGNMENT
    writer.write(0, buffers, sync=True)
    writer.close()
    return extents


def read(store: SegmentStore, *extents: Extent) -> list[Any]:
    found = store.read([Range.whole(one) for one in extents], PATIENCE)
    return [one if isinstance(one, Exception) else bytes(one) for one in found]


def test_what_was_written_is_read(store: SegmentStore) -> None:
    """Of any length, in any order, more than once."""
    raws = [os.urandom(size) for size in (0, 1, 63, 64, 65, 100_000)]
    extents = written(store, 1, *raws)
    assert read(store, *extents, *reversed(extents)) == [*raws, *reversed(raws)]


def test_a_part_is_read_by_itself(store: SegmentStore) -> None:
    raw = os.urandom(10_000)
    [extent] = written(store, 1, raw)
    [found] = store.read([Range(extent, 5000, 64)], PATIENCE)
    assert bytes(found) == raw[5000:5064]


def test_buffers_of_any_kind_are_written(store: SegmentStore) -> None:
    """More of them than the kernel takes in one call."""
    parts: Sequence[Any] = [memoryview(b"ab"), bytearray(b"cd"), b""] * 1000
    whole = b"".join(parts)
    extent = Extent(1, 1, 1, ALIGNMENT, len(whole))
    header, _, padding = framed(extent, whole)
    writer = store.writer("1.seg", anew=False)
    writer.write(0, [header, *parts, padding], sync=False)
    assert read(store, extent) == [whole]


def test_segments_are_listed_and_deleted(store: SegmentStore) -> None:
    written(store, 1, b"one")
    written(store, 2, b"two")
    listed = {one.name: one for one in store.segments()}
    assert set(listed) == {"1.seg", "2.seg"}
    assert listed["1.seg"].nbytes == 2 * ALIGNMENT
    store.delete("1.seg")
    store.delete("1.seg")
    assert [one.name for one in store.segments()] == ["2.seg"]


def test_raw_bytes_end_with_the_segment(store: SegmentStore) -> None:
    written(store, 1, b"x" * 64)
    assert store.read_raw("1.seg", 64, 1000) == b"x" * 64
    assert store.read_raw("1.seg", 5000, 10) == b""


def test_a_deleted_segment_is_gone(store: SegmentStore) -> None:
    """The others of the same call are read."""
    [one] = written(store, 1, b"one")
    [two] = written(store, 2, b"two")
    store.delete("1.seg")
    found = read(store, one, two)
    assert isinstance(found[0], GoneError)
    assert found[1] == b"two"


def test_a_segment_that_was_cut_short_is_damaged(store: SegmentStore) -> None:
    """Also where nothing of the payload is there any more."""
    first, second = written(store, 1, b"a" * 100, b"b" * 1000)
    raw = store.read_raw("1.seg", 0, 10_000)
    store.delete("1.seg")
    writer = store.writer("1.seg", anew=False)
    writer.write(0, [raw[:200]], sync=True)
    writer.close()
    found = store.read([Range.whole(first)], PATIENCE)
    assert bytes(found[0]) == b"a" * 100
    [cut] = store.read([Range.whole(second)], PATIENCE)
    assert isinstance(cut, DecodeError) or len(cut) < second.size


def test_a_marker_is_written_once(store: SegmentStore) -> None:
    assert store.write_marker(b"another") is False
    assert claim(store, DATABASE, 7, HOME) == 1


def test_whether_this_process_may_write_is_found_out_without_a_change(store: SegmentStore) -> None:
    marker = store.read_marker()
    store.check_may_write()
    assert store.read_marker() == marker
    assert [*store.segments()] == []


def test_a_place_of_another_database_is_refused(store: SegmentStore) -> None:
    with pytest.raises(ConfigError, match=r"another database.*name another place"):
        claim(store, "e" * 32, None, HOME)


def test_a_place_is_recognised_by_its_marker(store: SegmentStore) -> None:
    """One that has another marker, or another number, is not read from: its segments have the same names."""
    recognise(store, DATABASE, 1)
    with pytest.raises(PayloadStoreError, match="other payloads"):
        recognise(store, DATABASE, 2)
    with pytest.raises(PayloadStoreError, match="other payloads"):
        recognise(store, "e" * 32, 1)


def test_a_place_belongs_to_one_of_several_copies_of_a_database(store: SegmentStore) -> None:
    """The others may read."""
    copy = {**HOME, "path": "/runs/copy.db", "inode": "8"}
    with pytest.raises(CopyError) as refused:
        claim(store, DATABASE, 1, copy)
    assert refused.value.home == HOME
    assert not recognise(store, DATABASE, 1).belongs_to(copy)
    take_over(store, copy)
    assert claim(store, DATABASE, None, copy) == 1
    with pytest.raises(CopyError):
        claim(store, DATABASE, 1, HOME)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"path": "/runs/moved.db"}, True),
        ({"inode": "8"}, True),  # it was put back from a backup
        ({"host": "node-2"}, True),  # a container with another name, and the same volume
        ({"host": "node-2", "inode": "8"}, False),
        ({"path": "/runs/copy.db", "inode": "8"}, False),
        ({"path": "/runs/run.db.bak", "inode": "8", "name": "/runs/run.db on node-1"}, False),
    ],
)
def test_a_home_is_known_by_two_of_its_facts(change: dict[str, str], same: bool) -> None:
    assert Marker(DATABASE, 1, HOME).belongs_to({**HOME, **change}) is same


def test_what_is_missing_in_another_place_is_not_damaged(folder: Path) -> None:
    """Such as where the mount of another run has taken the place's path."""
    store = FolderStore(str(folder))
    store.check_writable()
    claim(store, DATABASE, 1, HOME)
    [extent] = written(store, 1, b"one")
    (folder / MARKER).write_bytes(b'{"database": "other", "place": 1}')
    (folder / "segments" / "1.seg").unlink()
    store.forget()
    with pytest.raises(PayloadStoreError, match="another place than before"):
        read(store, extent)
    with pytest.raises(PayloadStoreError, match="another place than before"):
        store.writer("2.seg", anew=False)


# Folders


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


# Object stores


@pytest.fixture
def objects(bucket: str) -> ObjectStore:
    store = ObjectStore(bucket, PATIENCE)
    claim(store, DATABASE, 1, HOME)
    return store


@pytest.mark.parametrize("status", [500, 503])
def test_an_answer_that_it_cannot_is_asked_again(objects: ObjectStore, relay: Relay, status: int) -> None:
    [extent] = written(objects, 1, b"x" * 1000)
    relay.status = status
    threading.Timer(0.5, relay.well).start()
    assert read(objects, extent) == [b"x" * 1000]
    relay.status = status
    threading.Timer(0.5, relay.well).start()
    written(objects, 2, b"y")


@pytest.mark.parametrize("way", ["away", "503", pytest.param("500", marks=pytest.mark.long)])
def test_a_store_that_is_down_is_not_damage(objects: ObjectStore, relay: Relay, way: str) -> None:
    """Whatever its name has in it; and the sentence says how long it was asked."""
    [extent] = written(objects, 1, b"x" * 1000)
    impatient = ObjectStore(objects.url, 1.0)
    relay.leave() if way == "away" else setattr(relay, "status", int(way))
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


def test_who_may_only_read_is_found_out(objects: ObjectStore, relay: Relay) -> None:
    relay.status, relay.when = 403, lambda line: line.startswith("PUT")
    objects.check_writable()
    with pytest.raises(PayloadStoreError, match="refuses these credentials"):
        objects.check_may_write()


def test_a_body_that_is_cut_is_asked_for_again(objects: ObjectStore, relay: Relay) -> None:
    raw = os.urandom(1_000_000)
    [extent] = written(objects, 1, raw)
    for link in relay._links:
        link.close()
    relay.cut_after, relay.cuts = 300_000, 2
    assert read(objects, extent) == [raw]


def test_a_slow_store_is_waited_for(objects: ObjectStore, relay: Relay) -> None:
    [extent] = written(objects, 1, b"x" * 1000)
    relay.seconds = 0.5
    assert read(objects, extent) == [b"x" * 1000]


def test_a_bucket_that_is_not_there_is_said_so(relay: Relay) -> None:
    store = ObjectStore("s3://nobody-made-it/run", PATIENCE)
    with pytest.raises(PayloadStoreError, match="no such bucket; make it, or correct the name"):
        claim(store, DATABASE, 1, HOME)
    with pytest.raises(PayloadStoreError, match="no such bucket"):
        written(store, 1, b"x")


def test_a_forked_process_is_told_how_to_start(objects: ObjectStore, bucket: str) -> None:
    """`obstore` has its threads in the parent only."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            ObjectStore(bucket, PATIENCE)
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    assert os.read(reading, 1000).startswith(b"PayloadStoreError")
