"""The output of the demo while it runs: a live table on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from replaybuf.demo.figures import Figures
from replaybuf.demo.mode import Mode
from replaybuf.demo.settings import STALE_THRESHOLD
from replaybuf.rollouts.rollout import Status

_BARS, _ASCII_BARS = "▁▂▃▄▅▆▇█", "_.:-=+*#"
_SPARKLINE_WIDTH = 40
_FRAME_SECONDS = 0.1
_LINES = 20  # of a whole run, where there is no terminal


class Processes(Protocol):
    """The workers, as the display sees them."""

    @property
    def pids(self) -> list[int]: ...


class Display:
    """Shows the figures of a run on a console."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live: Live | None = None
        self._figures: Figures | None = None
        self._workers: Processes | None = None
        self._drawn = 0.0
        self._printed_step = 0

    def say(self, line: str) -> None:
        """Print a line that stays. A terminal breaks it where it is full: so that a command in it can be copied."""
        self.console.print(Text(line), soft_wrap=True)

    def say_parts(self, parts: Sequence[str]) -> None:
        """Print parts on lines that are no longer than the console is wide, unless a part is."""
        line = ""
        for part in parts:
            if line and len(f"{line}; {part};") > self.console.width:
                self.say(f"{line};")
                line = part
            else:
                line = f"{line}; {part}" if line else part
        self.say(line)

    @contextmanager
    def showing(self, figures: Figures, workers: Processes) -> Iterator[None]:
        """Show these figures inside the block."""
        self._figures, self._workers, self._printed_step = figures, workers, figures.step
        if not self.console.is_terminal:
            if workers.pids:
                self.say(f"Rollout workers: {_pids(workers.pids)}")
            yield
            return
        with Live(self._table(), console=self.console, auto_refresh=False) as self._live:
            yield
            self._draw()
        self._live = None

    def update(self) -> None:
        """Show changed figures; draws at most every tenth of a second."""
        if self._live is not None:
            if time.monotonic() - self._drawn >= _FRAME_SECONDS:
                self._draw()
        elif self._figures is not None:
            every = max(1, (self._figures.target - self._figures.first_step) // _LINES)
            if self._figures.step >= self._printed_step + every:
                self._printed_step = self._figures.step
                self.say(progress_line(self._figures))

    def _draw(self) -> None:
        if self._live is not None:
            self._drawn = time.monotonic()
            self._live.update(self._table(), refresh=True)

    def _table(self) -> RenderableType:
        assert self._figures is not None
        assert self._workers is not None
        bars = _BARS if self.console.encoding.startswith("utf") else _ASCII_BARS
        return table(self._figures, self._workers.pids, bars)


def table(figures: Figures, pids: Sequence[int], bars: str = _BARS) -> RenderableType:
    """Return the live display."""
    into, out, tokens = figures.rates
    done, target = figures.step, figures.target
    bar = Table.grid(padding=(0, 2))
    bar.add_row(
        f"step {done}/{target}", ProgressBar(total=target, completed=done, width=40), f"{figures.seconds:.0f} s"
    )
    rows = Table.grid(padding=(0, 2), expand=True)
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(justify="right", no_wrap=True)
    # On a narrow terminal only the notes are cut.
    rows.add_column(no_wrap=True, overflow="ellipsis" if bars == _BARS else "crop", ratio=1)
    reward = "" if figures.reward is None else f"{figures.reward:.2f}"
    rows.add_row("reward", reward, Text(sparkline(figures.rewards, bars), style="green"))
    by = f"by {len(pids)} workers" if pids else "by the trainer itself"
    rows.add_row("generated", f"{into:,.0f}", f"groups/s, {by} ({figures.generated:,} since the start)")
    rows.add_row("trained", f"{out:,.0f}", f"groups/s, {tokens:,.0f} tokens/s ({figures.taken:,} groups)")
    if figures.left:
        rows.add_row(
            "replayed", f"{figures.replayed:,}", f"of {figures.left:,} completed groups that the last run left"
        )
    rows.add_row("buffered", f"{sum(figures.buffered.values()):,}", f"groups: {by_status(figures.buffered)}")
    if figures.mode == Mode.DISAGGREGATED:
        rows.add_row("in the making", f"{figures.leased:,}", "groups, by all workers")
    if figures.mode != Mode.SYNC:
        rows.add_row("interrupted", f"{figures.interrupted:,}", "groups so far, to be continued")
    if figures.mode == Mode.ASYNC:
        rows.add_row("reused", f"{figures.reused:,}", "groups, completed while an earlier batch was made")
    staleness = f"steps on average in the batch, at most {figures.staleness_max} (expires at {STALE_THRESHOLD})"
    rows.add_row("staleness", f"{figures.staleness_mean:.1f}", staleness)
    rows.add_row("expired", f"{figures.expired:,}", "groups so far, to be generated again")
    rows.add_row("time", "", times(figures))
    workers = f", rollout workers {_pids(pids)}" if pids else ""
    rows.add_row("processes", "", f"trainer pid {os.getpid()}{workers}")
    return Group(bar, rows)


def progress_line(figures: Figures) -> str:
    """Return the figures in one line."""
    into, out, _ = figures.rates
    mode = {
        Mode.SYNC: "",
        Mode.ASYNC: f", interrupted {figures.interrupted}, reused {figures.reused}",
        Mode.DISAGGREGATED: f", interrupted {figures.interrupted}",
    }
    return (
        f"step {figures.step}/{figures.target}: reward {figures.reward or 0:.2f}, generated {into:,.0f}/s, "
        f"trained {out:,.0f}/s, buffered {sum(figures.buffered.values())}, staleness {figures.staleness_mean:.1f} "
        f"(max {figures.staleness_max}), expired {figures.expired}{mode[figures.mode]}"
    )


def times(figures: Figures) -> str:
    """Return `generation 21 s, training 9 s`, or the time of waiting for the workers."""
    what = "waiting for groups" if figures.mode == Mode.DISAGGREGATED else "generation"
    return f"{what} {figures.produce_seconds:.0f} s, training {figures.train_seconds:.0f} s"


def _pids(pids: Sequence[int]) -> str:
    return "pid " + ", ".join(str(pid) for pid in pids)


def by_status(counts: dict[Status, int]) -> str:
    """Return `80 completed, 3 expired`."""
    return ", ".join(f"{number:,} {status}" for status, number in counts.items()) or "none"


def sparkline(values: Sequence[float], bars: str = _BARS, width: int = _SPARKLINE_WIDTH) -> str:
    """Return values between 0 and 1 as bars; more of them than `width` are averaged."""
    width = min(width, len(values))
    edges = [round(place * len(values) / width) for place in range(width + 1)] if width else []
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(edges)]
    return "".join(bars[min(len(bars) - 1, max(0, int(mean * len(bars))))] for mean in means)
