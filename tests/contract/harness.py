"""The base of the contract's tests: fixtures, and small groups to put."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from replaybuf.buffer.putting import PUT_TIMEOUT
from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.rules.limits import Limits, Rules
from replaybuf.rules.policies import ReplayPolicy, resolve_policy
from replaybuf.rules.query import parse
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.values import NewGroup, StorageItem
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.rollout import RolloutState, Status
from replaybuf.values.rollouts.rollout_type import RolloutType

NewStorage = Callable[[Codec, Rules], SQLStorage]
Open = Callable[..., Awaitable[SQLStorage]]
OpenBuffer = Callable[..., Awaitable[ReplayBuffer]]

CODEC = Codec(RolloutType(RolloutState))
#: A codec of other rollouts: `CODEC` can't read its payloads.
OTHER_CODEC = Codec(RolloutType(dict))

#: Long enough for anything that happens at all, in seconds.
SOON = 20.0


@pytest.mark.asyncio
class Harness:
    """The fixtures of the suite. Subclasses provide `new_storage`."""

    @pytest.fixture
    def new_storage(self) -> NewStorage:
        """A function that returns a new, empty storage for a codec and rules at each call."""
        raise NotImplementedError("give a fixture new_storage; `tests/contract/__init__.py` says how")

    @pytest_asyncio.fixture
    async def open_storage(self, new_storage: NewStorage) -> AsyncIterator[Open]:
        """A coroutine function that opens a new, empty storage (or the one given); closed after the test."""
        opened: list[SQLStorage] = []

        async def open_one(
            codec: Codec = CODEC, storage: SQLStorage | None = None, rules: Rules | None = None
        ) -> SQLStorage:
            opened.append(new_storage(codec, rules or Rules()) if storage is None else storage)
            await opened[-1].open()
            return opened[-1]

        yield open_one
        for storage in opened:
            await storage.close()

    @pytest_asyncio.fixture
    async def open_buffer(self, open_storage: Open) -> OpenBuffer:
        """A coroutine function that opens a buffer over a new, empty storage with these rules, or the storage given."""

        async def open_one(
            policy: str | ReplayPolicy = "fifo",
            codec: Codec = CODEC,
            storage: SQLStorage | None = None,
            *,
            put_timeout: float | None = PUT_TIMEOUT,
            **rules: Any,
        ) -> ReplayBuffer:
            opened = await open_storage(codec, storage, rules_of(policy, **rules))
            return ReplayBuffer(opened, put_timeout=put_timeout)

        return open_one

    @pytest_asyncio.fixture
    async def storage(self, open_storage: Open) -> SQLStorage:
        """An open, empty storage."""
        return await open_storage()

    @pytest_asyncio.fixture
    async def buffer(self, open_buffer: OpenBuffer) -> ReplayBuffer:
        """A buffer over an empty storage, oldest first."""
        return await open_buffer()

    async def damage(self, storage: SQLStorage, uid: int) -> None:
        """Flip a bit in the payload of a group."""
        payload = bytearray(await payload_of(storage, uid))
        payload[len(payload) // 2] ^= 1
        await self.spoil(storage, uid, bytes(payload))

    async def spoil(self, storage: SQLStorage, uid: int, payload: bytes) -> None:
        """Store another payload as that of a group."""
        spoil = "UPDATE rb_payload SET data = :data WHERE uid = :uid"
        await storage._write(lambda tx: tx.change(spoil, data=payload, uid=uid))


def rules_of(
    policy: str | ReplayPolicy = "fifo", *, remover: str | ReplayPolicy = "fifo", seed: int | None = 0, **limits: Any
) -> Rules:
    """Return rules, given the policies by name or as they are, the seed of both, and the fields of `Limits`."""
    return Rules(resolve_policy(policy, seed), resolve_policy(remover, seed), Limits(**limits))


def rollout(rollout_id: int = 0, **fields: Any) -> RolloutState:
    """Return a completed rollout of three tokens."""
    values: dict[str, Any] = {
        "rollout_id": rollout_id,
        "message": [{"role": "user", "content": f"prompt {rollout_id}"}],
        "prompt_ids": [1, 2],
        "tokens": [1, 2, 5, 6, 7],
        "response": "the answer",
        "response_ids": [5, 6, 7],
        "logprobs": [-0.5, -0.25, -0.125],
        "response_mask": [1, 1, 1],
        "finish_reason": "stop",
        "reward": {"score": 1.0},
        "status": Status.COMPLETED,
        "extra_fields": {"origin": "contract"},
    }
    return RolloutState(**(values | fields))


def group(*ids: int, **fields: Any) -> list[RolloutState]:
    """Return a group of completed rollouts with these ids, and with these fields."""
    return [rollout(rollout_id, **deepcopy(fields)) for rollout_id in ids or (0,)]


def new_group(*ids: int, task: str = "math", status: Status = Status.COMPLETED, **metadata: Any) -> NewGroup:
    """Return a group as the buffer would hand it to a storage."""
    values: dict[str, Any] = {"staleness": 0, "created_at": 1000.0} | metadata
    return NewGroup(task_name=task, status=status, rollouts=group(*ids, status=status), **values)


def ids(groups: list[list[Any]]) -> list[int]:
    """Return the id of the first rollout of each group."""
    return [rollouts[0].rollout_id for rollouts in groups]


async def found(buffer: ReplayBuffer, query: Any = None, **options: Any) -> list[StorageItem]:
    """Return the groups that match, or all without a query, as a list."""
    return [item async for item in buffer.find({} if query is None else query, **options)]


async def fill(buffer: ReplayBuffer, count: int, task: str = "math", first: int = 0, **options: Any) -> list[int]:
    """Put groups numbered from `first`, one after the other. Return their uids."""
    uids = [await buffer.put(group(number), task, **options) for number in range(first, first + count)]
    assert None not in uids
    return [uid for uid in uids if uid is not None]


async def drawn(buffer: ReplayBuffer, size: int = 1, task: str = "math", **options: Any) -> list[int]:
    """Return the uids of the groups of a `sample`, in the order in which they were drawn."""
    items = await buffer.sample({task: size}, **options)
    return [item.uid for item in items[task]]


async def total(buffer: ReplayBuffer, name: str, task: str = "math") -> int:
    """Return one of a task's metrics."""
    tasks = (await buffer.metrics(distributions=False))["tasks"]
    return int(tasks[task][name]) if task in tasks else 0


def chi_square(observed: Iterable[float], expected: Iterable[float]) -> float:
    """Return Pearson's statistic: how far counts are from the expected ones."""
    return sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))


async def only(buffer: ReplayBuffer) -> StorageItem:
    """Return the only group of the buffer."""
    [item] = await found(buffer)
    return item


async def matching(buffer: ReplayBuffer, query: Any) -> list[int]:
    """Return the uids of the groups that match, by `find`; their number must be that of `count_where`."""
    uids = [item.uid for item in await found(buffer, query)]
    assert await buffer.count_where(query) == len(uids)
    assert await buffer.storage.count(parse(query)) == len(uids)
    return uids


_SIMPLE = {int, str, bool, type(None)}


def plain(value: Any) -> Any:
    """Return a value in a form that compares by ==: arrays with dtype and shape, models as dicts."""
    if type(value) in _SIMPLE:
        return (type(value).__name__, value)
    if isinstance(value, np.ndarray):
        return ("array", value.dtype.str, value.shape, value.tolist())
    if isinstance(value, RolloutState):
        return {name: plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [plain(inner) for inner in value])
    return (type(value).__name__, repr(value) if isinstance(value, float) else value)


async def everything(buffer: ReplayBuffer) -> list[Any]:
    """Return all that is seen of the groups of a buffer, in a form that compares by ==."""
    return [plain({name: getattr(item, name) for name in type(item).__slots__}) for item in await found(buffer)]


async def payload_of(storage: SQLStorage, uid: int) -> bytes:
    """Return the encoded rollouts of a group."""
    return bytes(await storage._read(lambda tx: tx.value("SELECT data FROM rb_payload WHERE uid = :uid", uid=uid)))
