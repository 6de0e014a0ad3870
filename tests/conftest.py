"""Fixtures for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.postgres import new_database, running_server

# On a busy machine any example may be slow.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """`postgresql://...` of a server whose user may create databases."""
    with running_server() as url:
        yield url


@pytest.fixture
def postgres_database(postgres_url: str) -> Iterator[str]:
    """`postgresql://...` of a new, empty database, which is dropped after the test."""
    with new_database(postgres_url) as url:
        yield url
