"""`replaybuf watch`: how it stands with a database, live."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

from replaybuf import units
from replaybuf.cli.frame import Panel, arrange, line, one_line, panels_of
from replaybuf.cli.options import Buffer, Url, option
from replaybuf.cli.output import console, write
from replaybuf.errors import ReplayBufError
from replaybuf.rules.transitions import RATE_SECONDS
from replaybuf.storage.sql.inspection.reader import Reader, open_reader

if TYPE_CHECKING:
    from rich.text import Text

    from replaybuf.storage.sql.inspection.waits import Glance, Reading


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """Have the terminal give keys one by one; it is as it was afterwards. Without a terminal no key comes.

    What is yielded waits so many seconds for a key, and returns it: "" if none came, "q" if none will come any more.
    """

    def pressed(seconds: float) -> str:
        if not select.select([fd], [], [], seconds)[0]:
            return ""
        return os.read(fd, 1).decode("ascii", "replace") or "q"

    def never(seconds: float) -> str:
        time.sleep(seconds)
        return ""

    try:
        import termios
        import tty

        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
    except (ImportError, OSError, ValueError, termios.error):
        yield never
        return
    try:
        tty.setcbreak(fd)
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


#: The part of the time that reading may take: slow readings are made less often.
_SHARE = 0.1
_TICK = 0.1
_READ_TIMEOUT = 20.0
_ON_A_PIPE = 120
_ERROR_LINES = 3
_TERMINATED = 128 + 15
_HELP = [
    "q        quit (so does Ctrl-C)",
    "?        this help, and back",
    "r        read now",
    "",
    "in/min   groups put, and a ledger's prompts; out/min completed groups drawn: of the last minute",
    "SILENT   a worker that gave no sign of life for a minute, and didn't end",
    "staleness and reward are those of the completed groups that were put last",
]


def watch(
    url: Url,
    buffer: Buffer = None,
    interval: Annotated[
        float, option("--interval", metavar="S", min=0.1, max=3600, help="Read every so many seconds.")
    ] = 2.0,
    once: Annotated[bool, option("--once", help="Print one frame and end, as on a pipe.")] = False,
) -> None:
    """Watch a database, full screen: who waits and why, what goes in and out, staleness, rewards, workers, events.

    It only reads, by indexes and from small tables, so that a million groups cost as little as a few. Where reading
    takes long all the same, it is done less often than --interval says, and the screen says so. A database that is
    gone or locked is told, and tried again. The keys are q and ?; on a pipe one frame is printed.

    \b
    Examples:
      replaybuf watch run.db
      replaybuf watch postgresql://rl@db/run7 --interval 10
      replaybuf watch run.db --once | head -20
    """
    reader = open_reader(url)
    if once or not sys.stdout.isatty():
        found = _read(reader, buffer)
        state = Watched(reader.where, interval, found=found)
        out = console()
        width = _ON_A_PIPE if not out.is_terminal else out.width
        lines = arrange(state.head(width), panels_of(found), line(), width, None)
        _print(lines[:-1])  # keys mean nothing here
        return
    signal.signal(signal.SIGTERM, _terminate)
    _live(reader, buffer, interval)


def _print(lines: Sequence[Text]) -> None:
    out = console()
    if out.is_terminal:
        for one in lines:
            out.print(one, soft_wrap=True)
    else:
        write(f"{one.plain.rstrip()}\n" for one in lines)


def _read(reader: Reader, buffer: str | None) -> list[Glance]:
    from replaybuf.storage.sql.inspection.waits import glance

    return reader.read(lambda tx: glance(tx, buffer), timeout=_READ_TIMEOUT)


def _terminate(*_: Any) -> None:
    raise SystemExit(_TERMINATED)  # by way of what leaves the terminal clean


@dataclass(slots=True)
class Watched:
    """What is on the screen."""

    where: str
    interval: float
    found: Sequence[Glance] = ()
    error: str = ""
    cost: float = 0.0
    read_at: float = 0.0
    helping: bool = False
    readings: dict[str, deque[Reading]] = field(default_factory=dict)

    @property
    def pause(self) -> float:
        """The seconds from one reading to the next."""
        return max(self.interval, self.cost / _SHARE)

    def take(self, found: Sequence[Glance], error: str, cost: float) -> None:
        """Take what was read, with the readings before it, or what was wrong; `cost` is the seconds that it took."""
        self.error, self.cost = error, cost
        if not error:
            self.read_at = time.monotonic()
            self.found = [self._with_readings(one) for one in found]

    def _with_readings(self, one: Glance) -> Glance:
        """Return a glance whose rates go by what was read here, once that covers a minute."""
        kept = self.readings.setdefault(one.buffer, deque())
        kept.append(one.readings[-1])
        now = kept[-1][0]
        while len(kept) > 1 and (now - kept[1][0] >= RATE_SECONDS or kept[0][0] > now):
            kept.popleft()
        own = now - kept[0][0] >= RATE_SECONDS or (len(one.readings) == 1 and len(kept) > 1)
        return replace(one, readings=[*kept]) if own else one

    def head(self, width: int) -> list[Text]:
        """Return the first lines: which database, how old the figures are, and what is wrong."""
        at = f"{units.clock(self.found[0].about.now)} UTC" if self.found else "reading ..."
        why = f": reading takes {self.cost:.2g} s" if self.pause > self.interval else ""
        lines = [line((at, "bold"), f"  every {self.pause:.2g} s{why}  {self.where}")]
        if self.error:
            old = f" (the figures are {units.age(time.monotonic() - self.read_at)} old)" if self.found else ""
            wrong = one_line(f"trying again{old}: {self.error}")
            starts = range(0, min(len(wrong), _ERROR_LINES * width), width)
            lines += [line((wrong[start : start + width], "bold red")) for start in starts]
        return lines

    def lines(self, width: int, height: int) -> list[Text]:
        """Return the screen."""
        panels = [Panel("help", [line(text) for text in _HELP], least=20)] if self.helping else panels_of(self.found)
        return arrange(self.head(width), panels, line(("q quit  ? help", "dim")), width, height)


class _Reading(threading.Thread):
    """Reads when it is asked to, so that keys are answered though the database is not."""

    def __init__(self, reader: Reader, buffer: str | None) -> None:
        super().__init__(daemon=True)
        self._reader, self._buffer = reader, buffer
        self._wanted = threading.Event()
        self.news: queue.SimpleQueue[tuple[Sequence[Glance], str, float]] = queue.SimpleQueue()

    def ask(self) -> None:
        self._wanted.set()

    def run(self) -> None:
        import replaybuf.storage.sql.inspection.waits  # noqa: F401  # its import isn't what a reading costs

        while self._wanted.wait():
            self._wanted.clear()
            self.news.put(self._read())

    def _read(self) -> tuple[Sequence[Glance], str, float]:
        started = time.monotonic()
        try:
            return _read(self._reader, self._buffer), "", time.monotonic() - started
        except ReplayBufError as wrong:
            return (), str(wrong), 0.0
        except Exception as wrong:  # whatever it is: the next reading may go well
            return (), f"{type(wrong).__name__}: {wrong}", 0.0


def _live(reader: Reader, buffer: str | None, interval: float) -> None:
    from rich.console import ConsoleDimensions
    from rich.live import Live
    from rich.text import Text

    state = Watched(reader.where, interval)
    reading = _Reading(reader, buffer)
    reading.start()
    out = console()
    shown, asked_at, waiting = None, float("-inf"), False
    with keys() as pressed, Live(console=out, screen=True, auto_refresh=False) as live:
        while True:
            now = time.monotonic()
            if not waiting and now - asked_at >= state.pause:
                asked_at, waiting = now, True
                reading.ask()
            while not reading.news.empty():
                waiting = False
                state.take(*reading.news.get())
            out.size = ConsoleDimensions(*os.get_terminal_size(sys.stdout.fileno()))  # COLUMNS wouldn't follow it
            lines = state.lines(*out.size)
            if (out.size, lines) != shown:
                shown = (out.size, lines)
                live.update(Text("\n", no_wrap=True).join(lines), refresh=True)
            match pressed(_TICK):
                case "q" | "Q":
                    return
                case "?":
                    state.helping = not state.helping
                case "r" | "R":
                    asked_at = float("-inf")
