"""The reference backend: a dict, and the plainest reading of the contract.

It scans and sorts at every take, as in-memory buffers of the field do, and rewrites every rollout at every refresh. The
SQL backends must be indistinguishable from it. Payloads are encoded as they are on disk, so that what can be stored and
what comes back is the same everywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import replace
from typing import Any

from replaybuf.codec import Codec
from replaybuf.errors import DecodeError
from replaybuf.policy import Order, in_order
from replaybuf.query import LogicNode, Node, ScalarNode, SetNode, predicate
from replaybuf.query.python import Predicate
from replaybuf.rollout import Status
from replaybuf.staleness import find_expired, group_staleness, refresh_group, reset_response
from replaybuf.storage.base import Changes, NewGroup, Refresh, StorageBackend, StorageItem, Unset
from replaybuf.storage.state import check_empty, pack_state, unpack_state
from replaybuf.summary import Marks


class Items:
    """The metadata of groups by uid, in a dict. `storage.pandas` has the same in a DataFrame."""

    def __init__(self) -> None:
        self._items: dict[int, StorageItem] = {}

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: StorageItem) -> None:
        self._items[item.uid] = item

    def get(self, uid: int) -> StorageItem | None:
        """A copy of the group's metadata, or None when it isn't there."""
        item = self._items.get(uid)
        return None if item is None else replace(item, tags=dict(item.tags) if item.tags else None)

    def remove(self, uids: Iterable[int]) -> None:
        for uid in uids:
            del self._items[uid]

    def change(self, uids: Iterable[int], **values: Any) -> None:
        for uid in uids:
            for name, value in values.items():
                setattr(self._items[uid], name, value)

    def select(self, query: Node, order: Order = ()) -> list[int]:
        """The uids of the groups that match, in order; in that of insertion where there is none."""
        matches = predicate(query)
        return [item.uid for item in in_order(filter(matches, self._items.values()), order)]

    def with_key(self, task_name: str, key: str) -> list[int]:
        """The uid of the task's group with this key, if there is one."""
        return [item.uid for item in self._items.values() if (item.task_name, item.key) == (task_name, key)]

    def count_lanes(self) -> dict[tuple[str, Status], int]:
        """The number of groups of each task and status."""
        counts: dict[tuple[str, Status], int] = {}
        for item in self._items.values():
            lane = (item.task_name, item.status)
            counts[lane] = counts.get(lane, 0) + 1
        return counts


class MemoryStorage(StorageBackend):
    """Groups in a dict of this process; gone with it. Threads share it: one does something at a time."""

    new_table: type[Items] = Items

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._lock = threading.RLock()
        self._table = self.new_table()
        self._payloads: dict[int, bytes] = {}
        self._next_uid = 1
        self._dropped: dict[str, int] = {}
        self._waiting: set[asyncio.Future[None]] = set()
        self._version = 0

    async def close(self) -> None:
        self._notify()

    async def put(self, group: NewGroup) -> int:
        payload = self.codec.encode(group.rollouts)
        reward = Marks.of(group.rollouts).mean_reward
        with self._lock:
            return self._store(group, payload, reward)

    def _store(self, group: NewGroup, payload: bytes, reward: float | None) -> int:
        if group.key is not None:
            self._remove(self._table.with_key(group.task_name, group.key))
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
            reward=reward,
            tags=dict(group.tags) if group.tags else None,
            key=group.key,
        )
        self._payloads[uid] = payload
        self._table.add(item)
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
        with self._lock:
            taken: dict[str, list[StorageItem]] = {}
            for task_name, size in wanted.items():
                lane = (ScalarNode("task_name", "$eq", task_name), ScalarNode("status", "$eq", status.value))
                candidates = self._table.select(LogicNode("$and", lane if where is None else (*lane, where)), order)
                taken[task_name] = self._decodable(candidates, size)
                if all_or_nothing and len(taken[task_name]) < size:
                    return None
            self._remove(item.uid for items in taken.values() for item in items)
            return taken

    def _decodable(self, candidates: list[int], size: int) -> list[StorageItem]:
        """The first `size` candidates that can be decoded; those that can't are set aside."""
        good: list[StorageItem] = []
        for uid in candidates:
            if len(good) >= size:
                break
            try:
                good.append(self._decode(uid))
            except DecodeError as error:
                self._table.change([uid], status=Status.FAILED, error=str(error))
                self._notify()
        return good

    def _decode(self, uid: int) -> StorageItem:
        return replace(self._item(uid), item=self.codec.decode(self._payloads[uid]))

    def _item(self, uid: int) -> StorageItem:
        item = self._table.get(uid)
        assert item is not None
        return item

    async def find(self, query: Node, *, order: Order, limit: int | None = None) -> AsyncIterator[StorageItem]:
        matches = predicate(query)
        with self._lock:
            uids = self._table.select(query, order)[:limit]
        for uid in uids:
            item = self._read(uid, matches)
            if item is not None:
                yield item

    def _read(self, uid: int, matches: Predicate) -> StorageItem | None:
        """The group, if it is there and still matches; with the reason where it can't be decoded."""
        with self._lock:
            item = self._table.get(uid)
            if item is None or not matches(item):
                return None
            try:
                return self._decode(uid)
            except DecodeError as error:
                return replace(item, error=str(error))

    async def count(self, query: Node, *, at_most: int | None = None) -> int:
        with self._lock:
            found = len(self._table.select(query))
            return found if at_most is None else min(found, at_most)

    async def count_statuses(self) -> dict[tuple[str, Status], int]:
        with self._lock:
            return self._table.count_lanes()

    async def delete(self, query: Node) -> int:
        with self._lock:
            return self._remove(self._table.select(query))

    async def update(self, query: Node, changes: Changes) -> int:
        with self._lock:
            found = self._table.select(query)
            if not isinstance(changes.status, Unset):
                self._table.change(found, status=changes.status, error=None)
            if not isinstance(changes.priority, Unset):
                self._table.change(found, priority=changes.priority)
            if not isinstance(changes.tags, Unset):
                self._table.change(found, tags=dict(changes.tags) if changes.tags else None)
            self._notify()
            return len(found)

    async def refresh(self, refresh: Refresh) -> dict[str, int]:
        with self._lock:
            counts = dict.fromkeys(refresh.rules, 0)
            tasks = SetNode("task_name", "$in", tuple(refresh.rules))
            statuses = SetNode("status", "$in", tuple(status.value for status in refresh.statuses))
            for uid in self._table.select(LogicNode("$and", (tasks, statuses))):
                item = self._item(uid)
                counts[item.task_name] += self._refresh_one(item, refresh)
            self._notify()
            return counts

    def _refresh_one(self, item: StorageItem, refresh: Refresh) -> bool:
        try:
            rollouts = self.codec.decode(self._payloads[item.uid])
        except DecodeError:
            return False
        rule = refresh.rules[item.task_name]
        refresh_group(rollouts, refresh.train_step)
        expired = find_expired(rollouts, rule, refresh.train_step)
        if expired and not rule.retryable:
            self._remove([item.uid])
            self._dropped[item.task_name] = self._dropped.get(item.task_name, 0) + 1
            return True
        staleness = group_staleness(rollouts)
        for index in expired:
            reset_response(rollouts[index])
        self._payloads[item.uid] = self.codec.encode(rollouts)
        self._table.change(
            [item.uid],
            status=Status.EXPIRED if expired else item.status,
            staleness=staleness,
            reward=Marks.of(rollouts).mean_reward,
        )
        return bool(expired)

    async def drop(self, task_name: str, count: int = 1) -> None:
        with self._lock:
            self._dropped[task_name] = self._dropped.get(task_name, 0) + count

    async def dropped(self, task_name: str) -> int:
        with self._lock:
            return self._dropped.get(task_name, 0)

    def version(self) -> int:
        return self._version

    async def changed(self, timeout: float, since: int) -> None:
        waiting = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._version != since:
                return
            self._waiting.add(waiting)
        try:
            async with asyncio.timeout(timeout):
                await waiting
        except TimeoutError:
            pass
        finally:
            with self._lock:
                self._waiting.discard(waiting)

    def __len__(self) -> int:
        with self._lock:
            return len(self._table)

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            groups = [(self._item(uid), payload) for uid, payload in self._payloads.items()]
            return pack_state(groups, self._next_uid, self._dropped)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._lock:
            check_empty(len(self))
            groups, next_uid, self._dropped = unpack_state(state)
            for item, payload in groups:
                self._payloads[item.uid] = payload
                self._table.add(item)
            self._next_uid = max(self._next_uid, next_uid)
            self._notify()

    def _remove(self, uids: Iterable[int]) -> int:
        gone = list(uids)
        self._table.remove(gone)
        for uid in gone:
            del self._payloads[uid]
        return len(gone)

    def _notify(self) -> None:
        with self._lock:
            self._version += 1
            waiting, self._waiting = self._waiting, set()
        for future in waiting:
            with contextlib.suppress(RuntimeError):  # its loop was closed
                future.get_loop().call_soon_threadsafe(_wake, future)


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
