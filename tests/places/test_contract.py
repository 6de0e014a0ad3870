"""The contract of storages, kept with arrays of all groups in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.rollout import RolloutState
from tests.contract import DurableContract, ExactContract, harness
from tests.contract.durable import SamePlace
from tests.contract.harness import NewStorage
from tests.postgres import Databases

_rollout = harness.rollout


class Apart:
    """Storages with a folder each. Every group of the contract's has an array."""

    @pytest.fixture(autouse=True)
    def _arrays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def rollout(rollout_id: int = 0, **fields: Any) -> RolloutState:
            made = _rollout(rollout_id, **fields)
            made.extra_fields = {**made.extra_fields, "experts": np.full(20_000, rollout_id % 256, np.uint8)}
            return made

        monkeypatch.setattr(harness, "rollout", rollout)

    @pytest.fixture
    def new_url(self, tmp_path: Path) -> Any:
        numbers = count()
        return lambda: f"sqlite:///{tmp_path}/{next(numbers)}.db"

    @pytest.fixture
    def new_storage(self, new_url: Any, tmp_path: Path) -> NewStorage:
        numbers = count()

        def new(codec: Codec, rules: Any) -> SQLStorage:
            place = tmp_path / f"payloads{next(numbers)}"
            place.mkdir()
            return SQLStorage(new_url(), codec, rules, payloads=str(place), payload_threshold=1)

        return new

    @pytest.fixture
    def same_place(self) -> SamePlace:
        def open_again(storage: SQLStorage, codec: Codec) -> SQLStorage:
            url = storage.url.render_as_string(hide_password=False)
            place = storage._place or "database"
            return SQLStorage(url, codec, storage.rules, payloads=place, payload_threshold=1)

        return open_again


@pytest.mark.long
class TestSqliteWithFolder(Apart, ExactContract, DurableContract):
    """Some laws by default: `test_buffers.py`."""


@pytest.mark.long
class TestPostgresWithFolder(Apart, ExactContract, DurableContract):
    """Some laws by default: `test_buffers.py`."""

    @pytest.fixture
    def new_url(self, postgres_databases: Databases) -> Iterator[Any]:
        with postgres_databases.lent() as lend:
            yield lend
