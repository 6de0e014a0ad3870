"""Putting into several buffers, each of them open by itself: all of them or none."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from replaybuf.errors import ClosedError, FencedError
from replaybuf.segments.store import SegmentLostError
from replaybuf.storage.sql.statements import put as statements
from replaybuf.storage.sql.statements.fence import check_fence
from replaybuf.storage.sql.statements.new_rows import EncodedGroup, encode_groups
from replaybuf.storage.sql.statements.put import Stored
from replaybuf.storage.sql.tasks.encoding import Encoding
from replaybuf.storage.sql.tasks.group_commit import BRIEF_BYTES
from replaybuf.storage.sql.tasks.heartbeats import Presence
from replaybuf.storage.sql.tasks.transactions import Transactions
from replaybuf.storage.values import NewGroup


@dataclass(frozen=True, slots=True)
class BufferPut:
    """A group to be put into an open buffer, which is in this `database`."""

    database: str
    transactions: Transactions
    presence: Presence
    encoding: Encoding
    group: NewGroup


# By their place among all of the call.
_Puts = Mapping[int, BufferPut]
_Outcomes = dict[int, int | Stored]


async def put_together(puts: Sequence[BufferPut]) -> list[int | Stored]:
    """Put groups into their buffers.

    Of one database, that is one transaction: cancelled, all groups are committed or none. Those of several are open
    until the groups of all are stored: only a commit that fails could then come between them.
    """
    # In one order for all calls, so that two of them don't wait for each other.
    apart = [
        {place: one for place, one in enumerate(puts) if one.database == database}
        for database in sorted({one.database for one in puts})
    ]
    while True:
        try:
            outcomes = await _put(apart)
            return [outcomes[place] for place in range(len(puts))]
        except SegmentLostError:
            for one in puts:
                one.encoding.segments.lost()
        except FencedError:
            # A restore by one of these buffers may be committed and not be known to it yet: this waits for it, and
            # raises if the restore was another's.
            for one in puts:
                await one.transactions.thread.run(lambda of=one.transactions: of.read_fenced(check_fence))  # type: ignore[misc]


async def _put(apart: Sequence[_Puts]) -> _Outcomes:
    """Put into the buffers of the first database, and into those of the others before its commit."""
    here, *others = apart
    lead = next(iter(here.values())).transactions
    batches = {place: await one.transactions.thread.run(one.encoding.segments.ready) for place, one in here.items()}

    async def put() -> _Outcomes:
        def encode(puts: _Puts) -> dict[int, EncodedGroup]:
            return {at: encode_groups(one.encoding.codec, batches[at], [one.group])[0] for at, one in puts.items()}

        encoded = await lead.compute(encode, here)
        each = {place: statements.BufferGroup(here[place].transactions.scope, one) for place, one in encoded.items()}
        elsewhere: _Outcomes = {}
        if others:
            async with lead.engine.transaction(lead.scope, write=True) as steps:
                stored = await steps.run(statements.put_together, each)
                elsewhere = await _put(others)
        else:
            brief = sum(len(one.payload) for one in encoded.values()) <= BRIEF_BYTES
            stored = await lead.write(lambda tx: statements.put_together(tx, each), brief=brief)
        for place, one in encoded.items():
            _count(here[place], one)
        return stored | elsewhere

    return await lead.thread.run(put)


def _count(put: BufferPut, group: EncodedGroup) -> None:
    """Count what was put into a buffer, and wake those who wait for it, in its own thread."""

    def count() -> None:
        put.presence.count_puts([group])
        put.transactions.committed()

    with contextlib.suppress(ClosedError):  # meanwhile: nobody waits there
        put.transactions.thread.post(count)
