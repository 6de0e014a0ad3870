"""The stores that tables are tested on."""

from pathlib import Path

import pytest


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def any_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres_database"))
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/run.db"
