"""Random operations leave a database indistinguishable from the model in `tests/reference`.

The long form: `pytest -m long tests/side_by_side`. A failure prints the operations that lead to it.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.side_by_side import SideBySide

#: The machines of each kind of database, by whose names the examples are chosen.
NAMES = {"sqlite": "SideBySideWithSqliteFiles", "postgresql": "SideBySideWithPostgresDatabases"}


@pytest.mark.parametrize(
    ("kind", "examples", "steps"),
    [
        ("sqlite", 8, 13),
        ("postgresql", 6, 13),
        pytest.param("sqlite", 500, 50, marks=pytest.mark.long),
        pytest.param("postgresql", 300, 50, marks=pytest.mark.long),
    ],
)
def test_a_database_is_like_the_model(request: pytest.FixtureRequest, kind: str, examples: int, steps: int) -> None:
    machine = type(NAMES[kind], (SideBySide,), {"kind": kind, "request": request})
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
