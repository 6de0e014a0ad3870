"""The figures of a run, and how they are shown."""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
from pathlib import Path

import pytest
from rich.console import Console

from replaybuf import Status
from replaybuf.demo.display import Display, Figures, commands, result, verdict
from replaybuf.demo.policy import Policy
from replaybuf.demo.run_folder import BATCH_GROUPS, TASK, Run
from replaybuf.demo.trainer import argument_of
from replaybuf.rules.transitions import Tally
from tests.cli.terminal import needs_tmux, terminal


def tallies(**counts: int) -> dict:
    """What a store counts: `completed=...` groups that are there, `put_completed=...` that were put, and so on."""
    names = {name: name.split("_") if "_" in name else ("size", name) for name in counts}
    return {(TASK, Status(status), Tally(tally)): counts[name] for name, (tally, status) in names.items()}


@pytest.fixture
def run() -> Run:
    return Run(Policy.create(), 0, step=3, target=800, rewards=[0.1, 0.2, 0.6])


@pytest.fixture
def figures() -> Figures:
    """A run that began with 10 completed groups, and has trained 12."""
    before = tallies(completed=10, put_completed=100, put_aborted=5, expired_completed=7)
    gone_on = {"put_completed": 125, "put_aborted": 7, "put_expired": 1, "expired_completed": 9}
    now = tallies(completed=20, expired=3, archived=9, leased_aborted=4, **gone_on)
    return Figures(before, now, 12, [2] * 8 + [0] * 4)


def test_what_the_store_counts_is_counted_since_the_start(run: Run, figures: Figures) -> None:
    assert (figures.generated, figures.buffered) == (25, {Status.COMPLETED: 20, Status.EXPIRED: 3})
    line = "Generated 25 groups, trained on 12; 2 expired, 2 interruptions"  # "expired" is that of `stats`
    assert line in result(run, figures, 2, 1.0)


def shown(width: int, terminal: bool, run: Run, figures: Figures, pids: tuple[int, ...] = ()) -> str:
    output = io.StringIO()
    display = Display(Console(file=output, force_terminal=terminal, width=width, highlight=False))
    with display.showing(run, figures, lambda: pids):
        for run.step in range(400, 420):
            display.update(run, figures)
    return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", output.getvalue())


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_terminal_has_lines_that_fit_below_the_bar(run: Run, figures: Figures, width: int) -> None:
    text = shown(width, True, run, figures, (11, 12))
    for part in (
        "step 419/800",
        "reward 0.30",
        "groups generated 25, in the making 4",
        "staleness 1.3 (max 2, expires",
    ):
        assert part in text
    assert all(len(line) <= width for line in text.replace("\r", "\n").split("\n"))
    if width == 200:
        assert "in the buffer 20 completed, 3 expired, trained 12" in text
        assert "2 expired, 2 interruptions" in text
        assert "11, 12 (kill any, and run this again)" in text


def test_without_a_terminal_there_are_twenty_lines(run: Run, figures: Figures) -> None:
    [line] = shown(80, False, run, figures).splitlines()
    assert line.startswith("step 400/800: reward 0.30; groups generated 25, ")
    assert line.endswith("staleness 1.3 (max 2, expires at 4), 2 expired, 2 interruptions")


def test_the_result_has_the_first_and_the_last_tenth_of_all_rewards(run: Run, figures: Figures) -> None:
    run.rewards = [0.1] * 3 + [0.5] * 24 + [0.8] * 3
    run.step = run.target = 30
    lines = result(run, figures, 0, 12)
    assert lines[1] == "Mean reward 0.10 -> 0.80 in 30 steps, 12 s"
    assert result(run, figures, 20, 12)[1].endswith("in 30 steps (the last 10 of them in 12 s)")
    run.target = 40
    assert result(run, figures, 0, 12)[1].endswith("(of 40: the time was up; run it again to go on)")


URL = "postgresql+asyncpg://me:secret@db:5433/rl?sslmode=require&password=secret"


@pytest.mark.parametrize(
    ("url", "argument"),
    [
        (URL, ("postgresql://me@db:5433/rl?sslmode=require", True)),
        ("postgresql://me@db/rl", ("postgresql://me@db/rl", False)),
        ("sqlite:////data/my demo.db", ("/data/my demo.db", False)),
    ],
)
def test_commands_take_the_database_without_its_password(url: str, argument: tuple[str, bool]) -> None:
    assert argument_of(url) == argument
    lines = [line.split(" replaybuf ")[1] for line in commands(argument[0]) if " replaybuf " in line]
    assert [shlex.split(line)[:2] for line in lines] == [
        [name, argument[0]] for name in ("trace", "why", "show", "serve")
    ]


def test_the_verdict_says_whether_each_prompt_was_trained_once(run: Run, figures: Figures) -> None:
    run.target, run.trained = 20, list(range(20 * BATCH_GROUPS))
    assert "Each of the 640 prompts was trained once." in result(run, figures, 0, 1)
    assert verdict([2, 0, 1], 3) == "Each of the 3 prompts was trained once."


@pytest.mark.parametrize(
    ("trained", "said"),
    [
        ([0, 2], "2 prompts were trained, each of them once."),
        ([0, 1, 2, 3], "4 prompts were trained, each of them once."),
        ([], "0 prompts were trained, each of them once."),
        ([0, 1, 2, 1], "1 of 3 prompts were trained more than once: number 1, for example."),
    ],
)
def test_the_verdict_says_so_when_it_isnt_true(trained, said):
    assert verdict(trained, 3) == said


@needs_tmux
def test_the_end_fits_into_a_small_terminal_with_the_result_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with terminal(tmp_path) as opened:
        opened.start((80, 24), "demo", "--steps", 2, "--mode", "sync")
        seen = opened.wait("replaybuf serve", 60)
    order = ["Mean reward", "was trained once.", "replaybuf trace", "replaybuf why", "--worst 3", "replaybuf serve"]
    places = [seen.index(part) for part in order]
    assert places == sorted(places)
    assert "  replaybuf trace replaybuf-demo.db\n" in seen


@needs_tmux
@pytest.mark.parametrize("key", ["C-c", None])
def test_the_cursor_is_there_while_it_runs_and_when_it_was_stopped_or_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    with terminal(tmp_path) as opened:
        opened.start((80, 24), "demo", "--steps", 500, "--mode", "sync")
        seen = opened.wait(lambda shown: re.search(r"step [1-9]\d*/500", shown) is not None, 60)
        assert opened.tmux("display-message", "-p", "#{cursor_flag}").strip() == "1"
        if key:
            opened.press(key)
        else:
            os.kill(int(re.search(r"trainer: pid (\d+)", seen)[1]), signal.SIGKILL)
        opened.wait_for_end(130 if key else 137)
