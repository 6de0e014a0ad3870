"""Names, numbers and times in sentences about waits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from replaybuf.common.redact import escape

_NAMED = 3
_LONGEST = 80
_HALF_A_DAY = 12 * 3600.0


def brief(text: str, length: int = _LONGEST) -> str:
    """Return the beginning of a text on one line, without anything that could drive a terminal or forge a log."""
    return _cut(escape(" ".join(text[: 4 * length].split())), length)


def _cut(line: str, length: int = _LONGEST) -> str:
    return line if len(line) <= length else line[: length - 3] + "..."


def named(name: str) -> str:
    """Return the name of a task or worker, quoted if its white space would be ambiguous."""
    return brief(name) if name == " ".join(name.split()) else _cut(escape(repr(name[: 4 * _LONGEST])))


def listed(names: Iterable[str], most: int = _NAMED) -> str:
    """Return names as `a, b and c`, or `a, b, c and 4 more`."""
    return joined([named(name) for name in names], most)


def joined(parts: Sequence[str], most: int = _NAMED, *, link: str = "and") -> str:
    """Return parts of a sentence as `a, b and c`, or `a, b, c and 4 more`."""
    if len(parts) > most:
        return f"{', '.join(parts[:most])} and {len(parts) - most:,} more"
    return f" {link} ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)


def counted(counts: Mapping[str, int]) -> str:
    """Return names with their counts, the largest first: `b (60) and a (4)`."""
    largest = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
    return joined([f"{named(name)} ({count:,})" for name, count in largest])


def groups(count: int, status: str = "") -> str:
    """Return `1 completed group`, `64 completed groups`."""
    return f"{count:,} {status}{' ' if status else ''}group{'' if count == 1 else 's'}"


def are(count: int, status: str = "") -> str:
    """Return `1 completed group is`, `64 completed groups are`."""
    return f"{groups(count, status)} {'is' if count == 1 else 'are'}"


def wanted(wants: Mapping[str, int], status: str) -> str:
    """Return `64 completed groups of math and 8 of code`."""
    (task, count), *others = wants.items() or [("", 0)]
    first = groups(count, status) + (f" of {named(task)}" if wants else "")
    return joined([first, *(f"{n:,} of {named(name)}" for name, n in others)])


def people(names: Iterable[str], one: str, several: str) -> str:
    """Return the names with the verb for their number."""
    unique = list(dict.fromkeys(names))
    return f"{listed(unique)} {one if len(unique) == 1 else several}"


def clock(moment: float, now: float) -> str:
    """Return a time of day in UTC, with its date if it isn't within twelve hours of `now`.

    Sentences have no ages: they are read in logs, events and errors, when an age would be wrong.
    """
    form = "%H:%M:%S UTC" if abs(now - moment) < _HALF_A_DAY else "%Y-%m-%d %H:%M UTC"
    return datetime.fromtimestamp(moment, UTC).strftime(form)
