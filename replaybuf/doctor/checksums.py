"""Whether payloads are as they were written: each is read, and compared with its checksum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqlalchemy import Connection, select, union

from replaybuf.codec.payload import Codec
from replaybuf.doctor.finding import Finding, Look, fine, groups, problem, repairable, some, warning
from replaybuf.doctor.groups import put_aside
from replaybuf.errors import DecodeError, StorageError
from replaybuf.rollouts.rollout_type import RolloutType
from replaybuf.storage.sql.inspection import Reader
from replaybuf.storage.sql.schema.tables import checkpoint, checkpoint_group, group, payload
from replaybuf.storage.sql.statements.columns import uid_in

NAME = "checksums"

#: How many payloads are read with `--quick`.
SAMPLE = 200
_BATCH_BYTES = 16 * 1024 * 1024
_BATCH_GROUPS = 500

_codec = Codec(RolloutType(dict))
_Named = tuple[int, int]


def look_at_checksums(reader: Reader, look: Look) -> list[Finding]:
    """Read and verify payloads, in transactions of their own: a long one would hold back who cleans up.

    What is damaged is kept in `look.damaged`.
    """
    named = reader.read(_named)
    chosen = named[:: len(named) // SAMPLE + 1] if look.quick else named
    damaged: dict[int, str] = {}
    done = 0
    for batch in _batches(chosen):
        damaged |= _verify(reader, batch)
        done += len(batch)
        look.tell(done, len(chosen))
    look.damaged |= damaged
    what = f"{len(chosen):,} of {groups(len(named))}" if len(chosen) < len(named) else groups(len(named))
    note = f" (--quick: {len(chosen):,} of {len(named):,} read)" if len(chosen) < len(named) else ""
    if not damaged:
        return [fine(NAME, f"{what} read, all payloads as they were written")]
    return reader.read(lambda connection: _findings(connection, damaged, note))


def _findings(connection: Connection, damaged: dict[int, str], note: str) -> list[Finding]:
    there = select(group.c.uid).where(uid_in(connection, sorted(damaged)))
    uids = set(connection.execute(there).scalars())
    known = _set_aside_already(connection, sorted(damaged))
    found = []
    if new := sorted(uids - known):
        named = some([f"{uid} ({damaged[uid]})" for uid in new], 3)
        found.append(repairable(NAME, f"the payloads of {groups(len(new))} are damaged: {named}{note}"))
    if known:
        text = f"the payloads of {groups(len(known))} are damaged, set aside already: {some(sorted(known))}{note}"
        found.append(warning(NAME, text, 'buffer.delete({"uid": ...}) when nobody needs to know of them'))
    if kept := sorted(damaged.keys() - uids):
        text = f"the payloads of {groups(len(kept))} that only checkpoints have are damaged: {some(kept)}{note}"
        found.append(problem(NAME, text, "buffer.drop_checkpoint(step), or restore without them"))
    return found


def repair_checksums(connection: Connection, look: Look) -> Sequence[str]:
    """Set groups aside that were found damaged, and still are."""
    uids = sorted(look.damaged.keys() - _set_aside_already(connection, list(look.damaged)))
    reasons = {}
    for batch in (uids[start : start + 50] for start in range(0, len(uids), 50)):
        query = select(group.c.uid, payload.c.data).outerjoin_from(group, payload, payload.c.uid == group.c.uid)
        for uid, data in connection.execute(query.where(uid_in(connection, batch))):
            if (why := _why(data)) is not None:
                reasons[uid] = why
    return put_aside(connection, reasons)


def _set_aside_already(connection: Connection, uids: list[int]) -> set[int]:
    if not uids:
        return set()
    query = select(group.c.uid).where(uid_in(connection, uids), group.c.error.is_not(None))
    return set(connection.execute(query).scalars())


def _named(connection: Connection) -> list[_Named]:
    """The groups with a payload, those of checkpoints too, each with its size."""
    kept = checkpoint_group.c.checkpoint.in_(select(checkpoint.c.id))
    in_checkpoints = select(checkpoint_group.c.uid, checkpoint_group.c.bytes).where(kept)
    every = union(select(group.c.uid, group.c.bytes), in_checkpoints).subquery()
    query = select(every).join(payload, payload.c.uid == every.c.uid).order_by(every.c.uid)
    return [(uid, size) for uid, size in connection.execute(query)]


def _batches(named: Sequence[_Named]) -> Iterator[list[int]]:
    batch: list[int] = []
    size = 0
    for uid, nbytes in named:
        if batch and (size + nbytes > _BATCH_BYTES or len(batch) >= _BATCH_GROUPS):
            yield batch
            batch, size = [], 0
        batch.append(uid)
        size += nbytes
    if batch:
        yield batch


def _verify(reader: Reader, uids: list[int]) -> dict[int, str]:
    """Which of these payloads are damaged, and why. Those that are gone by now are not."""

    def read(connection: Connection) -> list[tuple[int, bytes]]:
        query = select(payload.c.uid, payload.c.data).where(payload.c.uid.in_(uids))
        return [(uid, data) for uid, data in connection.execute(query)]

    try:
        rows = reader.read(read)
    except StorageError as error:
        if len(uids) == 1:
            return {uids[0]: f"it can't be read: {error}"}
        half = len(uids) // 2
        return _verify(reader, uids[:half]) | _verify(reader, uids[half:])
    return {uid: why for uid, data in rows if (why := _why(data)) is not None}


def _why(data: bytes | None) -> str | None:
    if data is None:
        return "its payload is missing"
    try:
        _codec.verify(data)
    except DecodeError as error:
        return str(error)
    return None
