"""How groups are shown: the columns of tables, the colours of statuses, and times, leases and tags as texts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from replaybuf import units
from replaybuf.cli.output import Column
from replaybuf.rollouts.statuses import Status
from replaybuf.rules.transitions import Tally
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


def _column(header: str, name: str, digits: int = 0) -> Column:
    return Column(header, lambda row: units.number(row[name], digits))


def _mean_staleness(row: Mapping[str, Any]) -> str:
    return units.number(row["staleness"], 1 if isinstance(row["staleness"], float) else 0)


def _text(header: str, name: str) -> Column:
    return Column(header, lambda row: "-" if row[name] is None else row[name], right=False, text=True)


def _id(name: str) -> Column:
    return Column(name, lambda row: "-" if row[name] is None else str(row[name]))


#: The columns of fields that many tables have; others are columns of whole numbers under their own names.
_COLUMNS = {
    **{name: _id(name) for name in ("uid", "id", "step", "batch", "last_uid")},
    **{name: _text(name, name) for name in ("buffer", "file", "worker")},
    "task_name": _text("task", "task_name"),
    "status": Column("status", lambda row: row["status"], right=False, style=status_style),
    "now": Column("now", lambda row: row["now"], right=False),
    "bytes": Column("size", lambda row: units.size(row["bytes"])),
    "staleness": Column("stale", _mean_staleness),
    "min_reward": _column("lowest", "min_reward", 3),
    "max_reward": _column("highest", "max_reward", 3),
    "max_staleness": _column("max", "max_staleness"),
    "oldest_model_step": _column("weights", "oldest_model_step"),
    "times_sampled": _column("sampled", "times_sampled"),
    "response_tokens": Column("tokens", lambda row: units.short(row["response_tokens"])),
    **{name: _column(name, name, 3) for name in ("reward", "others", "below")},
}


def columns(*names: str, spare: Collection[str] = (), **headers: str) -> list[Column]:
    """Return the columns of these fields, under other headers where these are given; some may be left out (`spare`)."""
    found = [(name, _COLUMNS.get(name) or _column(name, name)) for name in names]
    return [replace(one, header=headers.get(name, one.header), spare=name in spare) for name, one in found]


def age_of(moment: datetime | None, now: datetime) -> float | None:
    """Return the seconds since a time."""
    return None if moment is None else (now - moment).total_seconds()


def trainer_text(trainer: Mapping[str, Any], of: str = "") -> str:
    """Return where the trainer says that it is (the fields of its `TrainState`)."""
    step = "has finished" if trainer["finished"] else f"is at step {trainer['train_step']}"
    return f"the trainer{of} {step}, its newest weights are of step {trainer['model_step']}"


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
