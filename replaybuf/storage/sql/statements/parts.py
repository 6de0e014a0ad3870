"""Groups that fill: their finished rollouts are FILLING groups of one rollout each, until the last one has come.

Such a rollout has a key of its own, with the name of its group, whose prefix finds the others by the index of keys. A
whole group has its name as key. So names are unique in a buffer, over all tasks. The finished rollouts of a prompt in
flight are named by its uid.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Sequence
from itertools import count, islice
from typing import Any

from replaybuf.common import units
from replaybuf.errors import ConflictError, ReplayBufError
from replaybuf.rules.transitions import Place, Tally, removed
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.counts import apply
from replaybuf.storage.sql.statements.eviction import replace_groups
from replaybuf.storage.sql.statements.matching import WITH_UIDS
from replaybuf.storage.sql.statements.past import COLUMNS, OURS
from replaybuf.storage.sql.statements.rows import ANY_TASK, GroupRow, name_key, part_key_around, part_of
from replaybuf.storage.values import NewGroup, Part, check_lease, lost_to_others
from replaybuf.values.rollouts.statuses import Status


class LastRolloutError(ReplayBufError):
    """Nothing was stored, since a rollout is the last one of its group: `uids` are those of the others."""

    def __init__(self, uids: Iterable[int]) -> None:
        super().__init__("the last rollout of a group is stored with the others, as a group")
        self.uids = list(uids)


def read_parts(tx: Transaction, name: str | int) -> dict[int, Part]:
    """Return the stored rollouts of a group that fills, by uid. Raises ConflictError if it is whole, or has left."""
    whole_key = name_key(tx.scope.buffer, name)
    rows = tx.tuples(_PARTS, whole=whole_key, **_key_bounds(tx, name))
    parts = _parts_by_uid(row for row in rows if row[0])
    if len(parts) < len(rows) and (not parts or any(key == whole_key for _, key in rows)):
        raise _whole_error(name)
    return parts


def _whole_error(name: str | int) -> ConflictError:
    return ConflictError(f"group {name!r:.200} has all its rollouts already, and takes no more: name a new group")


def _key_bounds(tx: Transaction, name: str | int) -> dict[str, str]:
    """Return the bounds of the keys of a group's rollouts."""
    prefix = name_key(tx.scope.buffer, name)[:-1] + ","
    # In the order of bytes "!" is the next character after the blank that follows the comma.
    return {"low": f"{prefix} ", "high": f"{prefix}!"}


def _name_in(key: str) -> str | int | None:
    """Return the name in the key of a group that fills, or was filled; None for another key."""
    scope, name, *_ = json.loads(key)
    return name if scope == ANY_TASK else None


_PARTS_ALONE = "SELECT uid, scoped_key FROM rb_group WHERE scoped_key >= :low AND scoped_key < :high"
_WHOLE_GROUP = "SELECT uid FROM rb_group WHERE scoped_key = :whole"
# The stored rollouts of a group; and a row with uid 0 if it is whole, and another if it has left.
_PARTS = f"""{_PARTS_ALONE}
UNION ALL SELECT 0, scoped_key FROM rb_group WHERE scoped_key = :whole
UNION ALL SELECT 0, NULL WHERE EXISTS (SELECT 1 FROM rb_past WHERE scoped_key = :whole AND draw > 0)"""  # noqa: S608
# How many rollouts of a group are stored, the key of one of them, whether a place is taken (that of their number, if
# none is wanted), and whether the group is whole, or has left.
_PLACE = """WITH there AS (
    SELECT count(*) AS n, min(scoped_key) AS one FROM rb_group WHERE scoped_key >= :low AND scoped_key < :high
)
SELECT n, one, EXISTS (SELECT 1 FROM rb_group WHERE scoped_key = CAST(:before AS text)
        || CAST(coalesce(CAST(:wanted AS bigint), n) AS text) || CAST(:behind AS text)),
    EXISTS (SELECT 1 FROM rb_group WHERE scoped_key = :whole),
    EXISTS (SELECT 1 FROM rb_past WHERE scoped_key = :whole AND draw > 0)
FROM there"""


def list_parts(tx: Transaction, task_name: str) -> dict[int, Part]:
    """Return the stored rollouts of all groups of a task that fill, by uid."""
    values = {"buffer": tx.scope.buffer, "task": task_name, "status": str(Status.FILLING)}
    return _parts_by_uid(tx.tuples(f"{_FILLING} AND task_name = :task ORDER BY uid", **values))


_FILLING = """SELECT uid, scoped_key, archived_at FROM rb_lane JOIN rb_group ON lane = rb_lane.id
WHERE buffer = :buffer AND status = :status AND NOT leased"""


def _parts_by_uid(rows: Iterable[Sequence[Any]]) -> dict[int, Part]:
    return {uid: part for uid, key, *_ in rows if key and (part := part_of(key)) is not None}


def overdue(
    tx: Transaction, before: float, after: tuple[float, int], limit: int
) -> tuple[dict[str | int, str], tuple[float, int] | None]:
    """Return the names of groups whose first rollout came before this moment, the oldest first, with their tasks.

    They come in pages of rollouts. Also return where the next page begins, None for the last one.
    """
    values = {"buffer": tx.scope.buffer, "status": str(Status.FILLING), "before": before, "limit": limit}
    rows = tx.tuples(_OVERDUE, **values, since=after[0], uid=after[1])
    tasks_by_name = {part.name: part.task_name for part in _parts_by_uid(rows).values()}
    return tasks_by_name, (rows[-1][2], rows[-1][0]) if len(rows) == limit else None


_OVERDUE = f"""{_FILLING}
AND archived_at >= :since AND (archived_at > :since OR uid > :uid) AND archived_at < :before
ORDER BY archived_at, uid LIMIT :limit"""


def newest_step(tx: Transaction, uids: Sequence[int]) -> int | None:
    """Return the newest train step of the puts of these rollouts, None if none had one."""
    step: int | None = tx.value("SELECT max(put_step) FROM rb_group WHERE uid {in:uids}", uids=uids)
    return step


def find_orphans(tx: Transaction) -> list[tuple[str, int]]:
    """Return task and uid of finished rollouts of prompts that were finished, deleted or pruned without them."""
    by_prompt: dict[int, list[tuple[str, int]]] = {}
    values = {"buffer": tx.scope.buffer, "status": str(Status.FILLING)}
    for uid, part in _parts_by_uid(tx.tuples(OF_PROMPTS, **values, low=_FIRST_UID, high=_BEHIND_UIDS)).items():
        assert isinstance(part.name, int)
        by_prompt.setdefault(part.name, []).append((part.task_name, uid))
    existing = set(tx.values("SELECT uid FROM rb_group WHERE uid {in:uids}", uids=list(by_prompt)) if by_prompt else ())
    return [orphan for name, parts in by_prompt.items() if name not in existing for orphan in parts]


#: The rollouts of prompts, found by their keys, in which a number is the name; the plus keeps SQLite from reading all
#: groups that fill.
OF_PROMPTS = """SELECT uid, scoped_key FROM rb_group JOIN rb_lane ON rb_lane.id = +lane
WHERE scoped_key >= :low AND scoped_key < :high AND buffer = :buffer AND status = :status AND NOT leased"""
_FIRST_UID, _BEHIND_UIDS = f'["{ANY_TASK}", 0', f'["{ANY_TASK}", :'  # ":" is the next character after "9"


def remove_orphans(tx: Transaction) -> None:
    """Remove what `find_orphans` finds."""
    step = removed(Place(Status.FILLING), Tally.DELETED)
    apply(tx, [(task, step, [uid]) for task, uid in find_orphans(tx)])


def settle_names(tx: Transaction, new: Iterable[GroupRow], keys: Iterable[str]) -> None:
    """Let each name of these keys have a whole group or rollouts that agree, after a restore that kept new groups.

    A whole group stays, else rollouts like the `new` ones.
    """
    new_uids = {row.uid for row in new}
    for name in {key_name for key in keys if isinstance(key_name := _name_in(key), str)}:
        whole = tx.values(_WHOLE_GROUP, whole=name_key(tx.scope.buffer, name))
        parts = _parts_by_uid(tx.tuples(_PARTS_ALONE, **_key_bounds(tx, name)))
        agreed = {(part.task_name, part.size, part.least) for uid, part in parts.items() if uid in new_uids}
        uids = [uid for uid, part in parts.items() if whole or (part.task_name, part.size, part.least) not in agreed]
        replace_groups(tx, WITH_UIDS, uids=uids)


def place_part(tx: Transaction, new: NewGroup) -> None:
    """Give a rollout its place in its group, whose name is locked.

    Raises ConflictError, LastRolloutError and, for a prompt in flight that is no longer held, LeaseLostError.
    """
    part = new.part
    assert part is not None
    if isinstance(part.name, int):
        _check_prompt(tx, new, part.name)
    name = part.name
    before, behind = part_key_around(tx.scope.buffer, part)
    values = {"whole": name_key(tx.scope.buffer, name), "before": before, "behind": behind, "wanted": part.wanted}
    [(stored, other_key, is_taken, is_whole, has_left)] = tx.tuples(_PLACE, **values, **_key_bounds(tx, name))
    if is_whole or (has_left and not stored):
        raise _whole_error(name)
    other = None if other_key is None else part_of(other_key)
    if other is not None and (other.task_name, other.size, other.least) != (new.task_name, part.size, part.least):
        raise ConflictError(
            f"group {name!r:.200} was begun with task_name={other.task_name!r}, size={other.size} and "
            f"min_size={other.least}, and this rollout comes with {new.task_name!r}, {part.size} and {part.least}"
        )
    part.index = stored if part.wanted is None else part.wanted
    if is_taken:
        taken = {sibling.index for sibling in read_parts(tx, name).values()}
        if part.wanted is not None:
            missing = "" if isinstance(name, int) else f"; missing are {_free_indexes(part.size, taken)}"
            raise ConflictError(f"group {name!r:.200} has its rollout {part.wanted} already{missing}")
        part.index = next(index for index in count() if index not in taken)
    if stored + 1 == part.size and isinstance(name, str):
        raise LastRolloutError(read_parts(tx, name))


def _free_indexes(size: int, taken: Container[int]) -> str:
    return units.some([*islice((index for index in range(size) if index not in taken), 100)])


def _check_prompt(tx: Transaction, new: NewGroup, uid: int) -> None:
    """Raise LeaseLostError unless the lease of a put holds its prompt, which is locked."""
    assert new.lease is not None
    check_lease(new.lease, tx.scope.epoch, tx.scope.database)
    if tx.values("SELECT lease FROM rb_group WHERE uid = :uid {lock}", uid=uid) != [new.lease.token]:
        raise lost_to_others(new.lease, [uid])


def forget_names(tx: Transaction, checkpoint: int) -> None:
    """Let groups be filled again that were put after a checkpoint and have left: its restore undoes them.

    A version that a later checkpoint has keeps its key, apart from the record of its draw.
    """
    for statement in (_KEEP_APART, _FORGET):
        tx.change(statement, buffer=tx.scope.buffer, checkpoint=checkpoint)


_UNDONE_KEYS = f"scoped_key IS NOT NULL AND +draw > 0 AND since >= :checkpoint AND {OURS}"  # by the index of keys
_KEEP_APART = f"""{{insert}} INTO rb_past ({COLUMNS}, until, removed_at)
SELECT {COLUMNS}, until, removed_at FROM rb_past WHERE until > :checkpoint AND {_UNDONE_KEYS}"""  # noqa: S608
_FORGET = f"UPDATE rb_past SET scoped_key = NULL, until = NULL WHERE {_UNDONE_KEYS}"  # noqa: S608
