"""The figures of a run, and how they are shown."""

import io
import re

import numpy as np
import pytest
from rich.console import Console

from replaybuf import Status
from replaybuf.demo.arithmetic import PROMPTS
from replaybuf.demo.display import Display, sparkline, table
from replaybuf.demo.figures import Figures
from replaybuf.demo.mode import Mode
from replaybuf.demo.policy import Policy
from replaybuf.demo.settings import BATCH_GROUPS, TASK
from replaybuf.demo.summary import WORKERS, has_password, queries, shell_url, summary, verdict, where
from replaybuf.produce import ProduceSummary
from replaybuf.rules.tallies import Tally
from tests.demo.made import generate_group


class Workers:
    pids = (11, 12)


class Alone:
    pids = ()


def batch(size, session="now", staleness=0):
    groups = [generate_group(Policy.create(0), np.random.default_rng(i), PROMPTS[i]) for i in range(size)]
    for rollout in (rollout for group in groups for rollout in group):
        rollout.session_id, rollout.seq_staleness = session, staleness
    return groups


def tallies(**counts):
    """What a store counts: `completed=...` groups that are there, `put_completed=...` that were put, and so on."""
    names = {name: name.split("_") if "_" in name else ("size", name) for name in counts}
    return {(TASK, Status(status), Tally(tally)): counts[name] for name, (tally, status) in names.items()}


@pytest.fixture
def figures():
    """A run that began with 10 completed groups, and has trained 8 of them and 4 others within 2 seconds."""
    now = iter(range(100))
    figures = Figures(target=20, rewards=[0.1, 0.2], session="now", step=2, clock=lambda: next(now) / 2)
    figures.count_store(tallies(completed=10, put_completed=100, put_aborted=5, expired_completed=7))
    figures.count_batch(batch(8, "before", 2) + batch(4), step=3, reward=0.6)
    figures.count_summary(ProduceSummary(reused=6, seconds=1.5, train_seconds=0.5))
    figures.count_store(
        tallies(
            completed=20,
            expired=3,
            archived=9,
            leased_aborted=4,
            put_completed=125,
            put_aborted=7,
            put_expired=1,
            expired_completed=9,
        )
    )
    return figures


def test_replayed_groups_are_those_of_another_session(figures):
    assert (figures.left, figures.taken, figures.replayed) == (10, 12, 8)


def test_what_the_store_counts_is_counted_since_the_start(figures):
    assert (figures.generated, figures.interrupted, figures.expired) == (25, 2, 3)
    assert (figures.buffered, figures.leased) == ({Status.COMPLETED: 20, Status.EXPIRED: 3}, 4)


def test_generation_and_training_are_apart(figures):
    assert (figures.reused, figures.produce_seconds, figures.train_seconds) == (6, 1.5, 0.5)


def test_staleness_is_that_of_the_batch(figures):
    assert (figures.staleness_mean, figures.staleness_max) == (pytest.approx(16 / 12), 2)


def test_rates_are_per_second(figures):
    generated, taken, tokens = figures.rates
    assert (generated, taken, tokens) == (25, 12, figures.tokens)


def test_the_first_and_last_tenth_are_of_the_whole_run(figures):
    assert figures.first_and_last() == (0.1, 0.6)


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([], ""),
        ([0.0, 0.5, 1.0], "▁▅█"),
        ([0.0, 0.0, 1.0, 1.0] * 1, "▁▁██"),
        ([0.0] * 50 + [1.0] * 50, "▁" * 20 + "█" * 20),
    ],
)
def test_a_sparkline_has_a_bar_for_each_value_or_mean(values, shown):
    assert sparkline(values) == shown


@pytest.mark.parametrize(("width", "lines"), [(80, 2), (200, 1), (30, 3)])
def test_the_first_line_breaks_between_its_parts(width, lines):
    parts = [
        "Buffer: /home/someone/runs/replaybuf-demo.db",
        "weights: replaybuf-demo.run",
        "mode: sync",
        "trainer: pid 7",
    ]
    display = Display(Console(file=io.StringIO(), width=width, highlight=False))
    display.say_parts(parts)
    said = display.console.file.getvalue()
    assert said.split() == "; ".join(parts).split()
    assert len(said.splitlines()) == lines


def test_a_terminal_has_the_live_table(figures):
    output = io.StringIO()
    display = Display(Console(file=output, force_terminal=True, width=100, highlight=False))
    with display.showing(figures, Workers):
        display.update()
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", output.getvalue())
    for part in (
        "waiting for groups 2 s, training 0 s",
        "step 3/20",
        "0.30",
        "8  of 10 completed groups",
        "20 completed, 3 expired",
        "pid 11, 12",
    ):
        assert part in text


@pytest.mark.parametrize("width", [40, 60, 68])
def test_a_narrow_terminal_cuts_the_notes_and_keeps_the_figures(figures, width):
    wide, narrow = (Console(file=io.StringIO(), width=columns) for columns in (300, width))
    for console in (wide, narrow):
        console.print(table(figures, Workers.pids))
    whole, cut = (console.file.getvalue().splitlines() for console in (wide, narrow))
    kept = [re.match(r"\S.*?  +(?:[\d.,]+(?=  )|(?=[a-z]))", line).group() for line in whole[1:]]
    assert len(cut) == len(whole)
    assert [line[: len(start)] for line, start in zip(cut[1:], kept, strict=True)] == kept
    assert "…" in "".join(cut)


def test_a_narrow_terminal_without_unicode_gets_none(figures):
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    display = Display(Console(file=output, force_terminal=True, width=60))
    with display.showing(figures, Workers):
        display.update()
    output.flush()
    assert b"in the making     4  groups, by all workers" in re.sub(
        rb"\x1b\[[\d;?]*[a-zA-Z]", b"", output.buffer.getvalue()
    )


def test_without_a_terminal_there_are_plain_lines(figures):
    output = io.StringIO()
    display = Display(Console(file=output, highlight=False))
    with display.showing(figures, Workers):
        display.update()
        figures.count_batch(batch(2), step=4, reward=0.3)
        display.update()
        display.update()
    assert re.fullmatch(
        r"Rollout workers: pid 11, 12\n"
        r"step 4/20: reward 0.30, generated \d+/s, trained \d+/s, buffered 23, .*, interrupted 2\n",
        output.getvalue(),
    )


@pytest.mark.parametrize(
    ("mode", "ending"),
    [(Mode.SYNC, "expired 3"), (Mode.ASYNC, "expired 3, interrupted 2, reused 6")],
)
def test_without_workers_no_processes_are_named(figures, mode, ending):
    output = io.StringIO()
    display, figures.mode = Display(Console(file=output, highlight=False)), mode
    with display.showing(figures, Alone):
        figures.count_batch(batch(2), step=4, reward=0.3)
        display.update()
    assert re.fullmatch(rf"step 4/20: .*, {ending}\n", output.getvalue())


URL = "postgresql+asyncpg://me:secret@db:5433/rl?sslmode=require&password=secret"


def test_the_summary_never_shows_a_password(figures, tmp_path):
    text = "\n".join(summary(URL, tmp_path, figures, []))
    assert "secret" not in text
    assert "PGPASSWORD" in text
    assert "8 of them replayed" in text


def test_psql_gets_the_url_in_its_own_form():
    assert shell_url(URL) == "postgresql://me@db:5433/rl?sslmode=require"
    assert has_password(URL)
    assert all(
        line.startswith("psql 'postgresql://me@db:5433/rl?sslmode=require' -c ")
        for line in queries(URL, Mode.DISAGGREGATED).values()
    )


def test_a_file_is_given_by_its_path():
    assert where("sqlite:////data/my demo.db") == "/data/my demo.db"
    lines = queries("sqlite:////data/my demo.db", Mode.SYNC).values()
    assert all("'/data/my demo.db'" in line for line in lines)


@pytest.mark.parametrize("mode", Mode)
def test_workers_are_compared_where_there_are_some(figures, tmp_path, mode):
    figures.mode = mode
    suggested = f"  # {WORKERS}" in summary(URL, tmp_path, figures, [])
    assert suggested == (mode == Mode.DISAGGREGATED)


def test_the_verdict_says_whether_each_prompt_was_trained_once(figures, tmp_path):
    every = range(20 * BATCH_GROUPS)
    assert "Each of the 640 prompts was trained once." in summary("sqlite:///x.db", tmp_path, figures, every)
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
