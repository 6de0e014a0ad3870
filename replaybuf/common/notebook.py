"""HTML tables for notebooks (`_repr_html_`)."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

from replaybuf.common import units
from replaybuf.common.redact import escape

_LONGEST = 200
_MOST_ROWS = 50


def table(caption: str, headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table as HTML: at most 50 rows, texts escaped and cut after 200 characters."""
    rows = list(rows)
    head = "".join(f"<th>{_shown(one)}</th>" for one in headers)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows[:_MOST_ROWS])
    more = f"<p>{len(rows) - _MOST_ROWS:,} more</p>" if len(rows) > _MOST_ROWS else ""
    return f"<p><b>{_shown(caption)}</b></p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def _cell(value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f'<td style="text-align: {"right" if is_number else "left"}">{_shown(value)}</td>'


def _shown(value: Any) -> str:
    text = units.figure(value) if isinstance(value, int | float) else "" if value is None else units.as_text(value)
    cut = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return html.escape(escape(cut))
