"""`replaybuf bench`: real processes on a real database."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import re
import signal
import subprocess
import threading
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import psutil
import pytest

from tests.bench.conftest import bench, left_behind
from tests.cli.conftest import run, start
from tests.stores import build, fill

FIGURES = {"count", "per_second", "mean_ms", "p50_ms", "p90_ms", "p99_ms", "p999_ms", "max_ms"}


@pytest.fixture
def url(shared_url: str) -> str:
    return shared_url


def test_a_load_accounts_for_every_group_and_leaves_nothing(url: str) -> None:
    found = bench(url)
    ledger = found["ledger"]
    assert ledger["balanced"] is True
    assert ledger["put"] == ledger["taken"] + ledger["left"] > 20
    assert ledger["taken"] >= 4
    assert (found["errors"], found["failed"], found["warnings"]) == ([], [], [])
    assert set(found["calls"]) == {"put", "put_waited", "take"}
    for call in ("put", "take"):
        figures = found["calls"][call]
        assert set(figures) == FIGURES
        assert 0 < figures["p50_ms"] <= figures["p90_ms"] <= figures["p99_ms"] <= figures["max_ms"]
    assert found["processes"]["workers"]["count"] == 2
    assert found["processes"]["workers"]["memory_most"] > 1 << 20
    assert "url" not in json.dumps(found["settings"])
    assert left_behind(url) == {}


def test_a_rate_is_kept_and_leases_are_acknowledged(url: str) -> None:
    found = bench(url, "--rate", 20, "--leases", "--minutes", 0.025, "--concurrency", 2)
    assert found["per_second"]["due"] == 40
    assert found["ledger"]["put"] + found["late"] == pytest.approx(60, abs=2)
    due, begun = found["calls"]["put_due"], found["calls"]["put"]
    assert 0 < due["count"] <= begun["count"] + found["calls"]["put_waited"]["count"]
    assert due["p50_ms"] >= begun["p50_ms"] * 0.95
    assert found["calls"]["acknowledge"]["count"] > 0
    assert found["ledger"]["balanced"] is True


def test_without_trainers_workers_wait_for_room_and_are_counted(url: str) -> None:
    found = bench(url, "--trainers", 0, "--capacity", 4, "--minutes", 0.01)
    assert found["ledger"] | {"put": 4, "left": 4, "taken": 0, "balanced": True} == found["ledger"]
    assert found["waits"]["for_room"]["count"] >= 2
    assert found["waits"]["for_room"]["part_of_time"] > 0.5
    assert any("Workers waited for room" in one for one in found["limits"])


def test_a_database_with_groups_of_somebody_is_refused(url: str) -> None:
    async def put() -> None:
        async with build(url, name="train") as buffer:
            await fill(buffer, 3)

    asyncio.run(put())
    before = left_behind(url)
    said = run("bench", url, "--minutes", 0.01, code=1).stderr
    assert "holds groups of buffer train" in said
    assert left_behind(url) == before


def test_a_buffer_of_a_load_that_is_kept_may_be_joined(url: str) -> None:
    first = bench(url, "--join", "here", "--trainers", 0, "--capacity", 8, "--minutes", 0.01)
    second = bench(url, "--join", "here", "--workers", 0, "--minutes", 0.01)
    assert first["ledger"]["balanced"] is second["ledger"]["balanced"] is None
    assert first["ledger"]["put"] == second["ledger"]["taken"] == 8


def test_the_page_fits_and_the_picture_is_drawn(tmp_path: Path) -> None:
    picture, url = tmp_path / "bench.svg", f"sqlite:///{tmp_path}/bench.db"
    small = ("--workers", 1, "--group", "1x8", "--take", 2, "--minutes", 0.06)
    page = run("bench", url, *small, "--picture", picture).stdout
    assert max(map(len, page.splitlines())) <= 100
    assert re.search(r"^ledger +[\d,]+ put, [\d,]+ taken, \d+ left: 0 lost, 0 doubled$", page, re.M)
    assert re.search(r"^put +[\d,]+ +[\d,.]+( +[\d,.]+){6}$", page, re.M)
    drawn = ElementTree.parse(picture)
    lines = [one for one in drawn.iter() if one.tag.endswith("polyline")]
    assert len(lines) >= 3


def test_a_worker_that_is_killed_is_told_of(tmp_path: Path) -> None:
    """The others go on, and what it had put until then is accounted for, or said not to be known."""

    def kill_one() -> None:
        deadline = time.monotonic() + 30
        while not (there := multiprocessing.active_children()) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(1.0)
        os.kill(int(there[0].pid or 0), signal.SIGKILL)

    killing = threading.Thread(target=kill_one)
    killing.start()
    found = bench(f"sqlite:///{tmp_path}/bench.db", "--minutes", 0.05, code=1)
    killing.join()
    assert len(found["failed"]) == 1
    assert re.match(r"(worker|trainer) \d: it was killed \(SIGKILL\)", found["failed"][0])
    assert found["ledger"]["balanced"] is not False
    assert found["ledger"]["put"] > 0


def test_a_database_that_is_not_there_is_an_error() -> None:
    assert "Error: " in run("bench", "/nowhere/bench.db", "--minutes", 0.01, code=1).stderr


# Ends


def children_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The workers and trainers of a load, once all are there and busy: children of children."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = [one for one in psutil.Process(process.pid).children(recursive=True) if _is_busy(one)]
        if len(found) >= 3:
            return found
        time.sleep(0.05)
    raise AssertionError("the processes don't begin")


def _is_busy(process: psutil.Process) -> bool:
    try:
        return process.parent().pid != os.getpid() and process.num_threads() > 2  # type: ignore[union-attr]
    except psutil.Error:
        return False


LONG = ("--workers", 2, "--trainers", 1, "--group", "2x16", "--take", 4, "--minutes", 5)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_load_early_with_its_results(tmp_path: Path, sent: signal.Signals) -> None:
    process = start("bench", url := f"sqlite:///{tmp_path}/bench.db", *LONG, "--json", start_new_session=True)
    there = children_of(process)
    time.sleep(0.5)
    os.killpg(process.pid, sent) if sent == signal.SIGINT else process.send_signal(sent)
    out, said = process.communicate(timeout=60)
    assert process.returncode == 128 + sent, said
    found = json.loads(out)
    assert found["ended_early"]
    assert found["ledger"]["balanced"] is True
    assert not [one for one in there if one.is_running()]
    assert left_behind(url) == {}


def test_a_load_whose_parent_is_killed_ends_and_removes_its_groups(url: str) -> None:
    process = start("bench", url, *LONG)
    there = children_of(process)
    time.sleep(0.5)
    process.kill()
    process.communicate(timeout=60)
    _, alive = psutil.wait_procs(there, timeout=45)
    assert not alive
    assert "group" not in left_behind(url)
