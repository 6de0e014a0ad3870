"""The repairs of `replaybuf doctor --repair`: of groups and payloads, counts, indexes and views; and all in turn.

A repair does only what is safe, in one exclusive write transaction, and returns what it did. It determines the damage
again by itself, because that may have changed since the check. (Repairs of files are in `check_places`.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import and_, update

from replaybuf.codec.stored import joined, read_tails
from replaybuf.codec.texts import Texts
from replaybuf.doctor import CheckContext, Severity, check_file, check_places, groups
from replaybuf.doctor.check_file import integrity_messages, only_of_indexes
from replaybuf.doctor.check_groups import (
    BARE,
    HALF_LEASED,
    LANELESS,
    LANELESS_TALLIES,
    LEAKED_PAYLOADS,
    MISSING,
    sizes_of,
    uids_of,
)
from replaybuf.doctor.check_payloads import BadText, count_of, reasons_of, set_aside_already, some_of, unreadable
from replaybuf.doctor.check_schema import find_revision, missing_views, wrong_indexes
from replaybuf.doctor.examine import FAILURES, text_of
from replaybuf.errors import DecodeError, StorageError
from replaybuf.rollouts.marks import Marks
from replaybuf.rollouts.outline import outline, prompt_preview
from replaybuf.rollouts.statuses import Status
from replaybuf.rules.limits import Limits, Rules
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.engine.transaction import Scope, Transaction
from replaybuf.storage.sql.inspection.group_payloads import AS_DICTS
from replaybuf.storage.sql.inspection.groups import buffers_of
from replaybuf.storage.sql.inspection.reader import Reader
from replaybuf.storage.sql.inspection.writer import open_writer
from replaybuf.storage.sql.schema.create import create_index, create_views, drop_views
from replaybuf.storage.sql.schema.tables import group, payload
from replaybuf.storage.sql.statements.counts import FREE, add_counts, set_aside
from replaybuf.storage.sql.statements.files import count_gone
from replaybuf.storage.sql.statements.lanes import COLUMNS as LANE_COLUMNS
from replaybuf.storage.sql.statements.lanes import Lane, need_lane
from replaybuf.storage.sql.statements.leases import end_leases
from replaybuf.storage.sql.statements.ordering import enter_races
from replaybuf.storage.sql.statements.past import sweep
from replaybuf.storage.sql.statements.restore import raise_uid
from replaybuf.storage.sql.statements.rows import uid_in
from replaybuf.storage.sql.statements.upkeep import wall_clock
from replaybuf.storage.sql.tasks.sweeper import GRACE_SECONDS
from replaybuf.units import some

#: The task for groups whose own task is unknown, and their error.
LOST = "lost+found"
WHY_LOST = "its task and status were lost"
_SWEPT_AT_ONCE = 10_000


def set_groups_aside(tx: Transaction, reasons: Mapping[int, str]) -> list[str]:
    """Make groups with unreadable payloads FAILED, with the reason as their error; return what was done.

    Archived groups stay ARCHIVED, with the reason. Leased groups are left to their consumers.
    """
    if not reasons:
        return []
    archived: list[int] = []
    homes: dict[int, tuple[str, Lane, list[int]]] = {}
    for uid, buffer, *columns in tx.tuples(_FREE, uids=list(reasons)):
        home = Lane.with_clocks(*columns)
        if home.status == Status.ARCHIVED:
            archived.append(uid)
            tx.change("UPDATE rb_group SET error = :error WHERE uid = :uid", uid=uid, error=reasons[uid])
        else:
            homes.setdefault(home.id, (buffer, home, []))[2].append(uid)
    done = [f"said so in the error of {groups(len(archived))} of the archive: {some(archived)}"] if archived else []
    for buffer, home, uids in homes.values():
        set_aside(tx.of(Scope(buffer)), home, {uid: reasons[uid] for uid in uids})
        done.append(f"set {groups(len(uids))} of the task {home.task_name} aside as failed: {some(uids)}")
    return done


_FREE = f"""SELECT uid, buffer, {LANE_COLUMNS} FROM rb_group JOIN rb_lane ON id = lane
WHERE uid {{in:uids}} AND NOT leased ORDER BY uid"""  # noqa: S608


def repair_lanes(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Set groups without a lane aside, as FAILED groups of a task of their own."""
    if not (uids := tx.values(LANELESS)):
        return []
    home = need_lane(tx, (LOST, Status.FAILED))
    free: dict[str, Any] = {**FREE, "lane": home.id, "error": WHY_LOST}
    tx.change(update(group).where(uid_in(tx, uids)).values(free))
    stepless = and_(uid_in(tx, uids), group.c.pinned_staleness.is_(None))
    tx.change(update(group).where(stepless).values(pinned_staleness=0))
    enter_races(tx, home, uids)
    add_counts(tx, {(home.id, Tally.PUT): len(uids), (home.id, Tally.SIZE): len(uids)})
    return [f"set {groups(len(uids))} of no task aside, as failed ones of the task {LOST}: {some(uids)}"]


def repair_leased(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Free half-leased groups; let leases without an end expire now."""
    uids = []
    for uid, lease, leased, buffer, task_name, status in tx.table(HALF_LEASED)[1]:
        own = tx.of(Scope(buffer))
        home = need_lane(own, (task_name, Status(status)))
        if leased and lease is not None:
            values: dict[str, Any] = {"leased_until": tx.dialect.clock(tx)}
        else:
            values = {**FREE, "lane": home.id}
        tx.change(update(group).where(group.c.uid == uid).values(values))
        if leased and lease is None:
            add_counts(tx, {(home.id, Tally.LEASED): -1, (home.id, Tally.SIZE): 1})
            enter_races(own, home, [uid])
        uids.append(uid)
    return [f"gave back {groups(len(uids))} that were half leased: {some(uids)}"] if uids else []


def repair_payloads(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Set aside groups without a payload."""
    bare = tx.table(BARE)[1]
    return set_groups_aside(tx, {uid: MISSING for uid, error in bare if error is None})


def repair_leaked(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Delete payloads that nothing refers to."""
    gone = tx.run(f"DELETE FROM {LEAKED_PAYLOADS} RETURNING file")  # noqa: S608
    count_gone(tx, (file for (file,) in gone))
    return [f"deleted {len(gone):,} leaked payloads"] if gone else []


def repair_garbage(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Sweep payloads whose grace period is over."""
    swept = sweep(tx, wall_clock(tx) - GRACE_SECONDS, _SWEPT_AT_ONCE)
    return [f"swept {swept:,} payloads"] if swept else []


#: Replacements of texts where the payload can't be read either.
_NOTHING: dict[str, Any] = {"marks": {"oldest": [], "newest": [], "reward": []}, "outline": [], "prompt": None}
_MENDED_AT_ONCE = 50


def repair_texts(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Rebuild previews and marks from the payload; remove unreadable tags, keys and reasons.

    Groups whose payload can't be read either are set aside. Raises PayloadStoreError.
    """
    bad, reasons = list(unreadable(tx)), {}
    for one in bad:
        value, reason = _made_anew(tx, one)
        table = group if one.table == "rb_group" else payload
        tx.change(update(table).where(table.c.uid == one.uid).values({one.column: value}))
        if reason:
            reasons[one.uid] = reason
    return [f"mended texts of {count_of(bad)}: {some_of(bad)}", *set_groups_aside(tx, reasons)] if bad else []


def _made_anew(tx: Transaction, bad: BadText) -> tuple[Any, str | None]:
    """Return the replacement of a text, and why its group must be set aside (None if it needn't)."""
    if bad.column not in _NOTHING:
        return None, None
    found = tx.tuples(_STATUS_AND_DATA, uid=bad.uid)
    status, data = (found[0][0] or "", found[0][1]) if found else ("", b"")
    [tail] = read_tails([data], tx.places())
    try:
        rollouts = AS_DICTS.decode(joined(data, tail))
    except DecodeError as error:
        return _NOTHING[bad.column], str(error)
    if bad.column == "marks":
        return marks_anew(rollouts, status).to_json(), None
    kind = AS_DICTS.rollout_type
    if bad.column == "prompt":
        return prompt_preview(rollouts, kind), None
    return outline(rollouts, kind, Texts(data).find), None


_STATUS_AND_DATA = """SELECT status, data FROM rb_payload p
LEFT JOIN rb_group g ON g.uid = p.uid LEFT JOIN rb_lane l ON l.id = g.lane WHERE p.uid = :uid"""


def marks_anew(rollouts: Sequence[Any], status: str) -> Marks:
    """Return the marks of a group, rebuilt from its rollouts. In an EXPIRED group all rollouts count as expired."""
    if status != Status.EXPIRED:
        return Marks.of(rollouts, AS_DICTS.rollout_type)
    nothing: list[Any] = [None] * len(rollouts)
    staleness = [int(rollout.get("seq_staleness", 0) or 0) for rollout in rollouts]
    return Marks(nothing, nothing, nothing, [True] * len(rollouts), staleness)


def repair_checksums(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Set aside groups that were found damaged, and still are."""
    left = sorted(context.damaged.keys() - set_aside_already(tx, context.damaged))
    reasons: dict[int, str] = {}
    for start in range(0, len(left), _MENDED_AT_ONCE):
        query = "SELECT g.uid, data FROM rb_group g LEFT JOIN rb_payload p ON p.uid = g.uid WHERE g.uid {in:uids}"
        rows = tx.tuples(query, uids=left[start : start + _MENDED_AT_ONCE])
        reasons |= reasons_of(rows, tx.places(), context.out_of_reach)
    return set_groups_aside(tx, reasons)


def repair_counts(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Recount the groups."""
    lost = tx.change(f"DELETE FROM {LANELESS_TALLIES}")  # noqa: S608
    wrong = [size for size in sizes_of(tx) if size.counted != size.there]
    add_counts(tx, {(size.lane, size.name): size.there - size.counted for size in wrong})
    done = [f"removed {lost:,} counts of lanes that are gone"] if lost else []
    return done + [f"counted {size.name} of {size.label} anew: {size.there - size.counted:+,}" for size in wrong]


def repair_uids(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Move the counter of uids past those in use."""
    used, last = uids_of(tx)
    if last is None:
        tx.change("INSERT INTO rb_counter (name, value) VALUES ('uid', 0)")
    elif last >= used:
        return []
    raise_uid(tx, used)
    return [f"raised the counter of uids from {last or 0:,} to {used:,}"]


def repair_leases(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """End the expired leases."""
    rules = Rules(limits=Limits(max_deliveries=0))  # the limit is known from the run's config only
    ended = {buffer: end_leases(tx.of(Scope(buffer, rules))) for buffer in buffers_of(tx)}
    return [
        f"gave back {groups(count)} of the buffer {buffer} whose lease was over"
        for buffer, count in ended.items()
        if count
    ]


def repair_integrity(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Rebuild indexes that differ from their tables."""
    messages = integrity_messages(tx, "integrity_check")
    if not messages or not only_of_indexes(messages):
        return []
    tx.run("REINDEX")
    return ["made all indexes anew"]


def repair_indexes(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Create the indexes that are missing or wrong."""
    wrong = list(wrong_indexes(tx))
    for index, _ in wrong:
        tx.run(f"DROP INDEX IF EXISTS {index.name}")
        create_index(tx, index)
    return [f"made the index {index.name}, which {why}" for index, why in wrong]


def repair_views(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Recreate the views."""
    missing = missing_views(tx)
    if missing:
        drop_views(tx)
        create_views(tx)
    return [f"made the views {', '.join(missing)}"] if missing else []


#: Does what is safe to repair in one exclusive write transaction, and returns what it did. It determines the damage
#: again by itself, because that may have changed since the check.
Repair = Callable[[Transaction, CheckContext], Sequence[str]]

_OF_FILES: dict[str, Repair] = {"integrity": repair_integrity, "texts": repair_texts}
#: The repairs, by the name of their check. Counts come last, because other repairs move groups.
_REPAIRS: dict[str, Repair] = {
    "indexes": repair_indexes,
    "views": repair_views,
    "lanes": repair_lanes,
    "leased groups": repair_leased,
    "payloads": repair_payloads,
    "leaked payloads": repair_leaked,
    "garbage": repair_garbage,
    "payload files": check_places.repair_files,
    "uids": repair_uids,
    "checksums": repair_checksums,
    "leases": repair_leases,
    "places": check_places.repair_places,
    "files that nothing names": check_places.delete_nobodys,
    "counts": repair_counts,
}


def repair(reader: Reader, context: CheckContext) -> list[str]:
    """Run the safe repairs, each in an exclusive write transaction. Return what was done.

    `context` has the payloads that `examine` found damaged. No group and no referenced payload is deleted. Raises
    StorageError if the schema isn't that of this version.
    """
    revision = reader.read_any(lambda tx: find_revision(tx, context))
    if any(finding.level != Severity.OK for finding in revision):
        raise StorageError(f"{reader.where} was left as it is: {revision[0].text}; {revision[0].mend}", reason="schema")
    done: list[str] = []
    with open_writer(reader) as writer:
        for name, mend in ((_OF_FILES if reader.path else {}) | _REPAIRS).items():
            try:
                done += writer.write(lambda tx, mend=mend: mend(tx, context))  # type: ignore[misc]
            except FAILURES as error:
                done.append(f"could not mend {name}: {text_of(error)}")
        if reader.path and check_file.is_log_large(context):
            emptied = writer.empty_log()
            done.append("emptied the log" if emptied else "could not empty the log: another process reads from it")
    return done
