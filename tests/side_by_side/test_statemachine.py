"""Random operations leave a database indistinguishable from the model in `tests/reference`.

The long form: `pytest -m long tests/side_by_side`. A failure prints the operations that lead to it.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.postgres import Databases
from tests.side_by_side import SideBySide
from tests.side_by_side.places import Place, PostgresDatabases, SqliteFiles


def run(place: Place, examples: int, steps: int) -> None:
    """Run the machine against buffers at the place."""
    machine = type(f"SideBySideWith{type(place).__name__}", (SideBySide,), {"place": place})
    run_settings = settings(
        max_examples=examples,
        derandomize=examples < 10,  # the same examples each time; the long form looks for new ones
        stateful_step_count=steps,
        deadline=None,
        print_blob=True,
        phases=[phase for phase in Phase if phase is not Phase.explain],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=run_settings)


def test_sqlite_is_like_the_model() -> None:
    run(SqliteFiles(), 8, 13)


def test_postgres_is_like_the_model(postgres_databases: Databases) -> None:
    run(PostgresDatabases(postgres_databases), 6, 13)


@pytest.mark.long
def test_sqlite_is_like_the_model_for_long() -> None:
    run(SqliteFiles(), 500, 50)


@pytest.mark.long
def test_postgres_is_like_the_model_for_long(postgres_databases: Databases) -> None:
    run(PostgresDatabases(postgres_databases), 300, 50)
