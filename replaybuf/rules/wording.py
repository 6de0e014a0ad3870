"""Names, numbers and times in sentences about waits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from replaybuf import units
from replaybuf.unsafe import escape

_NAMED = 3
_LONGEST = 80


def brief(text: str, length: int = _LONGEST) -> str:
    """Return the beginning of a text on one line, without anything that could drive a terminal or forge a log."""
    line = escape(" ".join(text[: 4 * length].split()))
    return line if len(line) <= length else line[: length - 3] + "..."


def listed(names: Iterable[str], most: int = _NAMED, *, link: str = "and") -> str:
    """Return names as `a, b and c`, or `a, b, c and 4 more`."""
    names = [brief(name) for name in names]
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most:,} more"
    return f" {link} ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def groups(count: int, status: str = "") -> str:
    """Return `1 completed group`, `64 completed groups`."""
    return f"{count:,} {status}{' ' if status else ''}group{'' if count == 1 else 's'}"


def clock(moment: float) -> str:
    """Return a time of the day, in UTC."""
    return f"{datetime.fromtimestamp(moment, UTC):%H:%M:%S} UTC"


def ago(seconds: float) -> str:
    """Return `12s ago`."""
    return f"{units.age(seconds)} ago"


def until(moment: float, now: float) -> str:
    """Return when a lease ends, or ended."""
    if moment > now:
        return f"until {clock(moment)} (in {units.age(moment - now)})"
    return f"until {clock(moment)} ({ago(now - moment)}: they come back as soon as somebody looks)"


def wanted(wants: Mapping[str, int], status: str) -> str:
    """Return `64 completed groups of math and 8 of code`."""
    tasks: Sequence[tuple[str, int]] = [*wants.items()]
    if not tasks:
        return groups(0, status)
    (task, count), *others = tasks
    return listed([f"{groups(count, status)} of {brief(task)}", *(f"{n:,} of {brief(name)}" for name, n in others)])
