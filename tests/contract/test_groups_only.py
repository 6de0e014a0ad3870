"""A backend without leases, checkpoints, cursors and copies keeps the contract of groups, and says what it can't do."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from replaybuf import PromptLedger, ReplayBuffer
from replaybuf.errors import UnsupportedError
from replaybuf.produce import published
from replaybuf.storage.values import Cursor
from replaybuf.testing import GroupContract
from replaybuf.testing.harness import CODEC, NewStorage, group, ids, rules_of
from tests.contract.groups_only import GroupsOnly


class TestGroupsOnly(GroupContract):
    @pytest.fixture
    def new_storage(self) -> NewStorage:
        return GroupsOnly


@pytest.fixture
def buffer() -> ReplayBuffer:
    return ReplayBuffer(GroupsOnly(CODEC, rules_of()), CODEC.rollout_type)


UNSUPPORTED: dict[str, tuple[str, Callable[[ReplayBuffer], Awaitable[Any]]]] = {
    "lease": ("LeaseStorage", lambda buffer: buffer.lease_batch({"math": 1}).__aenter__()),
    "checkpoint": ("CheckpointStorage", lambda buffer: buffer.checkpoint(1)),
    "restore": ("CheckpointStorage", lambda buffer: buffer.restore(1)),
    "checkpoints": ("CheckpointStorage", lambda buffer: buffer.checkpoints()),
    "drop_checkpoint": ("CheckpointStorage", lambda buffer: buffer.drop_checkpoint(1)),
    "read": ("CursorStorage", lambda buffer: buffer.cursors.read("data")),
    "move": ("CursorStorage", lambda buffer: buffer.cursors.move(Cursor("data"))),
    "draw": ("CursorStorage", lambda buffer: PromptLedger(buffer, [group(1)], "math").draw()),
    "published": ("CursorStorage", published),
    "save": ("CopyStorage", lambda buffer: buffer.save("never")),
    "resume": ("CopyStorage", lambda buffer: buffer.resume("never")),
}


@pytest.mark.parametrize("call", UNSUPPORTED)
async def test_what_a_backend_lacks_is_said(buffer: ReplayBuffer, call: str) -> None:
    """The error names the backend, the call, the capability, and backends that have it."""
    capability, attempt = UNSUPPORTED[call]
    with pytest.raises(UnsupportedError, match=rf"{capability}, and GroupsOnly\(\) is none; SQLStorage.* are"):
        await attempt(buffer)


def test_what_a_backend_lacks_is_said_to_those_who_block(buffer: ReplayBuffer) -> None:
    for attempt in (buffer.state_dict, lambda: buffer.load_state_dict({})):
        with pytest.raises(UnsupportedError, match="CopyStorage, and GroupsOnly"):
            attempt()


async def test_a_buffer_that_nobody_can_restore_is_never_fenced(buffer: ReplayBuffer) -> None:
    """Waits, which look for a fence, work there."""
    await buffer.check_fence()
    waits = asyncio.create_task(buffer.get(1, "math", timeout=20))
    await asyncio.sleep(0.01)
    await buffer.put(group(1), "math")
    assert ids(await waits) == [1]
