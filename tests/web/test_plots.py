"""Plots, and how the page ends."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf import ReplayBufferConfig, RolloutState, Status
from replaybuf.errors import ConfigError, InputError, LockedError
from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.web import server
from replaybuf.web.app import PAGES, create_app
from replaybuf.web.plots import (
    HEIGHT,
    POINTS,
    WIDTH,
    Across,
    lines,
    value_axis,
    write_step,
    write_time,
    x_axis,
)
from replaybuf.web.server import bind
from tests.cli.conftest import run
from tests.stores import until
from tests.web.conftest import client_of
from tests.web.test_browser import serving

numbers = st.floats(allow_nan=False, allow_infinity=False, width=32)


@given(st.lists(numbers, min_size=2, max_size=50))
def test_lines_stay_inside_of_the_frame(values: list[float]) -> None:
    plot = lines("any", {"<one>": list(enumerate(values))})
    assert plot is not None
    [line] = ElementTree.fromstring(plot.svg).iter("polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert all(-0.1 <= x <= WIDTH + 0.1 and -0.1 <= y <= HEIGHT + 0.1 for x, y in points)


def test_hostile_names_stay_texts() -> None:
    name = '"><script>alert(1)</script>\x1b\u202e'
    plot = lines(name, {name: [(0, 1), (1, 2)]})
    assert plot is not None
    assert "<script>" not in plot.svg
    assert not re.search("[\x1b\u202e]", plot.svg)
    ElementTree.fromstring(plot.svg)


def test_many_points_are_thinned_and_the_last_one_stays() -> None:
    plot = lines("many", {"one": [(x, x) for x in range(200_001)]})
    assert plot is not None
    assert plot.svg.partition("points=")[2].count(",") <= POINTS
    assert plot.legend == (("s0", "one 200k"),)


def test_a_dip_in_one_of_many_points_is_kept() -> None:
    plot = lines("mean", {"mean": [(x, 0.34 if x == 7777 else 0.4) for x in range(20_000)]}, fitted=True)
    assert plot is not None
    [line] = ElementTree.fromstring(plot.svg).iter("polyline")
    depths = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
    assert max(depths) - min(depths) > HEIGHT / 2
    assert "0.340" in json.loads(plot.data)["of"][0][2]


@given(st.lists(numbers, min_size=1, max_size=50), st.booleans())
def test_an_axis_has_all_values_between_its_first_and_last_tick(values: list[float], fitted: bool) -> None:
    axis = value_axis(values, fitted=fitted)
    assert axis.ticks[0][0] == axis.low <= min(values)
    assert axis.ticks[-1][0] == axis.high >= max(values)
    assert 2 <= len(axis.ticks) <= 8
    assert fitted or axis.low <= 0 <= axis.high


@given(st.integers(0, 2**33), st.integers(0, 2**24))
def test_ticks_of_times_and_steps_are_few_and_inside(low: int, span: int) -> None:
    for write in (write_time, write_step):
        ticks = [value for value, _ in x_axis(low, low + span, write).ticks]
        assert 1 <= len(ticks) <= 5
        assert ticks == sorted({*ticks})
        assert (ticks[0], ticks[-1]) == (low, low + span)


def test_the_script_gets_texts_of_each_value() -> None:
    across = Across(times=False)
    plot = lines("both", {"mean": [(1, 0.5), (3, 0.25)], "most": [(1, 1.0), (2, 1.0)]}, across=across)
    assert plot is not None
    assert json.loads(plot.data) == {
        "at": [0.0, 0.5, 1.0],
        "x": ["step 1", "step 2", "step 3"],
        "of": [["mean", "s0", ["0.50", "", "0.25"]], ["most", "s1", ["1", "1", ""]]],
    }


def test_a_point_with_a_mark_is_kept_among_many() -> None:
    plot = lines("mean", {"mean": [(x, float(x % 2)) for x in range(20_000)]}, marks={7776.0: "odd"})
    assert plot is not None
    assert plot.svg.count("<circle") == 1


def test_marks_lie_on_the_first_line_and_say_why() -> None:
    plot = lines("mean", {"mean": [(0, 0), (1, 1), (2, 0.5)]}, marks={1: "<bad>", 9: "elsewhere"})
    assert plot is not None
    [mark] = ElementTree.fromstring(plot.svg).iter("circle")
    assert (mark.attrib["cx"], mark.attrib["cy"], mark[0].text) == ("50.00%", "0.00%", "<bad>")


def test_nothing_is_plotted_of_nothing() -> None:
    assert lines("none", {}) is lines("one", {"a": [(0, 1)]}) is None


def test_plots_of_one_run_share_their_axis() -> None:
    plot = lines("mean", {"mean": [(2, 0.5), (3, 0.25)]}, across=Across(times=False, low=1, high=5))
    assert plot is not None
    assert (json.loads(plot.data)["at"], plot.axis) == ([0.25, 0.5], "train step")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    with ReplayBufferConfig(url=f"sqlite:///{tmp_path}/run.db").build_sync() as buffer:
        buffer.put([RolloutState(message=[], status=Status.COMPLETED)], "math")
    return tmp_path / "run.db"


def test_a_database_that_goes_away_is_said_and_comes_back(file: Path) -> None:
    page = client_of(str(file))
    file.rename(file.with_suffix(".away"))
    answer = page.get("/")
    assert answer.status_code == 503
    assert 'role="alert"' in answer.text
    assert "Traceback" not in answer.text
    file.with_suffix(".away").rename(file)
    assert page.get("/").status_code == 200


def test_a_defect_is_answered_without_its_traceback(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = client_of(str(file))
    monkeypatch.setattr("replaybuf.web.group_pages.list_groups", lambda *_, **__: 1 / 0)
    answer = page.get("/groups")
    assert answer.status_code == 500
    assert "An unexpected ZeroDivisionError" in answer.text
    assert "division by zero" not in answer.text
    assert "division by zero" in capsys.readouterr().err


def read(readings: server.Readings, function: Callable[[Any], Any]) -> Coroutine[Any, Any, Any]:
    """Run a function in a read transaction, in its turn."""
    return readings.run(lambda reader, seconds: reader.read(function, timeout=seconds))


def test_a_read_that_takes_too_long_is_stopped(file: Path) -> None:
    endless = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000000000) SELECT count(*) FROM n"
    )
    readings = server.Readings(open_reader(str(file)), seconds=0.2)
    with pytest.raises(LockedError, match=r"took longer than 0\.2 s"):
        asyncio.run(read(readings, lambda tx: tx.table(endless)))


def test_few_reads_go_on_at_the_same_time(file: Path) -> None:
    readings = server.Readings(open_reader(str(file)))
    now, highest, lock = 0, 0, threading.Lock()

    def work(tx: object) -> None:
        nonlocal now, highest
        with lock:
            now += 1
            highest = max(highest, now)
        time.sleep(0.02)
        with lock:
            now -= 1

    async def many() -> None:
        await asyncio.gather(*(read(readings, work) for _ in range(4 * server.AT_ONCE)))

    asyncio.run(many())
    assert highest <= server.AT_ONCE


def test_a_read_whose_turn_doesnt_come_says_so(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TURN_SECONDS", 0.05)
    readings, release = server.Readings(open_reader(str(file))), threading.Event()

    async def many() -> None:
        busy = [asyncio.create_task(read(readings, lambda tx: release.wait(10))) for _ in range(server.AT_ONCE)]
        await asyncio.sleep(0)
        try:
            await read(readings, lambda tx: None)
        finally:
            release.set()
            await asyncio.gather(*busy)

    with pytest.raises(LockedError, match="4 other reads"):
        asyncio.run(many())


def test_pages_that_take_long_keep_no_health_check_waiting(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TURN_SECONDS", 0.05)
    release, busy_pages = threading.Event(), list[object]()

    def show(tx: object, ask: object) -> dict[str, object]:
        busy_pages.append(ask)
        release.wait(60)
        raise InputError("released")

    monkeypatch.setitem(PAGES, "overview", replace(PAGES["overview"], show=show))
    app = create_app(open_reader(str(file)))

    async def ask() -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            busy = [asyncio.create_task(client.get("/")) for _ in range(server.AT_ONCE)]
            try:
                await until(lambda: len(busy_pages) == server.AT_ONCE)
                return (await client.get("/readyz")).status_code
            finally:
                release.set()
                await asyncio.gather(*busy)

    assert asyncio.run(ask()) == 200


def test_an_empty_database_has_pages(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/run.db"
    with ReplayBufferConfig(url=url).build_sync() as buffer:
        buffer.count("math", "completed")
    page = client_of(url)
    for path in ("/", "/groups", "/steps", "/workers"):
        assert page.get(path).status_code == 200


def test_a_port_that_is_taken_is_named(file: Path) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        error = run("serve", file, "--port", port, code=1).stderr
    assert error.startswith(f"Error: can't listen at port {port} of 127.0.0.1: ")


@pytest.mark.parametrize("host", ["nix.invalid", "203.0.113.1"])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"machine|can't listen"):
        bind(host, 0)


def test_what_cant_be_served_is_said_before_a_port_is_bound(tmp_path: Path) -> None:
    (tmp_path / "other.db").write_text("no database, but long enough to be looked at as one" * 40)
    assert "Error: " in run("serve", tmp_path / "other.db", code=1).stderr
    assert "there is no database" in run("serve", tmp_path / "nix.db", code=1).stderr


@pytest.mark.parametrize("missing", ["uvicorn", "anyio"])
def test_the_extra_is_asked_for_where_it_is_missing(missing: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("replaybuf.web", "starlette", missing))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    error = run("serve", file, code=1).stderr
    assert ": pip install starlette uvicorn jinja2" in error
    assert "No module" not in error


def test_the_command_serves_says_where_and_ends_quietly(file: Path) -> None:
    import httpx

    with serving(str(file), "--host", "0.0.0.0") as address:
        port, token = address.partition("//")[2].partition(":")[2].split("/?token=")
        assert len(token) >= 32
        assert httpx.get(f"http://127.0.0.1:{port}").status_code == 401
        assert "math" in httpx.get(f"http://127.0.0.1:{port}?token={token}", follow_redirects=True).text
