"""Checks of the texts of a SQLite file; PostgreSQL accepts no invalid ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from replaybuf.doctor.finding import Check, Finding, Look, fine, groups, repairable, some
from replaybuf.doctor.groups import said
from replaybuf.storage.sql.inspection.checkup.texts import BadText, mend_texts, unreadable_texts

if TYPE_CHECKING:
    from replaybuf.storage.sql.inspection.reader import Transaction

_TEXTS = "texts"


def look_at_texts(tx: Transaction, look: Look) -> Sequence[Finding]:
    """Check whether tags, marks, keys, previews and reasons are valid texts, and valid JSON where they should be."""
    bad = list(unreadable_texts(tx))
    if not bad:
        return [fine(_TEXTS, "all can be read")]
    return [repairable(_TEXTS, f"texts of {_count(bad)} are damaged, and queries that meet them fail: {_some(bad)}")]


def repair_texts(tx: Transaction, look: Look) -> Sequence[str]:
    """Make previews and marks anew from the payload; remove tags, keys and reasons that can't be read."""
    mended, aside = mend_texts(tx)
    return [f"mended texts of {_count(mended)}: {_some(mended)}", *said(aside)] if mended else []


def _count(bad: Sequence[BadText]) -> str:
    return groups(len({one.uid for one in bad}))


def _some(bad: Sequence[BadText]) -> str:
    return some([f"{one.column} of {one.uid}" for one in bad])


CHECKS = (Check(_TEXTS, look_at_texts, repair_texts),)
