"""The load of `bench`: its figures, limits and page."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from replaybuf import ReplayBufferConfig
from replaybuf.cli.bench import run as parent
from replaybuf.cli.bench.load import BenchSettings, GroupMaker, parse_group
from replaybuf.cli.bench.report import ledger_of, passed, print_results, quantiles
from replaybuf.cli.bench.run import Outcome
from replaybuf.errors import InputError, ReplayBufError
from replaybuf.storage.sql.inspection.reader import open_reader
from tests.cli.conftest import run, start
from tests.pages import DOCS
from tests.stores import TASK, group

FIGURES = {"count", "mean_ms", "p50_ms", "p90_ms", "p99_ms", "max_ms"}


@pytest.fixture
def url(shared_url: str) -> str:
    return shared_url


@pytest.fixture(autouse=True)
def _forked_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tests of this process share one process to fork from; and no variable is taken for an option."""
    monkeypatch.setattr(parent, "PRELOADED", ["tests.faults.preloaded"])
    for name in [name for name in os.environ if name.startswith("REPLAYBUF_") and "TEST" not in name]:
        monkeypatch.delenv(name)


def bench(url: str, *options: object, code: int | None = 0) -> Any:
    """The results of a small load: 20 groups a second of each of two workers, unless options say otherwise."""
    small = ("--workers", 2, "--trainers", 1, "--group", "2x16", "--take", 4, "--rate", 20, "--minutes", 0.02)
    return json.loads(run("bench", url, *small, *options, "--format=json", code=code).stdout)


_TABLES = ("group", "payload", "past", "lane", "tally", "worker", "batch", "event", "history")


def left_behind(url: str) -> dict[str, int]:
    """The number of rows that there are in tables of groups and buffers, where there are any."""
    if url.startswith("sqlite") and not Path(url.removeprefix("sqlite:///")).exists():
        return {}
    read = open_reader(url).read
    counts = {table: read(lambda tx, table=table: tx.value(f"SELECT count(*) FROM rb_{table}")) for table in _TABLES}  # type: ignore[misc]
    return {table: count for table, count in counts.items() if count}


def test_a_load_accounts_for_every_group_and_leaves_nothing(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    results = bench(url)
    ledger = results["ledger"]
    assert ledger["balanced"] is True
    assert ledger["put"] == ledger["taken"] + ledger["left"] > 8
    assert ledger["taken"] % 4 == 0
    assert (results["errors"], results["failed"]) == ([], [])
    assert set(results["calls"]) == {"put", "take"}
    figures = results["calls"]["put"]
    assert set(figures) == set(results["calls"]["take"]) == FIGURES
    assert 0 < figures["p50_ms"] <= figures["p90_ms"] <= figures["p99_ms"] <= figures["max_ms"]
    assert figures["count"] == ledger["put"]
    assert "url" not in json.dumps(results["settings"])
    cut_off = {**results, "failed": ["the database can't be read any more"]}
    print_results(cut_off)
    assert "failed     the database can't be read any more" in capsys.readouterr().out
    assert left_behind(url) == {}
    assert url.startswith("postgresql") or not list(Path(url.removeprefix("sqlite:///")).parent.glob("*.db*"))


def test_a_put_counts_from_when_it_was_due_and_leases_are_acknowledged(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the page of documentation has all rows that are printed of it."""
    results = bench(url, "--rate", 100, "--leases")
    assert results["per_second"]["due"] == 200
    assert results["calls"]["put"]["count"] == results["ledger"]["put"] > 40
    assert results["calls"]["acknowledge"]["count"] * 4 == results["ledger"]["taken"]
    assert results["ledger"]["balanced"] is True
    print_results(results)
    page = capsys.readouterr().out
    assert re.search(r"^ledger +[\d,]+ put, [\d,]+ taken, \d+ left: 0 lost, 0 doubled$", page, re.M)
    assert _SHOWN is not None
    assert rows(_SHOWN[1]) == rows(page)


def test_the_path_of_a_file_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench("a%20b.db", "--trainers", 0)["ledger"]["put"] > 2
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / "what?.db"  # which needs a URL if it is new
    file.touch()
    assert bench(file.name, "--trainers", 0)["ledger"]["put"] > 2
    assert list(tmp_path.glob("*.db")) == [file]


def test_a_database_with_groups_of_somebody_is_refused(url: str) -> None:
    with ReplayBufferConfig(url=url, name="train").build_sync() as buffer:
        buffer.put_many([group(number) for number in range(3)], TASK)
    before = left_behind(url)
    error = run("bench", url, "--minutes", 0.01, code=1).stderr
    assert "of buffer train" in error
    assert left_behind(url) == before


@pytest.mark.long
def test_a_worker_that_is_killed_is_told_of(tmp_path: Path) -> None:
    """The load ends, and what was put is said not to be known."""
    url = f"sqlite:///{tmp_path}/bench.db"

    def kill_one() -> None:
        until_begun(url)
        child = multiprocessing.active_children()[0]
        os.kill(int(child.pid or 0), signal.SIGKILL)

    killing = threading.Thread(target=kill_one)
    killing.start()
    results = bench(url, "--minutes", 0.1, code=1)
    killing.join()
    assert results["failed"] == ["a process was killed, and the load ended with it"]
    assert results["ledger"]["balanced"] is not False


def until_begun(url: str) -> None:
    """Wait until a load has taken a batch."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(ReplayBufError):
            if open_reader(url).read(lambda tx: tx.value("SELECT count(*) FROM rb_batch")):
                return
        time.sleep(0.05)
    raise AssertionError("the load doesn't begin")


def test_a_database_that_is_not_there_is_an_error() -> None:
    assert "Error: " in run("bench", "/nowhere/bench.db", "--minutes", 0.01, code=1).stderr


# Ends


def children_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The workers and trainers of a load, once all are there and busy: children of children."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        children = [child for child in psutil.Process(process.pid).children(recursive=True) if _is_busy(child)]
        if len(children) >= 3:
            return children
        time.sleep(0.05)
    raise AssertionError("the processes don't begin")


def _is_busy(process: psutil.Process) -> bool:
    try:
        return process.parent().pid != os.getpid() and process.num_threads() > 2  # type: ignore[union-attr]
    except psutil.Error:
        return False


LONG = ("--workers", 2, "--trainers", 1, "--group", "2x16", "--take", 4, "--minutes", 5)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_load_early_and_leaves_nothing(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    process = start("bench", url := f"sqlite:///{tmp_path}/bench.db", *LONG, start_new_session=True)
    until_begun(url)
    children = children_of(process)
    os.killpg(process.pid, sent)  # as a terminal does, or a cluster's scheduler
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (code, "", "")
    assert not [child for child in children if child.is_running()]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_load_whose_parent_is_killed_ends(url: str) -> None:
    process = start("bench", url, *LONG)
    until_begun(url)
    children = children_of(process)
    process.kill()
    process.communicate(timeout=60)
    _, alive = psutil.wait_procs(children, timeout=45)
    assert not alive


@pytest.mark.parametrize(
    ("found", "ends_well"),
    [
        ({}, True),
        ({"errors": [{"count": 1}]}, False),
        ({"failed": ["worker 3: it was killed"]}, False),
        ({"ledger": {"balanced": False}}, False),
        ({"ledger": {"balanced": None}}, True),
    ],
)
def test_errors_deaths_and_lost_groups_fail_a_load(found: dict[str, Any], ends_well: bool) -> None:
    assert passed({"errors": [], "failed": [], "ledger": {"balanced": True}, **found}) == ends_well


def test_a_group_is_what_was_asked_for_and_no_two_are_the_same() -> None:
    settings = BenchSettings("", "", rollouts=3, tokens=50)
    makers = [GroupMaker(settings, worker) for worker in (0, 1)]
    new_groups = [maker.make() for maker in makers * 2]
    assert [len(group) for group in new_groups] == [3, 3, 3, 3]
    assert {len(rollout.response_ids) for group in new_groups for rollout in group} == {50}
    assert len({rollout.rollout_id for group in new_groups for rollout in group}) == 12


@pytest.mark.parametrize("text", ["", "8", "8x", "x4000", "0x10", "8x4000x2", "8x4000000"])
def test_what_is_no_group_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_group(text)


@pytest.mark.parametrize(
    ("put", "taken", "left", "lost", "doubled"),
    [([1, 2, 3], [1, 2], [3], 0, 0), ([1, 2, 3], [1], [3], 1, 0), ([1, 2], [1, 2], [2], 0, 1), ([], [], [], 0, 0)],
)
def test_the_ledger_finds_what_was_lost_and_doubled(
    put: list[int], taken: list[int], left: list[int], lost: int, doubled: int
) -> None:
    outcome = Outcome(BenchSettings("", ""), "", left=left)
    outcome.reports["worker"].put, outcome.reports["trainer"].taken = put, taken
    ledger = ledger_of(outcome)
    assert (ledger["lost"], ledger["doubled"], ledger["balanced"]) == (lost, doubled, not (lost or doubled))


def test_quantiles_are_by_nearest_rank() -> None:
    latencies = quantiles([n / 1000 for n in range(100, 0, -1)])
    assert latencies.pop("mean_ms") == pytest.approx(50.5)
    assert latencies == {"count": 100, "p50_ms": 51, "p90_ms": 91, "p99_ms": 100, "max_ms": 100}


_PAGE = (DOCS / "large-runs.md").read_text("utf-8")
_SHOWN = re.search(r"(?ms)^```\n(\d+ workers .*?)^```$", _PAGE)
_ROW = re.compile(r"^(?:(\w+) {2,}|([a-z][\w ,.]*?) {2,}(?=\d))")


def rows(page: str) -> list[str]:
    """The names of the rows of a page of results, in order."""
    matches = [_ROW.match(line) for line in page.splitlines()]
    return [(match[1] or match[2]).strip() for match in matches if match]


@pytest.mark.parametrize("row", ["put", "take", "groups", "waits", "ledger", "errors"])
def test_every_row_is_explained(row: str) -> None:
    assert re.search(rf"^\| (`\w+`, )*`{row}`", _PAGE, re.M)
