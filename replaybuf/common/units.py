"""Formats of values for the terminal, the page, notebooks, sentences and programs: numbers, times, names, JSON."""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, overload

from replaybuf.common.redact import escape

#: Units, the smallest first, and how many of each are one of the next.
_TIMES = {"s": 60, "m": 60, "h": 24, "d": math.inf}
_COUNTS = {"": 1000, "k": 1000, "M": 1000, "G": 1000, "T": math.inf}
_SIZES = {" B": 1000, " kB": 1000, " MB": 1000, " GB": 1000, " TB": math.inf}
_MOST_NAMED = 3
_LONGEST_BRIEF = 80
_HALF_A_DAY = 12 * 3600.0
_LONGEST_CELL = 200
_MOST_ROWS = 50


def number(value: float | int | None, digits: int = 0) -> str:
    """Format a number: 1,234 or 0.417; a dash for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def figure(value: float | int | None, digits: int = 3) -> str:
    """Format a number: whole ones with commas, others with `digits` digits; a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return number(value, 0 if isinstance(value, int) or (value == int(value) and abs(value) >= 1000) else digits)


def short(value: int | None) -> str:
    """Format a count of tokens: 812, 13.4k, 2.1M."""
    return "-" if value is None else _scaled(value, _COUNTS, tenths_below=100)


def size(value: int | None) -> str:
    """Format a number of bytes: 812 B, 13.4 kB, 2.1 MB."""
    return "-" if value is None else _scaled(value, _SIZES, tenths_below=100)


def age(seconds: float | None) -> str:
    """Format an elapsed time: 12s, 4m, 3h, 2d."""
    return "-" if seconds is None else _scaled(max(0, seconds), _TIMES, tenths_below=10)


def _scaled(value: float, units: Mapping[str, float], tenths_below: int) -> str:
    """Format a number in the first unit in which it is less than one of the next, as rounded.

    Below `tenths_below` it has a decimal, unless the unit is the smallest.
    """
    limit = 0
    for unit, next_unit in units.items():
        digits = 1 if round(value, 1) < limit else 0
        text = f"{value:.{digits}f}{unit}"
        if round(value, digits) < next_unit:
            break
        value, limit = value / next_unit, tenths_below
    return text


def some(items: Sequence[object], most: int = 5) -> str:
    """Return the first few of many, for a message: `3, 7, 12 and 40 more`."""
    shown = ", ".join(map(str, items[:most]))
    return f"{shown} and {len(items) - most:,} more" if len(items) > most else shown


def number_of(count: int, name: str) -> str:
    """Return `1 task`, `1,234 tasks`."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"


# Times


@overload
def time_of(seconds: float) -> datetime: ...
@overload
def time_of(seconds: float | None) -> datetime | None: ...
def time_of(seconds: float | None) -> datetime | None:
    """Convert seconds since the epoch into a datetime; None for None."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def moment(value: datetime | None) -> str:
    """Format a time in UTC, to the second."""
    return "" if value is None else value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def iso(moment: datetime) -> str:
    """Format a time in UTC, to the millisecond."""
    if moment.tzinfo is None:
        return moment.isoformat()
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def ago(moment: datetime | None, now: datetime) -> str:
    """Format the time since a moment, or until one in the future."""
    if moment is None:
        return "-"
    seconds = (now - moment).total_seconds()
    return f"{age(seconds)} ago" if seconds >= 0 else f"in {age(-seconds)}"


def lease(until: datetime | None, now: datetime | None) -> str:
    """Format when a lease expires ("in 45s"), or that it has expired and a draw would return its groups."""
    if until is None or now is None:
        return "-"
    remaining = (until - now).total_seconds()
    return f"in {age(remaining)}" if remaining > 0 else f"over {age(-remaining)} ago"


# Texts and JSON


def as_text(value: Any, indent: int | None = None) -> str:
    """Return a text as it is, anything else as JSON, with times, arrays and images in it as `described`."""
    if isinstance(value, str):
        return value
    try:
        text = json.dumps(value, ensure_ascii=False, default=described, indent=indent)
    except (TypeError, ValueError):  # such as dict keys that JSON doesn't support
        return repr(value)
    return str(json.loads(text)) if text.startswith('"') else text


#: Arrays of so many numbers in a row, and fewer, are shown.
_FEW_NUMBERS = 32


def described(value: Any) -> Any:
    """Describe a value that JSON lacks: `float32 (32, 16)`, few numbers themselves, ISO times, `RGB 16x16`."""
    if isinstance(value, date):  # or a datetime
        return value.isoformat()
    if hasattr(value, "dtype") and hasattr(value, "shape"):  # of numpy or torch
        shape = tuple(value.shape)
        if hasattr(value, "tolist") and len(shape) < 2 and math.prod(shape) <= _FEW_NUMBERS:
            return value.tolist()
        return f"{str(value.dtype).removeprefix('torch.')} {shape}"
    if hasattr(value, "mode") and hasattr(value, "size") and hasattr(value, "getbands"):  # of Pillow
        return f"{value.mode} {value.size[0]}x{value.size[1]}"
    return repr(value)


def cell(value: Any) -> str:
    """Format a value of a database on one line."""
    if value is None:
        return ""
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value):,} bytes>"
    if isinstance(value, float | Decimal):
        is_whole = isinstance(value, Decimal) and value == value.to_integral_value()  # PostgreSQL's sums of integers
        return f"{value:.0f}" if is_whole else f"{value:.6g}"
    if isinstance(value, datetime):
        return iso(value)
    if isinstance(value, dict | list):
        return json.dumps(plain(value), ensure_ascii=False, allow_nan=False)
    return str(value)


def tags(values: Mapping[str, Any] | None) -> str:
    """Format tags on one line: name=value."""
    return " ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in (values or {}).items()
    )


def annotated(values: Mapping[str, Any]) -> str:
    """Format annotations on one line, by name."""
    return ", ".join(f"{name} {annotation(value)}" for name, value in values.items())


def annotation(value: Any) -> str:
    """Format an annotation; of an array, which is a dict, the mean and the range: `0.15 (0.1 to 0.2)`."""
    array = isinstance(value, dict) and value["tokens"]
    return f"{cell(value['mean'])} ({cell(value['min'])} to {cell(value['max'])})" if array else cell(value)


def reward(value: float | None, parts: Mapping[str, Any] | None) -> str | None:
    """Format a reward with the parts of a dict: `0.500 (format 1, score 0)`."""
    details = ", ".join(
        f"{key} {part:g}" if isinstance(part, int | float) else f"{key} {part}" for key, part in (parts or {}).items()
    )
    total = None if value is None else f"{value:.3f}"
    return f"{total or '-'} ({details})" if details else total


def is_there(value: Any) -> bool:
    """Return whether a value isn't None or empty; arrays, which have no truth value, count as present."""
    return value is not None and not (isinstance(value, str | list | tuple | dict | set) and not value)


def joined_parts(content: Any) -> Any:
    """Join the content of a message into one text if it is a list of text parts; else return it as it is."""
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        return "\n".join(as_text(part["text"]) for part in content)
    return content


def plain(value: Any) -> Any:
    """Convert a value for JSON: NaN and infinities become None, bytes base64."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {name if isinstance(name, str) else str(plain(name)): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return plain(sorted(value, key=repr))
    if isinstance(value, datetime):
        return iso(value)
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, bytes | bytearray | memoryview):
        return {"$base64": True, "encoded": base64.b64encode(value).decode("ascii")}
    if isinstance(value, Decimal):
        return (int(value) if value == value.to_integral_value() else float(value)) if value.is_finite() else None
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if hasattr(value, "tolist"):  # numpy's arrays and scalars
        return plain(value.tolist())
    return str(value)


def html_table(caption: str, headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table for notebooks (`_repr_html_`): at most 50 rows, texts escaped and cut after 200 characters."""
    rows = list(rows)
    head = "".join(f"<th>{_html(header)}</th>" for header in headers)
    body = "".join(f"<tr>{''.join(map(_html_cell, row))}</tr>" for row in rows[:_MOST_ROWS])
    more = f"<p>{len(rows) - _MOST_ROWS:,} more</p>" if len(rows) > _MOST_ROWS else ""
    return f"<p><b>{_html(caption)}</b></p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def _html_cell(value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f'<td style="text-align: {"right" if is_number else "left"}">{_html(value)}</td>'


def _html(value: Any) -> str:
    text = figure(value) if isinstance(value, int | float) else "" if value is None else as_text(value)
    cut = text if len(text) <= _LONGEST_CELL else f"{text[:_LONGEST_CELL]}…"
    return html.escape(escape(cut))


# In sentences


def brief(text: str, length: int = _LONGEST_BRIEF) -> str:
    """Return the beginning of a text on one line, without anything that could drive a terminal or forge a log."""
    return _cut(escape(" ".join(text[: 4 * length].split())), length)


def _cut(line: str, length: int = _LONGEST_BRIEF) -> str:
    return line if len(line) <= length else line[: length - 3] + "..."


def named(name: str) -> str:
    """Return the name of a task or worker, quoted if its white space would be ambiguous."""
    return brief(name) if name == " ".join(name.split()) else _cut(escape(repr(name[: 4 * _LONGEST_BRIEF])))


def listed(names: Iterable[str], most: int = _MOST_NAMED) -> str:
    """Return names as `a, b and c`, or `a, b, c and 4 more`."""
    return joined([named(name) for name in names], most)


def joined(parts: Sequence[str], most: int = _MOST_NAMED) -> str:
    """Return parts of a sentence as `a, b and c`, or `a, b, c and 4 more`."""
    if len(parts) > most:
        return f"{', '.join(parts[:most])} and {len(parts) - most:,} more"
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)


def counted(counts: Mapping[str, int]) -> str:
    """Return names with their counts, the largest first: `b (60) and a (4)`."""
    largest = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
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
