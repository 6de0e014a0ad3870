"""The reference backend: dicts, and the simplest implementation of the contract.

It scans and sorts at every take, like other in-memory buffers, and rewrites every rollout at every refresh. The SQL
backends must be indistinguishable from it. Payloads are encoded as on disk, so that the same values can be stored
everywhere, and are read back the same.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from replaybuf.codec.payload import Codec
from replaybuf.errors import DecodeError
from replaybuf.query import LogicNode, Node, SetNode, predicate
from replaybuf.query.python import Predicate
from replaybuf.rollouts.marks import Marks
from replaybuf.rollouts.rollout import Status
from replaybuf.rollouts.staleness import (
    find_expired,
    mask_stale_tokens,
    refresh_group,
    reset_response,
)
from replaybuf.rules import transitions
from replaybuf.rules.limits import Rules
from replaybuf.rules.policies import Order
from replaybuf.rules.race import PRIORITIZED, share
from replaybuf.rules.tallies import LaneName, Tally
from replaybuf.storage.contract import StorageBackend
from replaybuf.storage.memory.groups import Groups
from replaybuf.storage.memory.items import Items, in_lane
from replaybuf.storage.memory.loans import Loans
from replaybuf.storage.memory.loans import now as lease_time
from replaybuf.storage.memory.world import Checkpoints, World, add_new, load, state_of
from replaybuf.storage.portable import check_empty, pack_state, unpack_state
from replaybuf.storage.state_copies import StateCopies
from replaybuf.storage.values import (
    Changes,
    Checkpoint,
    Cursor,
    Draw,
    Leased,
    NewGroup,
    Refresh,
    StorageItem,
    Unset,
    check_epoch,
)
from replaybuf.storage.wakes import Wakes

Drawn = dict[str, list[StorageItem]]

_ALL = LogicNode("$and", ())


class MemoryStorage(StateCopies, StorageBackend):
    """Groups in a dict of this process; they are lost when it ends. Threads share it, one operation at a time."""

    new_table: type[Items] = Items

    def __init__(self, codec: Codec, rules: Rules | None = None) -> None:
        self.codec = codec
        self._copying = codec.as_stored()
        self.rules = rules or Rules()
        self._lock = threading.RLock()
        self._groups = Groups(self.new_table(), self.rules)
        self._loans = Loans(self._groups)
        self._checkpoints = Checkpoints()
        self._cursors: dict[str, Cursor] = {}
        self._next_uid = 1
        self._ticket_shift = 0  # uid minus ticket
        self._epoch = 0
        self._wakes = Wakes()

    async def close(self) -> None:
        self._notify()

    # Putting

    async def put(self, group: NewGroup) -> int:
        payload = self._encode(group)
        reward = self._reward(group)
        with self._lock:
            return self._store(group, payload, reward)

    def _store(self, group: NewGroup, payload: bytes, reward: float | None) -> int:
        groups = self._groups
        if group.lease is not None:
            check_epoch(group.lease, self._epoch)
        loans, replaced = self._loans.replaced_by(group), groups.replaced_by(group)
        if not group.stays_leased:
            groups.check_room(group, replaced)
        origins = set(group.replaces).union(*(groups.made_from.get(uid, ()) for uid in group.replaces))
        self._tell(group.dropped, [*map(groups.item, replaced), *(loan.item for loan in loans)])
        groups.remove(replaced, Tally.REPLACED)
        self._loans.remove(loans)
        item = self._add(group, payload, reward)
        groups.made_from[item.uid] = origins
        if group.lease is not None and group.stays_leased:
            item.deliveries = max(loan.item.deliveries for loan in loans) - 1
            self._loans.lend([item], group.lease.token, loans[0].until)
        else:
            excess = groups.excess(group.task_name)
            self._tell(group.dropped, map(groups.item, excess))
            groups.remove(excess, Tally.EVICTED)
        self._notify()
        return item.uid

    def _tell(self, dropped: list[StorageItem] | None, leaving: Iterable[StorageItem]) -> None:
        """Add groups that are about to leave to the caller's list, if there is one."""
        if dropped is not None:
            dropped += [self._decode_leniently(item) for item in leaving]

    async def drop(self, group: NewGroup) -> None:
        with self._lock:
            if group.lease is not None:
                check_epoch(group.lease, self._epoch)
            loans, replaced = self._loans.replaced_by(group), self._groups.replaced_by(group)
            self._tell(group.dropped, [*map(self._groups.item, replaced), *(loan.item for loan in loans)])
            self._groups.remove(replaced, Tally.REPLACED)
            self._loans.remove(loans)
            self._groups.count(group.task_name, transitions.dropped(group.status))
            self._notify()

    async def refuse(self, group: NewGroup) -> None:
        with self._lock:
            self._groups.count(group.task_name, transitions.refused(group.status))

    def _add(self, group: NewGroup, payload: bytes, reward: float | None) -> StorageItem:
        uid, groups = self._new_uid(), self._groups
        if self._ticket_shift:
            groups.races.tickets[uid] = uid - self._ticket_shift
        item = StorageItem(
            uid=uid,
            timestamp_id=uid,
            task_name=group.task_name,
            status=group.status,
            staleness=group.staleness,
            priority=group.priority,
            times_sampled=group.times_sampled,
            created_at=group.created_at,
            reward=reward,
            tags=dict(group.tags) if group.tags else None,
            key=group.key,
            error=group.error,
            deliveries=group.deliveries,
        )
        groups.payloads[uid] = payload
        groups.apply(transitions.put(group.status), item)
        return groups.item(uid)

    # Drawing

    async def take(self, draw: Draw) -> Drawn | None:
        with self._lock:
            drawn = self._draw(draw)
            if drawn is not None:
                for item in _all(drawn):
                    step = transitions.drawn(item, self.rules.limits)
                    self._groups.apply(step, item)
                    item.times_sampled += step.draws
                self._notify()
            return drawn

    def _draw(self, draw: Draw) -> Drawn | None:
        self._end_leases()
        drawn: Drawn = {}
        policy = self.rules.sampler
        for task_name, size in self._allowed(draw).items():
            lane = (task_name, draw.status)
            self._groups.begin_races(lane, policy.order)
            candidates = self._groups.table.select(in_lane(*lane, draw.where), policy.order, self._groups.races.key)
            drawn[task_name] = self._decodable(candidates, size)
        if not draw.is_met_by({task_name: len(items) for task_name, items in drawn.items()}):
            return None
        for task_name, items in drawn.items():
            if draw.probabilities:
                self._add_probabilities(items, (task_name, draw.status))
            self._groups.advance(items, policy.race)
            if draw.where is not None and policy.race is not None:
                self._groups.skip((task_name, draw.status), policy.race)
        return drawn

    def _allowed(self, draw: Draw) -> dict[str, int]:
        limits = self.rules.limits
        if draw.status != Status.COMPLETED or not limits.slows_draws:
            return dict(draw.sizes)
        return {task: min(size, limits.drawable(self._groups.level(task))) for task, size in draw.sizes.items()}

    def _decodable(self, candidates: list[int], size: int) -> list[StorageItem]:
        """Return the first `size` candidates that can be decoded, and set aside those that can't."""
        good: list[StorageItem] = []
        for uid in candidates:
            if len(good) >= size:
                break
            try:
                good.append(self._decode(uid))
            except DecodeError as error:
                item = self._groups.item(uid)
                self._groups.apply(transitions.set_aside(item.status, str(error)), item)
                self._notify()
        return good

    def _add_probabilities(self, items: Sequence[StorageItem], lane: LaneName) -> None:
        members = [self._groups.item(uid) for uid in self._groups.table.select(in_lane(*lane))]
        prioritized = self.rules.sampler.race == PRIORITIZED
        total = sum(share(member.priority) for member in members) if prioritized else 0.0
        idle = sum(member.priority == 0 for member in members) if prioritized else len(members)
        for item in items:
            item.probability = share(item.priority) / total if prioritized and item.priority else 1 / idle
            item.weight = len(members) * item.probability

    # Leases

    async def lease(self, draw: Draw, seconds: float) -> Leased | None:
        with self._lock:
            drawn = self._draw(draw)
            if drawn is None:
                return None
            token, until = self._new_uid(), lease_time() + seconds
            self._loans.lend(_all(drawn), token, until)
            self._notify()
            return Leased(token, until, drawn, self._epoch)

    async def acknowledge(self, lease: Leased, uids: Sequence[int]) -> None:
        with self._lock:
            check_epoch(lease, self._epoch)
            self._loans.acknowledge(lease, uids)
            self._notify()

    async def give_back(self, lease: Leased, uids: Sequence[int], *, counts: bool, reason: str = "") -> int:
        with self._lock:
            given_back = self._loans.give_back(lease, uids, reason if counts else None)
            self._notify()
            return given_back

    async def extend(self, lease: Leased, uids: Sequence[int], seconds: float) -> float:
        with self._lock:
            check_epoch(lease, self._epoch)
            held = self._loans.held(lease, uids)
            until = lease_time() + seconds
            for loan in held:
                loan.until = until
            return until

    def _end_leases(self) -> None:
        if self._loans.end_overdue():
            self._notify()

    # Reading

    async def find(self, query: Node, *, order: Order, limit: int | None = None) -> AsyncIterator[StorageItem]:
        matches = predicate(query)
        with self._lock:
            self._end_leases()
            uids = self._groups.table.select(query, order)[:limit]
        for uid in uids:
            item = self._read(uid, matches)
            if item is not None:
                yield item

    def _read(self, uid: int, matches: Predicate) -> StorageItem | None:
        """Return the group if it is there and still matches; with an error where it can't be decoded."""
        with self._lock:
            item = self._groups.table.get(uid)
            return None if item is None or not matches(item) else self._decode_leniently(item)

    def _decode_leniently(self, item: StorageItem) -> StorageItem:
        try:
            return replace(item, item=self.codec.decode(self._groups.payloads[item.uid]))
        except DecodeError as error:
            return replace(item, error=str(error))

    async def count(self, query: Node, *, at_most: int | None = None) -> int:
        with self._lock:
            self._end_leases()
            found = len(self._groups.table.select(query))
            return found if at_most is None else min(found, at_most)

    async def tallies(self) -> dict[tuple[str, Status, Tally], int]:
        with self._lock:
            self._end_leases()
            return dict(self._groups.tallies)

    async def histogram(self, field: str) -> dict[LaneName, dict[int, int]]:
        with self._lock:
            self._end_leases()
            counts: dict[LaneName, Counter[int]] = {}
            for item in map(self._groups.item, self._groups.table.select(_ALL)):
                counts.setdefault((item.task_name, item.status), Counter())[getattr(item, field)] += 1
            return {lane: dict(values) for lane, values in counts.items()}

    def __len__(self) -> int:
        with self._lock:
            self._end_leases()
            tallies = self._groups.tallies.items()
            return sum(n for (_, status, name), n in tallies if name == Tally.SIZE and status != Status.ARCHIVED)

    # Changing

    async def delete(self, query: Node) -> int:
        with self._lock:
            self._end_leases()
            gone = self._groups.remove(self._groups.table.select(query), Tally.DELETED)
            self._notify()
            return gone

    async def update(self, query: Node, changes: Changes) -> int:
        with self._lock:
            self._end_leases()
            found = self._groups.table.select(query)
            if not isinstance(changes.tags, Unset):
                for uid in found:
                    self._groups.table.change([uid], tags=dict(changes.tags) if changes.tags else None)
            if not isinstance(changes.priority, Unset):
                self._groups.set_priorities(dict.fromkeys(found, changes.priority))
            if not isinstance(changes.status, Unset):
                for item in map(self._groups.item, found):
                    self._groups.apply(transitions.updated(item.status, changes.status), item)
            self._notify()
            return len(found)

    async def update_priorities(self, priorities: Mapping[int, float]) -> int:
        with self._lock:
            return self._loans.set_priorities(priorities) + self._groups.set_priorities(priorities)

    async def refresh(self, refresh: Refresh) -> dict[str, int]:
        with self._lock:
            self._end_leases()
            counts = dict.fromkeys(refresh.rules, 0)
            tasks = SetNode("task_name", "$in", tuple(refresh.rules))
            statuses = SetNode("status", "$in", tuple(status.value for status in refresh.statuses))
            for item in map(self._groups.item, self._groups.table.select(LogicNode("$and", (tasks, statuses)))):
                counts[item.task_name] += self._refresh_one(item, refresh)
            self._notify()
            return counts

    def _refresh_one(self, item: StorageItem, refresh: Refresh) -> bool:
        groups, rule = self._groups, refresh.rules[item.task_name]
        leaves = item.status == Status.EXPIRED and not rule.retryable
        kind = self.codec.rollout_type
        try:
            rollouts = self._copying.decode(groups.payloads[item.uid])
        except DecodeError:
            if not leaves:
                return False
            rollouts = []
        staleness = refresh_group(rollouts, refresh.train_step, kind)
        expired = find_expired(rollouts, rule, refresh.train_step, kind, staleness)
        if leaves or (expired and not rule.retryable):
            if refresh.dropped is not None:
                found = self._decode_leniently(item)
                refresh_group(found.item, refresh.train_step, kind)
                refresh.dropped.append(replace(found, staleness=max(staleness, default=item.staleness)))
            groups.remove([item.uid], Tally.DROPPED)
            return True
        for index in expired:
            reset_response(rollouts[index], kind)
        if (through := rule.masked_through(refresh.train_step)) is not None:
            mask_stale_tokens(rollouts, through, kind)
        groups.payloads[item.uid] = self._copying.encode(rollouts)
        groups.table.change([item.uid], staleness=max(staleness), reward=Marks.of(rollouts, kind).mean_reward)
        if expired:
            groups.apply(transitions.expired(item.status), groups.item(item.uid))
        return bool(expired)

    # Checkpoints

    async def check_fence(self) -> None:
        """Do nothing: no other process can restore a buffer in memory."""

    async def checkpoint(self, step: int, keep: int | None) -> Checkpoint:
        with self._lock:
            self._end_leases()
            return self._checkpoints.make(step, self._world(), keep)

    async def restore(self, step: int, *, keep_new: bool) -> Checkpoint:
        with self._lock:
            made, restored = self._checkpoints.get(step)
            restored.loans.return_all()
            if keep_new:
                self._loans.return_all()
                add_new(self._world(), restored, set(restored.groups.payloads))
            else:
                self._cursors = restored.cursors
                self._ticket_shift = self._next_uid - restored.next_ticket
            self._groups, self._loans = restored.groups, restored.loans
            self._epoch += 1
            self._notify()
            return made

    def _world(self) -> World:
        return World(self._groups, self._loans, self._next_uid - self._ticket_shift, self._cursors)

    async def checkpoints(self) -> list[Checkpoint]:
        with self._lock:
            return self._checkpoints.all()

    async def drop_checkpoint(self, step: int) -> None:
        with self._lock:
            self._checkpoints.drop(step)

    # Prompts

    async def cursor(self, name: str) -> Cursor:
        with self._lock:
            return replace(self._cursors.get(name, Cursor(name)), epoch=self._epoch)

    async def move_cursor(self, cursor: Cursor) -> bool:
        with self._lock:
            moved = self._move(cursor)
            self._notify()
            return moved

    def _move(self, cursor: Cursor) -> bool:
        now = self._cursors.get(cursor.name, Cursor(cursor.name))
        if (now.version, self._epoch) != (cursor.version, cursor.epoch):
            return False
        self._cursors[cursor.name] = replace(cursor, version=cursor.version + 1)
        return True

    async def claim(self, groups: Sequence[NewGroup], cursor: Cursor, seconds: float) -> Leased | None:
        encoded = [(group, self._encode(group)) for group in groups]
        with self._lock:
            if not self._move(cursor):
                return None
            items = [self._add(group, payload, self._reward(group)) for group, payload in encoded]
            token, until = self._new_uid(), lease_time() + seconds
            claimed: Drawn = {}
            for item in items:
                claimed.setdefault(item.task_name, []).append(self._decode(item.uid))
            self._loans.lend(_all(claimed), token, until)
            self._notify()
            return Leased(token, until, claimed, self._epoch)

    async def put_behind(self, groups: Sequence[NewGroup], cursor: Cursor) -> bool:
        encoded = [(group, self._encode(group)) for group in groups]
        with self._lock:
            before, cursors = self._groups.copy(), dict(self._cursors)
            loans = self._loans.copy(before)
            if not self._move(cursor):
                return False
            try:
                for group, payload in encoded:
                    self._store(group, payload, self._reward(group))
            except BaseException:
                self._groups, self._loans, self._cursors = before, loans, cursors
                raise
            self._notify()
            return True

    # Waiting

    def version(self) -> int:
        return self._wakes.version

    async def changed(self, timeout: float, since: int) -> None:
        with self._lock:
            lease_ends = self._loans.next_end() - lease_time()
        await self._wakes.wait(min(timeout, max(0.0, lease_ends)), since)

    def _notify(self) -> None:
        self._groups.prune()
        self._wakes.wake()

    # Persistence

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return pack_state(state_of(self._world(), self._next_uid))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._lock:
            check_empty(len(self._groups.payloads), [made.step for made in self._checkpoints.all()])
            loaded = unpack_state(state)
            load(self._groups, loaded)
            self._next_uid = max(self._next_uid, loaded.next_uid)
            self._ticket_shift = self._next_uid - loaded.next_ticket
            self._cursors = {one.name: one for one in loaded.cursors}
            self._wakes.wake()

    def _new_uid(self) -> int:
        uid = self._next_uid
        self._next_uid += 1
        return uid

    def _encode(self, group: NewGroup) -> bytes:
        if group.payload is not None:
            return group.payload
        return self.codec.encode(group.rollouts, group.fetched or {})

    def _reward(self, group: NewGroup) -> float | None:
        return Marks.of(group.rollouts, self.codec.rollout_type).mean_reward

    def _decode(self, uid: int) -> StorageItem:
        return replace(self._groups.item(uid), item=self.codec.decode(self._groups.payloads[uid]))


def _all(drawn: Drawn) -> list[StorageItem]:
    return [item for items in drawn.values() for item in items]
