"""Prompt ledgers: their cursors, and what is known of the prompts of ledgers with an order.

That is the epoch in which each prompt was drawn last, and its rewards. A row is a prompt's state from a checkpoint on,
`since`, to the next row of the prompt, so that a checkpoint copies nothing. Claims (`put.claim`) stamp what has changed
with the version of their cursor: who has read the states at a version reads later only what changed since. Rewards that
are stored in between are pending until the next claim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.fence import FENCE, Row, join
from replaybuf.storage.sql.statements.past import newest
from replaybuf.storage.values import Cursor, NewGroup

#: The stamp of changes since the last claim: more than any version of a cursor.
_PENDING = 1 << 62

STATE = ("item", "epoch", "times", "rollouts", "reward", "squares", "last")
_COLUMNS = ", ".join(STATE)
_PAGE_SIZE = 5000
_SAME_PROMPT = "{0}.buffer = {1}.buffer AND {0}.name = {1}.name AND {0}.item = {1}.item"
_CURRENT = f"""buffer = :buffer AND NOT EXISTS (
    SELECT 1 FROM rb_prompt p WHERE {_SAME_PROMPT.format("p", "rb_prompt")} AND p.since > rb_prompt.since)"""  # noqa: S608


def read_cursor(tx: Transaction, name: str) -> Cursor:
    """Return the cursor of this name; version 0 if there is none."""
    [(*fence, version, position, value)] = tx.tuples(_CURSOR, buffer=tx.scope.buffer, cursor=name)
    join(tx, Row(*fence))
    cursor = Cursor(name) if version is None else Cursor(name, version, position, value)
    return replace(cursor, epoch=tx.scope.epoch)


_CURSOR = f"""SELECT fence.*, c.version, c.position, c.value FROM ({FENCE}) AS fence
LEFT JOIN rb_cursor c ON c.buffer = :buffer AND c.checkpoint = 0 AND c.name = :cursor"""  # noqa: S608
_INSERT = """INSERT INTO rb_cursor (buffer, name, checkpoint, version, position, value)
VALUES (:buffer, :name, 0, :version, :position, :value)"""
_MOVE = """UPDATE rb_cursor SET version = :version, position = :position, value = :value
WHERE buffer = :buffer AND name = :name AND checkpoint = 0 AND version = :known"""


def write_cursors(tx: Transaction, cursors: Sequence[Cursor]) -> None:
    """Write cursors into a buffer that has none."""
    if cursors:
        tx.each(_INSERT, [(tx.scope.buffer, row.name, row.version, row.position, row.value) for row in cursors])


def move_cursor(tx: Transaction, moved: Cursor) -> bool:
    """Write the cursor unless it was moved since its read, or the buffer restored; return whether it was written."""
    if moved.epoch != tx.scope.epoch:
        return False
    values = {"version": moved.version + 1, "position": moved.position, "value": moved.value}
    if moved.version == 0:
        sql = f"{_INSERT} ON CONFLICT DO NOTHING"
        return tx.change(sql, buffer=tx.scope.buffer, name=moved.name, **values) > 0
    return tx.change(_MOVE, buffer=tx.scope.buffer, name=moved.name, known=moved.version, **values) > 0


def read_changed(tx: Transaction, name: str, known: int) -> Sequence[Sequence[Any]]:
    """Return the states that have changed since a version of the cursor, in the order of `STATE`."""
    return tx.tuples(_CHANGED, buffer=tx.scope.buffer, name=name, known=known)


def read_page(tx: Transaction, name: str, after: int) -> Sequence[Sequence[Any]]:
    """Return the next states after that of a place in the dataset; an empty list after the last one."""
    return tx.tuples(_PAGE, buffer=tx.scope.buffer, name=name, after=after, size=_PAGE_SIZE)


_CHANGED = f"SELECT {_COLUMNS} FROM rb_prompt WHERE name = :name AND changed > :known AND {_CURRENT}"  # noqa: S608
_PAGE = f"""SELECT {_COLUMNS} FROM rb_prompt
WHERE name = :name AND item > :after AND {_CURRENT} ORDER BY item LIMIT :size"""  # noqa: S608


def note_drawn(tx: Transaction, name: str, version: int, epochs: Mapping[int, int]) -> None:
    """Record the epochs in which prompts are drawn, by place in the dataset, and stamp this and earlier changes."""
    _change(tx, [(name, item, version, epoch, 0, 0, 0.0, 0.0, None) for item, epoch in epochs.items()])
    tx.change(_STAMP, buffer=tx.scope.buffer, name=name, version=version)


def note_judged(tx: Transaction, groups: Iterable[NewGroup]) -> None:
    """Add the rewards of finished groups to what is known of their prompts."""
    judged = [new.judged for new in groups if new.judged is not None]
    _change(tx, [(name, item, _PENDING, None, 1, n, sums, *more, sums / n) for name, item, n, sums, *more in judged])


def _change(tx: Transaction, changes: list[tuple[Any, ...]]) -> None:
    if changes:
        at, buffer = newest(tx), tx.scope.buffer
        changes.sort(key=lambda row: row[:2])  # the order in which all transactions lock them
        tx.each(_CHANGE, [(buffer, name, item, at, *state) for name, item, *state in changes])
        if at:
            tx.each(_PRUNE, [(buffer, *row[:2]) for row in changes])


# A state since a checkpoint that was dropped, the newest then, goes on.
_CHANGE = f"""WITH new AS (SELECT CAST(:buffer AS text) AS buffer, CAST(:name AS text) AS name,
    CAST(:item AS bigint) AS item, coalesce((SELECT max(p.since) FROM rb_prompt p WHERE p.buffer = :buffer
        AND p.name = :name AND p.item = :item AND p.since > :since), CAST(:since AS bigint)) AS since,
    CAST(:changed AS bigint) AS changed,
    CAST(:epoch AS bigint) AS epoch, CAST(:times AS bigint) AS times, CAST(:rollouts AS bigint) AS rollouts,
    CAST(:reward AS double precision) AS reward, CAST(:squares AS double precision) AS squares,
    CAST(:last AS double precision) AS last)
INSERT INTO rb_prompt AS own (buffer, name, since, changed, {_COLUMNS})
SELECT new.buffer, new.name, new.since, new.changed, new.item, coalesce(new.epoch, old.epoch),
    coalesce(old.times, 0) + new.times, coalesce(old.rollouts, 0) + new.rollouts,
    coalesce(old.reward, 0) + new.reward, coalesce(old.squares, 0) + new.squares, coalesce(new.last, old.last)
FROM new LEFT JOIN rb_prompt old ON {_SAME_PROMPT.format("old", "new")} AND old.since = (
    SELECT max(p.since) FROM rb_prompt p WHERE {_SAME_PROMPT.format("p", "new")} AND p.since < new.since)
WHERE true
ON CONFLICT (buffer, name, item, since) DO UPDATE SET changed = excluded.changed,
    epoch = coalesce(CAST(:epoch AS bigint), own.epoch), times = own.times + CAST(:times AS bigint),
    rollouts = own.rollouts + CAST(:rollouts AS bigint), reward = own.reward + CAST(:reward AS double precision),
    squares = own.squares + CAST(:squares AS double precision),
    last = coalesce(CAST(:last AS double precision), own.last)"""  # noqa: S608
#: What only checkpoints had that were dropped since.
_PRUNE = f"""DELETE FROM rb_prompt WHERE buffer = :buffer AND name = :name AND item = :item AND since < (
    SELECT max(p.since) FROM rb_prompt p WHERE {_SAME_PROMPT.format("p", "rb_prompt")}
    AND p.since < (SELECT min(id) FROM rb_checkpoint WHERE buffer = :buffer))"""  # noqa: S608
_STAMP = f"""UPDATE rb_prompt SET changed = :version WHERE (buffer, name, item, since) IN (
    SELECT buffer, name, item, since FROM rb_prompt
    WHERE buffer = :buffer AND name = :name AND changed = {_PENDING} {{skip}})"""  # noqa: S608


def restore_prompts(tx: Transaction, checkpoint: int) -> None:
    """Restore the states that a checkpoint has. Later checkpoints keep theirs."""
    at, buffer = newest(tx), tx.scope.buffer
    tx.change("DELETE FROM rb_prompt WHERE buffer = :buffer AND since > :newest", buffer=buffer, newest=at)
    tx.change(_RESTORE, buffer=buffer, id=checkpoint, newest=at)


_RESTORE = f"""INSERT INTO rb_prompt (buffer, name, since, changed, {_COLUMNS})
SELECT new.buffer, new.name, CAST(:newest AS bigint), 0, new.item, old.epoch, coalesce(old.times, 0),
    coalesce(old.rollouts, 0), coalesce(old.reward, 0), coalesce(old.squares, 0), old.last
FROM (SELECT DISTINCT buffer, name, item FROM rb_prompt WHERE buffer = :buffer AND since >= :id) AS new
LEFT JOIN rb_prompt old ON {_SAME_PROMPT.format("old", "new")} AND old.since = (
    SELECT max(p.since) FROM rb_prompt p WHERE {_SAME_PROMPT.format("p", "new")} AND p.since < :id)
WHERE true
ON CONFLICT (buffer, name, item, since) DO UPDATE SET changed = 0,
    {", ".join(f"{column} = excluded.{column}" for column in STATE[1:])}"""  # noqa: S608
