"""The columns of all tables, on the terminal and the page: of steps, groups, workers, checkpoints and others.

A row is a mapping or a dataclass. How a value is written goes by the kind of the column, by `units`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from replaybuf.common import units
from replaybuf.values.rollouts.statuses import Status

#: Begins the names of columns of annotations.
ANNOTATIONS = "annotations."
#: Values that no column has by default: columns of them are always shown.
_ALWAYS = object()


@dataclass(frozen=True, slots=True)
class Column:
    """A column: the field of its rows, its header, and the kind of its values (a key of `KINDS`).

    On narrow terminals texts shrink, then `spare` columns are left out, the last first. The column isn't shown if all
    rows have its `usual` value. A cell is `bad` (red) where this field of its row is true. `title` explains the header.
    """

    name: str
    header: str
    kind: str = "whole"
    spare: bool = False
    usual: Any = _ALWAYS
    bad: str = ""
    title: str = ""

    @property
    def is_text(self) -> bool:
        return self.kind in _TEXTS

    @property
    def is_right(self) -> bool:
        return self.kind not in _LEFT_KINDS

    def text(self, row: Any, now: datetime | None) -> str:
        """Return the text of a row's cell; `now` is the time from which ages are."""
        value = value_of(row, self.name)
        return KINDS[self.kind](value, now)

    def is_bad(self, row: Any) -> bool:
        """Return whether a cell is to be looked at."""
        return bool(self.bad and value_of(row, self.bad))


def value_of(row: Any, name: str) -> Any:
    """Return a field of a row: of a mapping, or of an object with attributes. `annotations.NAME` may be missing."""
    if not isinstance(row, Mapping):
        return getattr(row, name)
    if name.startswith(ANNOTATIONS) and name not in row:
        return row["annotations"].get(name.removeprefix(ANNOTATIONS))
    return row[name]


def _text(value: Any, _: Any) -> str:
    if isinstance(value, list | tuple | set | frozenset):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def _ago(value: datetime | None, now: datetime | None) -> str:
    return "-" if value is None or now is None else units.ago(value, now)


def _age(value: datetime | None, now: datetime | None) -> str:
    return "-" if value is None or now is None else units.age((now - value).total_seconds())


#: How values of each kind are written.
KINDS: dict[str, Callable[[Any, datetime | None], str]] = {
    "whole": lambda value, _: units.number(value),
    "some": lambda value, _: units.number(value) if value else "",
    "id": lambda value, _: "-" if value is None else str(value),
    "reward": lambda value, _: units.number(value, 3),
    "change": lambda value, _: "" if value is None else f"{value:+.3f}",
    "mean": lambda value, _: units.number(value, int(isinstance(value, float))),
    "plain": lambda value, _: f"{value:g}",
    "tokens": lambda value, _: units.short(value),
    "size": lambda value, _: units.size(value),
    "milliseconds": lambda value, _: f"{value:,.2f}" if value < 10 else f"{value:,.1f}",
    "ago": _ago,
    "age": _age,
    "time": lambda value, _: "-" if value is None else units.iso(value),
    "lease": units.lease,
    "name": lambda value, _: "-" if value is None or value == [] else _text(value, None),
    "word": lambda value, _: "-" if value is None else str(value),
    "status": lambda value, _: str(value),
    "text": _text,
    "tags": lambda value, _: units.tags(value),
    "cell": lambda value, _: units.cell(value),
    "number": lambda value, _: units.annotation(value),
}
_TEXTS = ("name", "text", "tags", "cell")
_LEFT_KINDS = (*_TEXTS, "status", "word", "time")

#: The kinds of fields that have their own names as headers.
_KINDS_OF = {
    "id": ("uid", "step", "pid"),
    "name": ("buffer", "file", "worker", "host"),
    "word": ("now", "kind"),
    "status": ("status", "state"),
    "text": ("prompt", "response"),
    "reward": ("reward",),
}
#: The columns of common fields; other fields are whole numbers under their own names.
COLUMNS = {
    column.name: column
    for column in (
        *(Column(name, name, kind) for kind, names in _KINDS_OF.items() for name in names),
        Column("id", "draw", "id"),
        Column("batch", "draw", "id"),
        Column("position", "#", "id"),
        Column("rollout_id", "id", "id"),
        Column("name", "worker", "name", bad="stands_out"),
        Column("holder", "leased by", "name"),
        Column("taken_by", "taken by", "name"),
        Column("task_name", "task", "name"),
        Column("place", "rollout of", "word", usual=None, title="the group that it fills, and its place there"),
        Column("finish_reason", "finish", "word"),
        Column("bytes", "size", "size"),
        Column("staleness", "stale", "mean", title="staleness in train steps"),
        Column("max_staleness", "max stale", title="the largest staleness"),
        Column("min_reward", "low", "reward", title="the lowest of the groups' mean rewards"),
        Column("max_reward", "high", "reward", title="the highest of the groups' mean rewards"),
        Column("others", "others", "reward", title="mean reward of the groups that others made of the same tasks"),
        Column("below", "below", "reward", bad="stands_out", title="how far it is below the others"),
        Column("priority", "priority", "plain", usual=1.0),
        Column("oldest_model_step", "weights", "id", title="train step of the oldest weights"),
        Column("weights", "weights", "word", title="train steps of the weights"),
        Column("times_sampled", "sampled", usual=0),
        Column("deliveries", "deliveries", usual=0),
        Column("response_tokens", "tokens", "tokens"),
        Column("created_at", "age", "age"),
        Column("taken_at", "drawn", "ago"),
        Column("last_at", "trained", "ago"),
        Column("last_seen", "seen", "ago"),
        Column("started_at", "started", "ago"),
        Column("happened_at", "when", "ago"),
        Column("leased_until", "leased", "lease", usual=None),
        Column("until", "ends", "lease"),
        Column("archived_at", "archived", "age", usual=None),
        Column("tags", "tags", "tags", usual=None),
        Column("detail", "", "text"),
        Column("settled", "consumed"),
        Column("leased", "leased", usual=0),
        Column("back", "back", "some", usual=0, title="groups that came back"),
        Column("run", "run", "word", usual="first", title="the first one, or the restore after which it goes on"),
    )
}


def columns(*names: str, spare: Collection[str] = (), **headers: str) -> list[Column]:
    """Return the columns of fields, with `headers` in place of their names; `spare` ones may be left out."""
    chosen = [COLUMNS.get(name) or Column(name, name) for name in names]
    return [replace(col, header=headers.get(col.name, col.header), spare=col.name in spare) for col in chosen]


def annotated(shown: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Return the columns with one for each annotation of the rows, before the last one."""
    names = dict.fromkeys(name for row in rows for name in row["annotations"])
    return [*shown[:-1], *(Column(f"{ANNOTATIONS}{name}", name, "number", spare=True) for name in names), shown[-1]]


def used(shown: Sequence[Column], rows: Sequence[Any]) -> list[Column]:
    """Return the columns of which some row has another value than the usual one."""
    return [col for col in shown if col.usual is _ALWAYS or any(value_of(row, col.name) != col.usual for row in rows)]


# The tables of the views


#: Groups.
GROUPS = columns(
    *("uid", "buffer", "task_name", "status", "place", "leased_until", "deliveries", "staleness", "reward", "priority"),
    *("times_sampled", "rollouts", "response_tokens", "created_at", "archived_at", "worker", "tags", "prompt"),
    spare=("deliveries", "priority", "times_sampled", "rollouts", "response_tokens", "archived_at", "worker"),
)
#: Groups by task and status.
LANES = [
    *columns("buffer", "task_name", "status", "groups", "leased"),
    Column("overdue", "overdue", usual=0),
    *columns("rollouts", "reward", spare=("rollouts",)),
    *columns("staleness", "max_staleness", "response_tokens", "bytes", spare=("response_tokens", "bytes")),
    Column("oldest", "oldest", "age"),
    Column("newest", "newest", "age", spare=True),
]
#: Rollouts of a group.
ROLLOUTS = [
    *columns("position"),
    Column("parent", "after", "id", usual=None, title="the segment that it continues"),
    *columns("rollout_id", "status", "staleness", "oldest_model_step"),
    Column("rewards", "reward", "id"),
    *columns("response_tokens", "finish_reason", "response"),
]
#: A step's groups by worker, and by task.
_PART_COLUMNS = ("name", "groups", "reward", "others", "below", "staleness")
BY_WORKER = columns(*_PART_COLUMNS, spare=("others", "staleness"))
BY_TASK = columns(*_PART_COLUMNS, spare=("others", "staleness"), name="task", others="before")
#: The groups of a step.
MEMBERS = columns(
    *("uid", "worker", "task_name", "reward", "staleness", "oldest_model_step", "batch", "now", "prompt"),
    spare=("task_name", "staleness", "oldest_model_step", "batch", "now"),
    worker="made by",
)
#: Draws.
BATCHES = columns(
    *("id", "taken_at", "step", "groups", "settled", "back", "reward", "staleness", "worker"),
    spare=("back",),
    worker="by",
)
#: What happened to a group.
TIMELINE = [
    Column("at", "when", "time"),
    Column("at", "ago", "age", spare=True),
    Column("what", "what", "word"),
    *columns("step", "worker", "detail", worker="by"),
]
#: The columns of `Steps.rows`.
STEPS = [
    *columns("step", "last_at", "groups", spare=("last_at", "groups")),
    Column("consumed", "consumed", spare=True, usual=None),
    Column("reward", "reward", "reward", bad="lower"),
    Column("others", "others", "reward", usual=None, title="of the same tasks"),
    *columns("min_reward", "max_reward", "staleness", "max_staleness", "weights", "run", "taken_by",
             spare=("min_reward", "max_reward", "max_staleness", "weights", "taken_by")),
]  # fmt: skip
CHECKPOINTS = [*columns("buffer", "step"), Column("created_at", "made", "time"), *columns("groups", "bytes")]
LEASES = columns("holder", "task_name", "status", "groups", "until")
#: The tasks of a buffer, as waits see them.
TASKS = [
    *columns("buffer", "task_name", "completed"),
    *(
        Column(str(status), str(status), usual=0, spare=True)
        for status in Status
        if status not in (Status.COMPLETED, Status.ARCHIVED)
    ),
    Column("leased", "leased"),
    Column("archived", "archived", usual=0, spare=True),
    Column("prompts", "prompts", usual=0, spare=True, title="put by a prompt ledger, to be generated"),
    Column("made", "made", spare=True, title="groups put since the beginning, without prompts"),
    Column("drawn", "drawn", spare=True),
    Column("replays", "replays", usual=0, spare=True, title="draws of groups that were drawn before"),
    Column("expired_so_far", "expired so far", usual=0, spare=True, title="since the beginning"),
    Column("evicted", "evicted", usual=0, spare=True),
    Column("last_hour", "last hour", spare=True),
    Column("last_put", "last put", "ago"),
    Column("refreshed_to", "at step", "id", spare=True),
]
#: The processes that use a buffer.
PROCESSES = [
    Column("name", "worker", "name"),
    *columns("pid", "host", "state", spare=("pid", "host")),
    Column("seen_at", "seen", "ago"),
    Column("groups", "put", spare=True),
    Column("failures", "failed", spare=True),
    Column("taken", "drawn", spare=True),
]
