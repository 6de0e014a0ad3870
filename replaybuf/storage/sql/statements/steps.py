"""Applying transitions (`replaybuf.rules.transitions`): one statement for groups that change alike, and the tallies."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import ColumnElement, bindparam, case, literal, update

from replaybuf.rollouts.rollout import ASIDE
from replaybuf.rules import transitions
from replaybuf.rules.tallies import LaneName
from replaybuf.rules.transitions import Transition
from replaybuf.storage.presence import EventKind
from replaybuf.storage.sql.engine.prepared import Prepared
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import group
from replaybuf.storage.sql.statements.counts import Counts, add_counts, add_step
from replaybuf.storage.sql.statements.events import note
from replaybuf.storage.sql.statements.lanes import Lane, need_lanes
from replaybuf.storage.sql.statements.race_keys import enter_races
from replaybuf.storage.sql.statements.rows import GroupRow

#: A task, a step, and the uids of the groups that take it.
Step = tuple[str, Transition, Sequence[int]]
#: The lease columns of a group that isn't leased.
FREE: Mapping[str, Any] = {"lease": None, "leased_until": None, "holder": None}


def move(tx: Transaction, rows: Iterable[GroupRow], step_of: Callable[[GroupRow], Transition], **values: Any) -> None:
    """Let each group take the step that follows from its state, and set these columns of groups that stay."""
    known: dict[LaneName, Lane] = {}
    states: dict[tuple[int, int, int], list[GroupRow]] = {}
    for row in rows:
        states.setdefault((row.lane, row.times_sampled, row.deliveries), []).append(row)
        if row.found_in is not None:
            known[row.found_in.name] = row.found_in
    steps = [(same[0].task_name, step_of(same[0]), [row.uid for row in same]) for same in states.values()]
    apply(tx, steps, known.values(), **values)


def apply(tx: Transaction, steps: Sequence[Step], known: Iterable[Lane] = (), **values: Any) -> None:
    """Let groups take these steps, and set these columns of groups that stay. `known` are lanes already read."""
    homes = {home.name: home for home in known}
    homes |= need_lanes(tx, {(task, status) for task, step, _ in steps for status, _ in step.counts} - homes.keys())
    leased = {(task, step.after.status) for task, step, _ in steps if step.after is not None and step.after.leased}
    lanes = {False: homes, True: need_lanes(tx, leased, leased=True)}
    alike: dict[tuple[str, Transition], list[int]] = {}
    counts: Counts = Counter()
    for task, step, uids in steps:
        alike.setdefault((task, step), []).extend(uids)
        add_step(counts, homes, task, step, len(uids))
    gone: list[int] = []
    entering: dict[LaneName, list[int]] = {}
    for (task, step), uids in alike.items():
        if step.after is None:
            gone += uids
            continue
        change(tx, uids, _changed(task, step, lanes) | values, _added(step), _pinned_at(task, step, lanes))
        if step.enters_races:
            entering.setdefault((task, step.after.status), []).extend(uids)
    remove(tx, gone)
    for name, uids in entering.items():
        enter_races(tx, homes[name], uids)
    add_counts(tx, counts)


def _changed(task: str, step: Transition, lanes: Mapping[bool, Mapping[LaneName, Lane]]) -> dict[str, Any]:
    """Return the columns that a step sets, for groups of a task that stay."""
    after = step.after
    assert after is not None
    values: dict[str, Any] = {}
    if step.afresh:
        values |= {"deliveries": 0, "error": None}
    if step.error is not None:
        values["error"] = step.error
    if step.moves:
        values |= FREE
        values["lane"] = lanes[after.leased][(task, after.status)].id
        values["archived_at"] = time.time() if after.status in ASIDE and not after.leased else None
    return values


def _added(step: Transition) -> dict[str, int]:
    """Return what a step adds to columns."""
    added = {"times_sampled": step.draws, "deliveries": step.deliveries}
    return {name: n for name, n in added.items() if n}


def _pinned_at(task: str, step: Transition, lanes: Mapping[bool, Mapping[LaneName, Lane]]) -> int | None:
    """Return the train step for which groups that leave their lane keep their staleness, or None if they don't."""
    if step.pins_staleness and step.before is not None:
        return lanes[False][(task, step.before.status)].step or 0
    return None


def change(
    tx: Transaction,
    uids: Iterable[int],
    values: Mapping[str, Any],
    added: Mapping[str, int] | None = None,
    pinned_at: int | None = None,
) -> None:
    """Set columns of groups (not those with JSON), and add to others; pin the staleness at a train step, if given."""
    adding = {name: n for name, n in (added or {}).items() if name not in values}
    pin = () if pinned_at is None else (pinned_at,)
    statement = _changing(tuple(values), tuple(adding), bool(pin))
    tx.fetch(statement, *values.values(), *adding.values(), *pin, tx.dialect.listed(uids))


@lru_cache(maxsize=256)
def _changing(names: tuple[str, ...], adding: tuple[str, ...], pins: bool) -> Prepared:
    new = {name: bindparam(f"new_{name}", type_=group.c[name].type) for name in names}
    more = {name: group.c[name] + bindparam(f"more_{name}", type_=group.c[name].type) for name in adding}
    pin = _pinned(bindparam("pinned_at", type_=group.c.oldest_step.type)) if pins else {}
    return Prepared(
        lambda dialect: update(group).where(dialect.one_of(group.c.uid, "uids")).values(new | more | pin),
        *(f"new_{name}" for name in names),
        *(f"more_{name}" for name in adding),
        *(("pinned_at",) if pins else ()),
        "uids",
    )


def pinned(home: Lane) -> dict[str, Any]:
    """Return the columns that pin the staleness of groups that leave this lane."""
    return _pinned(literal(home.step or 0, group.c.oldest_step.type))


def _pinned(step: ColumnElement[int]) -> dict[str, Any]:
    follows = group.c.pinned_staleness.is_(None)
    return {
        "pinned_staleness": case((follows, step - group.c.oldest_step - 1), else_=group.c.pinned_staleness),
        "pinned_step": case((follows, step), else_=group.c.pinned_step),
    }


def remove(tx: Transaction, uids: Sequence[int]) -> None:
    """Remove groups, and leave their payloads to the sweep."""
    if uids:
        tx.dialect.remove_groups(tx, uids, time.time())


def set_aside(tx: Transaction, home: Lane, reasons: Mapping[int, str]) -> None:
    """Make groups of a lane FAILED, each with its own reason."""
    steps = [(home.task_name, transitions.set_aside(home.status, why), [uid]) for uid, why in reasons.items()]
    apply(tx, steps, [home])
    uids, why = list(reasons), next(iter(reasons.values()), None)
    note(tx, EventKind.SET_ASIDE, task_name=home.task_name, groups=len(uids), uids=uids, detail=why)
