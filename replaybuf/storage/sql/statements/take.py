"""Drawing: select the first groups in the policy's order, read them, set aside what is damaged.

What becomes of them is decided by the rules afterwards, in the same transaction (`leaving`, `lease`).
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, case, func, literal, select

from replaybuf.codec.payload import Codec
from replaybuf.errors import DecodeError
from replaybuf.rollouts.rollout import Status
from replaybuf.rules.race import PRIORITIZED, SLOWEST, UNIT, share
from replaybuf.storage.sql.schema.tables import group, payload
from replaybuf.storage.sql.statements.columns import uid_in
from replaybuf.storage.sql.statements.counts import lock_tasks, read_levels
from replaybuf.storage.sql.statements.lanes import Lane, Scope, find_lanes
from replaybuf.storage.sql.statements.leases import end_leases
from replaybuf.storage.sql.statements.leaving import by_lane, set_aside
from replaybuf.storage.sql.statements.ordering import Source
from replaybuf.storage.sql.statements.race_keys import advance, check_races, skip_arrived
from replaybuf.storage.sql.statements.rows import GroupRow
from replaybuf.storage.values import Draw

# Without these a group that was taken could not be given back.
_NEEDED = [column.name for column in group.columns if not column.nullable]


def draw_groups(
    connection: Connection, scope: Scope, codec: Codec, draw: Draw, skip: set[int]
) -> tuple[list[GroupRow] | None, bool]:
    """The first groups of each task whose payload is undamaged, in order; damaged ones are set aside.

    None, with `draw.whole`, unless there are as many as wanted. They are still in their lanes, and locked. `skip` has
    the uids of those that were set aside, so that a draw of FAILED groups doesn't meet them again and again. Also
    whether leases were ended for it: others may wait for what came back.
    """
    rows = _draw_once(connection, scope, codec, draw, skip)
    ended = len(rows) < sum(draw.sizes.values()) and end_leases(connection, scope) > 0
    if ended:
        rows = _draw_once(connection, scope, codec, draw, skip)
    if draw.whole and len(rows) < sum(draw.sizes.values()):
        return None, ended
    policy = scope.rules.sampler
    # By their numbers, as everywhere: whoever locks the rows of several lanes does so in the same order.
    for _, members in sorted(by_lane(rows).items()):
        home = members[0].home
        if draw.probabilities:
            _add_probabilities(connection, scope, home, members)
        if policy.race is not None:
            keys = [row.columns[policy.race] for row in members]
            advance(connection, home, policy.race, keys, [row.columns["priority"] for row in members])
            if draw.where is not None and policy.race in home.clocks:
                skip_arrived(connection, scope, home, policy.race)
    return rows, ended


def _draw_once(connection: Connection, scope: Scope, codec: Codec, draw: Draw, skip: set[int]) -> list[GroupRow]:
    order, limits = scope.rules.sampler.order, scope.rules.limits
    sizes = dict(draw.sizes)
    if draw.status == Status.COMPLETED and limits.slows_draws:
        lock_tasks(connection, scope, sizes)
        levels = read_levels(connection, scope, sizes)
        sizes = {task: min(size, limits.drawable(levels[task])) for task, size in sizes.items()}
    lanes = find_lanes(connection, scope, [(task, draw.status) for task in sizes])
    check_races(lanes.values(), order)
    rows: list[GroupRow] = []
    for task, size in sizes.items():
        home = lanes.get((task, draw.status))
        if home is not None and size > 0:
            rows += _draw_lane(connection, scope, codec, home, size, draw, skip)
    return rows


def _draw_lane(
    connection: Connection, scope: Scope, codec: Codec, home: Lane, size: int, draw: Draw, skip: set[int]
) -> list[GroupRow]:
    good: dict[int, GroupRow] = {}
    while True:
        source = Source(home, draw.where, skip if home.status == Status.FAILED else ())
        uids = [one.uid for one in source.first(connection, size, scope.rules.sampler.order)]
        damaged: dict[int, str] = {}
        for row in _read(connection, home, [uid for uid in uids if uid not in good]):
            try:
                if missing := [name for name in _NEEDED if row.columns[name] is None]:
                    raise DecodeError(f"group {row.uid}: its metadata is damaged ({', '.join(missing)} missing)")
                if row.payload is None:
                    raise DecodeError(f"the payload of group {row.uid} is missing")
                codec.verify(row.payload)
                row.verified = True
                good[row.uid] = row
            except DecodeError as error:
                damaged[row.uid] = str(error)
        if not damaged:
            return [good[uid] for uid in uids if uid in good]
        set_aside(connection, scope, home, damaged)
        skip.update(damaged)


def _read(connection: Connection, home: Lane, uids: Sequence[int]) -> list[GroupRow]:
    """The rows of these groups of a lane with their payloads."""
    if not uids:
        return []
    statement = (
        select(group, payload.c.data).outerjoin(payload, payload.c.uid == group.c.uid).where(uid_in(connection, uids))
    )
    names = {"task_name": home.task_name, "status": home.status, "step": home.step}
    rows = [GroupRow.of({**row, **names}) for row in connection.execute(statement).mappings()]
    for row in rows:
        row.found_in = home
    return rows


def _add_probabilities(connection: Connection, scope: Scope, home: Lane, rows: Sequence[GroupRow]) -> None:
    prioritized = scope.rules.sampler.race == PRIORITIZED
    in_lane = select(func.count()).select_from(group).where(group.c.lane == home.id)
    if prioritized:  # every group has a key: an index holds them with their priorities
        in_lane = in_lane.where(group.c.prioritized_key.is_not(None))
        priority = group.c.priority
        zero, least = literal(0.0, priority.type), literal(SLOWEST, priority.type)
        rate: ColumnElement[float] = case((priority == 0, zero), (priority < SLOWEST, least), else_=priority)
        weighed = in_lane.with_only_columns(func.count(), func.sum(rate / UNIT))
        members, total = connection.execute(weighed).one()
        idle = connection.execute(in_lane.where(group.c.priority == 0)).scalar_one()
    else:
        members, total = connection.execute(in_lane).scalar_one(), 0.0
        idle = members
    for row in rows:
        weight = share(row.columns["priority"])
        row.probability = weight / total if prioritized and weight else 1 / idle
        row.weight = members * row.probability
