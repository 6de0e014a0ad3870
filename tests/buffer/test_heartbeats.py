"""The thread that extends leases."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import MagicMock

import pytest

from replaybuf.buffer.lease import Heartbeats
from replaybuf.storage.values import Leased
from tests.stores import TASK, build, fill, until


async def test_a_heartbeat_that_fails_leaves_the_others_alone(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its storage raises."""
    async with build(url) as buffer:
        await fill(buffer, 2)
        failing, other = [await buffer.lease_batch({TASK: 1}, seconds=0.2) for _ in range(2)]
        extend, extended = buffer.storage.extend, []

        async def fail_or_note(leased: Leased, uids: Sequence[int], seconds: float) -> float:
            if leased.token == failing.token:
                raise RuntimeError
            extended.append(leased.token)
            return await extend(leased, uids, seconds)

        monkeypatch.setattr(buffer.storage, "extend", fail_or_note)

        async def went_on() -> bool:
            return len(extended) > 4

        await until(went_on)
        await other.acknowledge()


def test_a_heart_whose_last_lease_is_dropped_as_it_looks_comes_to_rest() -> None:
    heartbeats = Heartbeats()
    there = MagicMock()
    there.__len__.return_value = 1
    there.items.return_value = there.values.return_value = []
    heartbeats._leases = there
    assert heartbeats._wait() is None
