"""Request parameters, validated; the table pages and facets that they select; other runs to plot beside this one."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from replaybuf import units
from replaybuf.errors import InputError
from replaybuf.files.row_format import FileGroup
from replaybuf.files.sources import RolloutFile, is_sqlite
from replaybuf.redact import redact_path
from replaybuf.rollouts.rewards import reward_value
from replaybuf.storage.sql.inspection.groups import buffers_of
from replaybuf.storage.sql.inspection.reader import Reader, open_reader
from replaybuf.storage.sql.inspection.traces import StepSummary, summarise_steps

LARGEST = 2**63 - 1
#: The parameters that pages know. Others are dropped: each link repeats those of its page.
PARAMETERS = frozenset(
    (
        *("across", "after", "all", "before", "beside", "buffer", "by", "from", "hours", "kind"),
        *("order", "page", "size", "sort", "sql", "status", "task", "to", "where", "worker"),
    )
)

#: The parameters that select the part of a table that is shown.
_OF_A_TABLE = frozenset(("after", "before", "order", "page", "sort"))


@dataclass(frozen=True, slots=True)
class Ask:
    """The parameters of a URL's query, and the numbers in its path. Accessors raise InputError for invalid values.

    `others` are the names of runs of other databases and of exports, and `elsewhere` the train steps of the requested
    one of them. `prefix` is the path of a proxy before the paths of all pages, "/rl" or "".
    """

    parameters: Mapping[str, str]
    path: Mapping[str, str] = field(default_factory=dict)
    others: Sequence[str] = ()
    elsewhere: Sequence[StepSummary] | None = None
    prefix: str = ""

    def text(self, name: str) -> str | None:
        """Return a parameter's text, or None when it is missing or empty."""
        given = self.parameters.get(name) or None
        if given is not None and "\x00" in given:
            raise InputError(f"{name} has a NUL character, which no name and no query has")
        return given

    def number(self, name: str, default: int | None = None, *, least: int = 0, most: int = LARGEST) -> int | None:
        """Return a whole number between `least` and `most`, or the default when it isn't given."""
        given = self.path.get(name) or self.parameters.get(name)
        if not given:
            return default
        if not given.removeprefix("-").isdecimal() or not given.isascii() or len(given) > len(str(LARGEST)) + 1:
            raise InputError(f"{name} must be a whole number, not {given!r:.100}")
        if not least <= (value := int(given)) <= most:
            raise InputError(f"{name} must be from {least:,} to {most:,}, not {value:,}")
        return value

    def choice(self, name: str, among: tuple[str, ...]) -> str:
        """Return a parameter's value, which must be one of `among`; the default is the first of them."""
        given = self.text(name) or among[0]
        if given not in among:
            raise InputError(f"{name} must be one of {', '.join(among)}, not {given!r:.100}")
        return given

    def link(self, path: str = "", **changes: object) -> str:
        """Return a URL with these parameters changed; parameters set to None are left out.

        Parameters of a table (order, position) aren't passed on to another page.
        """
        kept = {name: one for name, one in self.parameters.items() if not path or name not in _OF_A_TABLE}
        return self._url(path, {**kept, **changes})

    def same(self, path: str) -> str:
        """Return a URL with another path and the same parameters."""
        return self._url(path, self.parameters)

    def _url(self, path: str, parameters: Mapping[str, object]) -> str:
        query = urlencode({name: one for name, one in parameters.items() if one not in (None, "")}, errors="replace")
        path = self.prefix + path if path else ""
        return f"{path}?{query}" if query else path or "?"


class NotThereError(InputError):
    """There is nothing of this number: it was taken, deleted or forgotten, or never was."""


#: Rows of a table on a page, and values of a facet.
SIZE, VALUES = 100, 10


@dataclass(frozen=True, slots=True)
class Listed:
    """One page of a table: its rows, the total number of rows, its offset, and the next page's offset, if any."""

    rows: Sequence[Any]
    total: int
    first: int
    next: int | None


def listed(
    rows: Sequence[Any], ask: Ask, columns: Sequence[str], *, order: str = "order", after: str = "after"
) -> Listed:
    """Return a page of rows, ordered by a column (descending with a "-" before its name), or in the given order.

    `order` and `after` name the parameters with the column and the offset. Rows without a value come last. Raises
    InputError.
    """
    name, first = ask.text(order), ask.number(after, 0) or 0
    if name is not None:
        column = name.removeprefix("-")
        if column not in columns:
            raise InputError(
                f"{order} must be one of {', '.join(columns)}, or that with a - before it, not {name!r:.100}"
            )
        known = [row for row in rows if value_of(row, column) is not None]
        known.sort(key=lambda row: value_of(row, column), reverse=name != column)
        rows = [*known, *(row for row in rows if value_of(row, column) is None)]
    end = first + SIZE
    return Listed(rows[first:end], len(rows), first, end if end < len(rows) else None)


def value_of(row: Any, name: str) -> Any:
    """Return a value of a row: of a mapping, or of an object with attributes."""
    return row[name] if isinstance(row, Mapping) else getattr(row, name)


@dataclass(frozen=True, slots=True)
class Choice:
    """A value of a facet: its text, the number of rows with it, the URL that selects it, and whether it is selected."""

    text: str
    count: int
    href: str
    chosen: bool


@dataclass(frozen=True, slots=True)
class Facet:
    """The values of a column, most frequent first; `more` is the number of values that aren't shown."""

    name: str
    choices: Sequence[Choice]
    more: int


def facet_of(name: str, counts: Mapping[Any, int], ask: Ask, *, parameter: str | None = None) -> Facet:
    """Return the values of a column with their row counts.

    The parameter, or else the query `where`, selects a value; the URL of a selected value deselects it.
    """
    choices = []
    for value, count in Counter(counts).most_common(VALUES):
        if parameter is not None:
            chosen = ask.text(parameter) == value
            href = ask.link("", **{parameter: None if chosen else value, "after": None, "before": None})
        else:
            where, chosen = toggled(ask.text("where"), name, value)
            href = ask.link("", where=where, after=None)
        choices.append(Choice(value if isinstance(value, str) else json.dumps(value), count, href, chosen))
    return Facet(name, choices, max(0, len(counts) - VALUES))


def toggled(where: str | None, name: str, value: Any) -> tuple[str | None, bool]:
    """Add the condition that a field has a value to a query, or remove it; return the query, and whether it had it."""
    try:
        query = json.loads(where) if where and where.strip() else {}
    except ValueError:
        query = {}
    if not isinstance(query, dict):
        query = {}
    if name in query and query[name] == value and type(query[name]) is type(value):
        rest = {field: one for field, one in query.items() if field != name}
        return json.dumps(rest) if rest else None, True
    if name in query and isinstance(query[name], dict):
        return json.dumps({"$and": [query, {name: value}]}), False
    return json.dumps({**query, name: value}), False


# Runs of other databases and of exports, whose train steps are plotted beside those of the served database

#: Train steps of a run that are plotted.
MOST_STEPS = 1000
_REWARD_KEY = "score"


#: Returns the last train steps of a run before one, newest first, within so many seconds.
OtherRun = Callable[[int | None, float], Sequence[StepSummary]]


def _of_buffer(reader: Reader, buffer: str, before: int | None, seconds: float) -> Sequence[StepSummary]:
    return reader.read(lambda tx: summarise_steps(tx, buffer, before=before, limit=MOST_STEPS), timeout=seconds)


def _of_export(steps: Sequence[StepSummary], before: int | None, seconds: float) -> Sequence[StepSummary]:
    return [one for one in steps if before is None or one.step < before][:MOST_STEPS]


def other_runs(sources: Sequence[str]) -> dict[str, OtherRun]:
    """Return the runs of databases (URLs or paths) and exports, by short name. Raises InputError, FileError, ..."""
    found: dict[str, OtherRun] = {}
    for source in sources:
        name, path = Path(source.partition("?")[0]).name or source, Path(source)
        if "://" not in source and (path.is_dir() or (path.exists() and not is_sqlite(path))):
            runs: dict[str, OtherRun] = {name: partial(_of_export, _summaries(source))}  # it is read once
        else:
            reader = open_reader(source)
            buffers = reader.read(buffers_of) or ["default"]
            labels = [name if len(buffers) == 1 else f"{name} {buffer}" for buffer in buffers]
            runs = {label: partial(_of_buffer, reader, one) for label, one in zip(labels, buffers, strict=True)}
        for label, run in runs.items():
            number, unique = 1, label
            while unique in found:
                number += 1
                unique = f"{label} ({number})"
            found[unique] = run
    return found


def _summaries(path: str) -> list[StepSummary]:
    """Return the train steps of an export, newest first. Raises InputError when no group has a train step."""
    by_step: dict[int, list[FileGroup]] = defaultdict(list)
    for group in RolloutFile(path).read():
        if group.trained_step is not None:
            group.rollouts = [{"reward": one.get("reward")} for one in group.rollouts]
            by_step[group.trained_step].append(group)
    if not by_step:
        raise InputError(
            f"{redact_path(path)} has no groups that were trained on: archive= in the config keeps them, and export "
            "writes them with their train step"
        )
    return [_summary(step, by_step[step]) for step in sorted(by_step, reverse=True)]


def _summary(step: int, groups: Sequence[FileGroup]) -> StepSummary:
    known = ([reward_value(rollout["reward"], _REWARD_KEY) for rollout in one.rollouts] for one in groups)
    numbers = ([reward for reward in of_group if reward is not None] for of_group in known)
    rewards = [sum(of_group) / len(of_group) for of_group in numbers if of_group]
    staleness = [one.staleness for one in groups]
    times = [units.time_of(one.created_at or 0.0) for one in groups]
    return StepSummary(
        step=step,
        restores=0,
        resumed=False,
        undone=False,
        first_at=min(times),
        last_at=max(times),
        batches=1,
        groups=len(groups),
        settled=len(groups),
        reward=sum(rewards) / len(rewards) if rewards else None,
        min_reward=min(rewards, default=None),
        max_reward=max(rewards, default=None),
        staleness=sum(staleness) / len(staleness),
        max_staleness=max(staleness),
        oldest_model_step=None,
        newest_model_step=None,
        taken_by=[],
    )
