"""A cluster for the tests of this folder, each of which begins with a primary, a standby and an empty database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.servers import Cluster, running_cluster
from tests.faults.conftest import _no_process_is_left, figures

__all__ = ["_no_process_is_left", "figures"]


@pytest.fixture(scope="package")
def _cluster() -> Iterator[Cluster]:
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def synchronous(_cluster: Cluster) -> Cluster:
    """Its commits wait for the standby."""
    _cluster.get_ready(synchronous=True)
    return _cluster


@pytest.fixture
def asynchronous(_cluster: Cluster) -> Cluster:
    """Its commits don't."""
    _cluster.get_ready(synchronous=False)
    return _cluster
