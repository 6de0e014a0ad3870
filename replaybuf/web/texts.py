"""Values as texts of a page. Every text that a template shows goes through `shown`, and is then escaped for HTML."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from datetime import UTC, date, datetime
from typing import Any

from replaybuf import units
from replaybuf.unsafe import escape

_LINES = "\n\t"


def shown(value: Any) -> Any:
    """Return what a template shows of a value: nothing of None, and texts without hidden characters."""
    if value is None:
        return ""
    if hasattr(value, "__html__") or not isinstance(value, str):
        return value
    return escape(value, keep=_LINES)


def moment(value: datetime | None) -> str:
    """Return a time in UTC, to the second."""
    return "" if value is None else value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def ago(value: datetime | None, now: datetime) -> str:
    """Return how long ago a time was, or in how long it will be."""
    if value is None:
        return "-"
    seconds = (now - value).total_seconds()
    return f"{units.age(seconds)} ago" if seconds >= 0 else f"in {units.age(-seconds)}"


def figure(value: float | int | None, digits: int = 3) -> str:
    """Return a number: whole ones with commas, others with so many digits; a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return units.number(value, 0 if isinstance(value, int) or (value == int(value) and abs(value) >= 1000) else digits)


def as_text(value: Any) -> str:
    """Return a text as it is, and anything else as JSON, or as Python writes it where JSON can't."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, default=repr, indent=2 if isinstance(value, dict) else None)
    except (TypeError, ValueError):
        return repr(value)


def as_json(value: Any) -> bytes:
    """Return JSON for programs: times as ISO 8601, numbers that JSON lacks as null, all in ASCII."""
    return json.dumps(_plain(value), allow_nan=False).encode()


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(one) for one in value]
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)
