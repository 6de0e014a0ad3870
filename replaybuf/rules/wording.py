"""Names, numbers and times in sentences about waits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from replaybuf import units
from replaybuf.redact import escape

_NAMED = 3
_LONGEST = 80


def brief(text: str, length: int = _LONGEST) -> str:
    """Return the beginning of a text on one line, without anything that could drive a terminal or forge a log."""
    return _cut(escape(" ".join(text[: 4 * length].split())), length)


def _cut(line: str, length: int = _LONGEST) -> str:
    return line if len(line) <= length else line[: length - 3] + "..."


def named(name: str) -> str:
    """Return the name of a task or worker: quoted if one that looks the same could differ from it in white space."""
    return brief(name) if name == " ".join(name.split()) else _cut(escape(repr(name[: 4 * _LONGEST])))


def listed(names: Iterable[str], most: int = _NAMED) -> str:
    """Return names as `a, b and c`, or `a, b, c and 4 more`."""
    return joined([named(name) for name in names], most)


def joined(parts: Sequence[str], most: int = _NAMED, *, link: str = "and") -> str:
    """Return parts of a sentence as `a, b and c`, or `a, b, c and 4 more`."""
    if len(parts) > most:
        return f"{', '.join(parts[:most])} and {len(parts) - most:,} more"
    return f" {link} ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)


def groups(count: int, status: str = "") -> str:
    """Return `1 completed group`, `64 completed groups`."""
    return f"{count:,} {status}{' ' if status else ''}group{'' if count == 1 else 's'}"


def clock(moment: float) -> str:
    """Return a time of the day, in UTC."""
    return f"{datetime.fromtimestamp(moment, UTC):%H:%M:%S} UTC"


# Ages are true at the time `now` only: what is read later (None) has the times themselves.


def ago(moment: float, now: float | None) -> str:
    """Return `12s ago`, or `at 20:43:10 UTC`."""
    return f"at {clock(moment)}" if now is None else f"{units.age(now - moment)} ago"


def at(moment: float, now: float | None) -> str:
    """Return `at 20:43:10 UTC (12s ago)`, or without the age."""
    return f"at {clock(moment)}" if now is None else f"at {clock(moment)} ({ago(moment, now)})"


def since(moment: float, now: float | None) -> str:
    """Return `since 12s`, or `since 20:43:10 UTC`."""
    return f"since {clock(moment)}" if now is None else f"since {units.age(now - moment)}"


def until(moment: float, now: float | None) -> str:
    """Return when a lease ends, or ended."""
    if now is None:
        return f"until {clock(moment)}"
    if moment > now:
        return f"until {clock(moment)} (in {units.age(moment - now)})"
    return f"until {clock(moment)} ({ago(moment, now)}: they come back as soon as somebody looks)"


def wanted(wants: Mapping[str, int], status: str) -> str:
    """Return `64 completed groups of math and 8 of code`."""
    tasks: Sequence[tuple[str, int]] = [*wants.items()]
    if not tasks:
        return groups(0, status)
    (task, count), *others = tasks
    return joined([f"{groups(count, status)} of {named(task)}", *(f"{n:,} of {named(name)}" for name, n in others)])
