"""The output of the demo: rich's progress bar with figures below it on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from replaybuf.demo import Mode
from replaybuf.demo.run_folder import BATCH_GROUPS, STALE_THRESHOLD, TASK, Run
from replaybuf.produce import ProduceSummary
from replaybuf.rollouts.rollout import RolloutState, Status
from replaybuf.rules.transitions import Tallies, Tally

_SMOOTHING_STEPS = 20
_LINES = 20  # lines of a whole run without a terminal


@dataclass
class Figures:
    """Counts of groups since this process started; counts from the store include all processes.

    `produce_seconds` is the time until the batches were complete, `train_seconds` the time to train and save them.
    """

    taken: int = 0
    produce_seconds: float = 0.0
    train_seconds: float = 0.0
    staleness: Sequence[int] = (0,)  # of the groups in the last batch
    buffered: dict[Status, int] = field(default_factory=dict)
    leased: int = 0  # groups that are being generated
    counts: Counter[str] = field(default_factory=Counter)  # groups generated, interrupted, expired, expired_early
    _before: Counter[str] | None = None

    def count_store(self, tallies: Tallies) -> None:
        """Update the counts from the store; the first call sets the baseline."""
        of = {(status, tally): n for (task, status, tally), n in tallies.items() if task == TASK and n}
        self.buffered = {status: of.get((status, Tally.SIZE), 0) for status in Status if status != Status.ARCHIVED}
        self.buffered = {status: n for status, n in self.buffered.items() if n}
        self.leased = sum(n for (_, tally), n in of.items() if tally == Tally.LEASED)
        counts = Counter(
            generated=of.get((Status.COMPLETED, Tally.PUT), 0),
            interrupted=of.get((Status.ABORTED, Tally.PUT), 0),
            expired=sum(n for (_, tally), n in of.items() if tally == Tally.EXPIRED),
            expired_early=of.get((Status.EXPIRED, Tally.PUT), 0),
        )
        self._before = self._before or counts
        self.counts = counts - self._before

    def count_batch(self, groups: Sequence[Sequence[RolloutState]], summary: ProduceSummary) -> None:
        """Count a batch that was trained, with the times from its production to the saved weights."""
        self.taken += len(groups)
        self.staleness = [max(rollout.seq_staleness for rollout in group) for group in groups]
        self.produce_seconds += summary.seconds
        self.train_seconds += summary.train_seconds


class Display:
    """Shows a run on a console."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._printed = 0

    def say(self, line: str) -> None:
        """Print a permanent line. Only the terminal wraps it, so that commands in it can be copied."""
        self.console.print(Text(line), soft_wrap=True)

    @contextmanager
    def showing(self, run: Run, figures: Figures, mode: Mode, pids: Callable[[], Sequence[int]]) -> Iterator[None]:
        """Show the run inside the block: live on a terminal, otherwise by `update`."""
        self._printed = run.step
        if not self.console.is_terminal:
            if workers := pids():
                self.say(f"Rollout workers: pid {', '.join(map(str, workers))}")
            yield
            return
        started = time.monotonic()

        def shown() -> Group:
            bar = Table.grid(padding=(0, 1))
            done = ProgressBar(run.target, run.step, width=40)
            bar.add_row(f"step {run.step}/{run.target}", done, f"{time.monotonic() - started:.0f} s")
            processes = ", ".join(map(str, [os.getpid(), *pids()]))
            lines = [*status(run, figures, mode), f"processes: pid {processes} (kill any, and run this again)"]
            return Group(bar, *(Text(line, no_wrap=True, overflow="crop") for line in lines))

        with Live(get_renderable=shown, console=self.console, refresh_per_second=8):
            self.console.show_cursor(True)  # after kill -9 nothing would restore it
            yield

    def update(self, run: Run, figures: Figures, mode: Mode, first_step: int) -> None:
        """Print a line about the step just trained, if there is no terminal and the next line is due."""
        if not self.console.is_terminal and run.step >= self._printed + max(1, (run.target - first_step) // _LINES):
            self._printed = run.step
            self.say(f"step {run.step}/{run.target}: {'; '.join(status(run, figures, mode)[:3])}")


def status(run: Run, figures: Figures, mode: Mode) -> list[str]:
    """Return the state of a run, in lines for people."""
    recent, counts = run.rewards[-_SMOOTHING_STEPS:], figures.counts
    buffered = ", ".join(f"{number:,} {name}" for name, number in figures.buffered.items()) or "none"
    mean, most = sum(figures.staleness) / len(figures.staleness), max(figures.staleness)
    making = f", in the making {figures.leased:,}" if mode == Mode.DISAGGREGATED else ""
    return [
        f"reward {sum(recent) / len(recent) if recent else 0:.2f}",
        f"groups generated {counts['generated']:,}{making}, in the buffer {buffered}, trained {figures.taken:,}",
        f"staleness {mean:.1f} (max {most}, expires at {STALE_THRESHOLD}), {_aside(figures, mode)}",
        times(figures, mode),
    ]


def _aside(figures: Figures, mode: Mode) -> str:
    interrupted = "" if mode == Mode.SYNC else f", {figures.counts['interrupted']:,} interruptions"
    early = figures.counts["expired_early"]
    before = f" in the buffer, and {early:,} before they were put" if early else ""
    return f"{figures.counts['expired']:,} expired{before}{interrupted}"


def times(figures: Figures, mode: Mode) -> str:
    """Return `generation 21 s, training 9 s`, or the time of waiting for the workers."""
    what = "waiting for groups" if mode == Mode.DISAGGREGATED else "generation"
    return f"{what} {figures.produce_seconds:.0f} s, training {figures.train_seconds:.0f} s"


def result(run: Run, figures: Figures, mode: Mode, first_step: int, seconds: float) -> list[str]:
    """Return the result of a run, in lines for people."""
    return [
        "",
        _learned(run, first_step, seconds),
        verdict(run.trained, run.target * BATCH_GROUPS),
        f"Generated {figures.counts['generated']:,} groups, trained on {figures.taken:,}; {_aside(figures, mode)}",
        times(figures, mode).capitalize(),
    ]


def commands(database: str, *, apart: bool = False) -> list[str]:
    """Return commands for looking into a run, each on its own line below a description.

    `apart` says whether the run keeps arrays outside the database.
    """
    places = {"where the arrays are": "sql {} 'SELECT * FROM places'"} if apart else {}
    looks = {
        "what the last steps were trained on": "trace {}",
        "whether anybody waits, and why": "why {}",
        "the worst answers": "show {} --worst 3",
        **places,
        "all of it in a browser (pip install -e '.[web]')": "serve {}",
    }
    return [
        line
        for what, look in looks.items()
        for line in (f"  # {what}", f"  replaybuf {look.format(shlex.quote(database))}")
    ]


def _learned(run: Run, first_step: int, seconds: float) -> str:
    if not run.rewards:
        return "No step was done."
    tenth = max(1, len(run.rewards) // 10)  # of all steps, the first and the last tenth
    first, last = (sum(some) / tenth for some in (run.rewards[:tenth], run.rewards[-tenth:]))
    line = f"Mean reward {first:.2f} -> {last:.2f} in {run.step} steps"
    line += f" (the last {run.step - first_step} of them in {seconds:.0f} s)" if first_step else f", {seconds:.0f} s"
    return line if run.step >= run.target else f"{line} (of {run.target}: the time was up; run it again to go on)"


def verdict(trained: Sequence[int], prompts: int) -> str:
    """Return whether each of the prompts, numbered from 0, was trained once."""
    counts = Counter(trained)
    twice = sorted(number for number, count in counts.items() if count > 1)
    if twice:
        return f"{len(twice):,} of {len(counts):,} prompts were trained more than once: number {twice[0]}, for example."
    if counts.keys() == set(range(prompts)):
        return f"Each of the {prompts:,} prompts was trained once."
    return f"{len(counts):,} prompts were trained, each of them once."
