"""Events: what happens seldom, noted in the transaction in which it happens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import nsmallest
from typing import Any

from sqlalchemy import delete, insert, select, update

from replaybuf.storage.presence import EventKind
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.records import event
from replaybuf.storage.sql.statements.rows import GroupRow

#: The most events of a buffer that are kept, and the most uids of one.
MOST_EVENTS, MOST_UIDS = 10_000, 100
_MOST_CHARS = 2000
# Events that follow each other closely are counted in one of these.
_RECENT, _RECENT_SECONDS = 20, 60.0


def note(
    tx: Transaction,
    kind: EventKind,
    *,
    task_name: str | None = None,
    worker: str | None = None,
    step: int | None = None,
    groups: int = 0,
    uids: Sequence[int] = (),
    detail: str | None = None,
    time: float | None = None,
) -> None:
    """Note an event: how many groups it is about, and the lowest of their uids, in order.

    `worker` is who did it, or held the groups. It happens now, or did at a `time` by the store's clock.
    """
    values = {
        "buffer": tx.scope.buffer,
        "happened_at": tx.dialect.clock(tx) if time is None else time,
        "kind": str(kind),
        "task_name": task_name,
        "worker": worker,
        "step": step,
        "groups": groups,
        "uids": nsmallest(MOST_UIDS, uids) or None,
        "detail": None if detail is None else detail[:_MOST_CHARS],
    }
    tx.execute(insert(event), values)


def note_more(
    tx: Transaction,
    kind: EventKind,
    *,
    task_name: str | None = None,
    worker: str | None = None,
    groups: int,
    detail: str | None = None,
) -> None:
    """Note an event that may come many times in a row: it is counted in a recent one that is the same otherwise."""
    alike = {"kind": str(kind), "task_name": task_name, "worker": worker, "detail": detail}
    newest = select(event.c.id, event.c.happened_at, *(event.c[name] for name in alike))
    newest = newest.where(event.c.buffer == tx.scope.buffer).order_by(event.c.happened_at.desc()).limit(_RECENT)
    since = tx.dialect.clock(tx) - _RECENT_SECONDS
    for row in tx.execute(newest).mappings():
        if row["happened_at"] >= since and all(row[name] == value for name, value in alike.items()):
            tx.execute(update(event).where(event.c.id == row["id"]).values(groups=event.c.groups + groups))
            return
    note(tx, kind, task_name=task_name, worker=worker, groups=groups, detail=detail)


def note_last(
    tx: Transaction,
    kind: EventKind,
    *,
    task_name: str | None = None,
    worker: str | None = None,
    groups: int,
    detail: str,
    time: float,
) -> None:
    """Note an event of which only the last one counts where a worker repeats it: it replaces one of the last minute."""
    alike = event.c.kind == str(kind), event.c.worker == worker, event.c.task_name.is_not_distinct_from(task_name)
    recent = event.c.buffer == tx.scope.buffer, event.c.happened_at.between(time - _RECENT_SECONDS, time)
    tx.execute(delete(event).where(*recent, *alike))
    note(tx, kind, task_name=task_name, worker=worker, groups=groups, detail=detail, time=time)


def note_rows(tx: Transaction, kind: EventKind, rows: Iterable[GroupRow], detail: str | None = None) -> None:
    """Note an event of groups that were leased, one for each task and holder."""
    alike: dict[tuple[str, Any], list[int]] = {}
    for row in rows:
        alike.setdefault((row.task_name, row.column("holder")), []).append(row.uid)
    for (task_name, holder), uids in alike.items():
        note(tx, kind, task_name=task_name, worker=holder, groups=len(uids), uids=uids, detail=detail)


def prune_events(tx: Transaction) -> None:
    """Remove all events of the buffer but the newest."""
    ours = event.c.buffer == tx.scope.buffer
    newest_first = select(event.c.happened_at).where(ours).order_by(event.c.happened_at.desc())
    last = tx.execute(newest_first.offset(MOST_EVENTS).limit(1)).scalar()
    if last is not None:
        tx.execute(delete(event).where(ours, event.c.happened_at <= last))
