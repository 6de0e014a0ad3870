"""Panels of lines, arranged on a screen of any size: side by side if it is wide, cut to what fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from replaybuf.cli.escape import escape_line
from replaybuf.cli.output import console

if TYPE_CHECKING:
    from rich.text import Text

#: From this width on there are two columns of panels.
TWO_COLUMNS = 140
_GAP = 2
# No screen shows more of one text.
_LONGEST = 2000


@dataclass(slots=True)
class Panel:
    """A title and lines below it, of which at least `least` are shown while there is any room.

    Lines that are too wide are cut or, if it `wraps`, go on below. `of` is the buffer that it tells of.
    """

    title: str
    lines: list[Text] = field(default_factory=list)
    least: int = 3
    wraps: bool = False
    of: str = ""

    def fitted(self, width: int) -> list[Text]:
        """Return the lines, none of which goes on beyond the width if it wraps."""
        if not self.wraps:
            return self.lines
        return [part for one in self.lines for part in one.wrap(console(), width, no_wrap=False, overflow="fold")]


def line(*parts: str | tuple[str, str]) -> Text:
    """Return a line of texts, or of pairs of a text and a style; whatever is in them, it is one line."""
    from rich.text import Text

    made = Text(no_wrap=True, overflow="ellipsis")
    for part in parts:
        text, style = (part, "") if isinstance(part, str) else part
        made.append(one_line(text), style)
    return made


def one_line(text: str) -> str:
    """Return a text that can't drive the terminal, without newlines; spaces at its ends stay."""
    shown = text[:_LONGEST]
    stripped = escape_line(shown)
    if shown.isspace() or not shown:
        return " " * len(shown)
    before, after = len(shown) - len(shown.lstrip(" ")), len(shown) - len(shown.rstrip(" "))
    return f"{' ' * before}{stripped}{' ' * after}"


def arrange(head: Sequence[Text], panels: Sequence[Panel], foot: Text, width: int, height: int | None) -> list[Text]:
    """Return the lines of a screen, none wider than it, and exactly as many as it has (None: as many as there are)."""
    room = None if height is None else max(0, height - len(head) - 1)
    if width >= TWO_COLUMNS:
        half = (width - _GAP) // 2
        (left, on_left), (right, on_right) = (stack(side, half, room) for side in (panels[0::2], panels[1::2]))
        body, shown = _beside(left, right, half), on_left | on_right
    else:
        body, shown = stack(panels, width, room)
    if room is not None:
        body = [*body[:room], *(line() for _ in range(room - len(body)))]
    if hidden := len({panel.of for panel in panels} - shown):
        foot = foot.copy().append(f"  {hidden:,} more buffer{'' if hidden == 1 else 's'}: --buffer NAME", "yellow")
    lines = [*head, *body, foot]
    for one in lines:
        one.truncate(width, overflow="ellipsis")
    return lines if height is None else lines[-height:] if height else []


def stack(panels: Sequence[Panel], width: int, room: int | None) -> tuple[list[Text], set[str]]:
    """Return panels one below the other, each cut so that all have their share of the room; and whose are shown."""
    fitted = [panel.fitted(width) for panel in panels]
    shares = share([len(one) for one in fitted], [panel.least for panel in panels], room)
    lines, shown = [], set()
    for panel, texts, given in zip(panels, fitted, shares, strict=True):
        if given is None:
            continue
        shown.add(panel.of)
        more = f" ({given} of {len(texts)})" if given < len(texts) else ""
        title = f"── {panel.title}{more} "
        lines.append(line((title + "─" * max(0, width - len(title)), "dim")))
        lines += texts[:given]
    for one in lines:
        one.truncate(width, overflow="ellipsis")
    return lines, shown


def share(wanted: Sequence[int], least: Sequence[int], room: int | None) -> list[int | None]:
    """Return how many lines each panel has below its title; None for those without room for a title and a line.

    The first have their least before the last have any; what is left over goes to those that lack most of theirs.
    """
    if room is None:
        return [*wanted]
    shares: list[int | None] = []
    for size, few in zip(wanted, least, strict=True):
        given = min(size, few, room - 1)
        shares.append(given if given > 0 or (size == 0 and room > 0) else None)
        room -= 0 if shares[-1] is None else given + 1
    while room > 0:
        lacking = [i for i, given in enumerate(shares) if given is not None and given < wanted[i]]
        if not lacking:
            break
        neediest = max(lacking, key=lambda i: wanted[i] - (shares[i] or 0))
        shares[neediest] = (shares[neediest] or 0) + 1
        room -= 1
    return shares


def _beside(left: Sequence[Text], right: Sequence[Text], width: int) -> list[Text]:
    from rich.text import Text

    lines = []
    for i in range(max(len(left), len(right))):
        one = left[i].copy() if i < len(left) else Text(no_wrap=True)
        one.pad_right(max(0, width + _GAP - one.cell_len))
        lines.append(one.append_text(right[i]) if i < len(right) else one)
    return lines
