"""`replaybuf watch`."""

from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path

import pytest

from replaybuf import NotReadyError, ReplayBufferConfig, RolloutState, Status
from tests.cli.conftest import run
from tests.cli.example import fill
from tests.cli.terminal import SIZES, needs_tmux, terminal
from tests.cli.test_escape import UNSAFE


def test_a_pipe_gets_one_frame(filled: str) -> None:
    shown = run("watch", filled).stdout
    assert shown.startswith("Nobody waits")
    assert "If somebody drew" not in shown
    assert run("stats", filled).stdout.partition("since the beginning")[2] in shown
    assert re.search(r"gpu-node-7 .* ended ", shown)
    assert "\x1b" not in shown


async def test_who_waits_is_told_first_and_with_the_reason(empty: str) -> None:
    async with ReplayBufferConfig(url=empty, name="a").build() as buffer:
        await buffer.put([RolloutState(message=[], reward={"score": 1.0}, status=Status.COMPLETED)], "math")

    async with ReplayBufferConfig(url=empty, name="b", worker="trainer-0").build() as buffer:
        waiting = asyncio.create_task(buffer.get(5, "math", timeout=60))
        while not waiting.done():
            shown = (await asyncio.to_thread(run, "watch", empty, "--once")).stdout
            if "trainer-0 of b waits" in shown:
                break
            await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises((asyncio.CancelledError, NotReadyError)):
            await waiting
    assert shown.startswith("trainer-0 of b waits since ")
    assert "nothing was ever put" in shown
    assert "\nNobody waits in a\n" in shown


# In a terminal


def is_screen(seen: str, height: int) -> bool:
    return seen.count("\n") == height and " UTC" in seen and (height < 10 or "Nobody waits" in seen)


@needs_tmux
@pytest.mark.parametrize("hostile", ["sqlite"], indirect=True)
def test_it_fits_the_terminal_whatever_its_size(hostile: str, tmp_path: Path) -> None:
    with terminal(tmp_path) as shown:
        shown.start(SIZES[0], "watch", hostile, "--interval", "0.5")
        for size in (SIZES[0], SIZES[1], (20, 6), SIZES[0]):
            shown.resize(size)
            seen = shown.wait(lambda seen, lines=size[1]: is_screen(seen, lines))
            assert not [character for character in UNSAFE if character in seen]
        shown.press("C-c")
        shown.wait_for_end(130)


@needs_tmux
@pytest.mark.parametrize("backend", ["sqlite", "postgres"])
def test_a_database_that_goes_away_is_told_and_tried_again(
    backend: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if backend == "postgres":
        url = request.getfixturevalue("postgres_url").replace("/postgres?", "/nowhere?")
    else:
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
def test_ctrl_c_ends_it_while_the_database_does_not_answer(tmp_path: Path) -> None:
    with terminal(tmp_path) as shown, socket.create_server(("127.0.0.1", 0)) as silent:
        shown.start(SIZES[0], "watch", f"postgresql://rl@127.0.0.1:{silent.getsockname()[1]}/rl?sslmode=disable")
        shown.wait("reading postgresql://")
        shown.press("C-c")
        shown.wait_for_end(130)
