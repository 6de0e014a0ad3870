"""The guard of statements, calls and CPU; plans of the hot queries; the table of docs/large-runs.md."""

from __future__ import annotations

import json
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.counts import counting_calls
from benchmarks.guard import AGAIN, KEPT, TOLERANCES, confirmed, regressions, typical
from benchmarks.large_run import table
from benchmarks.million import fill_many
from benchmarks.plans import explain_all
from replaybuf.storage.sql.engine.transaction import Hook
from tests.pages import DOCS

CPU = {"sqlite: CPU on Python 3.11": {"puts of 1 KB": 10.0}}
STATEMENTS = {"sqlite: statements": {"put": 7}, "postgresql: round trips": {"put": 9}}


def test_the_same_figures_and_fewer_statements_pass() -> None:
    assert regressions(CPU | STATEMENTS, CPU | STATEMENTS) == []
    assert regressions({"sqlite: statements": {"put": 6}}, STATEMENTS) == []


@pytest.mark.parametrize("section", STATEMENTS)
def test_one_more_is_a_regression(section: str) -> None:
    [line] = regressions({section: {"put": STATEMENTS[section]["put"] + 1}}, STATEMENTS)
    assert line.startswith(f"REGRESSION: {section}, put: ")


@pytest.mark.parametrize("kind", TOLERANCES)
def test_noise_passes_and_what_is_clearly_more_is_a_regression(kind: str) -> None:
    section, tolerance = f"sqlite: {kind} on Python 3.11", TOLERANCES[kind]
    baseline = {section: {"puts of 100 KB": 100.0}}
    assert regressions({section: {"puts of 100 KB": 100 * tolerance}}, baseline) == []
    [line] = regressions({section: {"puts of 100 KB": 101 * tolerance}}, baseline)
    assert line.startswith(f"REGRESSION: {section}, puts of 100 KB: {101 * tolerance:g} where 100 is kept")


def _in_turn(*figures: float) -> Callable[[], Awaitable[dict[str, float]]]:
    measurements = iter(figures)

    async def measure() -> dict[str, float]:
        return {"puts of 1 KB": next(measurements)}

    return measure


async def test_a_busy_moment_is_measured_again() -> None:
    [section] = CPU
    assert await confirmed(_in_turn(26.0, 24.0, 11.0), section, CPU) == {"puts of 1 KB": 11.0}


async def test_what_is_too_high_every_time_stays_a_regression() -> None:
    [section] = CPU
    figures = await confirmed(_in_turn(*[25.0] * (AGAIN + 1)), section, CPU)
    assert regressions({section: figures}, CPU)


async def test_what_is_kept_is_typical() -> None:
    assert await typical(_in_turn(8.0, 15.0, 10.0)) == {"puts of 1 KB": 10.0}


def test_a_call_of_which_nothing_is_kept_does_not_pass_in_silence() -> None:
    [line] = regressions({"sqlite: statements": {"get(1)": 1}}, STATEMENTS)
    assert "--update" in line


def test_calls_and_cpu_are_not_compared_with_those_of_another_python() -> None:
    measured = {f"sqlite: {kind} on Python 3.99": {"puts of 1 KB": 99.0} for kind in TOLERANCES}
    assert regressions(measured, CPU) == []


def test_calls_of_threads_that_are_started_meanwhile_are_counted() -> None:
    def calls(function: Callable[[], object]) -> int:
        before = count.value
        function()
        return count.value - before

    thread = threading.Thread(target=lambda: [len("") for _ in range(1000)])
    with counting_calls() as count:
        assert 1000 <= calls(lambda: [len("") for _ in range(1000)]) < 1010
        assert calls(lambda: (thread.start(), thread.join())) >= 1000
    assert calls(lambda: len("")) == 0


def test_figures_of_both_databases_are_kept() -> None:
    baseline = json.loads(KEPT.read_text())
    assert set(baseline) == {
        *("sqlite: statements", "sqlite: calls on Python 3.11", "sqlite: CPU on Python 3.11"),
        *("postgresql: statements", "postgresql: round trips"),
        *("postgresql: calls on Python 3.11", "postgresql: CPU on Python 3.11"),
    }


SEED = 1000


class Catching(Hook):
    """Catches statements with their parameters."""

    def __init__(self) -> None:
        self.caught: list[tuple[str, Any]] = []

    def statement(self, sql: str, values: Sequence[Any], many: bool) -> None:
        self.caught.append((sql, values))


async def _check(url: str, groups: int) -> None:
    await fill_many(url, groups, SEED)
    plans = await explain_all(url)
    purposes = {explained.purpose for explained in plans}
    assert purposes >= {
        "refresh",
        "take fifo",
        "take staleness",
        "take prioritized",
        "take mixed prioritized",
        "evict prioritized",
        "lease",
        "annotate",
        "sweep",
    }
    problems = [f"{plan.purpose}: {plan.problems}\n{plan.statement}\n{plan.plan}" for plan in plans if plan.problems]
    assert not problems, "\n\n".join(problems)
    [overdue] = [plan for plan in plans if plan.purpose == "look after groups" and "leased_until <=" in plan.statement]
    assert "rb_group_leased" in "".join(overdue.plan), overdue.plan  # not a lane after the other


async def test_plans__sqlite(tmp_path: Path) -> None:
    """SQLite answers all of them from indexes, however many groups there are."""
    await _check(f"sqlite:///{tmp_path}/run.db", SEED)


@pytest.mark.filterwarnings("default")
async def test_plans__postgresql(postgres_database: str) -> None:
    """PostgreSQL does, with custom and with generic plans."""
    await _check(postgres_database, 20 * SEED)


def test_the_table_is_the_one_that_the_script_prints() -> None:
    assert table() in (DOCS / "large-runs.md").read_text("utf-8")
