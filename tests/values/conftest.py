"""Fixtures: stores of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(params=["memory://", "sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/buffer.db"
    return str(request.getfixturevalue("lent_database") if request.param == "postgresql" else request.param)
