"""Commands that watch, and how they end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from replaybuf import NotReadyError, ReplayBufferConfig, RolloutState, Status
from replaybuf.buffer.sync import run as wait_for
from replaybuf.produce import Sampler, TrainState, publish
from replaybuf.storage.sql.inspection.reader import open_reader
from tests.cli.conftest import COMMAND, run, run_json, start
from tests.cli.example import fill_busy
from tests.cli.terminal import SIZES, needs_tmux, terminal
from tests.cli.test_help import UNSAFE
from tests.scripts import Script


def test_a_pipe_gets_one_frame(filled: str) -> None:
    output = run("watch", filled).stdout
    assert output.startswith("Nobody waits")
    assert "If somebody drew" not in output
    assert run("stats", filled).stdout.partition("so far, ")[2] in output
    assert re.search(r"gpu-node-7 .* ended ", output)
    assert "\x1b" not in output


async def test_who_waits_is_told_first_and_with_the_reason(empty: str) -> None:
    async with ReplayBufferConfig(url=empty, name="a").build() as buffer:
        await buffer.put([RolloutState(message=[], reward={"score": 1.0}, status=Status.COMPLETED)], "math")

    async with ReplayBufferConfig(url=empty, name="b", worker="trainer-0").build() as buffer:
        waiting = asyncio.create_task(buffer.get(5, "math", timeout=60))
        while not waiting.done():
            output = (await asyncio.to_thread(run, "watch", empty)).stdout
            if "trainer-0 of b has waited" in output:
                break
            await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises((asyncio.CancelledError, NotReadyError)):
            await waiting
    assert output.startswith("trainer-0 of b has waited for ")
    assert "nothing was ever put" in output
    assert "\nNobody waits in a\n" in output


# In a terminal


def is_screen(text: str, height: int) -> bool:
    return text.count("\n") == height and " UTC" in text and (height < 10 or "Nobody waits" in text)


@needs_tmux
@pytest.mark.parametrize("hostile", ["sqlite"], indirect=True)
def test_it_fits_the_terminal_whatever_its_size(hostile: str, tmp_path: Path) -> None:
    with terminal(tmp_path) as screen:
        screen.start(SIZES[0], "watch", hostile)
        for size in (SIZES[0], SIZES[1], (20, 6), SIZES[0]):
            screen.resize(size)
            text = screen.wait(lambda text, lines=size[1]: is_screen(text, lines))
            assert not [character for character in UNSAFE if character in text]
        screen.press("C-c")
        screen.wait_for_end(130)


@needs_tmux
def test_a_database_that_goes_away_is_told_and_tried_again(file: Path, tmp_path: Path) -> None:
    with terminal(tmp_path) as screen:
        screen.start(SIZES[1], "watch", file)
        screen.wait("completed")
        file.rename(tmp_path / "gone.db")
        assert "completed" in screen.wait("there is no database")
        (tmp_path / "gone.db").rename(file)
        screen.wait(lambda text: "trying again" not in text)
        screen.press("C-c")
        screen.wait_for_end(130)


@needs_tmux
def test_ctrl_c_ends_it_while_the_database_does_not_answer(tmp_path: Path) -> None:
    with terminal(tmp_path) as screen, socket.create_server(("127.0.0.1", 0)) as silent:
        screen.start(SIZES[0], "watch", f"postgresql://rl@127.0.0.1:{silent.getsockname()[1]}/rl?sslmode=disable")
        screen.wait("reading postgresql://")
        screen.press("C-c")
        screen.wait_for_end(130)


ENDLESS = "WITH RECURSIVE t(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM t) SELECT count(*) FROM t"
MANY = (
    "WITH RECURSIVE t(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM t WHERE x < 20000) "
    "SELECT x, 'more than a pipe holds' FROM t"
)


def test_an_error_of_replaybuf_ends_with_1_and_one_line(tmp_path: Path) -> None:
    message = f"Error: there is no database sqlite:///{tmp_path}/typo.db (file {tmp_path}/typo.db)\n"
    assert Script(COMMAND, "stats", tmp_path / "typo.db").end() == (1, "", message)


def test_an_error_cannot_drive_the_terminal(tmp_path: Path) -> None:
    stderr = run("stats", tmp_path / "a\x1b[2J\nb", code=1).stderr
    assert "\x1b" not in stderr
    assert len(stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", [("sql", MANY, "--format=json"), ("doctor",)], ids=lambda one: one[0])
def test_a_closed_pipe_ends_quietly(file: Path, arguments: tuple[str, ...]) -> None:
    with start(arguments[0], file, *arguments[1:]) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (1, "")


@pytest.mark.parametrize("backend", ["sqlite", "postgres"])
def test_ctrl_c_ends_quietly_and_at_once(file: Path, postgres_url: str, backend: str) -> None:
    url, statement = (str(file), ENDLESS) if backend == "sqlite" else (postgres_url, "SELECT pg_sleep(60)")
    process = Script(COMMAND, "sql", url, statement)
    if backend == "sqlite":
        while file not in [Path(opened.path) for opened in psutil.Process(process.pid).open_files()]:
            time.sleep(0.05)
    else:
        query = "SELECT pid FROM pg_stat_activity WHERE query LIKE '%pg_sleep(60)%' AND pid <> pg_backend_pid()"
        while not open_reader(url).read_any(lambda tx: tx.values(query)):
            time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.end(20) == (130, "", "")


def test_what_the_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(Path(__file__).parents[2])}
    (tmp_path / "x.db").touch()
    command = [sys.executable, "-m", "replaybuf", "sql", str(tmp_path / "x.db"), "SELECT 'é' AS a"]
    for format, escaped in (("--format=json", "\\u00e9"), ("--format=text", "\\xe9")):
        process = subprocess.run([*command, format], capture_output=True, text=True, env=env, timeout=60)
        assert (process.returncode, process.stderr) == (0, "")
        assert escaped in process.stdout


def test_leases_that_are_over_are_told_and_nothing_is_written(busy: str) -> None:
    """A crash leaves groups leased until somebody takes: they aren't lost."""
    for _ in range(2):
        rows = run_json("stats", busy)["groups"]
        assert {(row["buffer"], row["status"], row["leased"], row["overdue"]) for row in rows} == {
            ("default", "completed", 2, 1),
            ("default", "archived", 0, 0),
            ("eval", "completed", 0, 0),
        }
    header, _, line, *_ = run("stats", busy, "--buffer", "default").stdout.splitlines()
    assert line.split()[header.split().index("overdue")] == "1"


def test_where_the_run_is(empty: str) -> None:
    with ReplayBufferConfig(url=empty).build_sync() as buffer:
        wait_for(Sampler(buffer, [{"prompt": "7+5="}] * 1500, "math").draw(1200))
        wait_for(publish(buffer, TrainState(43, 42, weights="step-42")))
    output = run("stats", empty).stdout
    assert "\nprompts drawn: 1,200 for math\n" in output
    assert "\nthe trainer is at step 43, its newest weights are of step 42\n" in output
    metrics = run_json("stats", empty)["buffers"]["default"]
    assert metrics["prompts"] == {"math": 1200}
    assert metrics["trainer"] == {"train_step": 43, "model_step": 42, "weights": "step-42", "finished": False}


def test_the_steps_of_checkpoints_are_there(empty: str) -> None:
    asyncio.run(fill_busy(empty))
    assert "checkpoint" not in run("stats", empty).stdout
    for name, step in (("default", 40), ("eval", 7), ("default", 41)):
        with ReplayBufferConfig(url=empty, name=name).build_sync() as buffer:
            buffer.checkpoint(step)
            if step == 41:
                buffer.restore(41)
    buffers = run_json("stats", empty)["buffers"]
    positions = {
        name: (of["checkpoints"]["count"], of["checkpoints"]["step"], of["restores"]) for name, of in buffers.items()
    }
    assert positions == {"default": (2, 41, 1), "eval": (1, 7, 0)}
    assert abs(buffers["default"]["checkpoints"]["created_at"] - time.time()) < 60
    output = run("stats", empty).stdout
    assert (
        "2 step checkpoints of default, the last of step 41\n1 step checkpoint of eval, the last of step 7\n" in output
    )
    assert "\n1 step checkpoint, the last of step 7\n" in run("stats", empty, "--buffer", "eval").stdout


@pytest.mark.parametrize("command", ["stats", "ls"])
def test_a_buffer_that_is_not_there_is_an_error(busy: str, command: str) -> None:
    stderr = run(command, busy, "--buffer", "evil", code=1).stderr
    assert stderr == "Error: there is no buffer 'evil' in this database; there are default, eval\n"


def test_a_task_of_which_all_was_dropped_is_there(empty: str) -> None:
    with ReplayBufferConfig(url=empty).build_sync() as buffer:
        stale = RolloutState(message=[], status=Status.COMPLETED, seq_staleness=9)
        assert buffer.put([stale], "math", stale_threshold=4, expired_groups_retryable=False) is None
    assert run_json("stats", empty)["groups"] == []
    assert run_json("stats", empty)["buffers"]["default"]["tasks"]["math"]["dropped"] == 1
    assert "math" in run("stats", empty).stdout


def test_an_empty_buffer_is_no_error(empty: str) -> None:
    run("doctor", empty, "--upgrade")
    assert run("stats", empty).stdout.startswith("The buffer is empty.\n")
