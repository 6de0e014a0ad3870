"""Atomic puts into several open buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from replaybuf.errors import ClosedError, FencedError, ReplayBufError, StorageError
from replaybuf.storage.places.store import FileLostError
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
    """A group to be put into an open buffer of this `database`."""

    database: str
    transactions: Transactions
    presence: Presence
    encoding: Encoding
    group: NewGroup


# By index among all puts of the call.
_Puts = Mapping[int, BufferPut]
_Outcomes = dict[int, int | Stored]


async def put_together(puts: Sequence[BufferPut]) -> list[int | Stored]:
    """Put groups into their buffers.

    Within one database this is one transaction: if cancelled, all groups are committed or none. The transactions of
    several databases stay open until all groups are stored: only a failing commit can then break atomicity.
    """
    # Databases in the same order for all calls, to avoid deadlocks.
    apart = [
        {place: one for place, one in enumerate(puts) if one.database == database}
        for database in sorted({one.database for one in puts})
    ]
    while True:
        try:
            outcomes = await _put(apart)
            return [outcomes[place] for place in range(len(puts))]
        except FileLostError:
            continue
        except FencedError:
            # A restore by one of these buffers may be committed and not be known to it yet: this waits for the restore,
            # and raises if it was another process's.
            for one in puts:
                await one.transactions.thread.run(lambda of=one.transactions: of.read_fenced(check_fence))  # type: ignore[misc]


async def _put(apart: Sequence[_Puts]) -> _Outcomes:
    """Put into the buffers of the first database, and into the others' before its commit."""
    here, *others = apart
    lead = next(iter(here.values())).transactions

    async def put() -> _Outcomes:
        def encode(puts: _Puts) -> dict[int, EncodedGroup]:
            return {
                at: encode_groups(one.encoding.codec, one.encoding.files.batch(), [one.group])[0]
                for at, one in puts.items()
            }

        encoded = await lead.compute(encode, here)
        each = {place: statements.BufferGroup(here[place].transactions.scope, one) for place, one in encoded.items()}
        elsewhere: _Outcomes = {}
        try:
            if others:
                async with lead.engine.transaction(lead.scope, write=True) as steps:
                    stored = await steps.run(statements.put_together, each)
                    elsewhere = await _put(others)
            else:
                brief = sum(len(one.payload) for one in encoded.values()) <= BRIEF_BYTES
                stored = await lead.write(lambda tx: statements.put_together(tx, each), brief=brief)
        except (FileLostError, ReplayBufError) as error:
            if not isinstance(error, StorageError):  # refused, and rolled back
                for place, one in encoded.items():
                    here[place].transactions.thread.post(here[place].encoding.files.discard, [one])
            raise
        for place, one in encoded.items():
            _count(here[place], one)
        return stored | elsewhere

    return await lead.thread.run(put)


def _count(put: BufferPut, group: EncodedGroup) -> None:
    """Count a stored group, and wake callers that wait for it, in its buffer's thread."""

    def count() -> None:
        put.presence.count_puts([group])
        put.transactions.committed()

    with contextlib.suppress(ClosedError):  # nobody waits in a buffer that was closed meanwhile
        put.transactions.thread.post(count)
