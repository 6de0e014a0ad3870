"""Operations with leases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from replaybuf import ReplayBuffer, Status
from replaybuf.buffer.lease import Lease
from replaybuf.storage.values import NewGroup
from tests.side_by_side.drawn import (
    TASKS,
    make_prompt,
    sizes,
    sometimes,
    statuses,
    tasks,
)
from tests.side_by_side.pair import Pair
from tests.side_by_side.seen import plain_error, seen


class Leasing(Pair):
    """Leases of groups and prompts, and how they end."""

    @precondition(lambda self: len(self.reference) > 1)
    @rule(
        wanted=st.dictionaries(tasks, sizes, min_size=1),
        status=statuses,
        where=sometimes,
        failures=st.sampled_from([0, 0, 1, 2]),
    )
    def lease(self, wanted: dict[str, int], status: Status, where: Any, failures: int) -> None:
        """Groups are leased, after others may have failed with them."""

        async def leased(buffer: ReplayBuffer) -> Lease:
            for failure in range(failures + 1):
                lease = await buffer.lease_batch(
                    wanted, group_status=status, where=where, seconds=1000, heartbeat=False
                )
                if failure < failures:
                    await lease.give_back(failed=f"failure {failure}")
            return lease

        pair = self.each(leased)
        expected, got = (seen(one.items) if isinstance(one, Lease) else plain_error(one) for one in pair)
        assert got == expected
        if isinstance(pair[0], Lease):
            self.leases.append(pair)

    @precondition(lambda self: self.leases)
    @rule(
        which=st.integers(0, 9),
        part=st.none() | st.lists(st.integers(0, 3), max_size=2),
        how=st.sampled_from(["acknowledge", "acknowledge", "give back", "failed", "extend"]),
        priority=st.sampled_from([None, 0, 0.5, 1e3]),
    )
    def settle(self, which: int, part: list[int] | None, how: str, priority: float | None) -> None:
        """A part of a lease, or all that is open, perhaps with a new priority."""
        pair = self.leases[which % len(self.leases)]
        there = sorted(pair[0].open)
        uids = None if part is None else [there[place] for place in part if place < len(there)]
        if priority is not None:
            self.both(lambda buffer: buffer.update_priorities(dict.fromkeys(there, priority)))

        async def settled(lease: Lease) -> Any:
            if how == "acknowledge":
                return await lease.acknowledge(uids)
            if how == "extend":
                return await lease.extend(2000)
            return await lease.give_back(uids, failed="bad" if how == "failed" else None)

        expected, got = self.each(lambda buffer: settled(pair[0] if buffer is self.reference else pair[1]))
        assert plain_error(got) == plain_error(expected)
        assert pair[1].open == pair[0].open

    @rule(numbers=st.lists(st.integers(0, 9), max_size=3), behind=st.sampled_from([0, 0, 0, 1]), keep=st.booleans())
    def claim(self, numbers: list[int], behind: int, keep: bool) -> None:
        """Prompts are claimed, and one of them is finished."""

        async def claimed(buffer: ReplayBuffer) -> Any:
            now = await buffer.cursors.read("data")
            prompts = [NewGroup(TASKS[0], Status.INIT, 0, make_prompt(number), 1.0) for number in numbers]
            moved = replace(
                now, version=now.version - behind, position=now.position + len(numbers), value=bytes(numbers)
            )
            return await buffer.cursors.claim(prompts, moved, 1000)

        pair = self.each(claimed)
        expected, got = (seen(one.items) if isinstance(one, Lease) else one for one in pair)
        assert got == expected
        if not isinstance(pair[0], Lease):
            return
        self.leases.append(pair)
        uids = sorted(pair[0].open)[:1]

        async def finished(buffer: ReplayBuffer) -> Any:
            lease = pair[0] if buffer is self.reference else pair[1]
            prompt = make_prompt(7)
            put = lease.save if keep else lease.finish
            return await put(prompt, TASKS[0], replaces=uids)

        if uids:
            self.both(finished)
