"""How groups are shown: the colours of statuses, and times, leases and tags as texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from replaybuf import units
from replaybuf.rollouts.statuses import Status
from replaybuf.rules.transitions import Tally

if TYPE_CHECKING:
    from replaybuf.storage.sql.inspection.reader import ReadTransaction


_STYLES = {
    "completed": "green",
    "failed": "red",
    "aborted": "yellow",
    "expired": "magenta",
    "filtered": "cyan",
    "init": "blue",
    "archived": "dim",
}


def status_style(row: Mapping[str, Any]) -> str:
    return _STYLES.get(str(row.get("status")), "")


def age_of(moment: datetime | None, now: datetime) -> float | None:
    """Return the seconds since a time."""
    return None if moment is None else (now - moment).total_seconds()


def archived_at(row: Mapping[str, Any]) -> datetime | None:
    """Return when a group was archived. (For filtered and failed ones the column has the time when they became so.)"""
    return row["archived_at"] if row["status"] == Status.ARCHIVED else None


def lease_text(until: datetime | None, now: datetime) -> str:
    """Return when a lease ends ("in 45s"), or that it has ended, and its groups come back when they are drawn."""
    if until is None:
        return "-"
    left = (until - now).total_seconds()
    return f"in {units.age(left)}" if left > 0 else f"over {units.age(-left)} ago"


def tags_text(tags: Mapping[str, Any] | None) -> str:
    """Return tags on one line: name=value."""
    return " ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in (tags or {}).items()
    )


#: How texts are kept from now on.
ARCHIVE = 'archive=1000 in the config of the trainer (groups of each task, or a time such as "7d") keeps them'


def gone_of(tx: ReadTransaction, buffer: str | None, task: str | None) -> str | None:
    """Return that all groups which were trained on are gone with their texts, if so, and what would keep them."""
    from replaybuf.storage.sql.inspection.measures import tallies_of

    found = [of_buffer.items() for of_buffer in tallies_of(tx, buffer).values()]
    counts = [(status, name, n) for items in found for (of, status, name), n in items if task in (None, of)]
    taken = sum(n for status, name, n in counts if (status, name) == (Status.COMPLETED, Tally.TAKEN))
    if not taken or any(n for status, name, n in counts if (status, name) == (Status.ARCHIVED, Tally.SIZE)):
        return None
    return f"the texts of all {taken:,} groups that were trained on are gone: {ARCHIVE}"
