from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.postgres import new_database
from tests.query.stores import Store, postgres_store, sqlite_store


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """A table on each database. It is shared by the tests of a module, which fill it anew."""
    if request.param == "sqlite":
        with sqlite_store() as sqlite:
            yield sqlite
        return
    with new_database(request.getfixturevalue("postgres_url")) as url, postgres_store(url) as postgres:
        yield postgres
