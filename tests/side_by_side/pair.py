"""Two buffers on which the same operations run."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

import replaybuf.buffer.putting
from replaybuf import ReplayBuffer
from replaybuf.buffer.lease import Lease
from replaybuf.rules.limits import Rules
from replaybuf.storage.values import StorageItem
from tests.contract.harness import CODEC
from tests.reference.backend import Reference
from tests.side_by_side.places import Place
from tests.side_by_side.seen import (
    all_items,
    caught,
    everything,
    expected_views,
    make_group,
    outcome,
    plain_error,
    puts,
    rules,
    seen,
)


class Pair(RuleBasedStateMachine):
    """The buffers, what runs an operation on both, and what must be the same. Subclasses say where the other one is."""

    place: Place

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = Path(tempfile.mkdtemp(prefix="rb-side-"))
        self.clock = patch.object(replaybuf.buffer.putting, "time", _Clock())

    @initialize(rules=rules, first=st.lists(puts, min_size=4, max_size=8))
    def begin(self, rules: Rules, first: list[dict[str, Any]]) -> None:
        self.clock.start()
        self.rules = rules
        self.begin_with_new()
        self.put_at_once(first)

    def buffer(self, storage: Any) -> ReplayBuffer:
        return ReplayBuffer(storage, CODEC.rollout_type, put_timeout=0)

    def teardown(self) -> None:
        self.clock.stop()
        self.runner.run(self.other.close())
        self.runner.close()
        self.place.leave()
        shutil.rmtree(self.folder)

    def both(self, operation: Callable[[ReplayBuffer], Awaitable[Any]]) -> Any:
        """Run an operation on both buffers; its result, or error, which has to be the same."""
        replaybuf.buffer.putting.time.now += 1
        expected, got = (self.runner.run(outcome(operation, one)) for one in (self.reference, self.other))
        assert got == expected
        return got

    def each(self, operation: Callable[[ReplayBuffer], Awaitable[Any]]) -> tuple[Any, Any]:
        """Run an operation on both buffers; what it gives, or the error, for either."""
        replaybuf.buffer.putting.time.now += 1
        expected, got = (self.runner.run(caught(operation, one)) for one in (self.reference, self.other))
        return expected, got

    def put_at_once(self, many: list[dict[str, Any]]) -> None:
        rules, next_uid = self.reference.storage.rules, self.reference.storage._next_uid
        many = [_independent(put, next_uid) for put in many]
        if rules.limits.capacity is not None and (
            rules.remover.is_race or any(put["replaces"] or put.get("key") is not None for put in many)
        ):
            # Puts that are committed together evict together: by the same chances, but not the same groups; and what
            # one of them replaces is evicted then, or not yet.
            for put in many:
                self.put_one(put)
            return

        async def operation(buffer: ReplayBuffer) -> Any:
            calls = [buffer.put(**(put | {"items": make_group(put["items"])})) for put in many]
            return [plain_error(result) for result in await asyncio.gather(*calls, return_exceptions=True)]

        self.both(operation)

    def put_one(self, put: dict[str, Any]) -> None:
        async def operation(buffer: ReplayBuffer) -> Any:
            given, gone = make_group(put["items"]), list[StorageItem]()
            stored = await buffer.put(**(put | {"items": given, "dropped": gone}))
            return stored, given, seen({"": sorted(gone, key=lambda item: item.uid)})

        self.both(operation)

    def begin_anew(self) -> None:
        self.runner.run(self.other.close())
        self.begin_with_new()

    def begin_with_new(self) -> None:
        self.leases: list[tuple[Lease, Lease]] = []
        self.reference = self.buffer(Reference(CODEC, self.rules))
        self.other = self.buffer(self.place.new(self.rules))

    @invariant()
    def same(self) -> None:
        expected, got = (self.runner.run(everything(one)) for one in (self.reference, self.other))
        assert got["items"] == expected["items"]
        assert got == expected
        views = self.runner.run(self.place.views())
        if views is not None:
            items = self.runner.run(all_items(self.reference))
            for row in views["groups"]:
                del row["trained_step"]  # see `seen.fields`
            leased = {row["uid"] for row in views["groups"] if row.pop("leased_until") is not None}
            for name, rows in expected_views(items).items():
                assert [row for row in views[name] if row["uid"] not in leased] == rows, name


def _independent(put: dict[str, Any], next_uid: int) -> dict[str, Any]:
    """A put as one of several at once, for which it is a matter of time which are committed together.

    It names no group that comes with it, and isn't dropped when that would remove one.
    """
    put = put | {"replaces": [uid for uid in put.get("replaces", ()) if uid < next_uid]}
    stored: dict[str, Any] = {"expired_groups_retryable": True, "keep_unfit": True}
    return put | stored if put["replaces"] or "key" in put else put


class _Clock:
    """The time as both buffers see it: equal for the same operation."""

    def __init__(self) -> None:
        import time

        self.now = 1_000_000
        self.monotonic = time.monotonic

    def time(self) -> float:
        return float(self.now)
