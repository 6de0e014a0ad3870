"""Checks of step checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from replaybuf.doctor.finding import Check, Finding, Look, fine, number_of, problem, some
from replaybuf.storage.sql.inspection.checkpoints import Contents, Made, contents_of, count_dropped, list_checkpoints

if TYPE_CHECKING:
    from replaybuf.storage.sql.inspection.reader import Transaction

_NAME = "checkpoints"


def look_at_checkpoints(tx: Transaction, look: Look) -> Sequence[Finding]:
    """Check whether each checkpoint has as many groups as it records, and their payloads."""
    made = sorted(list_checkpoints(tx), key=lambda one: one.id)
    wrong = [text for one in made if (text := _problem(one, contents_of(tx, one)))]
    mend = "make another one, then buffer.drop_checkpoint(step); a restore would bring back what is there"
    if wrong:
        return [problem(_NAME, some(wrong, 3), mend)]
    steps = f" (steps {some([one.step for one in made])})" if made else ""
    left = count_dropped(tx)
    waiting = f"; what is left of {number_of(left, 'dropped checkpoint')} waits to be swept" if left else ""
    return [fine(_NAME, (f"{len(made):,}, all whole{steps}" if made else "none") + waiting)]


def _problem(made: Made, has: Contents) -> str:
    if (has.groups, has.bytes) != (made.groups, made.bytes):
        said = f"{made.groups:,} groups of {made.bytes:,} bytes"
        return f"the checkpoint of step {made.step} had {said}, and has {has.groups:,} of {has.bytes:,}"
    if has.bare:
        return f"{has.bare:,} of the {has.groups:,} payloads of the checkpoint of step {made.step} are missing"
    return ""


CHECKS = (Check(_NAME, look_at_checkpoints),)
