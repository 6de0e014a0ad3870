"""What seldom happened to a buffer."""

from __future__ import annotations

from typing import Any

import pytest

from replaybuf import FullError
from tests.presence.views import list_events, seen
from tests.stores import TASK, build, fill, group, until


async def test_what_happens_seldom_is_noted(shared_url: str) -> None:
    """In the transaction in which it happens, with who did it, or held the groups."""
    options: dict[str, Any] = {"max_deliveries": 1, "keep_checkpoints": 1, "worker": "me"}
    async with build(shared_url, **options) as buffer:
        for number in range(6):
            await buffer.put(group(number), TASK, model_step=number)
        lease = await buffer.lease_batch({TASK: 2}, heartbeat=False)
        await lease.give_back(failed="out of memory")
        await buffer.checkpoint(1)
        await buffer.checkpoint(2)
        await buffer.delete({"uid": {"$in": [3]}})
        await buffer.refresh_staleness(task_stale_thresholds={TASK: 2}, current_train_step=6)
        await buffer.restore(2)
        lease = await buffer.lease_batch({TASK: 1}, heartbeat=False, seconds=0.01)

        async def is_back() -> bool:
            return any(one.kind == "lease_lapsed" for one in await seen(shared_url, list_events))

        await until(is_back)
        found = [
            (one.kind, one.worker, one.task_name, one.step, one.groups, one.uids, one.detail)
            for one in reversed(await seen(shared_url, list_events))
            if one.kind != "limits"
        ]
    assert found[:-2] == [
        ("given_back", "me", TASK, None, 2, [1, 2], "out of memory"),
        ("set_aside", "me", TASK, None, 2, [1, 2], "out of memory"),
        ("checkpoint", "me", None, 1, 6, [], None),
        ("checkpoint", "me", None, 2, 6, [], None),
        ("checkpoint_dropped", "me", None, 1, 6, [], None),
        ("deleted", "me", TASK, None, 1, [3], '{"uid": {"$in": [3]}}'),
        ("expired", "me", TASK, 6, 1, [4], None),
        ("restored", "me", None, 2, 6, [], None),
    ]
    assert [one[:3] for one in found[-2:]] == [("lease_lapsed", "me", TASK), ("set_aside", "me", TASK)]


async def test_an_event_names_the_lowest_uids_in_order(shared_url: str) -> None:
    """Whatever the order in which the database finds them."""
    async with build(shared_url) as buffer:
        for number in range(3):
            await buffer.put(group(number), TASK, status="aborted" if number == 1 else "completed")
        await buffer.delete({})
    [event] = await seen(shared_url, list_events)
    assert event.uids == [1, 2, 3]


async def test_refusals_in_a_row_are_one_event(shared_url: str) -> None:
    async with build(shared_url, capacity=1, on_full="reject", worker="me") as buffer:
        await fill(buffer, 1)
        for number in range(30):
            with pytest.raises(FullError):
                await buffer.put(group(number), TASK)
    [event] = await seen(shared_url, list_events, kind="refused")
    assert (event.worker, event.task_name, event.groups) == ("me", TASK, 30)
