"""Annotations: what a trainer has found out about the groups of a draw, or about their rollouts.

They belong to the draw: a restore leaves them, and they are deleted with its batch (`batches`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from pydantic_core import from_json

from replaybuf.errors import InputError
from replaybuf.storage.decoding import DAMAGE, damaged
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.values import Annotation

#: The annotations of groups, by uid.
Annotations = Mapping[int, Sequence[Annotation]]


def annotate(tx: Transaction, annotations: Annotations, step: int | None) -> int:
    """Write annotations for the last draw of each group (for this train step), all or none, and return the number of
    groups. Raises InputError as `ReplayBuffer.annotate` says."""
    drawn = _last_draws(tx, annotations, step)
    if len(drawn) < len(annotations):  # an acknowledgement of a part of a lease may just have moved groups
        drawn = _last_draws(tx, annotations, step)
    if unknown := sorted(annotations.keys() - drawn.keys()):
        draw = f"draw of group {unknown[0]}" if step is None else f"draw of group {unknown[0]} for train step {step}"
        others = f" (nor of {len(unknown) - 1} others)" if len(unknown) > 1 else ""
        raise InputError(f"no {draw} is recorded{others}, by which it could be annotated")
    for uid, (_, rollouts) in drawn.items():
        if given := {one.rollouts for one in annotations[uid]} - {None, rollouts}:
            wanted = "one for each, in order, or one dict for the group"
            raise InputError(f"group {uid} has {rollouts} rollouts or segments, and {given.pop()} dicts: give {wanted}")
    _check_tokens(tx, annotations)
    rows = [(drawn[uid][0], uid, one.name, one.rows, one.data) for uid in sorted(drawn) for one in annotations[uid]]
    tx.each(_WRITE, rows)
    return len(drawn)


_WRITE = """INSERT INTO rb_annotation (draw, uid, name, rows, data) VALUES (:draw, :uid, :name, {json:rows}, :data)
ON CONFLICT (draw, uid, name) DO UPDATE SET rows = excluded.rows, data = excluded.data"""


def _last_draws(tx: Transaction, uids: Collection[int], step: int | None) -> dict[int, tuple[int, int]]:
    """Return the last recorded draw of each group (for a train step), locked, and the group's number of rollouts."""
    last = dict(map(tuple, tx.tuples(_LAST_DRAWS, uids=list(uids), buffer=tx.scope.buffer, step=step)))
    found = {}
    for uid, draw, marks in tx.tuples(_LOCKED, uids=list(last), draws=list({*last.values()})):
        try:
            rollouts = len(from_json(marks)["oldest"])
        except DAMAGE as error:
            raise damaged(uid, error) from error
        if draw == last[uid]:
            found[uid] = (draw, rollouts)
    return found


_LAST_DRAWS = """SELECT p.uid, max(p.draw) FROM rb_past p JOIN rb_batch b ON b.id = p.draw
WHERE p.uid {in:uids} AND p.draw > 0 AND b.buffer = :buffer
    AND (CAST(:step AS bigint) IS NULL OR b.step = CAST(:step AS bigint)) GROUP BY p.uid"""
_LOCKED = """SELECT p.uid, p.draw, CAST(p.marks AS text) FROM rb_past p JOIN rb_batch b ON b.id = p.draw
WHERE p.uid {in:uids} AND p.draw {in:draws} AND p.draw > 0 {lock}"""


def _check_tokens(tx: Transaction, annotations: Annotations) -> None:
    """Check that arrays have a number for each response token, of groups whose payload is there to count them."""
    arrays = {
        uid: several
        for uid, every in annotations.items()
        if (several := [one for one in every if one.data is not None])
    }
    for uid, outline in tx.tuples(_OUTLINES, uids=list(arrays)):
        tokens = [one["response_tokens"] for one in from_json(outline)]
        for name, place, length in ((one.name, row[0], row[-1]) for one in arrays[uid] for row in one.rows):
            if tokens[place] not in (0, length):
                numbers = f"{length} numbers for {tokens[place]} response tokens"
                raise InputError(f"{name} of group {uid}, rollout {place}, has {numbers}")


_OUTLINES = """SELECT p.uid, CAST(p.outline AS text) FROM rb_payload p JOIN rb_group g ON g.uid = p.uid
WHERE p.uid {in:uids}"""
