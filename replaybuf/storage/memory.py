"""The reference backend: a dict, and the plainest reading of SPEC.md.

It scans and sorts at every take, as in-memory buffers of the field do, and rewrites every rollout at every refresh. The
SQL backends must be indistinguishable from it. Payloads are encoded as they are on disk, so that what can be stored and
what comes back is the same everywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from replaybuf.codec import Codec
from replaybuf.errors import DecodeError
from replaybuf.policy import Order, in_order
from replaybuf.query import Node, predicate
from replaybuf.rollout import Status
from replaybuf.staleness import find_expired, group_staleness, refresh_group, reset_response
from replaybuf.storage.base import Changes, NewGroup, Refresh, StorageBackend, StorageItem, Unset
from replaybuf.storage.state import check_empty, pack_state, unpack_state
from replaybuf.summary import Marks


@dataclass(slots=True)
class _Stored:
    item: StorageItem
    payload: bytes


class MemoryStorage(StorageBackend):
    """Groups in a dict of this process; gone with it."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._groups: dict[int, _Stored] = {}
        self._next_uid = 1
        self._dropped: dict[str, int] = {}
        self._waiting: set[asyncio.Future[None]] = set()
        self._version = 0

    async def close(self) -> None:
        self._notify()

    async def put(self, group: NewGroup) -> int:
        payload = self._codec.encode(group.rollouts)
        if group.key is not None:
            self._remove(
                uid
                for uid, stored in self._groups.items()
                if (stored.item.task_name, stored.item.key) == (group.task_name, group.key)
            )
        uid = self._next_uid
        self._next_uid += 1
        item = StorageItem(
            uid=uid,
            timestamp_id=uid,
            task_name=group.task_name,
            status=group.status,
            staleness=group.staleness,
            priority=group.priority,
            times_sampled=0,
            created_at=group.created_at,
            reward=Marks.of(group.rollouts).mean_reward,
            tags=dict(group.tags) if group.tags else None,
            key=group.key,
        )
        self._groups[uid] = _Stored(item, payload)
        self._notify()
        return uid

    async def take(
        self,
        wanted: Mapping[str, int],
        *,
        status: Status,
        order: Order,
        where: Node | None = None,
        all_or_nothing: bool = False,
    ) -> dict[str, list[StorageItem]] | None:
        matches = predicate(where) if where is not None else _anything
        taken: dict[str, list[StorageItem]] = {}
        for task_name, size in wanted.items():
            candidates = [
                stored.item
                for stored in self._groups.values()
                if stored.item.task_name == task_name and stored.item.status == status and matches(stored.item)
            ]
            taken[task_name] = self._decodable(in_order(candidates, order), size)
            if all_or_nothing and len(taken[task_name]) < size:
                return None
        self._remove(item.uid for items in taken.values() for item in items)
        return taken

    def _decodable(self, candidates: list[StorageItem], size: int) -> list[StorageItem]:
        """The first `size` candidates that can be decoded; those that can't are set aside."""
        good: list[StorageItem] = []
        for item in candidates:
            if len(good) >= size:
                break
            try:
                good.append(self._read(item))
            except DecodeError as error:
                item.status, item.error = Status.FAILED, str(error)
        return good

    def _read(self, item: StorageItem) -> StorageItem:
        return replace(item, item=self._codec.decode(self._groups[item.uid].payload))

    async def find(self, query: Node, *, order: Order, limit: int | None = None) -> AsyncIterator[StorageItem]:
        matches = predicate(query)
        for item in in_order([s.item for s in self._groups.values() if matches(s.item)], order)[:limit]:
            if item.uid not in self._groups or not matches(item):
                continue
            try:
                yield self._read(item)
            except DecodeError as error:
                yield replace(item, error=str(error))

    async def count(self, query: Node, *, at_most: int | None = None) -> int:
        found = len(self._matching(query))
        return found if at_most is None else min(found, at_most)

    async def count_statuses(self) -> dict[tuple[str, Status], int]:
        counts: dict[tuple[str, Status], int] = {}
        for stored in self._groups.values():
            lane = (stored.item.task_name, stored.item.status)
            counts[lane] = counts.get(lane, 0) + 1
        return counts

    async def delete(self, query: Node) -> int:
        return self._remove(item.uid for item in self._matching(query))

    async def update(self, query: Node, changes: Changes) -> int:
        found = self._matching(query)
        for item in found:
            if not isinstance(changes.status, Unset):
                item.status = changes.status
            if not isinstance(changes.priority, Unset):
                item.priority = changes.priority
            if not isinstance(changes.tags, Unset):
                item.tags = dict(changes.tags) if changes.tags else None
        self._notify()
        return len(found)

    async def refresh(self, refresh: Refresh) -> dict[str, int]:
        counts = dict.fromkeys(refresh.rules, 0)
        for stored in list(self._groups.values()):
            item = stored.item
            if item.task_name in refresh.rules and item.status in refresh.statuses:
                counts[item.task_name] += self._refresh_one(stored, refresh)
        self._notify()
        return counts

    def _refresh_one(self, stored: _Stored, refresh: Refresh) -> bool:
        try:
            rollouts = self._codec.decode(stored.payload)
        except DecodeError:
            return False
        item, rule = stored.item, refresh.rules[stored.item.task_name]
        refresh_group(rollouts, refresh.train_step)
        expired = find_expired(rollouts, rule, refresh.train_step)
        if expired and not rule.retryable:
            self._remove([item.uid])
            self._dropped[item.task_name] = self._dropped.get(item.task_name, 0) + 1
            return True
        item.staleness = group_staleness(rollouts)
        for index in expired:
            reset_response(rollouts[index])
            item.status = Status.EXPIRED
        stored.payload = self._codec.encode(rollouts)
        item.reward = Marks.of(rollouts).mean_reward
        return bool(expired)

    async def drop(self, task_name: str, count: int = 1) -> None:
        self._dropped[task_name] = self._dropped.get(task_name, 0) + count

    async def dropped(self, task_name: str) -> int:
        return self._dropped.get(task_name, 0)

    def version(self) -> int:
        return self._version

    async def changed(self, timeout: float, since: int) -> None:
        if self._version != since:
            return
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        try:
            await asyncio.wait_for(waiting, timeout)
        except TimeoutError:
            pass
        finally:
            self._waiting.discard(waiting)

    def __len__(self) -> int:
        return len(self._groups)

    def state_dict(self) -> dict[str, Any]:
        return pack_state(((s.item, s.payload) for s in self._groups.values()), self._next_uid, self._dropped)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_empty(len(self))
        groups, next_uid, dropped = unpack_state(state)
        self._groups = {item.uid: _Stored(item, payload) for item, payload in groups}
        self._next_uid, self._dropped = next_uid, dropped
        self._notify()

    def _matching(self, query: Node) -> list[StorageItem]:
        matches = predicate(query)
        return [stored.item for stored in self._groups.values() if matches(stored.item)]

    def _remove(self, uids: Iterable[int]) -> int:
        return sum(self._groups.pop(uid, None) is not None for uid in list(uids))

    def _notify(self) -> None:
        self._version += 1
        for waiting in self._waiting:
            if not waiting.done():
                waiting.get_loop().call_soon_threadsafe(_wake, waiting)


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _anything(item: StorageItem) -> bool:
    return True
