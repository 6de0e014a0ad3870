"""`replaybuf watch`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf import NotReadyError, ReplayBufferConfig, RolloutState, Status
from replaybuf.cli.frame import Panel, arrange, binned, histogram, line, share, worker_lines
from replaybuf.cli.frame import rate_of as rate
from replaybuf.cli.watch import Watched
from replaybuf.rules.circumstances import Circumstances, Worker
from tests.cli.conftest import run
from tests.cli.example import fill
from tests.cli.terminal import SIZES, needs_tmux, terminal
from tests.cli.test_escape import UNSAFE

SOME = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), min_size=1, max_size=7)


# What is pure


@given(SOME, st.integers(0, 60))
def test_panels_share_all_the_room_and_no_more(sizes: list[tuple[int, int]], room: int) -> None:
    wanted, least = [size for size, _ in sizes], [few for _, few in sizes]
    shares = share(wanted, least, room)
    used = sum(given + 1 for given in shares if given is not None)
    assert used <= room
    shown = [i for i, given in enumerate(shares) if given is not None]
    assert used == room or all((shares[i] or 0) == wanted[i] for i in shown)
    assert all((shares[i] or 0) <= wanted[i] for i in shown)


@given(SOME, st.integers(1, 250), st.integers(0, 60))
def test_a_screen_is_as_high_as_the_terminal_and_never_wider(
    sizes: list[tuple[int, int]], width: int, height: int
) -> None:
    panels = [Panel("a title that is long", [line("x" * 300)] * size, few) for size, few in sizes]
    lines = arrange([line("head")], panels, line("foot"), width, height)
    assert len(lines) == height
    assert all(one.cell_len <= width for one in lines)


def test_why_somebody_waits_goes_on_in_the_next_line() -> None:
    panel = Panel("waiting", [line("word " * 50)], wraps=True)
    lines = arrange([], [panel], line(), 80, 24)
    assert "".join(one.plain for one in lines).count("word") == 50


def test_buffers_without_room_are_counted() -> None:
    panels = [Panel("waiting", [line("x")] * 3, 3, of=f"run-{i}") for i in range(9)]
    assert arrange([], panels, line("q quit"), 80, 9)[-1].plain == "q quit  7 more buffers: --buffer NAME"
    assert arrange([], panels[:2], line("q quit"), 80, 9)[-1].plain == "q quit"


@pytest.mark.parametrize(
    ("totals", "expected"),
    [
        ([(0, 0), (100, 1000), (130, 1010), (160, 1020)], pytest.approx(20 / 60)),
        ([(0, 0), (120, 120)], 1),
        ([(0, 0), (20, 900), (200, 900)], 0),  # the run is over
        ([(100, 10), (110, 30)], 2),  # within the first minute, that since the oldest reading
        ([(100, 10)], None),
        ([(0, 500), (60, 20)], 0),  # a restore
    ],
)
def test_a_rate_is_that_of_the_last_minute(totals: list[tuple[float, int]], expected: float | None) -> None:
    assert rate([(time, {"math": {"put": n}}) for time, n in totals], "math", ["put"]) == expected


@given(st.lists(st.floats(-1e6, 1e6), max_size=200))
def test_every_reward_is_in_a_bin(values: list[float]) -> None:
    assert sum(n for _, n in histogram(values)) == len(values)
    assert len(histogram(values)) <= 8


@given(st.dictionaries(st.integers(0, 100), st.integers(1, 50)))
def test_every_staleness_is_in_a_bin(counts: dict[int, int]) -> None:
    assert sum(binned(counts).values()) == sum(counts.values())
    assert len(binned(counts)) <= 8


def test_slow_readings_are_made_less_often_and_that_is_said() -> None:
    assert Watched("run.db", interval=2, cost=0.01).pause == 2
    slow = Watched("run.db", interval=2, cost=1.5)
    assert slow.pause == pytest.approx(15)
    assert "every 15 s: reading takes 1.5 s" in slow.head(80)[0].plain


def test_silent_workers_are_marked() -> None:
    now = 1000.0
    workers = [
        Worker("quick", 0, seen_at=now - 5, groups=7, failures=2),
        Worker("killed", 0, seen_at=now - 300),
        Worker("done", 0, seen_at=now - 300, ended_at=now - 290),
    ]
    shown = [one.plain for one in worker_lines(Circumstances(now, {}, workers=workers))]
    assert [text.split()[0] for text in shown] == ["killed", "quick", "done"]
    assert "SILENT for 5.0m" in shown[0]
    assert "alive" in shown[1]
    assert "put 7, 2 failed" in shown[1]
    assert "ended" in shown[2]


# One frame


def test_a_pipe_gets_one_frame(filled: str) -> None:
    shown = run("watch", filled).stdout
    assert "nobody waits" in shown
    assert "completed" in shown
    assert "2 groups, reward 0.625" in shown  # the last draw
    assert "SILENT" not in shown
    assert "\x1b" not in shown


async def test_who_waits_is_told_first_and_with_the_reason(empty: str) -> None:
    import asyncio

    async with ReplayBufferConfig(url=empty, name="a").build() as buffer:
        await buffer.put([RolloutState(message=[], reward={"score": 1.0}, status=Status.COMPLETED)], "math")

    async with ReplayBufferConfig(url=empty, name="b", worker="trainer-0").build() as buffer:
        waiting = asyncio.create_task(buffer.get(5, "math", timeout=20))
        for _ in range(100):
            shown = (await asyncio.to_thread(run, "watch", empty, "--once")).stdout
            if "trainer-0 waits" in shown:
                break
            await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises((asyncio.CancelledError, NotReadyError)):
            await waiting
    assert "trainer-0 waits" in shown
    assert "nothing was ever put" in shown
    assert shown.index("waiting of b") < shown.index("waiting of a")


# In a terminal


def is_screen(seen: str, height: int) -> bool:
    lines = seen.splitlines()
    return len(lines) == height and lines[-1].startswith("q quit") and "── wait" in seen


@needs_tmux
@pytest.mark.parametrize("hostile", ["sqlite"], indirect=True)
def test_it_fits_the_terminal_whatever_its_size(hostile: str, tmp_path: Path) -> None:
    with terminal(tmp_path) as shown:
        shown.start(SIZES[0], "watch", hostile, "--interval", "0.5")
        for size in (SIZES[0], SIZES[1], (20, 6), SIZES[0]):
            shown.resize(size)
            seen = shown.wait(lambda seen, lines=size[1]: is_screen(seen, lines))
            assert not [character for character in UNSAFE if character in seen]
        shown.press("?")
        shown.wait("this help")
        shown.press("?")
        shown.wait("nobody waits")
        shown.press("q")
        shown.wait_for_end(0)


@needs_tmux
@pytest.mark.parametrize("backend", ["sqlite", "postgres"])
def test_a_database_that_goes_away_is_told_and_tried_again(
    backend: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if backend == "postgres":
        url = request.getfixturevalue("postgres_url").replace("/postgres?", "/nowhere?")
    else:
        import asyncio

        url = str(tmp_path / "run.db")
        asyncio.run(fill(f"sqlite:///{url}"))
    with terminal(tmp_path) as shown:
        shown.start(SIZES[1], "watch", url, "--interval", "0.2")
        if backend == "sqlite":
            shown.wait("completed")
            (tmp_path / "run.db").rename(tmp_path / "gone.db")
            assert "completed" in shown.wait("there is no database")
            (tmp_path / "gone.db").rename(tmp_path / "run.db")
            shown.wait(lambda seen: "trying again" not in seen)
        else:
            assert "nowhere" in shown.wait("does not exist")
        shown.press("C-c")
        shown.wait_for_end(130)


@needs_tmux
def test_it_goes_on_while_the_database_is_locked(file: Path, tmp_path: Path) -> None:
    import sqlite3

    with terminal(tmp_path) as shown:
        shown.start(SIZES[0], "watch", file, "--interval", "0.2")
        shown.wait("completed")
        connection = sqlite3.connect(file)
        connection.execute("BEGIN EXCLUSIVE")
        shown.press("?")
        shown.wait("this help")
        connection.close()
        shown.press("q")
        shown.wait_for_end(0)
