"""A frame of `watch`: the state of a database, as panels."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from replaybuf import units
from replaybuf.cli.groups import status_style, trainer_text
from replaybuf.cli.output import console
from replaybuf.redact import escape
from replaybuf.rollouts.statuses import Status
from replaybuf.rules.transitions import Tally, rate

if TYPE_CHECKING:
    from rich.text import Text

    from replaybuf.rules.circumstances import Circumstances, Worker
    from replaybuf.storage.sql.inspection.waits import Dashboard, Reading


#: Minimum width for two columns of panels.
TWO_COLUMNS = 140
_GAP = 2
_NEWLINES = re.compile(r"\s*\n\s*")
# Texts are cut here: no screen shows more.
_LONGEST = 2000


@dataclass(slots=True)
class Panel:
    """A title and lines below it, at least `least` of which are shown if there is room.

    Lines that are too wide are cut or, with `wraps`, wrapped. `of` is the panel's buffer.
    """

    title: str
    lines: list[Text] = field(default_factory=list)
    least: int = 3
    wraps: bool = False
    of: str = ""

    def fitted(self, width: int) -> list[Text]:
        """Return the lines, wrapped to the width if the panel `wraps`."""
        if not self.wraps:
            return self.lines
        return [part for one in self.lines for part in one.wrap(console(), width, no_wrap=False, overflow="fold")]


def line(*parts: str | tuple[str, str]) -> Text:
    """Return one line of texts, or of pairs of a text and a style; newlines in them are escaped."""
    from rich.text import Text

    made = Text(no_wrap=True, overflow="ellipsis")
    for part in parts:
        text, style = (part, "") if isinstance(part, str) else part
        made.append(one_line(text), style)
    return made


def one_line(text: str) -> str:
    """Return a text without control characters and newlines."""
    return escape(_NEWLINES.sub(" ", text[:_LONGEST]))


def arrange(head: Sequence[Text], panels: Sequence[Panel], foot: Text, width: int, height: int | None) -> list[Text]:
    """Return the lines of a screen: none wider than `width`, and exactly `height` of them (None: any number)."""
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
        foot = foot.copy().append(f"  {units.number_of(hidden, 'more buffer')}: --buffer NAME", "yellow")
    lines = [*head, *body, foot]
    for one in lines:
        one.truncate(width, overflow="ellipsis")
    return lines if height is None else lines[-height:] if height else []


def stack(panels: Sequence[Panel], width: int, room: int | None) -> tuple[list[Text], set[str]]:
    """Return the lines of stacked panels, each cut to its share of the room, and the buffers whose panels are shown."""
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
    """Return the number of lines of each panel below its title; None for panels without room for a title and a line.

    Earlier panels get their minimum before later ones get any line; the rest goes to panels that lack most lines.
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
    for one, other in zip_longest(left, right):
        both = Text(no_wrap=True) if one is None else one.copy()
        both.pad_right(max(0, width + _GAP - both.cell_len))
        lines.append(both if other is None else both.append_text(other))
    return lines


_BINS = 8
_BAR = 24
_NAME = 20
_MOST = 20


def panels_of(found: Sequence[Dashboard]) -> list[Panel]:
    """Return the panels of each buffer, the most important first; neighbours stand side by side.

    With several buffers, those with waits come first: their waits, then all other panels.
    """
    several = len(found) > 1
    panels = [_waiting(one, several) for one in found if one.waits]
    for one in sorted(found, key=lambda one: not one.waits):
        of, now = f" of {one.buffer}" if several else "", one.about.now
        if not one.waits:
            panels.append(_waiting(one, several))
        batches = [_batch(row, now) for row in one.batches[:_MOST]] or [line("nothing was drawn yet")]
        events = [_event(row) for row in one.events[:_MOST]] or [line("none")]
        title = f"staleness, reward{of} of the {one.sample.groups:,} put last"
        panels += [
            Panel(f"workers{of}", worker_lines(one.about), 3, of=one.buffer),
            Panel(f"groups{of}, rates of the last minute", _tasks(one), 4, of=one.buffer),
            Panel(f"last draws{of}", batches, 2, of=one.buffer),
            Panel(title, _distributions(one), 4, of=one.buffer),
            Panel(f"events{of}", events, 2, of=one.buffer),
        ]
    return panels


def _waiting(found: Dashboard, several: bool) -> Panel:
    lines = []
    for one in found.waits:
        since = "" if one.wait.since is None else f" {units.age(found.about.now - one.wait.since)}"
        what = "" if one.wait.kind == "groups" else f" for {'room' if one.wait.kind == 'room' else 'the trainer'}"
        who = f"{one.wait.worker or 'somebody'} waits{what}{since}: "
        lines.append(line((who, "bold yellow"), one.diagnosis.sentence))
    title, lines = f"waiting of {found.buffer}" if several else "waiting", lines or [line(("nobody waits", "green"))]
    return Panel(title, lines, least=4, wraps=True, of=found.buffer)


def _tasks(found: Dashboard) -> list[Text]:
    from rich.cells import cell_len

    about = found.about
    tasks = sorted({task for task, _, _ in about.tallies})
    if not tasks:
        return [line("nothing was put yet")]
    used = [s for s in Status if s == Status.COMPLETED or any(about.count(task, s) for task in tasks)]
    width = min(_NAME, max(4, *map(cell_len, map(one_line, tasks))))
    heads = [*(f"{status!s:>10}" for status in used), f"{'leased':>8}{'in/min':>9}{'out/min':>9}"]
    lines = [line((f"{'task':<{width}}" + "".join(heads), "bold"))]
    for task in tasks:
        leased = sum(about.count(task, status, Tally.LEASED) for status in Status)
        counts = [(f"{about.count(task, status):>10,}", status_style({"status": str(status)})) for status in used]
        came = rate_of(found.readings, task, ("put",))
        went = rate_of(found.readings, task, ("sampled_new", "sampled_again"))
        lines.append(line(_cell(task, width), *counts, f"{leased:>8,}{_per_minute(came):>9}{_per_minute(went):>9}"))
    if about.trainer is not None:
        lines.append(line(trainer_text(asdict(about.trainer))))
    return lines


def rate_of(readings: Sequence[Reading], task: str, names: Sequence[str]) -> float | None:
    """Return a task's groups per second, of the tallies `names` together (`rules.transitions`)."""
    return rate([(time, sum(of.get(task, {}).get(name, 0) for name in names)) for time, of in readings])


def _per_minute(per_second: float | None) -> str:
    if per_second is None:
        return "-"
    minute = 60 * per_second
    return f"{minute:,.0f}" if minute >= 100 or minute == int(minute) else f"{minute:.1f}"


# Distributions


def _distributions(found: Dashboard) -> list[Text]:
    staleness = _bars([*binned(found.sample.staleness).items()])
    rewards = _bars(histogram(found.sample.rewards))
    if not staleness:
        return [line("no completed groups")]
    empty = ("", "", "")
    return [
        line(
            (f"{left[0]:>5} ", "dim"),
            (f"{left[1]:<{_BAR}}", "magenta"),
            f"{left[2]:<7} ",
            (f"{right[0]:>12} ", "dim"),
            (f"{right[1]:<{_BAR}}", "green"),
            right[2],
        )
        for left, right in zip_longest(staleness, rewards, fillvalue=empty)
    ]


def binned(counts: Mapping[int, int]) -> dict[str, int]:
    """Return counts by value; the highest values share a bin where there are too many."""
    values = sorted(counts)
    kept = values if len(values) <= _BINS else values[: _BINS - 1]
    rest = values[len(kept) :]
    more = {f"{rest[0]}+": sum(counts[value] for value in rest)} if rest else {}
    return {str(value): counts[value] for value in kept} | more


def histogram(values: Sequence[float]) -> list[tuple[str, int]]:
    """Return the numbers of values in bins of one width, or at each value where there are few."""
    return units.bins(values, _BINS, one="{:.3g}", two="{:.2g}..{:.2g}")


def _bars(counts: Sequence[tuple[str, int]]) -> list[tuple[str, str, str]]:
    most = max((n for _, n in counts), default=0)
    return [(name, "█" * max(1 if n else 0, round(_BAR * n / most)), f" {n:,}") for name, n in counts]


# Workers


def worker_lines(about: Circumstances) -> list[Text]:
    """Return a line for each worker: silent ones first, then live ones, then ended ones."""

    def place(one: Worker) -> tuple[bool, bool, float, str]:
        return one.ended_at is not None, not one.is_silent(about.now), -(one.ended_at or 0), one.name

    order = sorted(about.workers, key=place)
    return [_worker(one, about.now) for one in order] or [line("no worker is known")]


def _worker(one: Worker, now: float) -> Text:
    if one.ended_at is not None:
        state, style = f"ended {units.age(now - one.ended_at)} ago", "dim"
    elif one.is_silent(now):
        state, style = f"SILENT for {units.age(now - one.seen_at)}", "bold red"
    else:
        state, style = "alive", "green"
    failed = f", {one.failures:,} failed" if one.failures else ""
    return line(f"{_cell(one.name)} ", (f"{state:<16}", style), f" put {one.groups:,}{failed}, drew {one.taken:,}")


def _batch(row: Mapping[str, Any], now: float) -> Text:
    step = "" if row["step"] is None else f"step {row['step']}: "
    reward = "" if row["reward"] is None else f", reward {row['reward']:.3f}"
    stale = "" if row["staleness"] is None else f", staleness {row['staleness']:.1f} (max {row['max_staleness']})"
    ago = units.age(now - row["taken_at"])
    return line((f"{ago:>4} ago ", "dim"), f"{step}{units.number_of(row['groups'], 'group')}{reward}{stale}")


def _event(row: Mapping[str, Any]) -> Text:
    at = units.clock(row["happened_at"])
    facts = [
        units.number_of(row["groups"], "group") if row["groups"] else "",
        f"of {row['task_name']}" if row["task_name"] else "",
        f"step {row['step']}" if row["step"] is not None else "",
        f"by {row['worker']}" if row["worker"] else "",
    ]
    detail = f": {row['detail']}" if row["detail"] else ""
    return line((f"{at} ", "dim"), (row["kind"].replace("_", " "), "bold"), f" {' '.join(filter(None, facts))}{detail}")


def _cell(name: str, width: int = _NAME) -> str:
    """Return a name, cut or padded to exactly `width` columns."""
    shown = line(name)
    shown.truncate(width, overflow="ellipsis", pad=True)
    return shown.plain
