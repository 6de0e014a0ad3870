"""An endpoint for the examples."""

from collections.abc import Iterator

import pytest

from tests.examples.endpoint import Endpoint, serving

KEY = "sk-secret-of-the-tests"


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serving(Endpoint()) as endpoint:
        yield endpoint
