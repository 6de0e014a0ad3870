"""Stores of prompt ledgers."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres_database"))
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/buffer.db"
