"""The figures of a run, and how they are shown."""

import io
import re

import numpy as np
import pytest
from rich.console import Console

from replaybuf import Status
from replaybuf.demo.arithmetic import PROMPTS
from replaybuf.demo.display import Display, sparkline
from replaybuf.demo.figures import Figures
from replaybuf.demo.generation import generate_group
from replaybuf.demo.policy import Policy
from replaybuf.demo.summary import has_password, queries, shell_url, summary, where


class Workers:
    pids = (11, 12)


def batch(size, session="now", staleness=0):
    groups = [generate_group(Policy.create(0), np.random.default_rng(i), PROMPTS[i]) for i in range(size)]
    for rollout in (rollout for group in groups for rollout in group):
        rollout.session_id, rollout.seq_staleness = session, staleness
    return groups


@pytest.fixture
def figures():
    """A run that began with 10 completed groups, and has trained 8 of them and 4 others within 2 seconds."""
    now = iter(range(100))
    figures = Figures(target=20, rewards=[0.1, 0.2], session="now", left=10, step=2, clock=lambda: next(now) / 2)
    figures.count_buffered({Status.COMPLETED: 10, Status.EXPIRED: 0})
    figures.count_batch(batch(8, "before", 2) + batch(4), step=3, reward=0.6)
    figures.count_expired(3)
    figures.count_buffered({Status.COMPLETED: 20, Status.EXPIRED: 3})
    return figures


def test_replayed_and_generated_groups_are_counted_apart(figures):
    assert (figures.taken, figures.replayed) == (12, 8)
    assert figures.generated == 12 + 3 + 20 - 10


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


def test_a_terminal_has_the_live_table(figures):
    output = io.StringIO()
    display = Display(Console(file=output, force_terminal=True, width=100, highlight=False))
    with display.showing(figures, Workers):
        display.update()
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", output.getvalue())
    for part in ("step 3/20", "0.30", "8  of 10 completed groups", "20 completed, 3 expired", "pid 11, 12"):
        assert part in text


def test_without_a_terminal_there_are_plain_lines(figures):
    output = io.StringIO()
    display = Display(Console(file=output, highlight=False))
    with display.showing(figures, Workers):
        display.update()
        figures.count_batch(batch(2), step=4, reward=0.3)
        display.update()
        display.update()
    assert re.fullmatch(
        r"Rollout workers: pid 11, 12\nstep 4/20: reward 0.30, generated \d+/s, trained \d+/s, buffered 23, .*\n",
        output.getvalue(),
    )


URL = "postgresql+asyncpg://me:secret@db:5433/rl?sslmode=require&password=secret"


def test_the_summary_never_shows_a_password(figures, tmp_path):
    text = "\n".join(summary(URL, tmp_path, figures))
    assert "secret" not in text
    assert "PGPASSWORD" in text
    assert "8 of them replayed" in text


def test_psql_gets_the_url_in_its_own_form():
    assert shell_url(URL) == "postgresql://me@db:5433/rl?sslmode=require"
    assert has_password(URL)
    assert all(
        line.startswith("psql 'postgresql://me@db:5433/rl?sslmode=require' -c ") for line in queries(URL).values()
    )


def test_a_file_is_given_by_its_path():
    assert where("sqlite:////data/my demo.db") == "/data/my demo.db"
    assert all("'/data/my demo.db'" in line for line in queries("sqlite:////data/my demo.db").values())
