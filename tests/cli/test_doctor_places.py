"""`replaybuf doctor` where payloads are kept apart: what can be wrong is provoked once, found, and mended."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from replaybuf import ReplayBufferConfig
from replaybuf.cli.doctor import check_database
from replaybuf.storage.places.folder import FolderStore
from replaybuf.storage.places.store import FILES, MARKER
from tests.cli.conftest import new_url, run, run_json
from tests.cli.doctored import examine, wrong
from tests.places.arrays import apart, heavy
from tests.postgres import execute
from tests.stores import TASK

COUNT = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "payloads"


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path, folder: Path) -> Iterator[str]:
    """The URL of a database that keeps three payloads in the folder, and is closed."""

    async def fill(url: str) -> None:
        async with apart(url, folder) as buffer:
            for number in range(COUNT):
                await buffer.put(heavy(number), TASK)

    folder.mkdir()
    for url in new_url(request.param, request, tmp_path):
        asyncio.run(fill(url))
        yield url


def take_all(url: str) -> int:
    """The number of groups that can be taken."""
    with ReplayBufferConfig(url=url).build_sync() as buffer:
        return len(buffer.get(COUNT, TASK))


def used(folder: Path) -> Path:
    """The file in which the payloads are."""
    return max((folder / FILES).iterdir(), key=lambda file: file.stat().st_size)


def test_sound_files_are_counted(url: str, folder: Path) -> None:
    findings = examine(url)
    assert wrong(findings) == {}
    assert "3 payloads of 300 kB, as counted" in findings["payload files"][0]["text"]
    assert findings["places"][0]["text"] == str(folder)


BROKEN = {
    "the number of groups": "UPDATE rb_file SET groups = groups + 7",
    "the number of groups of one that would be deleted": "UPDATE rb_file SET groups = 0",
    "a file that is taken for nobody's": "UPDATE rb_file SET groups = -1",
    "a file's row": "DELETE FROM rb_file",
}


@pytest.mark.parametrize("statement", BROKEN.values(), ids=BROKEN)
def test_files_that_rows_contradict_are_mended(url: str, folder: Path, statement: str) -> None:
    execute(url, statement)
    findings = examine(url, code=1)
    assert wrong(findings)["payload files"] == "problem"
    assert findings["payload files"][0]["repairable"]
    assert wrong(examine(url, "--repair")) == {}
    assert take_all(url) == COUNT


@pytest.mark.parametrize("how", ["is gone", "was cut short"])
def test_a_file_that_is_not_whole_is_a_problem_and_its_groups_are_set_aside(url: str, folder: Path, how: str) -> None:
    used(folder).unlink() if how == "is gone" else os.truncate(used(folder), 50_000)
    findings = examine(url, code=1)
    assert wrong(findings) == {"payloads": "problem"}
    assert "put lost files of payloads back before a repair" in findings["payloads"][0]["text"]
    run("doctor", url, "--repair", code=None)
    assert len(run_json("ls", url, "--status", "failed")) == 1


@pytest.mark.parametrize("how", ["unmounted", "empty", "another's", "another number"])
def test_a_place_that_is_not_there_is_one_warning(url: str, folder: Path, how: str) -> None:
    """The rest is checked, and nothing is set aside."""
    marker = folder / MARKER
    if how == "unmounted":
        folder.rename(folder.with_name("elsewhere"))
    elif how == "empty":  # as a mount point is
        shutil.rmtree(folder)
        (folder / FILES).mkdir(parents=True)
    else:
        changed = {"database": "0" * 32} if how == "another's" else {"place": 9}
        marker.write_text(json.dumps({**json.loads(marker.read_text()), **changed}))
    findings = examine(url)
    assert wrong(findings) == {"places": "warning"}
    assert len(findings["places"]) == 1
    assert str(folder) in findings["places"][0]["text"]
    assert "without what is out of reach" in findings["payloads"][0]["text"]
    assert findings["checkpoints"][0]["level"] == "ok"
    run("doctor", url, "--repair")
    assert run_json("ls", url, "--status", "failed") == []
    before = marker.read_text() if marker.exists() else None
    run("doctor", url, "--take-over", code=1)
    assert before == (marker.read_text() if marker.exists() else None)


@pytest.mark.parametrize("content", [None, b"", b'{"database": '], ids=["gone", "empty", "torn"])
def test_a_marker_that_was_lost_is_written_anew(url: str, folder: Path, content: bytes | None) -> None:
    """As a power cut could take it: nothing else leads to the payloads."""
    marker = folder / MARKER
    before = marker.read_bytes()
    marker.unlink()
    if content is not None:
        marker.write_bytes(content)
    findings = examine(url)
    assert wrong(findings) == {"places": "warning"}
    assert "doctor URL --take-over writes it again" in findings["places"][0]["text"]
    assert f"wrote {MARKER} in {folder} again" in run("doctor", url, "--take-over").stderr
    assert marker.read_bytes() == before
    assert wrong(examine(url)) == {}
    assert take_all(url) == COUNT


def test_a_place_that_hangs_is_one_warning(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_database, "PATIENCE", 0.05)
    answering = threading.Event()
    monkeypatch.setattr(FolderStore, "read_marker", lambda _: answering.wait())
    monkeypatch.setattr(check_database, "_LISTING_SECONDS", 0.2)
    findings = examine(url)
    refused = run("doctor", url, "--take-over", code=1)
    answering.set()
    assert wrong(findings) == {"places": "warning"}
    assert f"{folder} didn't answer within 0.1 s" in findings["places"][0]["text"]
    assert f"{folder} didn't answer within 0.2 s" in refused.stderr
