"""Groups removed by a put, and how they are counted: those that it replaces, and those beyond the capacity."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from replaybuf.errors import ConflictError, DecodeError, ReplayBufError
from replaybuf.rules.policies import KEYS, in_order
from replaybuf.rules.transitions import Place, Tally, removed
from replaybuf.storage.sql.engine.transaction import Scope, Transaction
from replaybuf.storage.sql.statements.counts import Counts, add_step, apply
from replaybuf.storage.sql.statements.files import READING_SECONDS, keep_for_reading
from replaybuf.storage.sql.statements.lanes import COLUMNS, Lane
from replaybuf.storage.sql.statements.matching import WITH_UIDS, lock_groups
from replaybuf.storage.sql.statements.ordering import Ordered, Source, check_races, go_on
from replaybuf.storage.sql.statements.past import leave
from replaybuf.storage.sql.statements.rows import GroupRow, decode_leniently, read_rows
from replaybuf.storage.values import NewGroup, StorageItem, check_lease, lost_to_others
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.rollout import ASIDE

#: Collects the groups removed by a transaction, whose payloads are read after it; None if not requested.
Leaving = list[GroupRow] | None


def note(tx: Transaction, uids: Sequence[int], leaving: Leaving) -> None:
    """Read these groups of the buffer before their removal, if requested."""
    if leaving is not None and uids:
        leaving += read_rows(tx, "g.uid {in:uids}", uids=uids)


def keep_leaving(tx: Transaction, leaving: Leaving) -> None:
    """Keep removed groups' payloads until the caller has read them."""
    keep_for_reading(tx, [row.uid for row in leaving or ()], READING_SECONDS)


def read_removed(tx: Transaction, rows: Sequence[GroupRow]) -> None:
    """Read the payloads of removed groups, as long as they are kept."""
    payloads = dict(map(tuple, tx.tuples(_PAYLOADS, uids=[row.uid for row in rows])))
    for row in rows:
        row.payload = payloads.get(row.uid)


_PAYLOADS = "SELECT uid, data FROM rb_payload WHERE uid {in:uids}"


def decode_removed(rows: Iterable[GroupRow], codec: Codec) -> list[StorageItem]:
    """Return removed groups for the caller, without groups whose metadata is damaged as well."""
    items: list[StorageItem] = []
    for row in rows:
        with contextlib.suppress(DecodeError):
            items += decode_leniently([row], codec)
    return items


def replace_groups(tx: Transaction, condition: str, leaving: Leaving = None, **values: Any) -> None:
    """Remove replaced groups, including leased ones."""
    remove_replaced(tx, lock_replaced(tx, condition, **values), leaving)


def replaced_by_place(
    tx: Transaction, groups: Sequence[NewGroup]
) -> tuple[dict[int, list[GroupRow]], dict[int, ReplayBufError]]:
    """Return the groups replaced by each of these groups, or the error, by index. A stored group is replaced once."""
    uids = sorted({uid for new in groups for uid in (*new.replaces, *new.parts)})
    stored = {row.uid: row for row in lock_replaced(tx, WITH_UIDS, uids=uids)} if uids else {}
    replaced: dict[int, list[GroupRow]] = {}
    errors: dict[int, ReplayBufError] = {}
    for place, new in enumerate(groups):
        if new.replaces or new.parts or new.lease is not None:
            try:
                replaced[place] = _check_replaced(tx.scope, new, stored)
            except ReplayBufError as error:
                errors[place] = error
            else:
                for uid in (*new.replaces, *new.parts):
                    stored.pop(uid, None)
    return replaced, errors


def _check_replaced(scope: Scope, new: NewGroup, stored: Mapping[int, GroupRow]) -> list[GroupRow]:
    """Return the existing groups to be replaced by a put. Raises ConflictError, LeaseLostError and FencedError."""
    token = None
    if new.lease is not None:
        check_lease(new.lease, scope.epoch, scope.database)
        token = new.lease.token
    replaced = {uid: stored[uid] for uid in new.replaces if uid in stored and stored[uid].column("lease") == token}
    missing = [uid for uid in new.replaces if uid not in replaced]
    if missing and new.lease is not None:
        raise lost_to_others(new.lease, missing)
    replaced |= {uid: stored[uid] for uid in new.parts if uid in stored and not stored[uid].is_leased}
    missing += [uid for uid in new.parts if uid not in replaced]
    if missing:
        raise ConflictError(f"group {missing[0]}, which was to be replaced, is not in the buffer; nothing was stored")
    return list(replaced.values())


def lock_replaced(tx: Transaction, condition: str, **values: Any) -> list[GroupRow]:
    """Return the stored groups to be replaced, including leased ones, with row locks."""
    locked = [uid for uid, _ in lock_groups(tx, condition, **values)]
    return read_rows(tx, "g.uid {in:uids}", uids=locked) if locked else []


def remove_replaced(tx: Transaction, rows: Collection[GroupRow], leaving: Leaving = None) -> None:
    """Remove replaced groups, and append them to `leaving`."""
    if leaving is not None:
        leaving += sorted(rows, key=lambda row: row.uid)
    apply(tx, [(row.task_name, removed(Place(row.status, row.is_leased), Tally.REPLACED), [row.uid]) for row in rows])


#: A candidate for eviction, and its lane.
_Candidate = tuple[Lane, Ordered]


def evict(tx: Transaction, tasks: Iterable[str], counts: Counts, leaving: Leaving = None) -> None:
    """Remove the groups beyond the capacity of these tasks; `counts` are this transaction's unwritten counts."""
    limits = tx.scope.rules.limits
    if limits.capacity is None or limits.on_full != "evict":
        return
    rows = tx.tuples(_SIZES, buffer=tx.scope.buffer, tasks=sorted(tasks), aside=sorted(map(str, ASIDE)))
    lanes, sizes = [Lane.read(*row[:-1]) for row in rows], {row[0]: int(row[-1]) for row in rows}
    evicted: list[int] = []
    for task in sorted({home.task_name for home in lanes}):
        size = {home.id: sizes[home.id] + counts[(home.id, Tally.SIZE)] for home in lanes if home.task_name == task}
        filled = [home for home in lanes if size.get(home.id, 0) > 0]
        excess = sum(size.values()) - limits.capacity
        candidates = _first_candidates(tx, filled, excess) if excess > 0 else []
        evicted += [row.uid for _, row in candidates]
        homes = {home.name: home for home in filled}
        for status, n in Counter(home.status for home, _ in candidates).items():
            add_step(counts, homes, task, removed(Place(status), Tally.EVICTED), n)
    note(tx, evicted, leaving)
    counts.update(leave(tx, evicted))


#: The lanes of tasks that count towards the capacity, and the number of groups in each.
_SIZES = f"""SELECT {COLUMNS}, (
    SELECT coalesce(sum(amount), 0) FROM rb_tally t WHERE t.lane = rb_lane.id AND t.name = 'size'
) FROM rb_lane
WHERE buffer = :buffer AND NOT leased AND NOT status {{in_texts:aside}} AND task_name {{in_texts:tasks}} ORDER BY id"""  # noqa: S608


def _first_candidates(tx: Transaction, lanes: Sequence[Lane], count: int) -> list[_Candidate]:
    """Return the first groups of several lanes together, in the remover's order."""
    remover = tx.scope.rules.remover
    check_races(tx, lanes, remover.order)
    places = {term.field: place for place, term in enumerate(remover.order)}

    def value(candidate: _Candidate, field: str) -> Any:
        home, row = candidate
        return _comparable_value(home, field, row.values[places[field]])

    candidates = [(home, row) for home in lanes for row in Source(home).first(tx, count, remover.order)]
    firsts = in_order(candidates, remover.order, value)[:count] if len(lanes) > 1 else candidates
    if remover.is_race:
        waits = [value(candidate, remover.order[0].field) for candidate in firsts]
        for home in sorted(lanes, key=lambda home: home.id):
            assert home.race is not None
            home.race.pass_time(waits)
            go_on(tx, home, [row.priority for _, row in firsts])
    return firsts


def _comparable_value(home: Lane, field: str, value: Any) -> Any:
    """Return the sort value of groups of several lanes; for a sampling key, the virtual time left until its draw."""
    return home.race.left(value) if field in KEYS and home.race is not None else value
