"""The output of the demo: rich's progress bar with figures below it on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from replaybuf.demo.run_folder import BATCH_GROUPS, STALE_THRESHOLD, TASK, Run
from replaybuf.rollouts.rollout import Status
from replaybuf.rules.transitions import Tallies, Tally

_SMOOTHING_STEPS = 20
_LINES = 20  # of a whole run without a terminal


@dataclass
class Figures:
    """What the store counted when this process started, `before`, and last, `now`, whichever process it was caused by.

    `trained` groups are those of this process; `staleness` is that of the groups in its last batch.
    """

    before: Tallies
    now: Tallies
    trained: int = 0
    staleness: Sequence[int] = (0,)

    def there(self, tally: Tally = Tally.SIZE) -> Counter[Status]:
        """Return the numbers of groups by status: those in the buffer, or the leased ones."""
        return Counter({s: n for (task, s, of), n in self.now.items() if (task, of) == (TASK, tally)})

    def since(self, tally: Tally, *statuses: Status) -> int:
        """Return how many groups of these statuses were counted since this process started."""
        keys = [(TASK, status, tally) for status in statuses]
        return sum(self.now.get(key, 0) - self.before.get(key, 0) for key in keys)

    @property
    def buffered(self) -> dict[Status, int]:
        """The numbers of groups in the buffer by status, without those that were trained."""
        return {status: n for status, n in sorted(self.there().items()) if n and status != Status.ARCHIVED}

    @property
    def generated(self) -> int:
        """The number of completed groups since this process started."""
        return self.since(Tally.PUT, Status.COMPLETED)


class Display:
    """Shows a run on a console."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, *lines: str) -> None:
        """Print permanent lines. Only the terminal wraps them, so that commands in them can be copied."""
        for line in lines:
            self.console.print(Text(line), soft_wrap=True)

    @contextmanager
    def showing(self, run: Run, figures: Figures, pids: Callable[[], Sequence[int]]) -> Iterator[None]:
        """Show the run inside the block: live on a terminal, otherwise by `update`."""
        started = time.monotonic()
        if not self.console.is_terminal:
            yield
            return

        def shown() -> Group:
            bar = Table.grid(padding=(0, 1))
            done = ProgressBar(run.target, run.step, width=40)
            bar.add_row(f"step {run.step}/{run.target}", done, f"{time.monotonic() - started:.0f} s")
            processes = ", ".join(map(str, [os.getpid(), *pids()]))
            lines = [*status(run, figures), f"processes: pid {processes} (kill any, and run this again)"]
            return Group(bar, *map(Text, lines))

        with Live(get_renderable=shown, console=self.console, refresh_per_second=8):
            self.console.show_cursor(True)  # after kill -9 nothing would restore it
            yield

    def update(self, run: Run, figures: Figures) -> None:
        """Print a line about the step just trained, if there is no terminal and the next line is due."""
        if not self.console.is_terminal and run.step % max(1, run.target // _LINES) == 0:
            self.say(f"step {run.step}/{run.target}: {'; '.join(status(run, figures))}")


def status(run: Run, figures: Figures) -> list[str]:
    """Return the state of a run, in lines for people."""
    recent, stale = run.rewards[-_SMOOTHING_STEPS:], figures.staleness
    buffered = ", ".join(f"{number:,} {name}" for name, number in figures.buffered.items()) or "none"
    leased = figures.there(Tally.LEASED).total()
    making = f", in the making {leased:,}" if leased else ""
    return [
        f"reward {sum(recent) / max(1, len(recent)):.2f}",
        f"groups generated {figures.generated:,}{making}, in the buffer {buffered}, trained {figures.trained:,}",
        f"staleness {sum(stale) / len(stale):.1f} (max {max(stale)}, expires at {STALE_THRESHOLD}), {_aside(figures)}",
    ]


def _aside(figures: Figures) -> str:
    expired, interrupted = figures.since(Tally.EXPIRED, *Status), figures.since(Tally.PUT, Status.ABORTED)
    return f"{expired:,} expired, {interrupted:,} interruptions"


def result(run: Run, figures: Figures, first_step: int, seconds: float) -> list[str]:
    """Return the result of a run, in lines for people."""
    learned, rewards = "No step was done.", run.rewards
    if rewards:
        tenth = max(1, len(rewards) // 10)  # of all steps, the first and the last tenth
        learned = f"Mean reward {sum(rewards[:tenth]) / tenth:.2f} -> {sum(rewards[-tenth:]) / tenth:.2f}"
        last = f" (the last {run.step - first_step} of them in {seconds:.0f} s)" if first_step else f", {seconds:.0f} s"
        learned += f" in {run.step} steps{last}"
        if run.step < run.target:
            learned += f" (of {run.target}: the time was up; run it again to go on)"
    done = f"Generated {figures.generated:,} groups, trained on {figures.trained:,}; {_aside(figures)}"
    return ["", learned, verdict(run.trained, run.target * BATCH_GROUPS), done]


def commands(database: str, *, apart: bool = False) -> list[str]:
    """Return commands for looking into a run, each below its description; `apart`: arrays are kept elsewhere."""
    looks = {
        "what the last steps were trained on": "trace {}",
        "whether anybody waits, and why": "why {}",
        "the worst answers": "show {} --worst 3",
        **({"where the arrays are": "sql {} 'SELECT * FROM places'"} if apart else {}),
        "all of it in a browser (pip install -e '.[web]')": "serve {}",
    }
    shown = {what: look.format(shlex.quote(database)) for what, look in looks.items()}
    return [line for what, look in shown.items() for line in (f"  # {what}", f"  replaybuf {look}")]


def verdict(trained: Sequence[int], prompts: int) -> str:
    """Return whether each of the prompts, numbered from 0, was trained once."""
    counts = Counter(trained)
    twice = sorted(number for number, count in counts.items() if count > 1)
    if twice:
        return f"{len(twice):,} of {len(counts):,} prompts were trained more than once: number {twice[0]}, for example."
    if counts.keys() == set(range(prompts)):
        return f"Each of the {prompts:,} prompts was trained once."
    return f"{len(counts):,} prompts were trained, each of them once."
